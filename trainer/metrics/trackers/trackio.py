"""trackio: in its own folder on this machine, or at the server or Space its environment variables name."""

from __future__ import annotations

import re
import secrets
import warnings
from collections.abc import Callable
from typing import Any

import trackio

from trainer.config import terminal
from trainer.config.schema import RunConfig
from trainer.metrics.trackers import short, shown_config
from trainer.metrics.trackers.feed import Figures, Note, Picture, Place
from trainer.run.events import WarningEvent
from trainer.run.folder import RunDir

LEVELS = {
    "state": trackio.AlertLevel.INFO,
    "sample": trackio.AlertLevel.INFO,
    "warning": trackio.AlertLevel.WARN,
    "error": trackio.AlertLevel.ERROR,
}


def connect(run: RunDir, cfg: RunConfig, place: Place, say: Callable[[WarningEvent], None]) -> Trackio:
    """The run in the project, made or continued. What trackio cannot do it only warns of: the first is told."""
    _tell_first_warning(say)
    opened = trackio.init(
        project=cfg.trackers.project,
        name=place.run or _name(run),
        resume="allow" if place.run else "never",
        config=shown_config(cfg),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    place.run = opened.name
    return Trackio(opened)


def _name(run: RunDir) -> str:
    """trackio continues the latest run of a name: a folder that a person named gets something of its own behind it."""
    is_unique = re.search(r"-\d{8}-\d{6}-[0-9a-f]{6}$", run.path.name)
    return run.path.name if is_unique else f"{run.path.name}-{secrets.token_hex(3)}"


def _tell_first_warning(say: Callable[[WarningEvent], None]) -> None:
    told: list[str] = []

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        text = short(str(message))
        terminal.say(text)
        if "trackio" in text.lower() and not told:
            told.append(text)
            say(WarningEvent(message=f"trackers.trackio: {text}"))

    warnings.showwarning = show


class Trackio:
    """A Tracker."""

    def __init__(self, run: trackio.Run) -> None:
        self._run = run

    def figures(self, item: Figures) -> None:
        self._run.log({**item.values}, step=item.step)

    def picture(self, item: Picture) -> None:
        image = trackio.Image(item.image(), caption=item.prompt)
        self._run.log({f"samples/{item.index}": image}, step=item.step)

    def note(self, item: Note) -> None:
        self._run.alert(item.kind, text=item.text, level=LEVELS[item.kind], step=item.step)

    def flush(self) -> None:
        """trackio sends by itself, twice a second."""

    def finish(self, failed: bool) -> None:
        self._run.finish()
