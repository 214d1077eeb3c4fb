"""The remedy after running out of memory: the next rung of the plan's ladder. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.plan.hardware import Card, detected, like, of_machine
from trainer.plan.search.ladder import CPU, next_rung, nothing_left
from trainer.run import stages
from trainer.run.events import ENDS, ErrorEvent, EventReader, RankReader, StatusEvent
from trainer.run.failure import missing_memory
from trainer.run.folder import RunDir, shared_cache
from trainer.run.process import Launch
from trainer.system.amounts import GIB
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu


def with_remedy(run: RunDir, error: ErrorEvent, listed: Sequence[Gpu] | None = None) -> ErrorEvent:
    """Return why a run failed, with the change to try next where memory ran out; as it is where that is not known.

    Args:
        run: The run.
        error: Why its latest start failed.
        listed: This machine's GPUs. None: nvidia-smi is asked.
    """
    if missing_memory(error.message) is None:
        return error
    try:
        hardware = detected() if listed is None else of_machine(listed)
        return _with_rung(run.path, error, hardware.card if hardware else None)
    except (InputError, OSError):  # a damaged config, or GPUs that cannot be listed
        return error


@lru_cache(64)
def _with_rung(path: Path, error: ErrorEvent, here: Card | None) -> ErrorEvent:
    """here: the GPUs of this machine. Remembered, for the page asks again and again."""
    run = RunDir(path)
    whole = run.config()
    cfg = stages.current(run, whole).config
    card = _card(run, cfg, here)
    if card is None:
        return error
    missing = missing_memory(error.message) or 0.0
    events = reversed(EventReader(run.events_file).read())
    states = (one.state for one in events if isinstance(one, StatusEvent) and one.state not in ENDS)
    rung = next_rung(cfg, card, shared_cache(cfg, path.parent), missing, next(states, "training"))
    if rung is None:
        return replace(error, remedy=nothing_left(cfg), retry=())
    settings = stages.of_stage(whole, run.current_stage, rung.settings)
    plan = f"by the plan this takes {rung.need / GIB:.1f} of {card.memory / GIB:.1f} GiB; " if rung.need else ""
    how = "continue with --resume and" if rung.effect != "result" else "start a new run with"
    return replace(error, remedy=f"{how} {' '.join(map(shlex.quote, settings))}: {plan}{rung.in_words}", retry=settings)


def _card(run: RunDir, cfg: RunConfig, here: Card | None) -> Card | None:
    """Return what the ranks had, by their heartbeats: this machine's GPUs, others, or host memory; None if unknown."""
    ranks = (RankReader(file).read() for file in run.ranks.glob("rank*.jsonl"))
    memory = min((lines[-1].limit for lines in ranks if lines), default=None)
    launch = Launch.read(run)
    if cfg.parallel.device == "cpu" or (launch and launch.is_on_this_machine and here is None):
        return like(CPU, memory) if memory else None
    if here and (memory is None or (launch and launch.is_on_this_machine)):
        return like(here.name, memory or here.memory)
    return like("a GPU of another machine", memory) if memory else None
