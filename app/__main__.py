"""Starts the command line: `shardstudio`, `python -m app` and launch.py come here."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.config.terminal import complain, not_installed


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. argv: what was typed after the program's name; None: sys.argv."""
    try:
        from app import command_line

        return command_line.main(sys.argv[1:] if argv is None else argv)
    except ModuleNotFoundError as missing:
        complain(not_installed(missing))
        return 2


if __name__ == "__main__":
    sys.exit(main())
