"""trackio: in its own folder on this machine, or at the server or Space that its environment variables name."""

from __future__ import annotations

import re
import secrets
import warnings
from collections.abc import Callable
from typing import Any

import trackio

from trainer.config.schema import RunConfig
from trainer.metrics.trackers import short, shown_config
from trainer.metrics.trackers.feed import Figures, Note, Position, SampleImage
from trainer.run.events import WarningEvent
from trainer.run.folder import RunDir
from trainer.system import terminal

LEVELS = {
    "state": trackio.AlertLevel.INFO,
    "sample": trackio.AlertLevel.INFO,
    "warning": trackio.AlertLevel.WARN,
    "error": trackio.AlertLevel.ERROR,
}


def connect(run: RunDir, cfg: RunConfig, position: Position, emit: Callable[[WarningEvent], None]) -> Trackio:
    """Create or continue the run in the project. trackio only warns of failures: the first becomes an event."""
    _emit_first_warning(emit)
    opened = trackio.init(
        project=cfg.trackers.project,
        name=position.run or _name(run),
        resume="allow" if position.run else "never",
        config=shown_config(cfg),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    position.run = opened.name
    return Trackio(opened)


def _name(run: RunDir) -> str:
    """Name a new run. trackio continues the latest run of a name, so a name that a person chose gets a suffix."""
    is_unique = re.search(r"-\d{8}-\d{6}-[0-9a-f]{6}$", run.path.name)
    return run.path.name if is_unique else f"{run.path.name}-{secrets.token_hex(3)}"


def _emit_first_warning(emit: Callable[[WarningEvent], None]) -> None:
    emitted: list[str] = []
    show_other = warnings.showwarning

    def show(message: Warning | str, *position: Any, **more: Any) -> None:
        if "trackio" not in str(message).lower():
            show_other(message, *position, **more)
            return
        text = short(str(message))
        terminal.say(text)
        if not emitted:
            emitted.append(text)
            emit(WarningEvent(message=f"trackers.trackio: {text}"))

    warnings.showwarning = show


class Trackio:
    """A Tracker."""

    def __init__(self, run: trackio.Run) -> None:
        self._run = run

    def figures(self, item: Figures) -> None:
        self._run.log({**item.values}, step=item.step)

    def image(self, item: SampleImage) -> None:
        image = trackio.Image(item.image(), caption=item.prompt)
        self._run.log({f"samples/{item.index}": image}, step=item.step)

    def note(self, item: Note) -> None:
        self._run.alert(item.kind, text=item.text, level=LEVELS[item.kind], step=item.step)

    def flush(self) -> None:
        """trackio sends by itself, twice a second."""

    def finish(self, failed: bool) -> None:
        self._run.finish()
