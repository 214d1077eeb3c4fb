"""Trials of configs: started as the command line starts them, stopped, resumed, drawn, exported, compared."""

from __future__ import annotations

import math
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from tests.distributed import run_ranks
from trainer.config.load import dump_config, load_config
from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.export.export import export
from trainer.launcher import preflight
from trainer.run.events import EventReader, SampleEvent, StepEvent
from trainer.run.folder import RunDir, shared_cache
from trainer.system.errors import InputError
from trainer.train.log import emitter
from trainer.train.loop import Trainer

Outcome = Literal["ran", "refused before the start", "refused after the start", "crashed", "differs"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
WRONG: tuple[Outcome, ...] = ("refused after the start", "crashed", "differs")
OnRanks = Callable[..., list[Any]]
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-2}
"""Of losses, relative, between runs that add the same numbers in another order."""
EIGHT_BIT = 1e-3
"""The same where 8-bit states are rounded by the blocks of other shards: the third loss shows it first."""


@dataclass(frozen=True)
class Trial:
    """What came of a config. why: the sentence, the traceback, or what differs."""

    outcome: Outcome
    why: str = ""


@dataclass(frozen=True)
class Ended:
    """How the work of a rank ended. when: by a clock of this machine."""

    outcome: Outcome
    why: str
    when: float


def tried(cfg: RunConfig, plain: RunConfig, root: Path, name: str, on_ranks: OnRanks = run_ranks) -> Trial:
    """Try a config.

    Args:
        cfg: The config.
        plain: The same without what must not change its losses.
        root: Folder of the runs; what they cache stays there.
        name: Name of the run folder, which is removed.
        on_ranks: Runs a function on a number of ranks, as `run_ranks`.
    """
    try:
        run = _started(cfg, root, name)
    except InputError as error:
        return Trial("refused before the start", str(error))
    other = RunDir.create(root / "runs", plain, at=root / "runs" / f"{name}-plain")
    try:
        for ranks, one, folder, times in ((cfg.parallel.world_size, cfg, run, 2), (1, plain, other, 1)):
            first = min(on_ranks(ranks, trained, one, folder, times), key=lambda ended: ended.when)
            if first.outcome != "ran":
                return Trial(first.outcome, first.why)
        problems = list(_differences(cfg, run, other))
        return Trial("differs", "; ".join(problems)) if problems else Trial("ran")
    except RuntimeError as error:  # a rank died
        return Trial("crashed", str(error))
    finally:
        for folder in (run, other):
            shutil.rmtree(folder.path)


def _started(cfg: RunConfig, root: Path, name: str) -> RunDir:
    """Make the run folder of a config as the command line does."""
    file = root / "presets" / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(dump_config(cfg), encoding="utf-8")
    return preflight.new_run(load_config(file), root / "runs", at=root / "runs" / name)


def trained(world: World, cfg: RunConfig, run: RunDir, times: int) -> Ended:
    """Train so often, from where the time before ended, and export on rank 0. The errors are part of the result."""
    try:
        for number in range(times):
            weights = _trained(world, cfg, run, is_stopped=number < times - 1)
        if world.rank == 0 and cfg.export_what != "none":
            export(cfg, run, shared_cache(cfg, run.path.parent), weights)
    except InputError as error:
        return Ended("refused after the start", str(error), time.monotonic())
    except Exception:  # noqa: BLE001 - it is what is looked for
        return Ended("crashed", traceback.format_exc(), time.monotonic())
    return Ended("ran", "", math.inf)


def _trained(world: World, cfg: RunConfig, run: RunDir, is_stopped: bool) -> Mapping[str, Tensor]:
    """Train to the end, or until the first step is done. Returns the weights to verify an export with."""
    trainer = Trainer(cfg, run, world, shared_cache(cfg, run.path.parent), emitter(run, world))
    try:
        if is_stopped:
            run.request("stop")
        trainer.train()
        return {} if "full" in map(cfg.mode, trainer.model) else trainer.trained_weights()
    finally:
        trainer.close()


def _differences(cfg: RunConfig, run: RunDir, plain: RunDir) -> Iterator[str]:
    """What is not as it is in the plain run, or is missing."""
    events = EventReader(run.events_file).read()
    found, expected = _losses(run), _losses(plain)
    if found.keys() != expected.keys():
        yield f"steps {list(found)}, not {list(expected)}"
        return
    is_same = cfg.parallel.world_size == cfg.train.micro_batch == 1 and not cfg.train.compile
    tolerance = 0.0 if is_same else TOLERANCES[cfg.train.precision]
    if cfg.parallel.world_size > 1 and cfg.optim.type == "adamw8bit":
        tolerance = max(tolerance, EIGHT_BIT)
    for step, loss in found.items():
        if not abs(loss - expected[step]) <= tolerance * max(abs(expected[step]), 1e-1):
            yield f"step {step}: loss {loss!r}, not {expected[step]!r}"
    if cfg.sample.every and not any(isinstance(event, SampleEvent) for event in events):
        yield "no samples"


def _losses(run: RunDir) -> dict[int, float]:
    return {event.step: event.loss for event in EventReader(run.events_file).read() if isinstance(event, StepEvent)}
