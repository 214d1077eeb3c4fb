"""Simulates the memory of a traced pass under FSDP2, for any strategy and number of ranks.

The order of events is FSDP2's own (torch/distributed/fsdp/_fully_shard, torch 2.11 to 2.13): in forward the gathered
buffer of a block stays allocated until the next block's has been copied out; in backward the next block is gathered
while one computes; the buffer in which its gradients are reduced stays allocated until the next block's. No torch.

See DECISIONS 86.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import ClassVar

from trainer.parallel.offload_order import BlockResidency, Direction, offloaded_blocks
from trainer.parallel.strategy import REDUCED_BYTES, has_few_parameters
from trainer.plan.simulate.steps import ModelPass, Moment, Parameter, grains
from trainer.run.allocator import pinned_bytes


@dataclass(frozen=True)
class Sharding:
    """How a pass is spread over ranks.

    Attributes:
        ranks: Ranks that share a copy of the model.
        replicas: Copies of the model.
        is_one_node: Whether all ranks are on one node.
        is_sharded: Whether FSDP wraps the model.
        reshard: Whether blocks are freed after forward, or the number of ranks over which they are kept.
        offload: Whether weights and optimizer state are in host memory.
        offload_blocks: Blocks whose frozen weights are in host memory, as `parallel.offload_blocks` gives them.
        pins_exactly: Whether pinned host memory is not rounded up, as `run.allocator` has it.
        prefetch: Blocks gathered ahead in forward and in backward; 0 is torch's own order.
        passes: Passes per optimizer step.
        is_reduced_each_pass: Whether gradients are reduced in each pass: no rank may hold the unsharded gradient.
        optimizer_bytes: Bytes of state per trained number, including the moving average.
    """

    ranks: int = 1
    replicas: int = 1
    is_one_node: bool = True
    is_sharded: bool = True
    reshard: bool | int = True
    offload: bool = False
    offload_blocks: int | float | str = 0
    pins_exactly: bool = False
    prefetch: tuple[int, int] = (0, 0)
    passes: int = 1
    is_reduced_each_pass: bool = False
    optimizer_bytes: float = 8.0

    @property
    def gathers_frozen(self) -> bool:
        """Whether FSDP gathers frozen weights: in a group of one rank only those that `offload` keeps on the host."""
        return self.is_sharded and (self.ranks > 1 or self.offload)


@dataclass
class Memory:
    """Bytes on one rank.

    Attributes:
        peak: Most bytes at once.
        items: {purpose: bytes} at the peak.
        when: Moment and unit of the peak.
        host: Bytes of pinned host memory for offloaded tensors.
        gathered: Bytes through all-gathers in an optimizer step, of the unsharded tensors.
        scattered: Bytes through reduce-scatters, likewise.
        reduced: Bytes through all-reduces, likewise.
        copied: Bytes copied from host memory in an optimizer step: of offloaded blocks, or of this rank's shards.
        flops: Floating-point operations of an optimizer step.
    """

    peak: float = 0.0
    items: dict[str, float] = field(default_factory=dict)
    when: tuple[str, str] = ("", "")
    host: float = 0.0
    gathered: float = 0.0
    scattered: float = 0.0
    reduced: float = 0.0
    copied: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Point:
    """A moment of an optimizer step, with the computing since the moment before.

    Attributes:
        moment: As in `Mark`; "" before the first pass, "optimizer" after the last.
        unit: Name of the unit.
        number: Number of the pass.
        flops: Floating-point operations from the beginning of the step to this moment.
        peak: Most bytes at once since the moment before.
        highest: {purpose: bytes} of `peak`.
        after: {purpose: bytes} that are still allocated after this moment.
    """

    moment: str
    unit: str
    number: int
    flops: float
    peak: float
    highest: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def words(self) -> str:
        """The moment in words: `forward of transformer.transformer_blocks.7`."""
        return in_words(self.moment, self.unit)


def in_words(moment: str, unit: str) -> str:
    """Return a moment of a training step in words, which name the unit if there is one."""
    if moment == "optimizer":
        return moment
    if not moment:
        return "before the step"
    direction = "forward" if moment.startswith("forward") else "backward"
    return f"{direction} of {unit}" if unit else direction


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one unit.

    Attributes:
        shard: At rest.
        inputs: Copies that the all-gather reads.
        buffer: The buffer that the all-gather writes.
        unsharded: The gathered parameters, copied out of the buffer.
        copied: Copies of parameters that are computed in another type than they are stored in.
        kept: The part that is kept after forward.
        reduced: The unsharded gradients in fp32.
        reduced_shard: This rank's part of the gradients in fp32.
        trained: Numbers, not bytes, that this rank trains.
        pinned: Pinned host memory of the shards and of their gradients, if they are offloaded.
        frozen: The part of the shard that is frozen.
        frozen_pinned: Pinned host memory of this part, if it is offloaded.
    """

    shard: int
    inputs: int
    buffer: int
    unsharded: int
    copied: int
    kept: int
    reduced: int
    reduced_shard: int
    trained: int
    pinned: int
    frozen: int
    frozen_pinned: int


DIFFERENT_PASSES = 4
"""Passes of a step that differ: the first, which accumulates gradients, the second, the others, and the last."""
MOST_KEPT_PASSES = 8
"""Passes of a step whose every moment is kept."""


def simulate(model_pass: ModelPass, sharding: Sharding) -> Memory:
    """Return the memory of rank 0, which holds the most, in the second optimizer step and later.

    Args:
        model_pass: A pass of the whole model with backward.
        sharding: How it is spread.
    """
    simulation = _Simulation(model_pass, sharding)
    simulation.second_step()
    return simulation.memory


def history(model_pass: ModelPass, sharding: Sharding) -> tuple[Point, ...]:
    """Return the moments of the step that `simulate` plays. The largest `peak` is that of `simulate`.

    Of more than MOST_KEPT_PASSES passes those that repeat are one point each.

    Args:
        model_pass: A pass of the whole model with backward.
        sharding: How it is spread.
    """
    recording = _Recording(model_pass, sharding)
    recording.second_step()
    return (*recording.points(), recording.optimizer())


def simulate_forward(
    model_pass: ModelPass, sharding: Sharding, constant: Mapping[str, float], after: float = 0.0
) -> Memory:
    """Return the memory of rank 0 in passes without backward.

    Args:
        model_pass: A pass without backward.
        sharding: How it is spread.
        constant: {purpose: bytes} that are allocated all the time.
        after: Bytes allocated and freed after the last pass.
    """
    simulation = _Simulation(model_pass, sharding)
    for what, size in constant.items():
        simulation._add(what, size)
    for _ in range(2):  # in the second pass the root is still gathered from the first
        simulation.one_pass(is_last=False)
    simulation.when = ("end", "")
    simulation._peak_with("activations", after)
    return simulation.memory


def least(model_pass: ModelPass, sharding: Sharding) -> Memory:
    """Return bounds that `simulate` is not below, at a small part of its cost.

    Each block is gathered once per pass, and once more where it is freed after forward and has a backward. The peak
    leaves out gathered blocks and gradients that are kept.
    """
    memory = Memory(flops=sharding.passes * sum(mark.flops for mark in model_pass.marks))
    sizes = _sizes_of_units(model_pass, sharding)
    if not sharding.offload:
        offloaded = _offloaded(model_pass, sharding.offload_blocks)
        away = [sizes[unit].frozen for unit in offloaded]
        if len({mark.unit for mark in model_pass.marks if mark.moment == "forward"}) == len(sizes):
            is_kept = sharding.gathers_frozen and sharding.reshard is not True
            again = set() if is_kept else {mark.unit for mark in model_pass.marks if mark.moment == "backward"}
            copies = [sizes[unit].frozen * (1 + (unit in again)) for unit in offloaded]
            memory.copied = float(sharding.passes * (sum(copies) - max(copies, default=0)))  # one block stays
        allocated = sum(size.shard for size in sizes) - sum(away)
        memory.peak = allocated + sharding.optimizer_bytes * sum(size.trained for size in sizes)
    memory.peak += model_pass.buffers + model_pass.most_activations
    if sharding.is_sharded:
        blocks = {(m.moment, m.unit) for m in model_pass.marks if m.unit >= 0 and not model_pass.units[m.unit].is_root}
        moments = ("forward", "backward") if sharding.reshard else ("forward",)
        gathered = [sizes[unit] for moment, unit in blocks if moment in moments]
        reduced = [sizes[unit] for moment, unit in blocks if moment == "backward_end"]
        reductions = sharding.passes if sharding.is_reduced_each_pass else 1
        memory.gathered = float(sharding.passes * sum(size.buffer for size in gathered))
        if sharding.offload:
            memory.copied = float(sharding.passes * sum(size.shard for size in gathered))
        memory.scattered = float(reductions * sum(size.reduced for size in reduced))
        memory.reduced = float(sum(size.reduced_shard for size in reduced)) if sharding.replicas > 1 else 0.0
    return memory


class _Simulation:
    keeps_all: ClassVar[bool] = False
    """Whether moments below the peak count too."""

    def __init__(self, model_pass: ModelPass, sharding: Sharding) -> None:
        self.model_pass, self.sharding = model_pass, sharding
        self.sizes, self.groups = _sizes_of_units(model_pass, sharding), _groups(model_pass, sharding)
        self.memory = Memory()
        self.allocated: defaultdict[str, float] = defaultdict(float)
        self.total = 0.0
        self.when = ("", "")
        trained = sum(sizes.trained for sizes in self.sizes)
        self.offloaded = () if sharding.offload else _offloaded(model_pass, sharding.offload_blocks)
        self.numbers = {unit: number for number, unit in enumerate(self.offloaded)}
        self.moves_outside = not sharding.gathers_frozen
        again = self.moves_outside or sharding.reshard is True
        self.residency = BlockResidency(len(self.offloaded), again) if self.offloaded else None
        self.trains = any(mark.moment == "backward" for mark in model_pass.marks)
        self.at_work: int | None = None  # in backward, outside of FSDP
        offloaded = [self.sizes[unit] for unit in self.offloaded]
        resident = {
            "weights": sum(sizes.shard for sizes in self.sizes) - sum(sizes.frozen for sizes in offloaded),
            "optimizer": trained * sharding.optimizer_bytes,
        }
        if sharding.offload:
            self.memory.host = sum(sizes.pinned for sizes in self.sizes) + resident["optimizer"]
        else:
            self.memory.host = sum(sizes.frozen_pinned for sizes in offloaded)
            for what, size in resident.items():
                self._add(what, size)
        self._add("buffers", model_pass.buffers)
        self.unsharded: dict[int, int] = {}  # bytes of gathered units
        self.buffers: dict[int, int] = {}  # gathered bytes that are not copied out yet
        self.kept: dict[int, int] = {}
        self.last_buffer = 0
        self.order: list[int] = []
        self.scatter = 0
        self.accumulated: set[int] = set()
        self.waiting: Counter[int] = Counter()  # bytes of gradients that a root reduces with its own
        self.has_gradients: set[int] = set()

    def second_step(self) -> None:
        """Simulate an optimizer step that is not the first."""
        if self.residency:
            self.one_step()  # the step before leaves a block on the device
            self.restart()
        self.one_step()

    def one_step(self) -> None:
        """Simulate an optimizer step. Passes that repeat are simulated once."""
        memory, passes = self.memory, self.sharding.passes
        for _ in range(min(passes, DIFFERENT_PASSES) - 1):
            before = replace(memory)
            self.one_pass(is_last=False)
        if (more := passes - DIFFERENT_PASSES) > 0:
            for name in ("flops", "gathered", "scattered", "copied"):
                now, earlier = vars(memory)[name], vars(before)[name]
                setattr(memory, name, now + more * (now - earlier))
        self.one_pass(is_last=True)

    def restart(self) -> None:
        """Measure from here."""
        self.memory = Memory(host=self.memory.host)
        self._peak_with("activations", 0)

    def one_pass(self, is_last: bool) -> None:
        self.order.clear()
        units = [number for number, unit in enumerate(self.model_pass.units) if not unit.is_root]
        for mark in self.model_pass.marks:
            name = self.model_pass.units[mark.unit].name if mark.unit >= 0 else ""
            self.when = (mark.moment, name)
            self._peak_with("activations", mark.peak)
            self._add("activations", mark.change)
            self.memory.flops += mark.flops
            if mark.moment == "end":
                continue
            if not self.sharding.is_sharded:
                self._move(mark.moment, mark.unit)
                self._copy(mark.moment, mark.unit)
                continue
            if self.moves_outside:
                self._move(mark.moment, mark.unit)
            match mark.moment:
                case "forward":
                    self._forward(mark.unit, units)
                case "forward_end":
                    self._forward_end(mark.unit)
                case "backward":
                    self._backward(mark.unit, units)
                case "backward_end":
                    self._backward_end(mark.unit, is_last)
        self._add("gradients being reduced", -self.scatter)
        self.scatter = 0
        self._add("activations", -self.allocated["activations"])
        for unit in list(self.buffers):  # gathered ahead for a backward that came before, or never
            self._add("gathered blocks", -self.buffers.pop(unit))
        if is_last:
            self._add("gradients", -self.allocated["gradients"])
            self.has_gradients.clear()

    def _copy(self, moment: Moment, unit: int) -> None:
        """Without FSDP a unit computes on copies of its fp32 weights; a recomputed one makes them again."""
        copied = self.sizes[unit].copied
        again = unit in self.model_pass.recomputed
        if moment == "forward" or (moment == "backward" and again):
            self.unsharded[unit] = copied
            self._add("gathered blocks", copied)
        elif moment == "backward_end" or (moment == "forward_end" and again):
            self._free(unit)  # unless no forward reached it
            if moment == "backward_end" and unit not in self.has_gradients:
                self.has_gradients.add(unit)
                self._add("gradients", self.sizes[unit].reduced)

    def _move(self, moment: Moment, unit: int) -> None:
        """Weights of an offloaded block that FSDP does not gather are there while it computes."""
        if self.residency is None or self.model_pass.units[unit].is_root:
            return
        if moment in ("forward", "backward") and self.at_work is not None:
            self._end(self.at_work)
            self.at_work = None
        if moment == "forward":
            self._begin(unit, "forward")
        elif moment == "forward_end":
            self._end(unit)
        elif moment == "backward":
            self.at_work = unit
            self._begin(unit, "backward")

    def _begin(self, unit: int, direction: Direction) -> None:
        """Bring the weights of an offloaded block, and of the next one, to the device."""
        number = self.numbers.get(unit)
        if self.residency is None or number is None:
            return
        busy = [self.numbers[other] for other in self.buffers if other in self.numbers]
        moves = self.residency.begin(number, direction, self.trains, busy)
        for other in moves.frees:
            self._add("weights", -self.sizes[self.offloaded[other]].frozen)
        for other in moves.copies:
            self._add("weights", self.sizes[self.offloaded[other]].frozen)
            self.memory.copied += self.sizes[self.offloaded[other]].frozen

    def _end_gathering(self, unit: int) -> None:
        if not self.moves_outside:
            self._end(unit)

    def _end(self, unit: int) -> None:
        number = self.numbers.get(unit)
        if self.residency is not None and number is not None and self.residency.end(number):
            self._add("weights", -self.sizes[unit].frozen)

    def _forward(self, unit: int, units: list[int]) -> None:
        self._gather(unit, "forward")
        if unit in self.buffers:
            self._copy_out(unit)
            self._drop_last_buffer()  # torch still names it while it copies
            self.last_buffer = self.buffers.pop(unit)
            self._end_gathering(unit)
        ahead = self.sharding.prefetch[0]
        if ahead and unit in units:
            at = units.index(unit)
            for other in units[at + 1 : at + 1 + ahead]:
                self._gather(other, "forward")

    def _forward_end(self, unit: int) -> None:
        if self.model_pass.units[unit].is_root:
            self._drop_last_buffer()
        elif self.sharding.reshard:
            kept = self.sizes[unit].kept
            self._add("gathered blocks", kept)
            self._free(unit)
            if kept:
                self.kept[unit] = kept
        self.order.append(unit)

    def _backward(self, unit: int, units: list[int]) -> None:
        self._gather(unit, "backward")
        if unit in self.buffers:
            self._copy_out(unit)
            self._add("gathered blocks", -self.buffers.pop(unit))
            self._end_gathering(unit)
        ahead = self.sharding.prefetch[1]
        if ahead and unit in units:
            at = units.index(unit)
            for other in units[max(0, at - ahead) : at][::-1]:
                self._gather(other, "backward")
        elif unit in self.order:
            at = self.order.index(unit)
            if at > 0:
                self._gather(self.order[at - 1], "backward")

    def _backward_end(self, unit: int, is_last: bool) -> None:
        """Reduce the gradients; the next mark's change contains that they are freed."""
        sizes = self.sizes[unit]
        self._free(unit)
        if unit in self.groups.roots:
            self._add("gradients", self.groups.computed[unit])
            self.waiting[self.groups.roots[unit]] += self.groups.computed[unit]
        if not sizes.reduced:
            return
        waiting = self.waiting.pop(unit, 0)
        if not is_last and not self.sharding.is_reduced_each_pass:
            if unit not in self.accumulated:
                self.accumulated.add(unit)
                self._add("gradients", sizes.reduced)
            self._add("gradients", -waiting)
            return
        self._add("gradients being reduced", -self.scatter)
        self.scatter = sizes.reduced
        self._add("gradients being reduced", sizes.reduced)
        self.memory.scattered += sizes.reduced
        self._add("gradients", -waiting)
        if unit in self.accumulated:
            self.accumulated.remove(unit)
            self._add("gradients", -sizes.reduced)
        if self.sharding.replicas > 1 and is_last:
            self.memory.reduced += sizes.reduced_shard
        if not self.sharding.offload and unit not in self.has_gradients:
            self.has_gradients.add(unit)
            self._add("gradients", sizes.reduced_shard)
        elif not self.sharding.offload:
            self._peak_with("gradients", sizes.reduced_shard)

    def _gather(self, unit: int, direction: Direction) -> None:
        if unit in self.unsharded or unit in self.buffers:
            return
        sizes = self.sizes[unit]
        kept = self.kept.pop(unit, 0)
        if not kept and not self.moves_outside:  # else FSDP gathers what it has kept, not the shards
            self._begin(unit, direction)
        self._peak_with("gathered blocks", sizes.inputs + sizes.buffer)
        self._add("gathered blocks", sizes.buffer)
        self.buffers[unit] = sizes.buffer
        if kept:
            self._add("gathered blocks", -kept)
        self.memory.gathered += sizes.buffer
        if self.sharding.offload:
            self.memory.copied += sizes.shard

    def _copy_out(self, unit: int) -> None:
        unsharded = self.sizes[unit].unsharded
        self.unsharded[unit] = unsharded
        self._add("gathered blocks", unsharded)

    def _drop_last_buffer(self) -> None:
        self._add("gathered blocks", -self.last_buffer)
        self.last_buffer = 0

    def _free(self, unit: int) -> None:
        self._add("gathered blocks", -self.unsharded.pop(unit, 0))

    def _peak_with(self, what: str, more: float) -> None:
        """Update the peak with bytes that are allocated for a moment only."""
        if self.total + more > self.memory.peak:
            self.memory.peak = self.total + more
            self.memory.items = dict(self.allocated) | {what: self.allocated[what] + more}
            self.memory.when = self.when

    def _add(self, what: str, num_bytes: float) -> None:
        self.allocated[what] += num_bytes
        self.total += num_bytes
        if num_bytes > 0 and (self.keeps_all or self.total > self.memory.peak):
            self._peak_with(what, 0)


def _offloaded(model_pass: ModelPass, wanted: int | float | str) -> tuple[int, ...]:
    """Return the units whose frozen weights are offloaded."""
    blocks = [
        number
        for number, unit in enumerate(model_pass.units)
        if not unit.is_root and any(not p.is_trained for p in unit.parameters)
    ]
    return tuple(blocks[number] for number in offloaded_blocks(wanted, len(blocks)))


class _Recording(_Simulation):
    """Also keeps every moment, which is slower."""

    keeps_all = True

    def __init__(self, model_pass: ModelPass, sharding: Sharding) -> None:
        self._passes: list[list[Point]] = [[]]
        self._most = -1.0
        self._items: dict[str, float] = {}
        self._begun: tuple[str, str] | None = None
        super().__init__(model_pass, sharding)

    def points(self) -> list[Point]:
        """Return the points of all passes, also of those that were not simulated because they repeat."""
        more = self.sharding.passes - DIFFERENT_PASSES
        if more <= 0:
            return list(chain(*self._passes))
        *first, last = self._passes
        again, flops = first[-1], first[-1][-1].flops - first[-2][-1].flops
        if self.sharding.passes > MOST_KEPT_PASSES:
            again = [replace(max(again, key=lambda point: point.peak), flops=again[-1].flops, after=again[-1].after)]
        repeated = [
            replace(point, number=point.number + number, flops=point.flops + number * flops)
            for number in range(1, more + 1)
            for point in again
        ]
        return [*chain(*first), *repeated, *(replace(point, number=self.sharding.passes - 1) for point in last)]

    def optimizer(self) -> Point:
        """Return the point of the optimizer, which has unsharded gradients and no activations."""
        end = self._passes[-1][-1]
        allocated = dict(self.allocated) | {"gradients": end.highest.get("gradients", 0.0)}
        return Point(
            "optimizer", "", self.sharding.passes - 1, end.flops, sum(allocated.values()), allocated, allocated
        )

    def one_pass(self, is_last: bool) -> None:
        super().one_pass(is_last)
        self._end_point()
        self._begun = None
        if not is_last:
            self._passes.append([])

    def restart(self) -> None:
        self._passes, self._begun = [[]], None
        super().restart()

    def _peak_with(self, what: str, more: float) -> None:
        if self.when is not self._begun:  # each moment begins with the activations of what leads to it
            self._end_point()
            self._begun = self.when
        if self.total + more > self._most:
            self._most = self.total + more
            self._items = dict(self.allocated) | {what: self.allocated[what] + more}
        super()._peak_with(what, more)

    def _end_point(self) -> None:
        if self._begun is not None:
            passes = self._passes
            after = dict(self.allocated)
            point = Point(*self._begun, len(passes) - 1, self.memory.flops, self._most, self._items, after)
            passes[-1].append(point)
        self._most = -1.0


@lru_cache(256)
def _sizes_of_units(model_pass: ModelPass, sharding: Sharding) -> list[_Sizes]:
    """Return the sizes of all units; those that share their parameters, as equal blocks do, are computed once."""
    reshard, offload = sharding.reshard, sharding.offload
    alike = Sharding(sharding.ranks, reshard=reshard, offload=offload, pins_exactly=sharding.pins_exactly)
    known: dict[int, _Sizes] = {}
    groups = _groups(model_pass, sharding).parameters
    for parameters in groups:
        if id(parameters) not in known:
            known[id(parameters)] = _sizes(parameters, alike)
    return [known[id(parameters)] for parameters in groups]


@dataclass(frozen=True)
class _Groups:
    """The parameters of a model as FSDP groups them.

    Attributes:
        parameters: Of each unit.
        roots: {number of a block whose trained parameters are in the group of a root: number of that root}.
        computed: {number of such a block: bytes of its trained parameters, and of their gradients, as it computes}.
    """

    parameters: tuple[tuple[Parameter, ...], ...]
    roots: Mapping[int, int] = field(default_factory=dict)
    computed: Mapping[int, int] = field(default_factory=dict)


@lru_cache(256)
def _groups(model_pass: ModelPass, sharding: Sharding) -> _Groups:
    """Group parameters as `parallelize` does: those of the first component are one where `trains_few_parameters`."""
    units = model_pass.units
    parameters = [unit.parameters for unit in units]
    roots: dict[int, int] = {}
    root = next((number for number, unit in enumerate(units) if unit.is_root), None)
    if root is not None and sharding.is_sharded and sharding.is_one_node and not sharding.gathers_frozen:
        inside = [number for number, unit in enumerate(units) if unit.name.startswith(f"{units[root].name}.")]
        everything = [p for number in (root, *inside) for p in parameters[number]]
        is_left_out = any(not p.is_trained and p.stored == p.gathered for p in everything)
        if is_left_out and has_few_parameters(sum(p.numbers for p in everything if p.is_trained)):
            roots = dict.fromkeys(inside, root)
    computed: dict[int, int] = {}
    frozen: dict[int, tuple[Parameter, ...]] = {}
    for block, owner in roots.items():
        trained = [p for p in parameters[block] if p.is_trained]
        computed[block] = sum(p.count * grains(p.rows * p.row * p.gathered) for p in trained)
        parameters[owner] = (*parameters[owner], *trained)
        rest = tuple(p for p in parameters[block] if not p.is_trained)
        parameters[block] = frozen.setdefault(id(units[block].parameters), rest)  # equal blocks go on sharing them
    return _Groups(tuple(parameters), roots, computed)


@lru_cache(4096)
def _sizes(parameters: tuple[Parameter, ...], sharding: Sharding) -> _Sizes:
    ranks = sharding.ranks
    shard = inputs = transient = buffer = unsharded = copied = kept = reduced = reduced_shard = trained = pinned = 0
    frozen = frozen_pinned = 0
    for p in parameters:
        rows = p.shard_rows(ranks)
        numbers = rows * p.row
        shard += p.count * grains(numbers * p.stored)
        on_host = p.count * pinned_bytes(numbers * p.stored, sharding.pins_exactly)
        pinned += on_host
        if not p.is_trained:
            frozen += p.count * grains(numbers * p.stored)
            frozen_pinned += on_host
        if p.stored != p.gathered:
            inputs += p.count * grains(numbers * p.gathered)
            copied += p.count * grains(p.rows * p.row * p.gathered)
            transient = max(transient, grains(numbers * p.stored) if sharding.offload else 0)
        elif sharding.offload:
            inputs += p.count * grains(numbers * p.stored)
        if not sharding.gathers_frozen and not p.is_trained and p.stored == p.gathered:
            continue
        buffer += p.count * ranks * numbers * p.gathered
        unsharded += p.count * grains(ranks * numbers * p.gathered)
        if sharding.reshard and sharding.reshard is not True:
            kept += p.count * grains(ranks * numbers * p.gathered // sharding.reshard)
        if p.is_trained:
            reduced += p.count * ranks * numbers * REDUCED_BYTES
            reduced_shard += p.count * numbers * REDUCED_BYTES
            trained += p.count * numbers
            pinned += p.count * pinned_bytes(numbers * REDUCED_BYTES, sharding.pins_exactly)
    if ranks == 1:
        # Copied one parameter at a time, without a collective.
        biggest = max((grains(p.rows * p.row * p.gathered) for p in parameters if p.stored != p.gathered), default=0)
        inputs, transient, buffer = biggest, 0, 0
    return _Sizes(
        shard=shard,
        inputs=inputs + transient,
        buffer=grains(buffer),
        unsharded=unsharded,
        copied=copied,
        kept=kept,
        reduced=grains(reduced),
        reduced_shard=grains(reduced_shard),
        trained=trained,
        pinned=pinned,
        frozen=frozen,
        frozen_pinned=frozen_pinned,
    )
