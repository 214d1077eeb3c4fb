"""The time of a step, split into phases. See DECISIONS 23."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from trainer.distributed.world import World

DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"

Mark = float | torch.cuda.Event


@dataclass
class StepMarks:
    """When the phases of one step began and ended."""

    start: Mark
    is_hidden: bool
    phases: list[tuple[str, Mark]] = field(default_factory=list)
    blocks: list[tuple[Mark, Mark]] = field(default_factory=list)
    communication: float = 0.0

    @property
    def seconds(self) -> float:
        """From the start to the end of the last phase. On CUDA, waits for it."""
        return _elapsed(self.start, self.phases[-1][1])

    def read(self) -> dict[str, float]:
        """Seconds per phase, with `communication` and `own` (which are parts of the others). On CUDA, waits for the end
        of the step."""
        seconds: dict[str, float] = defaultdict(float)
        before = self.start
        for phase, mark in self.phases:
            seconds[phase] += _elapsed(before, mark)
            before = mark
        seconds["communication"] = float("nan") if self.is_hidden else self.communication
        seconds["own"] = seconds[DATA] + sum(_elapsed(*block) for block in self.blocks)
        return seconds


class StepTimer:
    """Splits the seconds of each step into phases, on CUDA by events.

    `communication` is the time that this rank's compute waited for other ranks: exact where collectives block the host
    (gloo). NaN with several ranks on CUDA, where the wait happens inside streams that torch does not expose, and with
    copies of the model, whose all-reduce torch does not let us time. `own` is the time that this rank worked by itself:
    reading its examples, and forward of the blocks once their weights are gathered.
    """

    def __init__(self, world: World, mesh: DeviceMesh | None) -> None:
        self._cuda = world.device.type == "cuda"
        has_copies = mesh is not None and mesh.ndim > 1
        self._hidden = world.size > 1 and (self._cuda or has_copies)
        self._step = StepMarks(0.0, self._hidden)
        self._block_start: Mark = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._step = StepMarks(self._now(), self._hidden)

    def mark(self, phase: str) -> None:
        """End `phase`, which began at the last mark."""
        self._step.phases.append((phase, self._now()))

    def marks(self) -> StepMarks:
        """Those of the step that began last."""
        return self._step

    @contextmanager
    def communication(self) -> Iterator[None]:
        """Count the time inside as waiting for other ranks."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._step.communication += time.perf_counter() - begin

    def watch(self, model: nn.Module, blocks: Collection[str], is_compiled: bool) -> None:
        """Time the forward of blocks, given by class names, and the collectives of a sharded model.

        A compiled block is not timed, as hooks would become part of its graph; on CUDA, collectives are not timed.
        """
        for module in model.modules():
            if type(module).__name__.removeprefix("FSDP") in blocks and not is_compiled:
                # Inside the hooks of the sharded block, which gather its weights and free them.
                module.register_forward_pre_hook(self._enter_block)
                module.register_forward_hook(self._leave_block, prepend=True)
        if self._cuda:
            return
        gather, scatter = _TimedAllGather(self), _TimedReduceScatter(self)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)

    def _enter_block(self, *_: object) -> None:
        self._block_start = self._now()

    def _leave_block(self, *_: object) -> None:
        self._step.blocks.append((self._block_start, self._now()))

    def _now(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class _Timed:
    """Mixed into the class of a collective: its calls count as communication."""

    def __init__(self, clock: StepTimer) -> None:
        super().__init__()
        self._clock = clock

    def __call__(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # torch's own signature, passed through
        with self._clock.communication():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _TimedAllGather(_Timed, DefaultAllGather):
    pass


class _TimedReduceScatter(_Timed, DefaultReduceScatter):
    pass


def _elapsed(before: Mark, after: Mark) -> float:
    if isinstance(after, torch.cuda.Event):
        assert isinstance(before, torch.cuda.Event)
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000
    assert isinstance(before, float)
    return after - before
