"""The screen of one run: what changed since the last call, requests to the run, prompts and notes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from app.runs import notes, run_screen
from app.runs.monitor import CHARTS, Follower, RunView
from app.runs.run_screen import LogWish, Part
from app.studio import Studio
from app.web.answers import Calls
from trainer.run import process
from trainer.run.prompts import request_prompts
from trainer.system.errors import InputError
from trainer.view.chart import MOST_SENT, MOST_SENT_SMALL, Chart

UNITS: Mapping[str, str] = {
    "Seconds per step": "seconds",
    "Speed": "per second",
    "GPU load": "%",
    "GPU temperature": "°C",
    "GPU power": "W",
    "GPU clock": "MHz",
    "Host memory": "GiB",
}
"""{chart: title of its y axis}; default: the chart's title in lower case."""


def facts() -> dict[str, Any]:
    """Return what the script knows from the start: the charts of every run."""
    return {"charts": [{"title": name, "ylabel": UNITS.get(name, name.lower())} for name in CHARTS], "units": UNITS}


def calls(studio: Studio) -> Calls:
    """Return the functions of the screen's script."""

    def run_view(
        name: str, known: dict[str, str], log: LogWish | None = None, only_head: bool = False
    ) -> dict[str, Any]:
        try:
            run = studio.found(name)
        except InputError:  # its folder was deleted or moved, or the address has a typing error
            return {"is_gone": True}
        run.guard()
        follower = studio.follower(run)
        view = follower.view()
        if known.get("run") != follower.token:  # the first call, or another run of the same name
            known = {}
        parts = {"run": Part(follower.token, lambda: None), "head": run_screen.head(follower, view, studio.gpus())}
        if not only_head:
            parts |= run_screen.overview(studio, follower, view, known) | {"curves": _curves(follower, view)}
        answer = {"title": run.title, "id": run.title_id, "parts": run_screen.changes(parts, known)}
        return answer | ({"log": run_screen.log(run, log)} if log else {})

    def run_request(name: str, what: Literal["stop", "save", "sample"]) -> None:
        run = studio.run(name)
        if not process.alive(run):
            raise InputError(f"{name} is not running any more")
        run.request(what)

    def run_resume(name: str) -> None:
        run = studio.run(name)
        if studio.follower(run).view().state == "finished":
            raise InputError(f"{name} has finished; let it go on for more steps")
        studio.resume(run)

    def run_extend(name: str, steps: int) -> None:
        studio.extend(studio.run(name), steps)

    def run_branch(name: str, step: int, lr: str, steps: int) -> str:
        run = studio.run(name)
        config = run.config()
        changes = [f"train.steps={steps}"] if steps != config.train.steps else []
        return studio.branch(run, step, [*changes, f"optim.lr={lr}"]).path.name

    def run_prompts(name: str, prompts: list[str]) -> None:
        run = studio.run(name)
        if not process.alive(run):
            raise InputError(f"{name} is not running any more: it generates no more samples")
        request_prompts(run, prompts)

    def run_rename(name: str, title: str) -> None:
        notes.give_title(studio.run(name), title)

    def run_notes(name: str, text: str, version: str) -> dict[str, Any]:
        return asdict(notes.save(studio.run(name), text, version))

    return {
        "run_view": run_view,
        "run_request": run_request,
        "run_resume": run_resume,
        "run_extend": run_extend,
        "run_branch": run_branch,
        "run_prompts": run_prompts,
        "run_rename": run_rename,
        "run_notes": run_notes,
    }


def _curves(follower: Follower, view: RunView) -> Part:
    """Return {chart: its content}.

    A run that was resumed repeats steps, so that `view.curves` changes, too.
    """
    source = follower.run.path.name

    def make() -> dict[str, str]:
        large = next(iter(CHARTS))
        sizes = {name: MOST_SENT if name == large else MOST_SENT_SMALL for name in follower.charts()}
        return {name: Chart(name, follower.lines(name), source=source).json(size) for name, size in sizes.items()}

    return Part(repr(view.curves), make)
