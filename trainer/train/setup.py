"""From a config to a loop that is ready for its first step, in the one order that works."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import config_changes
from trainer.checkpoint.restore import newest_intact, restore
from trainer.checkpoint.save import TrainState
from trainer.config.schema import RunConfig
from trainer.data.loader import BatchSizes, Loader
from trainer.data.open import open_data
from trainer.data.source import DataSource, Sampler
from trainer.distributed.context import RankContext
from trainer.distributed.world import World
from trainer.export.check import check_export
from trainer.metrics.out_of_memory import OomContext
from trainer.metrics.step_time import StepTimer
from trainer.models import families
from trainer.models.base import ModelFamily
from trainer.models.build import LoadedModel, build_model, encoder_loader, load_model
from trainer.models.objectives import kinds as objectives
from trainer.models.objectives.base import Objective
from trainer.models.pissa import initial_file
from trainer.models.start import continue_adapter
from trainer.optim import Ema, HasEvaluationWeights, evaluation_weights, learning_rate, make_optimizer
from trainer.parallel.compile import compiler_problem, compiles
from trainer.parallel.replicas import check_reduced
from trainer.run.events import Emit, EventReader, LengthEvent, StatusEvent
from trainer.run.folder import RunDir
from trainer.run.manifest import Progress, complete, progress_of
from trainer.run.preemption import Preemption
from trainer.system.errors import InputError
from trainer.train.log import RunLog
from trainer.train.passes import Passes
from trainer.train.sampling import SampleSchedule, with_requested_prompts

RISE = 1.1
"""A learning rate that is so many times as high after a resume is worth a warning."""
LEAST_RATE = 0.01
"""Part of `optim.lr` below which weights hardly change."""


@dataclass(frozen=True)
class Ready:
    """All that the loop works with.

    Attributes:
        cfg: The config with what it leaves open decided: offloading, recomputation, `train.compile`.
        batch_sizes, num_steps: Of the whole run.
        saved: Of the checkpoint that was resumed; None for a new run.
    """

    cfg: RunConfig
    log: RunLog
    family: ModelFamily
    objective: Objective
    data: DataSource
    sampler: Sampler
    sample_schedule: SampleSchedule
    loaded: LoadedModel
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    clock: StepTimer
    oom_context: OomContext
    passes: Passes
    loader: Loader[Any]
    batch_sizes: BatchSizes
    num_steps: int
    saved: Progress | None


def set_up(
    cfg: RunConfig, run: RunDir, world: World, cache: Path, emit: Emit, is_stopping: Callable[[], bool], before: int
) -> Ready:
    """Make this rank's part of a run ready for its next step, in the one order that works. Collective.

    Arguments as of `Trainer`. is_stopping: whether this rank should stop.

    Raises:
        InputError: The config, the model and the data do not fit together.
        StopRequested: The run was stopped while data was encoded or counted.
    """
    log = RunLog(run, world, emit, before)

    # 1. The family and the objective refuse a config that they cannot do.
    family = families.make(cfg, cache)
    objective = objectives.make(cfg, family)
    for warning in (*family.warnings(cfg), *objective.warnings(cfg)):
        log.warn(warning)

    # 2. Build on the meta device, quantize, inject. What does not fit together is refused here, before a large set of
    # captions is encoded for hours.
    built = build_model(cfg, family)
    objective.check(built)
    export_notes = check_export(cfg, family, built.trainables)

    # 3. Caches. Encoders are loaded, sharded, used for what the cache lacks, and freed before the model takes their
    # memory. Drawing samples loads the autoencoder again.
    load = encoder_loader(cfg, world, cache, log.listener("encoding"))
    events = EventReader(run.events_file).read() if world.rank == 0 else []
    context = RankContext(with_requested_prompts(cfg, events, world, log), world, cache, emit, is_stopping)
    data, sampler = open_data(family, load, context)
    sample_schedule = SampleSchedule(sampler, cfg.sample.seed, run, world, log, before, events)

    # 4. Mesh (`parallel.strategy: auto` needs the bytes of the built model), then recompute, compile, `fully_shard`: a
    # recompute inside the sharded block gathers nothing again. Then `to_empty`, and every rank reads its own rows.
    emit(StatusEvent(state="loading"))
    started = time.perf_counter()
    cfg = _decide_compiling(log.decide(cfg, cache), run, world, log)
    loaded = load_model(built, cfg, family, world, cache, log.listener("loading"), initial_file(run))

    # 5. The adapter's first values are drawn from (seed, name), equal on any number of ranks. In a new run those of
    # `adapter.start` replace them.
    newest, problems = newest_intact(run.checkpoints, world)
    for problem in problems:
        log.warn(problem)
    start_notes = continue_adapter(loaded, cfg, family, log.warn) if newest is None else ()
    for note in (*built.notes, *loaded.adapter.notes, *start_notes, *export_notes):
        log.note("loading", note)

    # 6. The optimizer over the shards. Made earlier, it would hold parameters that sharding has replaced.
    optimizer = make_optimizer(loaded.trainables, cfg.optim)
    check_reduced(loaded.trainables, (p for group in optimizer.param_groups for p in group["params"]), world)
    ema = Ema(loaded.trainables, cfg.optim.ema) if cfg.optim.ema else None

    # 7. Hooks of the step timer and the out-of-memory context, ordered before or after those of FSDP.
    clock = StepTimer(world, loaded.mesh)
    clock.watch(loaded.module, family.shard.blocks, cfg.train.compile is True)
    oom_context = OomContext(loaded.module, family.shard.blocks, cfg.train.compile is True, world.heartbeat)
    passes = Passes(family, objective, loaded.module, world, clock)

    # 8. Resume: the newest intact checkpoint is read into the objects of 5 and 6; the loader begins at its position.
    saved = _resume(newest, train_state(loaded, optimizer, ema), cfg, world, data, log) if newest else None
    step = saved.step if saved else 0
    batch_sizes, num_steps = _find_length(saved, cfg, data, context, log)
    _warn_of_a_rise(saved, cfg, num_steps, log)
    loader = _make_loader(saved, cfg, world, data, batch_sizes, passes)
    log.model_loaded(loaded, time.perf_counter() - started, step)
    log.show_plan(cfg, cache, step)
    return Ready(
        cfg=cfg,
        log=log,
        family=family,
        objective=objective,
        data=data,
        sampler=sampler,
        sample_schedule=sample_schedule,
        loaded=loaded,
        optimizer=optimizer,
        ema=ema,
        clock=clock,
        oom_context=oom_context,
        passes=passes,
        loader=loader,
        batch_sizes=batch_sizes,
        num_steps=num_steps,
        saved=saved,
    )


def _decide_compiling(cfg: RunConfig, run: RunDir, world: World, log: RunLog) -> RunConfig:
    """The config with `train.compile` decided, equally on all ranks. Collective."""
    # A resumed run does as its checkpoint did, so that a step is as fast and rounds as before.
    saved = complete(run.checkpoints) if world.rank == 0 else []
    mine = progress_of(saved[-1]).config.get("train", {}).get("compile") if saved else None
    before = world.gather(mine)[0]
    wanted = compiles(cfg.train, world.device, before if isinstance(before, bool) else None)
    world.heartbeat.enter("loading", moves=False)
    problem = compiler_problem(world.device, cfg.train.compile_backend) if wanted else ""
    problems = [found for found in world.gather(problem) if found]
    if problems:
        log.warn(problems[0])
    train = cfg.train.model_copy(update={"compile": wanted and not problems})
    return cfg.model_copy(update={"train": train})


def _resume(newest: Path, state: TrainState, cfg: RunConfig, world: World, data: DataSource, log: RunLog) -> Progress:
    """Read a checkpoint into `state`, and say what has changed since. Collective."""
    saved = restore(newest, state)
    world.barrier()
    if world.rank in world.remote_leaders:
        shutil.rmtree(newest)  # a copy of rank 0's
    log.note("loading", f"resumed from {newest.name}", saved.step)
    changed = config_changes.changes(saved.config, cfg.model_dump(mode="json")) if saved.config else []
    if changed:
        log.note("loading", f"changed since it was saved: {'; '.join(map(str, changed))}", saved.step)
    if saved.data and saved.data != data.digest:
        log.warn(data.changed_message, saved.step)
    return saved


def _make_loader(
    saved: Progress | None, cfg: RunConfig, world: World, data: DataSource, sizes: BatchSizes, passes: Passes
) -> Loader[Any]:
    """The loader of this rank, which begins at the position that was resumed."""
    return Loader(
        data.batch_sampler(sizes, saved),
        data.example,
        world.data_rank,
        world.data_size,
        cfg.train.micro_batch,
        data.loss_weight,
        world.device,
        partial(passes.prepare, cfg.train.seed),
        data.micro_batch,
        data.batch_key,
    )


def _find_length(
    saved: Progress | None, cfg: RunConfig, data: DataSource, context: RankContext, log: RunLog
) -> tuple[BatchSizes, int]:
    """The batch size of each step and the number of steps, which is announced. Collective.

    Neither depends on the number of ranks.

    Raises:
        InputError: `optim.warmup` is not shorter.
        StopRequested: As `DataSource.num_samples`.
    """
    num_steps, step = cfg.train.steps, saved.step if saved else 0
    sizes = BatchSizes.after(saved, cfg.train.batch_size)
    if cfg.train.epochs is not None:
        sizes = replace(sizes, end=data.num_samples(cfg.train.epochs, context))
        num_steps = sizes.num_steps
        if cfg.optim.schedule != "constant" and cfg.optim.warmup >= num_steps:
            epochs = f"{num_steps} steps of train.epochs {cfg.train.epochs:g}"
            raise InputError(f"optim.warmup: must be less than the {epochs}, not {cfg.optim.warmup}; lower it")
    log.emit(length_event(num_steps, step, sizes, data))
    return sizes, num_steps


def length_event(num_steps: int, step: int, sizes: BatchSizes, data: DataSource) -> LengthEvent:
    """The length of a run in steps, and how far it is in its epochs after `step` of them."""
    samples = data.samples_of_an_epoch
    return LengthEvent(step=step, steps=num_steps, epoch=sizes.before(step) / samples, epoch_steps=samples / sizes.now)


def _warn_of_a_rise(saved: Progress | None, cfg: RunConfig, num_steps: int, log: RunLog) -> None:
    """Warn if the learning rate rises where the run continues: a schedule that had fallen ends later now."""
    if saved is None:
        return
    optim, before = cfg.optim, saved.lr
    after = learning_rate(saved.step, optim, num_steps)
    is_wanted = saved.step < optim.warmup or (saved.config and saved.config["optim"]["lr"] != optim.lr)
    if saved.step < num_steps and after > RISE * before and not is_wanted:
        why = "is constant now" if optim.schedule == "constant" else f"{optim.schedule} now ends at {num_steps}"
        former = f"to go on at the former rate, stop and resume with optim.schedule=constant optim.lr={before:.3g}"
        if before < LEAST_RATE * optim.lr:  # as at the end of a schedule
            former = "where that is too much, stop and resume with a lower optim.lr"
        log.warn(
            f"the learning rate rises from {before:.3g} to {after:.3g}, because optim.schedule {why}; {former}",
            saved.step,
        )


def train_state(loaded: LoadedModel, optimizer: torch.optim.Optimizer, ema: Ema | None) -> TrainState:
    """The state for a checkpoint; weights to evaluate with are added only where they are not the trained ones."""
    evaluation: dict[str, Tensor] = {}
    if ema:
        evaluation = ema.average
    elif isinstance(optimizer, HasEvaluationWeights):
        with evaluation_weights(optimizer, list(loaded.trainables.values()), None):
            evaluation = {name: parameter.detach().clone() for name, parameter in loaded.trainables.items()}
    return TrainState(loaded.module, loaded.trainables, optimizer, evaluation)


def stop_requested(run: RunDir, world: World, preemption: Preemption, parent: int) -> bool:
    """Whether a request, a signal or the death of torchrun stops the run. Only rank 0 sees requests.

    Args:
        parent: The process that started this rank. A rank whose torchrun was killed is adopted by another one, and
            would train on unnoticed.
    """
    return bool(preemption) or (world.rank == 0 and run.requested("stop")) or os.getppid() != parent
