"""The log of a run: events of rank 0, and once per second each rank's memory. Nothing here trains."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.config.schema import RunConfig
from trainer.distributed.world import World
from trainer.metrics.memory import MemoryMeter
from trainer.models.build import Listener, LoadedModel
from trainer.plan.calibration import Measured, keep, tells_speed
from trainer.plan.hardware import like
from trainer.plan.memory import MemoryPlan
from trainer.plan.search import compare
from trainer.plan.search.decide import decided, is_open
from trainer.plan.search.ladder import CPU, next_rung
from trainer.run.events import (
    CheckpointEvent,
    Emit,
    EventWriter,
    LossyWriter,
    RankLine,
    State,
    StatusEvent,
    StepEvent,
    WarningEvent,
)
from trainer.run.failure import missing_memory
from trainer.run.folder import RunDir
from trainer.run.manifest import steps_in
from trainer.system.errors import InputError

log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 1.0
SMALL_MODEL_BYTES = 1 << 30
MEASURED_STEPS = 10
"""Steps after which the planned memory is compared with what the GPU really uses."""


def emitter(run: RunDir, world: World, before: int = 0) -> Emit:
    """Where a rank sends its events: rank 0's go to the run folder, other ranks' are dropped, as all emit the same.

    Args:
        before: Optimizer steps of the stages before, which are added to the step of each event.
    """
    if world.rank:
        return lambda event: None
    write = LossyWriter(run.events_file).write

    def emit(event: Any) -> None:
        write(replace(event, step=event.step + before))

    return emit


class RunLog:
    """The events and heartbeats of one rank.

    Args:
        emit: Takes events; only rank 0's reach a reader.
        before: Optimizer steps of the stages before, which are added to the step of each heartbeat.
    """

    def __init__(self, run: RunDir, world: World, emit: Emit, before: int = 0) -> None:
        self.emit = emit
        self.meter = MemoryMeter(world)
        self._run, self._world, self._before = run, world, before
        self._lines = EventWriter(run.rank_file(world.rank))
        self._read_at = time.monotonic()
        self._plan: MemoryPlan | None = None
        self._state: State = "starting"
        self.heartbeat("starting", 0)

    def close(self) -> None:
        """Close this rank's file."""
        self._lines.close()

    def enter(self, state: State, step: int) -> None:
        """Log that the run enters a phase."""
        self._world.heartbeat.enter(state, moves=False)
        log.debug("step %d: %s", step, state)
        self._state = state
        self.emit(StatusEvent(state=state, step=step))
        self.heartbeat(state, step)

    def note(self, state: State, message: str, step: int = 0) -> None:
        """Log a sentence within a phase."""
        self.emit(StatusEvent(state=state, step=step, message=message))

    def warn(self, message: str, step: int = 0) -> None:
        """Log a sentence that the user should read."""
        self.emit(WarningEvent(step=step, message=message))

    def listener(self, state: State) -> Listener:
        """Receives the progress and the notes of a model that is being loaded."""
        return Listener(read=partial(self._weights_read, state), note=partial(self.note, state), warn=self.warn)

    def model_loaded(self, loaded: LoadedModel, seconds: float, step: int) -> None:
        """Log how much was read and how much of it is trained."""
        ranks = "1 rank" if self._world.size == 1 else f"{self._world.size} ranks"
        trained = sum(parameter.numel() for parameter in loaded.trainables.values())
        read = f"{loaded.bytes_read / 2**20:,.1f} MiB in {seconds:.1f} s"
        self.note("loading", f"the model is loaded: {trained:,} parameters are trained on {ranks}; read {read}", step)
        self.heartbeat("loading", step)

    def decide(self, cfg: RunConfig, cache: Path) -> RunConfig:
        """Return the config with what it leaves to the plan decided, on rank 0 for all. Collective.

        Args:
            cache: Folder shared by runs.
        """
        if not is_open(cfg):
            return cfg
        world, found = self._world, cfg
        memory = min(world.gather(world.memory))
        world.heartbeat.enter("loading", moves=False)  # a model is traced before its first run
        if world.rank == 0:
            name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
            found = compare.decide_here(cfg, cache, name, memory, partial(self.note, "loading"))
        return decided(cfg, *world.gather((found.train.checkpointing, found.parallel.offload_blocks))[0])

    def less_memory(self, cfg: RunConfig, cache: Path, message: str) -> tuple[str, ...]:
        """Return the change, as `key=value`, with which the run needs less memory and trains the same; empty where
        there is none left.

        Args:
            cfg: The decided config with which memory ran out on this rank.
            cache: Folder shared by runs.
            message: The error's.
        """
        device = self._world.device
        card = like(torch.cuda.get_device_name(device) if device.type == "cuda" else CPU, self._world.memory)
        rung = next_rung(cfg, card, cache, missing_memory(message) or 0.0, self._state, most="same")
        return rung.settings if rung else ()

    def show_plan(self, cfg: RunConfig, cache: Path, step: int) -> None:
        """Log the memory plan before the first step. It needs a GPU and a model that was recorded.

        Args:
            cache: Folder shared by runs, where `stepped` stores what the run used: later plans are calibrated by it.
        """
        if self._world.device.type != "cuda" or self._world.rank:
            return
        self._cache, self._measure_at, self._is_compiled = cache, step + MEASURED_STEPS, cfg.train.compile is True
        name = torch.cuda.get_device_name(self._world.device)
        self._seconds: deque[float] = deque(maxlen=MEASURED_STEPS // 2)
        self._plan = compare.plan_here(cfg, cache, name, self._world.memory)
        if self._plan is not None:
            self._tells_speed = tells_speed(cfg, self._plan.strategy)
            self.note("loading", compare.describe_plan(self._plan), step)
            warning = compare.warning(cfg, self._plan, cache)
            if warning:
                self.warn(warning, step)
        # The peak so far is that of encoding; the plan is compared with that of training.
        torch.cuda.reset_peak_memory_stats(self._world.device)

    def stepped(self, event: StepEvent) -> None:
        """Log an optimizer step, and a heartbeat when one is due."""
        self.emit(event)
        if self._plan is not None:
            self._seconds.append(event.seconds)
            if event.step == self._measure_at:
                self._compare_with_plan(self._plan, event)
        if time.monotonic() - self._beat_at >= HEARTBEAT_SECONDS:
            self.heartbeat("training", event.step)

    def checkpoint_saved(self, path: Path | None) -> None:
        """Log a complete checkpoint; None is ignored."""
        if path and self._world.rank == 0:
            self.emit(CheckpointEvent(step=steps_in(path), path=str(path.relative_to(self._run.path))))

    def heartbeat(self, phase: State, step: int) -> None:
        """Write the memory of this rank, now."""
        self._beat_at = time.monotonic()
        memory = self.meter.read()
        line = RankLine(
            rank=self._world.rank,
            step=self._before + step,
            phase=phase,
            allocated=memory.allocated,
            reserved=memory.reserved,
            peak=memory.peak,
            limit=memory.limit,
        )
        with self._world.heartbeat.writing:
            self._world.heartbeat.line = asdict(line)
            with suppress(OSError):  # the disk is full: a heartbeat is not worth the run
                self._lines.write(line)

    def _weights_read(self, state: State, done: int, total: int) -> None:
        """Report how much of a large model is read, at most once per second."""
        self._world.heartbeat.beat()
        now = time.monotonic()
        if now - self._read_at >= HEARTBEAT_SECONDS and total > SMALL_MODEL_BYTES:
            self._read_at = now
            self.emit(StatusEvent(state=state, message="MiB of weights", done=done >> 20, total=total >> 20))

    def _compare_with_plan(self, plan: MemoryPlan, event: StepEvent) -> None:
        if plan.card is None:
            return
        device = self._world.device
        free, total = torch.cuda.mem_get_info(device)
        measured = Measured(
            gpu=plan.card.name,
            ranks=self._world.size,
            planned=plan.training.peak,
            allocated=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.max_memory_reserved(device),
            used=total - free,
            seconds=statistics.median(self._seconds),
            flops=plan.flops if self._tells_speed else 0.0,
            is_compiled=self._is_compiled,
        )
        self.note("training", compare.describe_measured(measured), event.step)
        try:
            keep(self._cache, measured)
        except InputError as error:
            self.warn(f"measurements are not saved: {error}", event.step)
