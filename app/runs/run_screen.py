"""The screen of one run as JSON: a browser names what it shows, and gets the parts that changed since.

Curves are texts of `trainer.view.chart.Chart.json`, which the page adds.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.runs import exports, notes
from app.runs.monitor import SILENT_S, Follower, Level, RunView, explained, log_files, read_log
from app.studio import Studio
from trainer.config import families
from trainer.config.schema import RunConfig
from trainer.config.titles import method_title, model_title
from trainer.launcher.console import sentence
from trainer.launcher.remedy import with_remedy
from trainer.run import manifest
from trainer.run.events import (
    AnyEvent,
    CheckpointEvent,
    ErrorEvent,
    ExportEvent,
    SampleEvent,
    StatusEvent,
    ValidationEvent,
    WarningEvent,
)
from trainer.run.folder import Request, RunDir
from trainer.run.prompts import requested_prompts
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu

NUM_EVENTS = 200
"""Events that a browser is sent at most; the log has all."""
NUM_STEPS = 8
"""Newest steps with samples that the strip offers."""
REQUESTS: Mapping[Request, str] = {
    "stop": "It stops after this step and writes a checkpoint.",
    "save": "A checkpoint is written after this step.",
    "sample": "Samples are generated after this step.",
}
"""{request: sentence while it was not handled yet}"""


@dataclass(frozen=True)
class LogWish:
    """The log that a browser shows.

    Attributes:
        source: One of `monitor.log_files`.
        level: Its level.
        file: `file` of the last answer; empty at first.
        offset: `offset` of the last answer; 0 at first.
    """

    source: str = "torchrun"
    level: Level = "all"
    file: str = ""
    offset: int = 0


@dataclass(frozen=True)
class Part:
    """A part of the screen.

    Attributes:
        key: Changes with the content.
        make: Returns the content, which JSON can hold.
    """

    key: str
    make: Callable[[], Any]

    @classmethod
    def of(cls, content: Any) -> Part:
        text = json.dumps(content, allow_nan=False)
        return cls(hashlib.sha256(text.encode()).hexdigest()[:16], lambda: content)


def changes(parts: Mapping[str, Part], known: Mapping[str, str]) -> dict[str, Any]:
    """Return {part: {key, value}} of the parts whose key a browser does not know yet."""
    return {
        name: {"key": part.key, "value": part.make()} for name, part in parts.items() if part.key != known.get(name)
    }


def overview(studio: Studio, follower: Follower, view: RunView, known: Mapping[str, str]) -> dict[str, Part]:
    """Return the parts of the overview, without its curves and its log."""
    return {
        "memory": Part.of(memory(view, studio.gpus())),
        "samples": samples(view),
        "events": Part(str(follower.num_events), lambda: _new_events(follower.events(), known.get("events", "0"))),
        "prompts": Part.of({"now": list(view.prompts), "asked": _asked_prompts(follower.run)}),
        "notes": Part.of(_notes(follower.run)),
    }


def head(follower: Follower, view: RunView, gpus: Sequence[Gpu] = ()) -> Part:
    """Return the state of the run, its figures, and what can be done with it. gpus: those of this machine."""
    run, config = follower.run, follower.config
    is_ended = not view.is_running and not view.is_alive
    return Part.of(
        {
            "state": view.state,
            "sentence": view.sentence,
            "is_running": view.is_running,
            "is_alive": view.is_alive,
            "is_stuck": view.is_stuck,
            "problems": list(view.problems),
            "about": about(config),
            "is_text": families.trains_on(config) == "text",
            "is_rehearsal": run.is_rehearsal,
            "step": view.step,
            "num_steps": view.num_steps,
            "length": view.length,
            "epoch": view.epoch,
            "stages": _stages(config, view),
            "done": [view.done, view.total] if view.is_running else [0, 0],
            "message": view.message if view.is_running else "",
            "pending": [words for name, words in REQUESTS.items() if view.is_running and run.requested(name)],
            "marks": _marks(config, view),
            "has_prompts": bool(view.prompts or _asked_prompts(run)),
            "next_sample": _next_sample(config, view),
            "figures": figures(follower, view),
            "split": {part: _finite(seconds) for part, seconds in view.seconds.items()},
            "waited_s": _finite(view.waited_s),
            "error": _error(run, view, gpus),
            "more": more(run, config, view) if is_ended else None,
            "exports": _exports(run, view),
            "better": _better(run, view),
        }
    )


def figures(follower: Follower, view: RunView) -> dict[str, Any]:
    """Return the figures at the top. None stands for what is not known."""
    rated = [event for event in follower.validations if math.isfinite(event.loss)]
    best = min(rated, key=lambda event: event.loss, default=None)
    rate, unit = view.speed
    return {
        "loss": _finite(view.loss),
        "diverged_at": view.diverged_at,
        "best": {"loss": best.loss, "step": best.step} if best else None,
        "rate": _finite(rate) if view.loss is not None else None,
        "unit": unit,
        "step_s": _finite(view.step_s) if view.loss is not None else None,
        "eta_s": None if view.eta_s is None or not view.is_running or view.is_stuck else _finite(view.eta_s),
        "duration_s": view.duration_s,
        "last_event_s": view.last_event_s,
    }


def about(config: RunConfig) -> str:
    """Return model, method and number of ranks: "FLUX.2 dev · LoRA rank 16, nf4 base · 4 ranks"."""
    name, num_ranks = model_title(config.model.path, config.model.family), config.parallel.world_size
    return " · ".join((name, method_title(config, is_sized=True), f"{num_ranks} rank" + "s" * (num_ranks != 1)))


def more(run: RunDir, config: RunConfig, view: RunView) -> dict[str, Any]:
    """Return how an ended run can go on.

    "resume": it has steps left.  "extend": it is finished, and goes on with more steps.  "start": it never started.
    """
    saved = manifest.newest_step(run.checkpoints)
    if view.state == "finished":
        return {"kind": "extend" if saved and not run.is_rehearsal else "", "saved": saved}
    return {"kind": "start" if view.state == "created" else "resume", "saved": saved}


def memory(view: RunView, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return the memory of the ranks, in bytes, and the GPUs of this machine."""
    return {
        "ranks": [
            {
                **{name: getattr(rank, name) for name in ("rank", "allocated", "reserved", "peak", "limit")},
                "late_s": round(rank.age_s) if view.is_running and rank.age_s > SILENT_S else None,
            }
            for rank in view.ranks
        ],
        "imbalance": round(view.imbalance, 2),
        "gpus": [asdict(gpu) for gpu in gpus],
        "slow": view.slow,
    }


def samples(view: RunView) -> Part:
    """Return the newest steps with samples. The files come from `samples_images`."""
    newest = max((sample.time for sample in view.samples), default=0.0)
    return Part(f"{len(view.samples)} {newest}", lambda: _steps(view.samples))


def _steps(found: Sequence[SampleEvent]) -> dict[str, Any]:
    steps = sorted({sample.step for sample in found})
    shown = steps[-NUM_STEPS:]
    cells: dict[int, list[dict[str, Any]]] = {step: [] for step in shown}
    for sample in found:
        if sample.step in cells:
            cell = {"index": sample.index, "prompt": sample.prompt, "step": sample.step, "kind": sample.kind.name}
            if cell not in cells[sample.step]:
                cells[sample.step].append(cell)
    listed = [{"step": step, "cells": cells[step]} for step in shown]
    return {"steps": listed, "num_steps": len(steps), "num_samples": len(found)}


def log(run: RunDir, wish: LogWish) -> dict[str, Any]:
    """Return what was appended to the wanted log, and which logs there are.

    `is_fresh` says that it replaces what was shown. `problem` says why it cannot be read.
    """
    found = log_files(run)
    source = wish.source if wish.source in found else next(iter(found), "")
    if not source:
        return {"sources": [], "source": "", "file": "", "offset": 0, "text": "", "rest": "", "is_fresh": True}
    file = str(found[source])
    answer = {"sources": list(found), "source": source, "file": file}
    is_same = wish.file == file and wish.source == source
    try:
        return answer | asdict(read_log(found[source], wish.level, wish.offset if is_same else 0))
    except InputError as error:
        return answer | {"offset": 0, "text": "", "rest": "", "is_fresh": True, "problem": str(error)}


def _new_events(events: Sequence[AnyEvent], known: str) -> dict[str, Any]:
    """Return the events after the first `known` ones, but at most NUM_EVENTS."""
    count = int(known) if known.isdecimal() else 0
    start = count if count <= len(events) else 0
    rows = [_row(event) for event in events[max(start, len(events) - NUM_EVENTS) :]]
    return {"is_fresh": start == 0, "rows": rows}


def _row(event: AnyEvent) -> dict[str, Any]:
    """Return an event as a row. Successive rows of one `group` are shown as one."""
    mood, group = "", ""
    match event:
        case StatusEvent():
            mood, group = "bad" if event.state == "failed" else "", f"status {event.state}"
        case SampleEvent():
            group = f"sample {event.step}"
        case WarningEvent():
            mood = "warn"
        case ErrorEvent():
            mood = "bad"
    return {"time": event.time, "mood": mood, "group": group, "step": event.step, "text": _sentence(event)}


def _sentence(event: AnyEvent) -> str:
    match event:
        case ExportEvent():
            check = exports.check_in_words(event)
            return f"Exported {event.what}: {event.path}" + (f"; {check}" if check else "")
        case ValidationEvent():
            return f"Step {event.step:,}: validation loss {event.loss:.4g}"
        case CheckpointEvent():
            return f"Step {event.step:,}: checkpoint written"
        case SampleEvent():
            return f"Step {event.step:,}: sample of “{event.prompt}”"
    text = sentence(event)  # type: ignore[arg-type]  # a follower's events have no steps
    return text[:1].upper() + text[1:]


def _stages(config: RunConfig, view: RunView) -> dict[str, Any] | None:
    """Return names and steps of the stages, and the current one, from 1; None for a run without stages."""
    if not config.stages:
        return None
    names = [stage.name for stage in config.stages]
    done = bool(view.state == "finished")
    number = view.stage.number if view.stage else 1
    return {"names": names, "steps": list(view.stage_steps), "number": len(names) if done else number}


def _marks(config: RunConfig, view: RunView) -> dict[str, int]:
    """Return after how many steps checkpoints and samples are due; 0 for never, or where stages may differ."""
    if config.stages:
        return {"checkpoint": 0, "sample": 0}
    return {"checkpoint": config.checkpoint.every, "sample": config.sample.every if view.prompts else 0}


def _next_sample(config: RunConfig, view: RunView) -> dict[str, float] | None:
    """Return the step of the next samples, and the seconds until then."""
    every = _marks(config, view)["sample"]
    if not every or view.state != "training" or view.eta_s is None:
        return None
    step = min((view.step // every + 1) * every, view.num_steps or math.inf)
    return {"step": step, "eta_s": (step - view.step) * view.step_s}


def _error(run: RunDir, view: RunView, gpus: Sequence[Gpu]) -> dict[str, Any] | None:
    if view.error is None or view.state != "failed":
        return None
    error = with_remedy(run, view.error, gpus)
    sources = {str(file): source for source, file in log_files(run).items()}
    return {
        "message": error.message,
        "step": error.step,
        "rank": error.rank,
        "remedy": error.remedy,
        "log": error.log or "",
        "source": sources.get(str(run.path / error.log), "") if error.log else "",
        "retry": [] if run.is_rehearsal else list(error.retry),
    }


def _exports(run: RunDir, view: RunView) -> list[dict[str, Any]]:
    """Return the exports of a finished run that are there: the main one, then the others, newest first."""
    if view.state != "finished":
        return []
    newest = {event.path: event for event in view.exports}
    main = [view.main_export] if view.main_export else []
    others = [event for event in reversed(newest.values()) if event.path not in {one.path for one in main}]
    return [found for event in (*main, *others) if (found := _export(run, newest[event.path]))]


def _better(run: RunDir, view: RunView) -> dict[str, Any] | None:
    """Return the checkpoint of a finished run whose validation loss is lower than that of the newest; None without."""
    if view.state != "finished":
        return None
    losses = manifest.validation_losses(run.checkpoints)
    best, newest = manifest.by_loss(losses)[:1], list(losses)[-1:]
    if not best or best == newest:
        return None
    return {"step": manifest.step_of(best[0]), "loss": losses[best[0]], "last": _finite(losses[newest[0]])}


def _export(run: RunDir, event: ExportEvent) -> dict[str, Any] | None:
    """Return an export; None where its file was removed."""
    try:
        path = run.own_file(event.path)
        size = sum(file.stat().st_size for file in _files(path))
        name = exports.shown_name(path.relative_to(run.export.resolve()))
    except (InputError, OSError, ValueError):  # not a file of this run, or removed meanwhile
        return None
    return {
        "name": name,
        "size": size,
        "step": event.step,
        "is_file": path.is_file(),
        "check": exports.check_in_words(event),
        "is_verified": event.difference <= exports.LARGEST_ROUNDING,
    }


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (file for file in path.rglob("*") if file.is_file())
    else:
        raise FileNotFoundError(os.fspath(path))


def _asked_prompts(run: RunDir) -> list[str] | None:
    """Return the prompts that were requested and not taken yet."""
    try:
        asked = requested_prompts(run)
    except InputError:  # the trainer says so when it reads them
        return None
    return None if asked is None else list(asked)


def _notes(run: RunDir) -> dict[str, str]:
    try:
        return asdict(notes.read(run))
    except (InputError, OSError) as error:
        return {"text": "", "version": "", "problem": explained(error)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
