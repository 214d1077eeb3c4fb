"""The screen Queue: the waiting runs, their order, and what happens after a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from app.runs import queue_rows
from app.studio import Studio
from app.web.answers import Calls
from trainer.launcher.queue import AfterFailure

MOST_TAKEN = 30
"""Runs that the queue has started, shown at most."""


def calls(studio: Studio) -> Calls:
    """Return the functions of the screen's script. Each returns the state of the queue."""
    functions: list[Callable[..., Any]] = [state, move, remove, change]
    return {f"queue_{function.__name__}": partial(function, studio) for function in functions}


def state(studio: Studio) -> dict[str, Any]:
    """Return waiting runs in their order, those that were started, newest first, and the settings."""
    queue, settings = studio.queue, studio.queue.settings
    taken = queue.taken()
    return {
        "waiting": [queue_rows.row(entry) for entry in queue.waiting()],
        "taken": [queue_rows.row(entry, queue.state_of(entry)) for entry in reversed(taken[-MOST_TAKEN:])],
        "num_earlier": max(0, len(taken) - MOST_TAKEN),
        "next": queue_rows.next_start(queue),
        "is_paused": settings.is_paused,
        "after_failure": settings.after_failure,
        "problems": [text for text in (studio.queue_problem, *queue.problems()) if text],
        "num_gpus": len(studio.gpus()),
    }


def move(studio: Studio, key: str, by: int) -> dict[str, Any]:
    """Move a waiting run by some places; negative is earlier."""
    studio.queue.move(queue_rows.find(studio.queue, key).number, by)
    return state(studio)


def remove(studio: Studio, key: str) -> dict[str, Any]:
    """Remove a waiting run from the queue."""
    studio.queue.remove(queue_rows.find(studio.queue, key).number)
    return state(studio)


def change(studio: Studio, is_paused: bool | None = None, after_failure: AfterFailure | None = None) -> dict[str, Any]:
    """Change the settings that are given."""
    given = {"is_paused": is_paused, "after_failure": after_failure}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    studio.queue.change(replace(studio.queue.settings, **changes))
    return state(studio)
