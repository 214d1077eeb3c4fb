"""Which runs of a folder are running now. Cheap for hundreds of runs: only those that may run are read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from app.monitor import Follower, RunView, last_start
from trainer.config.errors import InputError
from trainer.run import process
from trainer.run.folder import RunDir, is_run


class Live:
    """The running runs of one folder.

    Attributes:
        ended: {name: state} of the runs that this process saw running and that run no more, oldest end first.
    """

    def __init__(self, runs: Path, follower: Callable[[RunDir], Follower]) -> None:
        self._runs = runs
        self._follower = follower
        self._lock = threading.Lock()
        self._idle: dict[Path, int] = {}  # {run that was not alive: modification time of its launch record then}
        self._seen: set[Path] = set()
        self.ended: dict[str, str] = {}

    def views(self) -> list[RunView]:
        """Return the running runs, newest start first. Those that cannot be read are left out."""
        with self._lock:
            folders = self._runs.iterdir() if self._runs.is_dir() else ()
            found = [view for path in folders if (view := self._view(RunDir(path))) is not None]
            found.sort(key=lambda view: last_start(view.path), reverse=True)
            for path in self._seen - {view.path for view in found}:
                self._end(path)
            self._seen = {view.path for view in found}
            for path in self._seen:  # resumed
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
            view = self._follower(run).view() if process.alive(run) else None
        except (InputError, OSError):  # the table of runs and its own page say what is wrong
            view = None
        if view is None:
            self._idle[run.path] = launched
        return view

    def _end(self, path: Path) -> None:
        try:
            self.ended[path.name] = self._follower(RunDir(path)).view().state
        except (InputError, OSError):  # deleted, or damaged: its end cannot be read
            return
        for old in list(self.ended)[:-20]:
            del self.ended[old]
