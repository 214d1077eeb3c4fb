"""ShardStudio's command line in a checkout. An installed ShardStudio has it as `shardstudio`."""

from __future__ import annotations

import sys

from app.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
