"""Starts the command line: `shardstudio`, `python -m app` and launch.py come here."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence

from trainer.system.terminal import complain, not_installed

CUT_OFF = 128 + signal.SIGPIPE
"""Exit code where nothing reads the output any more, as a shell gives it for a program that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. argv: what was typed after the program's name; None: sys.argv."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here and not at exit, where Python could only print the error
    except BrokenPipeError:
        # The output streams whose reader has gone are given up, as with `| head`.
        gone = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream.fileno())]
        for stream in gone:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not gone:
            raise
        return CUT_OFF


def _run(argv: Sequence[str] | None) -> int:
    try:
        from app import command_line

        return command_line.main(sys.argv[1:] if argv is None else argv)
    except ModuleNotFoundError as missing:
        complain(not_installed(missing))
        return 2


def _has_no_reader(descriptor: int) -> bool:
    pipe = select.poll()
    pipe.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in pipe.poll(0))


if __name__ == "__main__":
    sys.exit(main())
