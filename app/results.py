"""What is done with a run's result: it is drawn with, and uploaded, each by a process that the page follows."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.config.errors import InputError
from trainer.config.models import published_models
from trainer.launcher import commands, upload
from trainer.launcher.model_card import base_of, model_card
from trainer.launcher.upload import Upload
from trainer.run.drawings import Drawing, DrawingRequest, drawings
from trainer.run.folder import RunDir


@dataclass(frozen=True)
class Outcome:
    """How a process is doing.

    Attributes:
        is_running: Whether it goes on.
        text: What it said at its end; "" before, and where none was started.
        failed: Whether it ended without a result.
    """

    is_running: bool = False
    text: str = ""
    failed: bool = False


class Results:
    """Drawings and uploads of the runs of one folder. One of a kind at a time for each run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[tuple[str, Path], subprocess.Popen[bytes]] = {}

    def draw(self, run: RunDir, request: DrawingRequest) -> None:
        """Draw a prompt with and without what the run has trained. Raises InputError for one that cannot be drawn."""
        self._begin("drawing", run, lambda: commands.begin_drawing(run, request))

    def drawing(self, run: RunDir) -> Outcome:
        """Return how the latest drawing is doing."""
        return self._outcome("drawing", run, commands.drawing_output)

    def drawings(self, run: RunDir) -> list[Drawing]:
        """Return the finished drawings of a run, newest first."""
        return sorted(drawings(run), key=lambda drawing: -drawing.time)

    def upload(self, run: RunDir, repo: str, is_private: bool, overwrites: bool) -> None:
        """Upload the exported files with a model card. Raises InputError for a wrong name, or without an export."""
        wanted = Upload(repo, is_private, overwrites, licence_of(run))
        self._begin("upload", run, lambda: upload.begin_upload(run, wanted))

    def uploaded(self, run: RunDir) -> Outcome:
        """Return how the latest upload is doing."""
        return self._outcome("upload", run, upload.upload_output)

    def card(self, run: RunDir, repo: str) -> str:
        """Return the model card that an upload writes. Raises InputError without an export."""
        return model_card(run, repo or "OWNER/NAME", licence_of(run))

    def _begin(self, kind: str, run: RunDir, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        with self._lock:
            running = self._processes.get((kind, run.path))
            if running is not None and running.poll() is None:
                raise InputError(f"{run.path.name}: another {kind} is running; wait until it is done")
            self._processes[kind, run.path] = start()

    def _outcome(self, kind: str, run: RunDir, output: Callable[[RunDir, int], str]) -> Outcome:
        process = self._processes.get((kind, run.path))
        if process is None:
            return Outcome()
        code = process.poll()
        if code is None:
            return Outcome(is_running=True)
        return Outcome(text=output(run, code), failed=code != 0)


def licence_of(run: RunDir) -> str | None:
    """Return the licence of the model that a run was trained on, where it is known."""
    known = published_models().get(base_of(run.config()) or "")
    return known.licence or None if known else None
