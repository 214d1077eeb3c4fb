"""Runs the trainer's own step on the fake device and notes what it allocates.

For a process of its own that loads torch (see `fake_device`). `trace_step` runs the whole model and returns its peak;
`trace_passes` runs a shortened model and returns what `timeline` needs to compute the peak for any number of ranks.

See DECISIONS 84.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from trainer import adapters
from trainer.config.recompute import Recompute
from trainer.config.schema import RunConfig
from trainer.config.sections import HUB_ID, ObjectiveConfig, ParallelConfig
from trainer.config.size import Size
from trainer.models import families
from trainer.models.base import ImageFamily, ModelFamily, TextFamily
from trainer.models.build import (
    BuiltModel,
    blocks_to_offload,
    build_model,
    materialize,
    offload,
    shard_model,
    sync_gradients,
)
from trainer.models.objectives.base import Batch
from trainer.models.parts.published import published_folder
from trainer.optim import Ema, make_optimizer
from trainer.parallel.mesh import device_mesh
from trainer.parallel.parallelize import (
    COMPUTE_DTYPE,
    blocks_of,
    checkpoint_activations,
    gathered_for_samples,
)
from trainer.parallel.strategy import Strategy
from trainer.plan.record import fake_device
from trainer.plan.record.fake_mode import Watch
from trainer.plan.record.memory_tracker import ACTIVATIONS, GATHERED, REDUCED, MemoryTracker
from trainer.plan.simulate.sizes import passes_of
from trainer.plan.simulate.steps import Mark, Moment, Parameter, PassInput, Run, Unit, grains
from trainer.plan.simulate.tables import (
    KIND_OF,
    PASS_KINDS,
    RANKS,
    MomentFigures,
    PassKind,
    PassTable,
    RankTable,
    has_rank,
    sides_of,
    traced_inputs,
)
from trainer.rng import SampleRng
from trainer.system.errors import InputError

RECOMPUTES = {kind: mode for mode, kind in KIND_OF.items()}
KEPT = 4
"""Blocks traced of a list of equal ones: the first, which may have no gradient to pass on, the second, before which the
input of the first is freed, one in the middle, and the last."""


@dataclass(frozen=True)
class StepTrace:
    """An optimizer step of a whole model on rank 0.

    Attributes:
        peak: Most bytes at once.
        items: {purpose: bytes} at the peak.
        sent: {collective: bytes}.
        flops: Floating-point operations.
    """

    peak: int
    items: dict[str, int]
    sent: dict[str, int]
    flops: int


def trace_step(cfg: RunConfig, family: ModelFamily, device: torch.device, size: PassInput, steps: int = 2) -> StepTrace:
    """Run `steps` optimizer steps of the whole model and return the last one's memory.

    Args:
        cfg: The run's config, with `parallel.strategy` decided.
        family: The run's family.
        device: The fake device.
        size: Input of each pass.
        steps: Number of optimizer steps.
    """
    with sharded_model(build_model(cfg, family), cfg, family, device) as sharded:
        sharded.average()
        passes = passes_of(cfg)
        for _ in range(steps):
            sharded.tracker.reset()
            for number in range(passes):
                sharded.one_pass(size, is_last=number == passes - 1)
            sharded.update()
        tracker = sharded.tracker
        return StepTrace(tracker.highest, tracker.at_peak, dict(tracker.sent), tracker.flops)


def trace_sampling(cfg: RunConfig, family: ModelFamily, device: torch.device, size: PassInput) -> int:
    """Return the most bytes on rank 0 while the whole model generates a sample, before anything was trained.

    cfg: `parallel.strategy` must be decided.
    """
    strategy: Strategy = cfg.parallel.strategy  # type: ignore[assignment]
    with sharded_model(build_model(cfg, family), cfg, family, device) as sharded:
        sharded.tracker.reset()
        with gathered_for_samples(sharded.module, cfg.parallel, strategy, cfg.parallel.world_size):
            for _ in range(2):
                sharded.draw(size)
        return sharded.tracker.highest


@dataclass(frozen=True)
class PassTraces:
    """Passes of a shortened model.

    Attributes:
        units: The shortened model's units.
        runs: Lists of blocks that were shortened.
        buffers: Bytes of the model's buffers, and of tensors that its first pass makes and keeps.
        marks: {kind of pass: the marks for each size}.
        rank: Rank of the adapter; meaningless where it has none.
    """

    units: tuple[Unit, ...]
    runs: tuple[Run, ...]
    buffers: int
    marks: dict[PassKind, tuple[tuple[Mark, ...], ...]]
    rank: int = RANKS[0]


def trace_passes(
    cfg: RunConfig,
    family: ModelFamily,
    device: torch.device,
    sizes: Sequence[PassInput],
    kinds: Sequence[PassKind] = PASS_KINDS,
    done: Callable[[], None] = lambda: None,
) -> PassTraces:
    """Trace passes of the shortened model, of each kind and size, without FSDP's own memory.

    Args:
        cfg: The run's config; its sharding, number of ranks and checkpointing do not matter.
        family: The run's family.
        device: The fake device.
        sizes: Inputs of the passes.
        kinds: Kinds of passes.
        done: Called after each pass.
    """
    # The config sharded over two ranks, with one pass per step.
    parallel = ParallelConfig(devices=2, strategy="full")
    train = cfg.train.model_copy(update={"batch_size": 1, "micro_batch": 1, "compile": False, "checkpointing": "none"})
    cfg = cfg.model_copy(update={"parallel": parallel, "train": train})
    built = build_model(cfg, family)
    runs = _shorten(built.module, family)
    with sharded_model(built, cfg, family, device) as sharded:
        units = sharded.units()
        sharded.keep_gathered()
        numbers = {unit.name: number for number, unit in enumerate(units)}
        sharded.draw(sizes[0])  # allocates the tensors that are made only once, and stay as buffers do
        buffers = sharded.buffers() + sharded.tracker.current[ACTIVATIONS]

        def passes(run: Callable[[PassInput], None]) -> tuple[tuple[Mark, ...], ...]:
            marks = []
            for size in sizes:
                with sharded.moments.record(numbers) as found:
                    run(size)
                sharded.optimizer.zero_grad()
                marks.append(tuple(found))
                done()
            return tuple(marks)

        marks: dict[PassKind, tuple[tuple[Mark, ...], ...]] = {}
        for kind in kinds:
            if kind in RECOMPUTES:
                sharded.recompute(RECOMPUTES[kind])
            marks[kind] = passes(sharded.draw if kind == "drawn" else partial(sharded.one_pass, is_last=True))
        kept = tuple(Run(numbers[name], count, KEPT) for name, count in runs.items())
        return PassTraces(units, kept, buffers, marks)


def on_this_machine(cfg: RunConfig, cache: Path) -> RunConfig:
    """Return the config with a local folder of its model's configs.

    For a published model that is not on this machine the folder is written from its known sizes. Weights are neither
    read nor made.
    """
    model = cfg.model
    is_away, is_random = HUB_ID.fullmatch(model.path) and not Path(model.path).exists(), model.path == "random"
    if model.options.architecture is not None and (is_away or model.is_single_file or is_random):
        folder = str(published_folder(model, cache / "models"))
    elif is_random and model.base is not None:
        folder = model.base
    else:
        return cfg
    # The model's own objective is unknown without its files; it does not change what is allocated.
    # The folder has no tokenizer to which tokens could be added; their few rows do not matter.
    options = model.options.model_copy(update={"new_tokens": ()})
    changes = {
        "model": model.model_copy(update={"path": folder, "base": None, "options": options}),
        "objective": ObjectiveConfig(),
    }
    return cfg.model_copy(update=changes)


def trace_rank(
    cfg: RunConfig,
    number: int,
    kinds: Sequence[PassKind],
    cache: Path,
    device: torch.device,
    done: Callable[[], None] = lambda: None,
) -> PassTraces:
    """Trace all sizes of a model with an adapter of one of its traced ranks.

    Args:
        cfg: The run's config.
        number: Index of the rank in `traced_ranks`.
        kinds: Kinds of passes.
        cache: Folder shared by runs.
        device: The fake device.
        done: Called after each pass.

    Raises:
        InputError: The model does not take the run's adapter.
    """
    rank = traced_ranks(cfg, cache)[number]
    changed = _with_rank(cfg, rank) if has_rank(cfg) else cfg
    family = families.make(changed, cache)
    return replace(trace_passes(changed, family, device, traced_inputs(sides_of(cfg)), kinds, done), rank=rank)


def traced_ranks(cfg: RunConfig, cache: Path) -> tuple[int, ...]:
    """Return the ranks of the adapter that are traced: `RANKS`, or the largest halves of them that the layers of a
    small model take. cache: folder shared by runs. Raises InputError if they do not take the run's own rank."""
    if not has_rank(cfg):
        return RANKS[:1]
    low, high = RANKS
    if _refusal(_with_rank(cfg, high), cache) is None:
        return RANKS
    if refusal := _refusal(cfg, cache):
        raise refusal
    while low > 1 and _refusal(_with_rank(cfg, high), cache):
        low, high = low // 2, high // 2
    return low, high


def _refusal(cfg: RunConfig, cache: Path) -> InputError | None:
    """Why the model does not take the adapter."""
    try:
        build_model(cfg, families.make(cfg, cache))
    except InputError as error:
        return error
    return None


def _with_rank(cfg: RunConfig, rank: int) -> RunConfig:
    return cfg.model_copy(update={"adapter": cfg.adapter.model_copy(update={"rank": rank})})


def join_traces(parts: Sequence[PassTraces]) -> PassTraces:
    """Join traces of the same model with different kinds of passes."""
    marks = {kind: marks for part in parts for kind, marks in part.marks.items()}
    return replace(parts[0], marks=marks)


def make_table(cfg: RunConfig, traces: Sequence[PassTraces]) -> PassTable:
    """Make the table of a model with the adapter's type and the base's format. traces: `trace_rank` of each rank."""
    by_rank = tuple(
        RankTable(
            units, {kind: tuple(map(_moment_figures, zip(*marks, strict=True))) for kind, marks in of.marks.items()}
        )
        for units, of in zip(merge_equal([of.units for of in traces]), traces, strict=True)
    )
    first = traces[0]
    moments, drawn = (tuple((mark.moment, mark.unit) for mark in first.marks[kind][0]) for kind in ("kept", "drawn"))
    ranks = tuple(of.rank for of in traces)
    return PassTable(versions(), sides_of(cfg), ranks, moments, drawn, first.runs, first.buffers, by_rank)


def _moment_figures(marks: Sequence[Mark]) -> MomentFigures:
    """Collect the figures of one moment. marks: the moment's mark for each size."""
    columns = zip(*((mark.change, mark.peak, mark.flops) for mark in marks), strict=True)
    return MomentFigures(*columns)


def _shorten(model: nn.ModuleDict, family: ModelFamily) -> dict[str, int]:
    """Keep KEPT blocks of each sequence of equal ones. Returns {name of the first: original number}.

    See DECISIONS 85.
    """
    counts: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and all(type(block).__name__ in family.shard.blocks for block in module):
            rows = [list(row) for _, row in itertools.groupby(module, _shape)]
            counts |= {id(row[0]): len(row) for row in rows if len(row) > KEPT}
            kept = [block for row in rows for block in (*row[: KEPT - 1], *row[KEPT - 1 :][-1:])]
            del module[:]
            module.extend(kept)
    return {name: counts[id(module)] for name, module in model.named_modules() if id(module) in counts}


def _shape(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters())


class MomentRecorder:
    """Records the bytes that are allocated between moments. tracker: counts them."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker = tracker
        self._marks: list[Mark] | None = None
        self._numbers: dict[str, int] = {}
        self._start = self._flops = 0

    @contextmanager
    def record(self, numbers: dict[str, int]) -> Iterator[list[Mark]]:
        """Inside, marks are appended to the yielded list. numbers: {name of a unit: its number}."""
        self._numbers, self._marks = numbers, []
        self._begin()
        try:
            yield self._marks
        finally:
            self._marks = None

    def mark(self, moment: Moment, unit: str) -> None:
        """Append a mark for this moment. Does nothing outside of `record`."""
        if self._marks is None:
            return
        tracker = self.tracker
        self._marks.append(
            Mark(
                moment,
                self._numbers.get(unit, -1),
                tracker.current[ACTIVATIONS] - self._start,
                tracker.peak_of[ACTIVATIONS] - self._start,
                tracker.flops - self._flops,
            )
        )
        self._begin()

    def _begin(self) -> None:
        self.tracker.reset_peak()
        self._start, self._flops = self.tracker.current[ACTIVATIONS], self.tracker.flops


class Sharded:
    """A model on a device, ready for its passes.

    Attributes:
        tracker: Counts bytes by purpose.
        moments: Records bytes by moment.
    """

    def __init__(
        self, built: BuiltModel, cfg: RunConfig, family: ModelFamily, tracker: MemoryTracker, device: torch.device
    ) -> None:
        self.module, self.cfg, self.family, self.tracker, self.device = built.module, cfg, family, tracker, device
        self.trainables = built.trainables
        self.ema: Ema | None = None
        self.optimizer = make_optimizer(self.trainables, cfg.optim)
        self.moments = MomentRecorder(tracker)
        self._forwards = {module: vars(module).get("forward") for module in built.module.modules()}

    def average(self) -> None:
        """Allocate the moving average of the weights, if the run has one."""
        if self.cfg.optim.ema:
            with self.tracker.making("optimizer"):
                self.ema = Ema(self.trainables, self.cfg.optim.ema)

    def one_pass(self, size: PassInput, is_last: bool) -> None:
        """Run forward and backward."""
        if passes_of(self.cfg) > 1:
            sync_gradients(self.module, is_last, self.cfg.shards_gradients(self.cfg.parallel.strategy))
        self._forward(size).backward()  # type: ignore[no-untyped-call]
        self.moments.mark("end", "")

    @torch.no_grad()
    def draw(self, size: PassInput) -> None:
        """Run forward without gradients, as when sampling."""
        self._forward(size)
        self.moments.mark("end", "")

    def keep_gathered(self) -> None:
        """Keep parameters gathered from now on: gathering is not traced here and takes a third of a pass."""
        for component in self.module.values():
            if isinstance(component, FSDPModule):
                component.set_reshard_after_forward(False)
                component.set_reshard_after_backward(False)

    def recompute(self, mode: Recompute) -> None:
        """Recompute all blocks in this way from now on."""
        for module, forward in self._forwards.items():
            vars(module).pop("forward", None)
            if forward:
                module.forward = forward
        units = [unit for module in self.module.values() for unit in blocks_of(module, self.family.shard.blocks)]
        checkpoint_activations(
            units, [mode] * len(units), adapters.saves_no_activations(self.module), is_compiled=False
        )

    def update(self) -> None:
        """Run the optimizer's step."""
        with self.tracker.making("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def units(self) -> tuple[Unit, ...]:
        """Return blocks and roots, in the order in which they are defined; a root comes after its blocks."""
        return units_of(self.module, self.family.shard.blocks, COMPUTE_DTYPE[self.cfg.train.precision])

    def buffers(self) -> int:
        """Return the bytes of the buffers on the device."""
        return bytes_on(self.module.buffers(), self.device)

    def _forward(self, size: PassInput) -> Tensor:
        dtype = COMPUTE_DTYPE[self.cfg.train.precision]
        batch = batch_of(self.family, size, dtype, self.device)
        rng = SampleRng(0, tuple(range(size.batch)), self.device)
        if dropouts := adapters.dropouts(self.module):
            with unset_fake_temporarily():  # which row is whose depends on values
                rows = self.family.sample_rows(batch_of(self.family, size, dtype, torch.device("cpu")))
                adapters.set_samples(dropouts, rng.seed, rng.indices, rows)
        total: Tensor = self.family.loss(self.module, batch, rng).total
        return total


def batch_of(family: ModelFamily, size: PassInput, dtype: torch.dtype, device: torch.device) -> Batch:
    """Make a batch of blank examples on the device. dtype: type of the text embeddings."""
    if isinstance(family, TextFamily):
        with unset_fake_temporarily():  # how many tokens are in the loss depends on values
            batch = family.collate([family.blank_row(round(size.pixels))] * size.batch)
    else:
        assert isinstance(family, ImageFamily)
        side = round(math.sqrt(size.pixels) / family.size_multiple) * family.size_multiple
        example = family.blank_example(Size(side, side), size.text_tokens, dtype)
        batch = family.collate([example] * size.batch)
    batch["weight"] = torch.ones(size.batch)
    return {key: tensor.to(device) for key, tensor in batch.items()}


def units_of(model: nn.ModuleDict, blocks: Sequence[str], dtype: torch.dtype) -> tuple[Unit, ...]:
    """Return the units of each component, with every parameter by itself (`merge_equal`).

    Args:
        model: {component: module}.
        blocks: Class names of the blocks.
        dtype: Type in which floats are gathered.
    """
    names = {id(part): name for name, part in model.named_modules()}
    found = []
    for component, module in model.items():
        inside: set[int] = set()
        for block in blocks_of(module, blocks):
            inside |= {id(p) for p in block.parameters()}
            found.append(Unit(names[id(block)], _parameters(block.parameters(), dtype)))
        rest = [p for p in module.parameters() if id(p) not in inside]
        found.append(Unit(component, _parameters(rest, dtype), is_root=True))
    return tuple(found)


def bytes_on(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes of the tensors that are on the device."""
    return sum(grains(tensor.nbytes) for tensor in tensors if tensor.device.type == device.type)


def _parameters(parameters: Iterable[nn.Parameter], compute: torch.dtype) -> tuple[Parameter, ...]:
    found = []
    for p in parameters:
        gathered = compute if p.dtype.is_floating_point else p.dtype
        rows, *rest = p.shape or (1,)
        found.append(Parameter(rows, math.prod(rest), p.dtype.itemsize, gathered.itemsize, p.requires_grad))
    return tuple(found)


def merge_equal(by_rank: Sequence[Sequence[Unit]]) -> list[tuple[Unit, ...]]:
    """Merge the parameters of each unit that are equal at all traced ranks of the adapter.

    Matrices of a narrow layer's adapter may have one shape at one rank and two at another. They stay two at both, so
    that `PassTable` can interpolate parameter by parameter.

    Args:
        by_rank: The units at each rank, with every parameter by itself.
    """
    merged: list[list[Unit]] = [[] for _ in by_rank]
    for units in zip(*by_rank, strict=True):
        counts = Counter(zip(*(unit.parameters for unit in units), strict=True))
        columns = zip(*counts, strict=True) if counts else ((),) * len(units)
        for found, unit, column in zip(merged, units, columns, strict=True):
            pairs = zip(column, counts.values(), strict=True)
            found.append(replace(unit, parameters=tuple(replace(p, count=count) for p, count in pairs)))
    return [tuple(units) for units in merged]


@contextmanager
def sharded_model(
    built: BuiltModel,
    cfg: RunConfig,
    family: ModelFamily,
    device: torch.device,
    watch: Watch | None = None,
) -> Iterator[Sharded]:
    """Put the model on the device, wrapped as the trainer wraps it, on rank 0 of a fake process group.

    On every device all tensors inside are fake. `watch` is called with each operation that runs.
    """
    with fake_device.ranks(cfg.parallel.world_size, device) as world, ExitStack() as stack:
        strategy: Strategy = cfg.parallel.strategy  # type: ignore[assignment]
        mesh = device_mesh(cfg.parallel, world, strategy)
        tracker = stack.enter_context(MemoryTracker(device.type, watch))
        stack.enter_context(fake_device.fake_tensors(device, tracker.observe))
        shard_model(built.module, cfg, family, strategy, mesh)
        with tracker.making("weights"):
            chosen = blocks_to_offload(built.module, cfg, family)
            materialize(built.module, cfg, device, chosen)
            offload(built.module, chosen, family, device)
        for buffer in built.module.buffers():
            tracker.track(buffer, "buffers")
        sharded = Sharded(built, cfg, family, tracker, device)
        stack.enter_context(watched_groups(built.module, sharded.moments))
        yield sharded


@contextmanager
def watched_groups(model: nn.Module, moments: MomentRecorder) -> Iterator[None]:
    """Patch FSDP: inside, its tensors are tracked under their purpose, and its moments are marked."""
    tracker = moments.tracker
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    original = {name: getattr(FSDPParamGroup, name) for name in _WATCHED_METHODS}

    def name_of(group: FSDPParamGroup) -> str:
        return names[id(group.modules[0])]

    def making(name: str, what: str) -> Callable[..., Any]:
        def run(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            with tracker.making(what):
                return original[name](group, *args, **kwargs)

        return run

    def pre_backward(group: FSDPParamGroup, *args: Any) -> Any:
        if group._training_state != TrainingState.PRE_BACKWARD:
            moments.mark("backward", name_of(group))
        return original["pre_backward"](group, *args)

    def post_backward(group: FSDPParamGroup, *args: Any) -> Any:
        moments.mark("backward_end", name_of(group))
        with tracker.making(REDUCED):
            out = original["post_backward"](group, *args)
        moments.mark("reduced", name_of(group))
        return out

    def forward(name: str, moment: Moment) -> Callable[..., Any]:
        def run(group: FSDPParamGroup, *args: Any) -> Any:
            moments.mark(moment, name_of(group))
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
        # The class is patched, and other traces follow in this process.
        for name, method in original.items():
            setattr(FSDPParamGroup, name, method)


_WATCHED_METHODS = ("unshard", "wait_for_unshard", "pre_forward", "post_forward", "pre_backward", "post_backward")


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a model allocates."""
    return {name: version(name).partition("+")[0] for name in ("torch", "diffusers", "transformers", "peft")}
