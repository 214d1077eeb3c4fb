"""The screen Machine: what this machine can train, its GPUs, the doctor's checks, and notices of the end of runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, get_args, get_origin

from app import machine
from app.studio import Studio
from app.web.answers import Calls
from trainer.launcher import notices
from trainer.launcher.notices import Notices, Way
from trainer.system.errors import InputError
from trainer.system.gpus import load
from trainer.system.installation import notices_file

WITHHELD = ("webhook", "mail")
"""Fields whose values are not sent to a browser: only whether they are set."""


def calls(studio: Studio) -> Calls:
    """Return the functions of the screen's script."""
    functions: list[Callable[..., Any]] = [checks, gpus, now, notice_fields, save_notices, try_notice]
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


def now(studio: Studio) -> dict[str, Any]:
    """Return what this machine does now: host memory in bytes, and of each GPU power and clock, -1 where not known."""
    found = load.read()
    return {**asdict(found), "slow": load.slow([found])}


def notice_fields(studio: Studio) -> dict[str, Any]:
    """Return the fields that say where the end of a run is told, and their file. A damaged one is shown as empty."""
    found, problem = Notices(), ""
    try:
        found = notices.read()
    except InputError as error:
        problem = str(error)
    values = {**found.model_dump(mode="json"), "command": shlex.join(found.command)}
    fields = [
        {
            "name": name,
            "title": field.title,
            "help": field.description,
            "value": "" if name in WITHHELD else values[name],
            "is_set": bool(values[name]),
            "choices": get_args(field.annotation) if get_origin(field.annotation) is Literal else (),
        }
        for name, field in Notices.model_fields.items()
    ]
    return {"fields": fields, "file": str(notices_file() or ""), "problem": problem}


def save_notices(studio: Studio, values: dict[str, str | bool]) -> dict[str, Any]:
    """Save the fields. One that was withheld and is not among the values stays."""
    former: dict[str, Any] = {}
    if missing := [name for name in WITHHELD if name not in values]:
        former = notices.read().model_dump(include=set(missing))
    notices.save(notices.checked({**former, **values}))
    return notice_fields(studio)


def try_notice(studio: Studio, way: Way) -> str:
    """Send a notice of the newest run in one of the ways. Returns where to look for it."""
    found = notices.read()
    if way not in found.ways:
        raise InputError(f"{Notices.model_fields[way].title}: is empty; fill it in and save it first")
    notice = notices.example(studio.runs, found)
    if problems := notices.send(found, notice, [way]):
        raise InputError(problems[0])
    return f"Sent by {way}: “{notice.title}”. Look for it where it should arrive."
