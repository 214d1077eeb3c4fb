"""How a process that computes with torch ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from trainer.system.terminal import complain

INTERRUPTED = 130
"""The exit code of a process that Ctrl+C ended, as shells have it."""


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run `main` and end this process with its exit code, without Python's finalization.

    torch's threads live longer than `main`. One that asks for the interpreter while Python finalizes it aborts the
    process, and so does a `FileStore` that is destroyed on a disk it cannot write: torchrun would call a rank that has
    finished failed. What a user may rely on happens as always: an error is printed, threads that are no daemons are
    waited for, exit handlers run, output is flushed. See DECISIONS 154.
    """
    code = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            complain(end.code)
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    finally:
        _exit(code)


def _exit(code: int) -> NoReturn:
    kind, error, traceback = sys.exc_info()
    if kind and error:
        sys.excepthook(kind, error, traceback)
    try:
        # Python's own finalization begins with these two, which have no public name.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed before the start
            stream.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError:  # the last output was lost
        code = code or 1
    finally:
        os._exit(code)
