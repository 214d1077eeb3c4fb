"""The abilities of this machine: the doctor's checks, renewed in the background, disk, and one sentence about it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.launcher import doctor
from trainer.launcher.doctor import Check
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu


@dataclass(frozen=True)
class Disk:
    """The disk that holds the runs; all in bytes.

    Attributes:
        runs: Size of the files below the folder of the runs; a file with several names counts once.
    """

    free: int
    total: int
    runs: int


@dataclass(frozen=True)
class Examination:
    """The newest results of the checks.

    Attributes:
        checks: Empty before the first examination has ended.
        disk: None before the first examination has ended.
        at: Unix seconds of its end; 0 before the first.
        is_running: Whether another examination is under way.
        failure: Why the last examination could not be made; "" otherwise.
    """

    checks: tuple[Check, ...] = ()
    disk: Disk | None = None
    at: float = 0.0
    is_running: bool = False
    failure: str = ""


class Machine:
    """Examines this machine on a thread, at most once at a time."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._last = Examination()
        self._thread: threading.Thread | None = None

    def examined(self, is_fresh: bool = False) -> Examination:
        """Return the newest results without waiting. `is_fresh` starts another examination."""
        with self._lock:
            is_running = self._thread is not None and self._thread.is_alive()
            if not is_running and (is_fresh or not self._last.at):
                self._thread = threading.Thread(target=self._examine, name="machine", daemon=True)
                self._thread.start()
                is_running = True
            last = self._last
            return Examination(last.checks, last.disk, last.at, is_running, last.failure)

    def _examine(self) -> None:
        try:
            found = Examination(tuple(doctor.checks(self._runs)), disk_of(self._runs), time.time())
        except (InputError, OSError) as error:
            last = self._last
            found = Examination(last.checks, last.disk, time.time(), failure=f"This machine cannot be checked: {error}")
        with self._lock:
            self._last = found


def disk_of(runs: Path) -> Disk:
    """Return the disk of a folder, which need not exist yet."""
    existing = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.is_dir())
    space = shutil.disk_usage(existing)
    return Disk(space.free, space.total, _size(runs))


def _size(folder: Path) -> int:
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(parent, name))
            except OSError:  # removed a moment ago
                continue
            sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def headline(checks: Sequence[Check], gpus: Sequence[Gpu]) -> str:
    """Return whether runs can start here, and on what.

    Args:
        checks: Results of the doctor's checks.
        gpus: This machine's GPUs.
    """
    failed = [check.what for check in checks if check.verdict == "fail"]
    if failed:
        return f"Runs may not start: see {', '.join(failed)}."
    advice = sum(check.verdict == "warn" for check in checks)
    more = "" if not advice else f" {advice} warning{'s' if advice > 1 else ''} below."
    if not gpus:
        return f"CPU only: the demo model trains here, and small language models; FLUX.2 and its kind need GPUs.{more}"
    smallest = min(gpus, key=lambda gpu: gpu.memory)
    count = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    each = "" if len(gpus) == 1 else " each"
    return f"{count}, {smallest.memory / 1024:.0f} GiB{each}: runs can start. New run says which models fit.{more}"


def packages(checks: Sequence[Check]) -> list[Check]:
    """Return the checks of Python and of the packages that a run needs, whose facts are versions."""
    names = {"python", *(requirement.name for requirement in doctor.requirements())}
    return [check for check in checks if check.what in names]
