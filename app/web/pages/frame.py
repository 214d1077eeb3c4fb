"""The frame of every page: the running job and how many runs wait."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from app.runs.monitor import RunView
from app.studio import Studio
from app.web.answers import Calls
from app.web.served_files import address
from trainer.run.events import newest_picture
from trainer.run.folder import RunDir
from trainer.system.errors import InputError


def calls(studio: Studio) -> Calls:
    """Return the functions of the frame's script."""

    def live() -> dict[str, Any]:
        return {
            "runs": [job(view) for view in studio.live.views()],
            "at_work": [_at_work(*job) for job in studio.at_work()],
            "ended": [_ending(studio, view) for view in studio.live.ended.values()],
            "num_waiting": _num_waiting(studio),
        }

    return {"live": live}


def job(view: RunView) -> dict[str, Any]:
    """Return what the foot of the rail shows of a run."""
    return {
        "name": view.path.name,
        "title": RunDir(view.path).title,
        "state": view.state,
        "step": view.step,
        "num_steps": view.num_steps,
        "length": view.length,
        "eta_s": view.eta_s,
    }


def _at_work(run: RunDir, word: str, share: float | None) -> dict[str, Any]:
    """What the foot of the rail shows of a drawing and the like, in the fields of `job`: its steps are per cent."""
    step = None if share is None else round(100 * share)
    job = {"name": run.path.name, "title": run.title, "state": word, "step": step, "num_steps": 100}
    return job | {"length": "", "eta_s": None}


def _ending(studio: Studio, view: RunView) -> dict[str, Any]:
    """What the browser's notice says and shows of a run that has ended."""
    loss, image = "" if view.loss is None else f"Loss, smoothed: {view.loss:.4g}.", ""
    with suppress(InputError, OSError, ValueError):  # the run's own page says why it cannot be shown
        if picture := newest_picture(view.samples):
            image = address(studio.thumbnails.of(RunDir(view.path).own_file(picture)))
    return {"name": view.path.name, "state": view.state, "sentence": f"{view.sentence}. {loss}".strip(), "image": image}


def _num_waiting(studio: Studio) -> int:
    try:
        return len(studio.queue.waiting())
    except (InputError, OSError):  # the page Queue says what is wrong
        return 0
