"""The frame of every page: the running job and how many runs wait."""

from __future__ import annotations

from typing import Any

from app.runs.monitor import RunView
from app.studio import Studio
from app.web.answers import Calls
from trainer.system.errors import InputError


def calls(studio: Studio) -> Calls:
    """Return the functions of the frame's script."""

    def live() -> dict[str, Any]:
        return {
            "runs": [job(view) for view in studio.live.views()],
            "ended": list(studio.live.ended.items()),
            "num_waiting": _num_waiting(studio),
        }

    return {"live": live}


def job(view: RunView) -> dict[str, Any]:
    """Return what the foot of the rail shows of a run."""
    return {
        "name": view.path.name,
        "title": title(view.path.name),
        "state": view.state,
        "step": view.step,
        "num_steps": view.num_steps,
        "length": view.length,
        "eta_s": view.eta_s,
    }


def title(run: str) -> str:
    """Return a run's name without the time and random part that its folder's name ends with."""
    parts = run.rsplit("-", 3)
    is_made = len(parts) == 4 and parts[1].isdecimal() and parts[2].isdecimal()
    return parts[0] if is_made else run


def _num_waiting(studio: Studio) -> int:
    try:
        return len(studio.queue.waiting())
    except (InputError, OSError):  # the page Queue says what is wrong
        return 0
