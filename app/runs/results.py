"""Uses of a run's result: sampling, film and upload, each by a process that the page follows."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.runs import film
from trainer.launcher import commands
from trainer.launcher.jobs import side_process, uploads
from trainer.run.drawings import Drawing, DrawingRequest, drawings, progress
from trainer.run.folder import RunDir
from trainer.system.errors import InputError

Process = subprocess.Popen[bytes] | side_process.Adopted
Kind = Literal["drawing", "film", "upload"]
KINDS: Mapping[Kind, tuple[str, str]] = {
    "drawing": ("draw", "trainer.train.draw"),
    "film": ("film", film.MODULE),
    "upload": ("upload", uploads.MODULE),
}
"""{kind: its name in `side_process`, what its command runs}"""
WORDS: Mapping[Kind, str] = {"drawing": "drawing", "film": "making a film", "upload": "publishing"}
STOPPED_WITHIN_S = 10.0
"""A process that is still there after this is killed: what it has written is complete or not named."""
BEGUN_WITHIN_S = 10.0
"""Between the files that a process is given and its entry in the machine's list of processes."""


@dataclass(frozen=True)
class Outcome:
    """How a process is doing.

    Attributes:
        is_running: Whether it goes on.
        text: What it said at its end; "" before, and where none was started.
        failed: Whether it ended without a result by itself.
        is_stopped: Whether `stop` ended it.
    """

    is_running: bool = False
    text: str = ""
    failed: bool = False
    is_stopped: bool = False


class Results:
    """Drawings, films and uploads of the runs of one folder. One of a kind at a time for each run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[tuple[Kind, Path], Process] = {}
        self._stopped: set[Process] = set()
        self._looked: dict[tuple[Kind, Path], float | None] = {}

    def running(self) -> list[tuple[RunDir, str, float | None]]:
        """Return what goes on, as far as this process has seen it: the run, a word, and the share that is done."""
        known = [
            (kind, RunDir(path)) for (kind, path), process in list(self._processes.items()) if process.poll() is None
        ]
        return [(run, WORDS[kind], progress(run) if kind == "drawing" else None) for kind, run in known]

    def draw(self, run: RunDir, request: DrawingRequest) -> None:
        """Sample prompts without and with what the run has trained. Raises InputError if they cannot be sampled."""
        self._begin("drawing", run, lambda: commands.begin_drawing(run, request))

    def stop(self, kind: Kind, run: RunDir) -> None:
        """End the running process of a kind, if there is one, and return when it has ended."""
        process = self._process(kind, run)
        if process is None or process.poll() is not None:
            return
        self._stopped.add(process)
        process.terminate()
        try:
            process.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def drawing(self, run: RunDir) -> Outcome:
        """Return how the latest drawing is doing."""
        return self._outcome("drawing", run, commands.drawing_output)

    def drawings(self, run: RunDir) -> list[Drawing]:
        """Return the drawings of a run, newest first."""
        return sorted(drawings(run), key=lambda drawing: -drawing.time)

    def make_film(self, run: RunDir, price: float | None = None) -> None:
        """Make the film of a run's samples. price: of a GPU-hour, in dollars. Raises InputError if its folders cannot
        be made."""
        self._begin("film", run, lambda: film.begin(run, price))

    def film(self, run: RunDir) -> Outcome:
        """Return how the latest film is doing."""
        return self._outcome("film", run, film.output)

    def upload(self, run: RunDir, repo: str, is_private: bool, overwrites: bool) -> None:
        """Upload the exported files with a model card. Raises InputError for a wrong name, or without an export."""
        self._begin("upload", run, lambda: uploads.begin(run, repo, is_private, overwrites))

    def uploaded(self, run: RunDir) -> Outcome:
        """Return how the latest upload is doing."""
        return self._outcome("upload", run, uploads.output)

    def _process(self, kind: Kind, run: RunDir) -> Process | None:
        """The latest process of a kind, started here or by another page. Processes are scanned only after a start."""
        key, name = (kind, run.path), KINDS[kind][0]
        known = self._processes.get(key)
        if known is not None and known.poll() is None:
            return known
        began = side_process.last_begun(run, name)
        if key in self._looked and self._looked[key] == began:
            return known
        found = side_process.adopted(run, *KINDS[kind])
        if self._processes.get(key) is not known:  # started here meanwhile: its exit code is known to its parent only
            return self._processes[key]
        if found is not None:
            self._processes[key] = found
        elif began is None or began < time.time() - BEGUN_WITHIN_S:
            self._looked[key] = began
        return found or known

    def _begin(self, kind: Kind, run: RunDir, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        with self._lock:
            running = self._process(kind, run)
            if running is not None and running.poll() is None:
                raise InputError(f"{run.path.name}: another {kind} is running; wait until it is done")
            if running is not None:
                self._stopped.discard(running)
            self._processes[kind, run.path] = start()

    def _outcome(self, kind: Kind, run: RunDir, output: Callable[[RunDir, int], str]) -> Outcome:
        process = self._process(kind, run)
        if process is None:
            return Outcome()
        code = process.poll()
        if code is None:
            return Outcome(is_running=True)
        if process in self._stopped and code != 0:
            return Outcome(text=f"The {kind} was stopped.", is_stopped=True)
        return Outcome(text=output(run, code), failed=code != 0)
