"""ShardStudio's command line in a checkout. An installed ShardStudio has it as `shardstudio`."""

from __future__ import annotations

import sys

from trainer.config.terminal import complain, not_installed

try:
    from app.command_line import main
except ModuleNotFoundError as missing:
    complain(not_installed(missing))
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
