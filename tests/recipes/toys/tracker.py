"""Lines: what a run reports as JSON lines in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TextIO

from trainer.config.schema import RunConfig
from trainer.metrics.trackers.feed import Figures, Note, Position, SampleImage
from trainer.run.events import WarningEvent
from trainer.run.folder import RunDir


def connect(run: RunDir, cfg: RunConfig, position: Position, emit: Callable[[WarningEvent], None]) -> Lines:
    """Continue the file."""
    position.run = run.path.name
    return Lines((run.path / "lines.jsonl").open("a", encoding="utf-8"))


class Lines:
    """A Tracker."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def figures(self, item: Figures) -> None:
        self._write(step=item.step, **item.values)

    def image(self, item: SampleImage) -> None:
        self._write(step=item.step, prompt=item.prompt, size=item.image().size)

    def note(self, item: Note) -> None:
        self._write(step=item.step, **{item.kind: item.text})

    def flush(self) -> None:
        self._file.flush()

    def finish(self, failed: bool) -> None:
        self._write(failed=failed)
        self._file.close()

    def _write(self, **values: object) -> None:
        self._file.write(json.dumps(values) + "\n")
