"""The screen Machine: what this machine can train, its GPUs, and the checks of the doctor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from app import machine
from app.studio import Studio
from app.web.answers import Calls


def calls(studio: Studio) -> Calls:
    """Return the functions of the screen's script."""
    functions: list[Callable[..., Any]] = [checks, gpus]
    return {f"machine_{function.__name__}": partial(function, studio) for function in functions}


def checks(studio: Studio, is_fresh: bool = False) -> dict[str, Any]:
    """Return the newest results, with a headline about all of them. `is_fresh` starts further checks."""
    found = studio.machine.examined(is_fresh)
    packages = machine.packages(found.checks)
    return {
        "headline": machine.headline(found.checks, studio.gpus()) if found.checks else "",
        "checks": [asdict(check) for check in found.checks if check not in packages or check.verdict != "ok"],
        "versions": [[check.what, check.fact] for check in packages if check.verdict == "ok"],
        "disk": asdict(found.disk) if found.disk else None,
        "folder": str(studio.runs),
        "at": found.at,
        "is_running": found.is_running,
        "failure": found.failure,
    }


def gpus(studio: Studio) -> list[dict[str, Any]]:
    """Return the state of each GPU: memory in MiB; a number that the driver does not report is -1."""
    return [asdict(gpu) for gpu in studio.gpus()]
