"""The screen Machine: what this machine can train, its GPUs, and the checks of the doctor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from app import machine
from app.studio import Studio
from app.web.answers import Calls
from trainer.launcher import doctor


def calls(studio: Studio) -> Calls:
    """Return the functions of the screen's script."""
    functions: list[Callable[..., Any]] = [checks, gpus]
    return {f"machine_{function.__name__}": partial(function, studio) for function in functions}


def checks(studio: Studio) -> dict[str, Any]:
    """Run the checks. Returns them, with a headline about all of them."""
    found = list(doctor.checks(studio.runs))
    return {"headline": machine.headline(found, studio.gpus()), "checks": [asdict(check) for check in found]}


def gpus(studio: Studio) -> list[dict[str, Any]]:
    """Return the state of each GPU: memory in MiB; a number that the driver does not report is -1."""
    return [asdict(gpu) for gpu in studio.gpus()]
