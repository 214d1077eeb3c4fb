"""Runs the trainer's own step on a device that holds nothing, and writes down what it allocates.

For a process of its own that loads torch (see `virtual`). `trace` runs the whole model and says what it held at most;
`record` runs a shortened one and keeps what `timeline` needs to say the same for any number of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from trainer import families
from trainer.config import HUB_ID, MODEL_WORDS, LokrAdapter, ParallelConfig, RankAdapter, RunConfig
from trainer.families._published import published_folder
from trainer.families.base import ModelFamily
from trainer.modules import BuiltModel, build_model, materialize, shard_model, sync_gradients
from trainer.objectives import Batch
from trainer.optim import make_optimizer
from trainer.parallel.mesh import device_mesh
from trainer.parallel.shard import COMPUTE_DTYPE, blocks_of
from trainer.plan import virtual
from trainer.plan.ledger import ACTIVATIONS, GATHERED, REDUCED, Ledger
from trainer.plan.steps import Mark, Moment, Parameter, Run, Size, Unit, grains
from trainer.plan.tables import RANKS, SIDES, SMALL_SIDES, Figures, Recorded, Table, recorded_sizes
from trainer.rng import SampleRng
from trainer.world import World
from trainer.zero import Strategy

KEPT = 4
"""Of a list of equal blocks: the first, which may have no gradient to pass on, the second, before which the input of
the first is freed, one in the middle, and the last."""


@dataclass(frozen=True)
class Trace:
    """What the step of a whole model held on rank 0 at most, in bytes. items: what it was made of.

    gathered, scattered, reduced: bytes through collectives.  flops: of the step.
    """

    peak: int
    items: dict[str, int]
    sent: dict[str, int]
    flops: int


def trace(cfg: RunConfig, family: ModelFamily, device: torch.device, size: Size, steps: int = 2) -> Trace:
    """Run `steps` optimizer steps of the whole model and return the last one's memory.

    cfg: `parallel.strategy` must be decided.
    """
    with sharded_model(build_model(cfg, family), cfg, family, device) as sharded:
        for _ in range(steps):
            sharded.ledger.begin()
            for number in range(cfg.micro_steps):
                sharded.one_pass(size, is_last=number == cfg.micro_steps - 1)
            sharded.update()
        ledger = sharded.ledger
        return Trace(ledger.highest, ledger.at_peak, dict(ledger.sent), ledger.flops)


@dataclass(frozen=True)
class Recording:
    """Passes of a shortened model. runs: what was left out.  marks: of each size."""

    units: tuple[Unit, ...]
    runs: tuple[Run, ...]
    buffers: int
    marks: tuple[tuple[Mark, ...], ...]


def record(cfg: RunConfig, family: ModelFamily, device: torch.device, sizes: Sequence[Size]) -> Recording:
    """A pass of the shortened model for each size, without FSDP's own memory.

    cfg: how it is sharded, and over how many ranks, does not matter.
    """
    cfg = _plain(cfg)
    built = build_model(cfg, family)
    runs = _shorten(built.module, family)
    with sharded_model(built, cfg, family, device) as sharded:
        units = sharded.units()
        numbers = {unit.name: number for number, unit in enumerate(units)}
        sharded.one_pass(sizes[0], is_last=True)  # what is made once only
        marks = []
        for size in sizes:
            with sharded.recording(numbers) as found:
                sharded.one_pass(size, is_last=True)
            marks.append(tuple(found))
        kept = tuple(Run(numbers[name], count, KEPT) for name, count in runs.items())
        return Recording(units, kept, sharded.buffers(), tuple(marks))


def on_this_machine(cfg: RunConfig, cache: Path) -> RunConfig:
    """The config with a folder of its model's configs: of a published one that is not here, one written from its sizes.

    Its weights are never read.
    """
    model = cfg.model
    is_away = HUB_ID.fullmatch(model.path) and not Path(model.path).exists()
    if model.options.architecture is None or not (is_away or model.path.endswith(".safetensors")):
        return cfg
    folder = published_folder(model, cache / "models")
    return cfg.model_copy(update={"model": model.model_copy(update={"path": str(folder), "base": None})})


def tabulate(cfg: RunConfig, cache: Path, device: torch.device) -> Table:
    """Everything that is recorded of a model with the adapter's type and the base's format.

    cache: folder shared by runs.
    """
    has_rank = isinstance(cfg.adapter, RankAdapter) and not isinstance(cfg.adapter, LokrAdapter)
    ranks = RANKS if has_rank else RANKS[:1]
    family = families.make(cfg, cache)
    sides = SMALL_SIDES if cfg.model.path in MODEL_WORDS else SIDES
    sizes = recorded_sizes(sides)
    recorded: list[Recorded] = []
    for rank in ranks:
        adapter = cfg.adapter.model_copy(update={"rank": rank} if has_rank else {})
        found = {}
        for kind, checkpointing in (("kept", "none"), ("recomputed", "full")):
            train = cfg.train.model_copy(update={"checkpointing": checkpointing})
            found[kind] = record(cfg.model_copy(update={"adapter": adapter, "train": train}), family, device, sizes)
        figures = {kind: tuple(map(_figures, zip(*of.marks, strict=True))) for kind, of in found.items()}
        recorded.append(Recorded(found["kept"].units, figures))
    last = found["kept"]
    moments = tuple((mark.moment, mark.unit) for mark in last.marks[0])
    return Table(versions(), sides, ranks, moments, last.runs, last.buffers, tuple(recorded))


def _figures(marks: Sequence[Mark]) -> Figures:
    """Of one moment. marks: for each size."""
    columns = zip(*((mark.change, mark.peak, mark.flops) for mark in marks), strict=True)
    return Figures(*columns)


def _plain(cfg: RunConfig) -> RunConfig:
    """Sharded over two ranks, one pass per step."""
    parallel = ParallelConfig(devices=2, strategy="full")
    train = cfg.train.model_copy(update={"batch_size": 1, "micro_batch": 1, "compile": False})
    return cfg.model_copy(update={"parallel": parallel, "train": train})


def _shorten(model: nn.ModuleDict, family: ModelFamily) -> dict[str, int]:
    """Leave a few of each row of equal blocks. Returns {name of the first: how many there were}."""
    counts: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and all(type(block).__name__ in family.shard_blocks for block in module):
            rows = [list(row) for _, row in itertools.groupby(module, _shape)]
            counts |= {id(row[0]): len(row) for row in rows if len(row) > KEPT}
            kept = [block for row in rows for block in (*row[: KEPT - 1], *row[KEPT - 1 :][-1:])]
            del module[:]
            module.extend(kept)
    return {name: counts[id(module)] for name, module in model.named_modules() if id(module) in counts}


def _shape(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters())


class Sharded:
    """A model on a device, ready for its passes. ledger: sees what they allocate."""

    def __init__(
        self, built: BuiltModel, cfg: RunConfig, family: ModelFamily, ledger: Ledger, device: torch.device
    ) -> None:
        self.module, self.cfg, self.family, self.ledger, self.device = built.module, cfg, family, ledger, device
        self.optimizer = make_optimizer(list(built.trainables.values()), cfg.optim)
        self.marks: list[Mark] | None = None
        self.numbers: dict[str, int] = {}
        self._start = self._flops = 0

    def one_pass(self, size: Size, is_last: bool) -> None:
        """Forward and backward."""
        if self.cfg.micro_steps > 1:
            sync_gradients(self.module, is_last, self.cfg.shards_gradients(self.cfg.parallel.strategy))
        self._forward(size).backward()  # type: ignore[no-untyped-call]
        self.mark("end", "")

    def update(self) -> None:
        """The optimizer's step."""
        with self.ledger.making("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def recording(self, numbers: dict[str, int]) -> Iterator[list[Mark]]:
        """Inside, marks are written down. numbers: of the units, by name."""
        self.numbers, self.marks = numbers, []
        self.ledger.mark()
        self._start, self._flops = self.ledger.current[ACTIVATIONS], self.ledger.flops
        try:
            yield self.marks
        finally:
            self.marks = None
            self.optimizer.zero_grad()

    def mark(self, moment: Moment, unit: str) -> None:
        """A moment has come."""
        if self.marks is None:
            return
        ledger = self.ledger
        now = ledger.current[ACTIVATIONS]
        self.marks.append(
            Mark(
                moment,
                self.numbers.get(unit, -1),
                now - self._start,
                ledger.peak_of[ACTIVATIONS] - self._start,
                ledger.flops - self._flops,
            )
        )
        ledger.mark()
        self._start, self._flops = now, ledger.flops

    def units(self) -> tuple[Unit, ...]:
        """Blocks and roots, in the order in which they are defined; a root comes after its blocks."""
        found = []
        for component, module in self.module.items():
            blocks = blocks_of(module, self.family.shard_blocks)
            names = {id(part): name for name, part in self.module.named_modules()}
            inside = {id(p) for block in blocks for p in block.parameters()}
            dtype = COMPUTE_DTYPE[self.cfg.train.precision]
            for block in blocks:
                found.append(Unit(names[id(block)], _parameters(block.parameters(), dtype)))
            rest = [p for p in module.parameters() if id(p) not in inside]
            found.append(Unit(component, _parameters(rest, dtype), is_root=True))
        return tuple(found)

    def buffers(self) -> int:
        """Bytes of the buffers on the device."""
        return sum(grains(b.nbytes) for b in self.module.buffers() if b.device.type == self.device.type)

    def _forward(self, size: Size) -> Tensor:
        batch = batch_of(self.family, size, COMPUTE_DTYPE[self.cfg.train.precision], self.device)
        rng = SampleRng(0, tuple(range(size.batch)), self.device)
        total: Tensor = self.family.loss(self.module, batch, rng).total
        return total


def batch_of(family: ModelFamily, size: Size, dtype: torch.dtype, device: torch.device) -> Batch:
    """Blank examples of a size, on the device. dtype: of the text encoders."""
    side = round(math.sqrt(size.pixels) / family.size_multiple) * family.size_multiple
    example = family.blank_example(side, side, size.text_tokens, dtype)
    batch = family.collate([example] * size.batch)
    batch["weight"] = torch.ones(size.batch)
    return {key: tensor.to(device) for key, tensor in batch.items()}


def _parameters(parameters: Iterable[nn.Parameter], compute: torch.dtype) -> tuple[Parameter, ...]:
    found: Counter[Parameter] = Counter()
    for p in parameters:
        gathered = compute if p.dtype.is_floating_point else p.dtype
        rows, *rest = p.shape or (1,)
        found[Parameter(rows, math.prod(rest), p.dtype.itemsize, gathered.itemsize, p.requires_grad)] += 1
    return tuple(replace(parameter, count=count) for parameter, count in found.items())


@contextmanager
def sharded_model(built: BuiltModel, cfg: RunConfig, family: ModelFamily, device: torch.device) -> Iterator[Sharded]:
    """The model on the device, wrapped as the trainer wraps it, on rank 0 of a fake process group.

    On the virtual device, or any other, all tensors inside are fake.
    """
    ranks = cfg.parallel.world_size
    with virtual.ranks(ranks), ExitStack() as stack:
        world = World(0, ranks, 0, ranks, device, dist.group.WORLD, None)  # type: ignore[arg-type]
        strategy: Strategy = cfg.parallel.strategy  # type: ignore[assignment]
        mesh = device_mesh(cfg.parallel, world, strategy)
        stack.enter_context(virtual.fake_tensors(device))
        ledger = stack.enter_context(Ledger(device.type))
        shard_model(built.module, cfg, family, strategy, mesh)
        with ledger.making("weights"):
            materialize(built.module, cfg, device)
        for buffer in built.module.buffers():
            ledger.hold(buffer, "buffers")
        built.module.train()
        sharded = Sharded(built, cfg, family, ledger, device)
        stack.enter_context(_watched_groups(sharded))
        yield sharded


@contextmanager
def _watched_groups(sharded: Sharded) -> Iterator[None]:
    """What FSDP makes is written down as such, and its moments are marked."""
    ledger = sharded.ledger
    names: dict[int, str] = {id(module): name for name, module in sharded.module.named_modules()}
    original = {name: getattr(FSDPParamGroup, name) for name in _MOMENTS}

    def name_of(group: FSDPParamGroup) -> str:
        return names[id(group.modules[0])]

    def making(name: str, what: str) -> Callable[..., Any]:
        def run(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            with ledger.making(what):
                return original[name](group, *args, **kwargs)

        return run

    def pre_backward(group: FSDPParamGroup, *args: Any) -> Any:
        if group._training_state != TrainingState.PRE_BACKWARD:
            sharded.mark("backward", name_of(group))
        return original["pre_backward"](group, *args)

    def post_backward(group: FSDPParamGroup, *args: Any) -> Any:
        sharded.mark("backward_end", name_of(group))
        with ledger.making(REDUCED):
            out = original["post_backward"](group, *args)
        sharded.mark("reduced", name_of(group))
        return out

    def forward(name: str, moment: Moment) -> Callable[..., Any]:
        def run(group: FSDPParamGroup, *args: Any) -> Any:
            sharded.mark(moment, name_of(group))
            return original[name](group, *args)

        return run

    changed = {
        "unshard": making("unshard", GATHERED),
        "wait_for_unshard": making("wait_for_unshard", GATHERED),
        "pre_forward": forward("pre_forward", "forward"),
        "post_forward": forward("post_forward", "forward_end"),
        "pre_backward": pre_backward,
        "post_backward": post_backward,
    }
    try:
        for name, method in changed.items():
            setattr(FSDPParamGroup, name, method)
        yield
    finally:
        for name, method in original.items():
            setattr(FSDPParamGroup, name, method)


_MOMENTS = ("unshard", "wait_for_unshard", "pre_forward", "post_forward", "pre_backward", "post_backward")


def versions() -> dict[str, str]:
    """Of the packages that decide what a model allocates."""
    return {name: version(name).partition("+")[0] for name in ("torch", "diffusers", "transformers", "peft")}
