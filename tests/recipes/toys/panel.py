"""The screen Toy: a greeting."""

from __future__ import annotations

from functools import partial

from app.studio import Studio
from app.web.answers import Calls


def calls(studio: Studio) -> Calls:
    """Return the functions of the screen's script."""
    return {"toy_greeting": partial(greeting, studio)}


def greeting(studio: Studio, name: str) -> str:
    """Return a greeting with the name of the runs folder."""
    return f"Hello {name}, your runs are in {studio.runs.name}."
