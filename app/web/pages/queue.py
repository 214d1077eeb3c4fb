"""The screen Queue: the waiting runs, their order, and what happens after a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from app.model_choices import method_title
from app.studio import Studio
from app.web.answers import Calls
from trainer.config.errors import InputError
from trainer.config.load import load_config_text
from trainer.config.models import published_models
from trainer.launcher.queue import AfterFailure, Entry

MOST_TAKEN = 30
"""Runs that the queue has started, shown at most."""


def calls(studio: Studio) -> Calls:
    """Return the functions of the screen's script. Each returns the state of the queue."""
    functions: list[Callable[..., Any]] = [state, move, remove, change]
    return {f"queue_{function.__name__}": partial(function, studio) for function in functions}


def state(studio: Studio) -> dict[str, Any]:
    """Return waiting runs in their order, those that were started, newest first, and the settings."""
    queue = studio.queue
    waiting, taken = queue.waiting(), queue.taken()
    return {
        "waiting": [_row(entry, "waiting") for entry in waiting],
        "taken": [_row(entry, queue.state_of(entry)) for entry in reversed(taken[-MOST_TAKEN:])],
        "is_paused": queue.settings.is_paused,
        "after_failure": queue.settings.after_failure,
        "problems": [text for text in (studio.queue_problem, *queue.problems()) if text],
        "num_gpus": len(studio.gpus()),
    }


def move(studio: Studio, number: int, by: int) -> dict[str, Any]:
    """Move a waiting run by some places; negative is earlier."""
    studio.queue.move(number, by)
    return state(studio)


def remove(studio: Studio, number: int) -> dict[str, Any]:
    """Take a waiting run out of the queue."""
    studio.queue.remove(number)
    return state(studio)


def change(studio: Studio, is_paused: bool | None = None, after_failure: AfterFailure | None = None) -> dict[str, Any]:
    """Change the settings that are given."""
    given = {"is_paused": is_paused, "after_failure": after_failure}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    studio.queue.change(replace(studio.queue.settings, **changes))
    return state(studio)


def _row(entry: Entry, what: str) -> dict[str, Any]:
    return {
        "number": entry.number,
        "name": entry.name,
        "gpus": list(entry.gpus),
        "run": entry.run,
        "error": entry.error,
        "state": what,
        **_described(entry),
    }


def _described(entry: Entry) -> dict[str, str]:
    try:
        config = load_config_text(entry.config, (), Path(f"{entry.name}.yaml")).config
    except InputError as error:  # of a version that had other fields
        return {"model": "", "method": "", "problem": str(error)}
    known = published_models().get(config.model.path)
    name = known.name if known else config.model.path.rpartition("/")[2]
    return {"model": name, "method": method_title(config), "problem": ""}
