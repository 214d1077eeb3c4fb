"""Which runs of a folder are running now. Cheap for hundreds of runs: only those that may run are read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from app.runs.monitor import Follower, RunView, last_start
from trainer.run import process
from trainer.run.folder import RunDir, is_run
from trainer.system.errors import InputError


class Live:
    """The running runs of one folder.

    Attributes:
        ended: {name: view} of the runs that this process saw running and that run no more, oldest end first.
    """

    def __init__(self, runs: Path, follower: Callable[[RunDir], Follower]) -> None:
        self._runs = runs
        self._follower = follower
        self._lock = threading.Lock()
        self._idle: dict[Path, int] = {}  # {run that was not alive: modification time of its launch record then}
        self._seen: set[Path] = set()
        self.ended: dict[str, RunView] = {}

    def views(self) -> list[RunView]:
        """Return the running runs, newest start first. Those that cannot be read are left out until they can be."""
        with self._lock:
            folders = self._runs.iterdir() if self._runs.is_dir() else ()
            found = [view for path in folders if (view := self._view(RunDir(path))) is not None]
            found.sort(key=lambda view: last_start(view.path), reverse=True)
            running = {view.path for view in found}
            self._seen = running | {path for path in self._seen - running if not self._has_ended(path)}
            for path in running:  # resumed
                self.ended.pop(path.name, None)
            return found

    def _view(self, run: RunDir) -> RunView | None:
        try:
            launched = run.launch_file.stat().st_mtime_ns
        except OSError:  # never started
            return None
        if self._idle.get(run.path) == launched or not is_run(run.path):
            return None
        try:
            with run.boundary():
                if process.alive(run):
                    return self._follower(run).view()
        except (InputError, OSError):  # its own page says what is wrong; a file may be written at this moment
            return None
        self._idle[run.path] = launched
        return None

    def _has_ended(self, path: Path) -> bool:
        """Remember how a run that was running has ended, unless it has not: one look at it may fail."""
        try:
            view = self._follower(RunDir(path)).view()
        except (InputError, OSError):  # deleted, or damaged: its end cannot be read yet
            return not is_run(path)
        if view.is_running:
            return False
        self.ended[path.name] = view
        for old in list(self.ended)[:-20]:
            del self.ended[old]
        return True
