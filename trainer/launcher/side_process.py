"""Processes that do something with a run's result, such as an export: their output is in the run's logs.

The last lines of stdout are the answer; libraries print to stderr while they load, which is of no use to a person.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from trainer.run import failure, process
from trainer.run.folder import RunDir


def begin(run: RunDir, kind: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start one. Its exit code is 2 for the user's mistake.

    Args:
        run: The run.
        kind: Name of its two files, `<kind>.log` and `<kind>-answer.txt`.
        argv: The command.
    """
    log_file, answer_file = run.logs / f"{kind}.log", run.logs / f"{kind}-answer.txt"
    with log_file.open("ab") as log, answer_file.open("wb") as answer:
        return subprocess.Popen(argv, env=process.worker_environment(), stdout=answer, stderr=log)


def answer(run: RunDir, kind: str, code: int, noun: str) -> str:
    """Return what the last one of a kind answered, or why it failed.

    Args:
        run: The run.
        kind: As for `begin`.
        code: Its exit code.
        noun: What the sentence about a failure calls it.
    """
    if code in (0, 2):
        return (run.logs / f"{kind}-answer.txt").read_text(encoding="utf-8").strip()
    log = run.logs / f"{kind}.log"
    return f"the {noun} failed: {failure.last_line(log)}\nlog: {log}"
