"""Processes that do something with a run's result, such as an export: their output is in the run's logs.

The last lines of stdout are the answer; libraries print to stderr while they load, which is of no use to a person.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from trainer.run import failure, process
from trainer.run.folder import RunDir
from trainer.system import files


def begin(run: RunDir, kind: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start one. Its exit code is 2 for the user's mistake.

    Args:
        run: The run.
        kind: Name of its two files, `<kind>.log` and `<kind>-answer.txt`.
        argv: The command.
    """
    answer_file = run.logs / f"{kind}-answer.txt"
    answer_file.unlink(missing_ok=True)
    with open(files.opened_to_append(run.logs / f"{kind}.log"), "ab") as log, answer_file.open("xb") as answer:
        return subprocess.Popen(argv, env=process.worker_environment(), stdout=answer, stderr=log)


class Adopted:
    """A process that another process started, as the page before its restart. It has the methods of `Popen`."""

    def __init__(self, process: psutil.Process, answer_file: Path) -> None:
        self._process = process
        self._answer_file = answer_file

    def poll(self) -> int | None:
        """Return None while it runs, then a guess of its exit code: only its parent knows that. Results are one line,
        an address or a folder."""
        if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
            return None
        text = self._answer_file.read_text(encoding="utf-8").strip()
        is_result = text.startswith(("http://", "https://")) or (text.startswith("/") and Path(text).is_dir())
        return 0 if is_result else 2 if text else 1

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> None:
        """Raises subprocess.TimeoutExpired."""
        _, alive = psutil.wait_procs([self._process], timeout)
        if alive:
            raise subprocess.TimeoutExpired(str(self._process.pid), timeout or 0.0)


def adopted(run: RunDir, kind: str, module: str) -> Adopted | None:
    """Return the running process of a kind, by its command line; None if there is none.

    Args:
        run: The run.
        kind: As for `begin`.
        module: What its command runs.
    """
    own = ["-m", module, str(run.path)]
    for found in process.all_processes():
        if process.argv_of(found)[1:4] == own:
            return Adopted(found, run.logs / f"{kind}-answer.txt")
    return None


def last_begun(run: RunDir, kind: str) -> float | None:
    """Return when the files of a kind last changed, as Unix time; None where there are none.

    `begin` changes them, also in another program: a process that it started can be running only after that.
    """
    try:
        return files.written((run.logs / f"{kind}-answer.txt").stat())
    except OSError:
        return None


def answer(run: RunDir, kind: str, code: int, noun: str) -> str:
    """Return what the last one of a kind answered, or why it failed.

    Args:
        run: The run.
        kind: As for `begin`.
        code: Its exit code.
        noun: What the sentence about a failure calls it.
    """
    log, text = run.logs / f"{kind}.log", ""
    if code in (0, 2):
        text = (run.logs / f"{kind}-answer.txt").read_text(encoding="utf-8").strip()
    if text or not code:
        return text
    # On a full disk neither file holds a reason.
    reason = failure.last_line(log) or failure.write_trouble(run) or "it gave no reason"
    return f"the {noun} failed: {reason}\nlog: {log}"
