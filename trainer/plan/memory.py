"""What a run takes: bytes per rank by what they are for, bytes through the links, operations and time. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config import NoAdapter, RankAdapter, RunConfig
from trainer.plan.hardware import CARDS, NETWORK, Card
from trainer.plan.steps import Size, Step
from trainer.plan.tables import Table
from trainer.plan.timeline import Memory, Sharding, simulate
from trainer.zero import TRAINED_BYTES, Strategy, choose_strategy, reshard_after_forward, ring_share, shard_ranks

GIB = 2**30
Verdict = Literal["fits", "tight", "does not fit"]
TIGHT = 0.92
"""Above this share of a card's memory a plan is tight: what is not counted may be more on the day."""
STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2.0 + 8 / 256, "schedulefree": 8.0}
"""Optimizer state per trained number: two moments in fp32, in 8 bits with a scale per 256, or one and a second copy."""
BITS = {"nf4": 4.25, "int8": 8.25, "fp8": 8.0}
"""Per weight, scales included."""
DECODING_TRAFFIC = 4
"""Bytes that go to and from a GPU's memory for each byte of bf16 that is decoded: codes, the weight and its pieces."""
FIXED_STEP_S = 0.4
"""Seconds of a step that no operation explains, as launching kernels (read off published steps, see DECISIONS.md)."""


@dataclass(frozen=True)
class Reserve:
    """What the allocator and the driver take beside what is allocated.

    share: of it, for gaps between blocks of memory.  context: bytes of CUDA's context and libraries.
    communication: bytes of NCCL's buffers, where there are several ranks.  is_measured: on such a GPU.
    """

    share: float = 0.06
    context: int = 600 * 2**20
    communication: int = 400 * 2**20
    is_measured: bool = False

    def of(self, allocated: float, ranks: int) -> float:
        """Bytes beside `allocated`."""
        return self.share * allocated + self.context + (self.communication if ranks > 1 else 0)


@dataclass(frozen=True)
class Item:
    """A part of the memory of one rank. size: bytes.  sentence: what it is."""

    name: str
    size: float
    sentence: str


@dataclass(frozen=True)
class Time:
    """Seconds of an optimizer step, from everything at once to one after the other. bound_by: what takes longest."""

    low: float
    high: float
    bound_by: str


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes on each rank at its fullest moment. Sizes in bytes.

    items: they add up to `need`.  peak: of tensors.  need: with what allocator and driver take besides.
    when: the moment.  host: pinned memory of what is offloaded.  checkpoint: on disk, each.  received: through links
    per rank and optimizer step.  flops: of a rank and step.  time: where the card is known.
    """

    strategy: Strategy
    ranks: int
    items: tuple[Item, ...]
    peak: float
    need: float
    when: str
    host: float
    checkpoint: float
    received: float
    flops: float
    card: Card | None
    time: Time | None

    @property
    def verdict(self) -> Verdict | None:
        """Whether it fits the card; None without one."""
        if self.card is None:
            return None
        if self.need > self.card.memory:
            return "does not fit"
        return "tight" if self.need > TIGHT * self.card.memory else "fits"


def plan_of(cfg: RunConfig, table: Table, card: Card | None, reserve: Reserve = Reserve()) -> MemoryPlan:
    """The plan of a run by what was recorded of its model.

    card: each rank's. None: not known; `parallel.strategy` auto is then decided as for 80 GB.
    """
    step = table.step(size_of(cfg), rank_of(cfg), cfg.train.checkpointing)
    strategy = strategy_of(cfg, step, card)
    sharding = sharding_of(cfg, strategy)
    memory = simulate(step, sharding)
    ranks = cfg.parallel.world_size
    items = _items(memory, sharding, reserve, ranks)
    received = _received(memory, sharding)
    return MemoryPlan(
        strategy=strategy,
        ranks=ranks,
        items=items,
        peak=memory.peak,
        need=sum(item.size for item in items),
        when=_when(memory),
        host=memory.host,
        checkpoint=_trained(step) * (4 + optimizer_bytes(cfg)),
        received=received,
        flops=memory.flops,
        card=card,
        time=_time(cfg, step, memory, sharding, card) if card else None,
    )


def size_of(cfg: RunConfig) -> Size:
    """What a pass is given; reference images are further pixels."""
    references = 1 if cfg.data.references else 0
    return Size((1 + references) * cfg.data.resolution**2, cfg.train.micro_batch)


def rank_of(cfg: RunConfig) -> int:
    """The adapter's rank; any number where it has none."""
    return cfg.adapter.rank if isinstance(cfg.adapter, RankAdapter) else 1


def strategy_of(cfg: RunConfig, step: Step, card: Card | None) -> Strategy:
    """`parallel.strategy` as the trainer decides it."""
    memory = card.memory if card else 80 * GIB
    parallel = cfg.parallel
    return choose_strategy(parallel, parallel.world_size, parallel.devices, _state_bytes(step), memory)


def sharding_of(cfg: RunConfig, strategy: Strategy) -> Sharding:
    """How a step is spread over the ranks."""
    parallel = cfg.parallel
    ranks = shard_ranks(parallel, strategy, parallel.world_size)
    return Sharding(
        ranks=ranks,
        replicas=parallel.world_size // ranks,
        is_sharded=strategy != "none",
        reshard=reshard_after_forward(parallel, strategy),
        offload=parallel.cpu_offload,
        prefetch=(parallel.prefetch_forward, parallel.prefetch_backward),
        passes=cfg.micro_steps,
        is_reduced_each_pass=cfg.shards_gradients(strategy),
        optimizer_bytes=optimizer_bytes(cfg),
    )


def optimizer_bytes(cfg: RunConfig) -> float:
    """State per trained number, the moving average included."""
    return STATE_BYTES[cfg.optim.type] + (4.0 if cfg.optim.ema else 0.0)


def _trained(step: Step) -> int:
    return sum(p.count * p.rows * p.row for unit in step.units for p in unit.parameters if p.is_trained)


def _state_bytes(step: Step) -> int:
    """As the trainer counts it when it decides."""
    frozen = sum(p.count * p.rows * p.row * p.stored for u in step.units for p in u.parameters if not p.is_trained)
    return frozen + TRAINED_BYTES * _trained(step)


SENTENCES = {
    "weights": "the base and what is trained, {share}",
    "optimizer": "what the optimizer remembers of each trained weight, {share}",
    "gradients": "of the trained weights, in fp32, {share}",
    "gathered blocks": "blocks whose weights are whole while they compute, and the next ones on their way",
    "gradients being reduced": "of the block whose gradients are summed over the ranks",
    "activations": "what forward keeps for backward, and what the block at work needs",
    "buffers": "tables of the model that are no weights, as positions",
}


def _items(memory: Memory, sharding: Sharding, reserve: Reserve, ranks: int) -> tuple[Item, ...]:
    share = f"1/{sharding.ranks} on each rank" if sharding.ranks > 1 else "whole"
    items = [
        Item(name, memory.items[name], sentence.format(share=share))
        for name, sentence in SENTENCES.items()
        if memory.items.get(name, 0) >= 1
    ]
    beside = reserve.of(memory.peak, ranks)
    what = "gaps of the allocator, CUDA's context" + (", NCCL's buffers" if ranks > 1 else "")
    origin = "as measured here" if reserve.is_measured else "an assumption"
    return (*items, Item("reserve", beside, f"{what}; {origin}"))


def _when(memory: Memory) -> str:
    moment, unit = memory.when
    names = {"forward": "forward", "forward_end": "forward", "backward": "backward", "backward_end": "backward"}
    what = names.get(moment, "backward")
    return f"{what} of {unit}" if unit else what


def _received(memory: Memory, sharding: Sharding) -> float:
    """By ring algorithms (see `trainer.zero`)."""
    inside = ring_share(sharding.ranks) * (memory.gathered + memory.scattered)
    return inside + 2 * ring_share(sharding.replicas) * memory.reduced


def _time(cfg: RunConfig, step: Step, memory: Memory, sharding: Sharding, card: Card) -> Time:
    """A roofline: from all at once, as when gathers hide behind computing, to one after the other."""
    crosses = cfg.parallel.nodes > 1 and sharding.ranks > cfg.parallel.devices
    link = NETWORK if crosses else card.link
    gathers = ring_share(sharding.ranks) * (memory.gathered + memory.scattered) / link
    between = 2 * ring_share(sharding.replicas) * memory.reduced / (NETWORK if cfg.parallel.nodes > 1 else card.link)
    computing = memory.flops / (card.tflops * 1e12 * card.share)
    parts = {
        "computing": computing + DECODING_TRAFFIC * _decoded(cfg, step) / card.bandwidth,
        "gathering weights": gathers + between,
        "copies from host memory": _offloaded(memory, sharding) / card.host_link,
    }
    return Time(
        max(parts.values()) + FIXED_STEP_S, sum(parts.values()) + FIXED_STEP_S, max(parts, key=parts.__getitem__)
    )


def _decoded(cfg: RunConfig, step: Step) -> float:
    """Bytes of bf16 that a step makes of quantized weights: in forward and backward, and where forward is repeated."""
    if cfg.quantize.format == "none":
        return 0.0
    stored = [sum(p.count * p.rows * p.row for p in unit.parameters if p.stored == 1) for unit in step.units]
    passes = sum(size * (3 if number in step.recomputed else 2) for number, size in enumerate(stored))
    return passes * 16 / BITS[cfg.quantize.format] * cfg.micro_steps


def _offloaded(memory: Memory, sharding: Sharding) -> float:
    """Bytes from the host in a step: this rank's shard of all that is gathered."""
    return memory.gathered / sharding.ranks if sharding.offload else 0.0


def describe(cfg: RunConfig) -> str:
    """The run in a line: `lora rank 16, base in nf4, 1024 px, 1 per rank and pass, 2 ranks`."""
    what = "full fine-tune" if isinstance(cfg.adapter, NoAdapter) else cfg.adapter.type
    rank = f" rank {cfg.adapter.rank}" if isinstance(cfg.adapter, RankAdapter) else ""
    base = "bf16" if cfg.quantize.format == "none" else cfg.quantize.format
    ranks = cfg.parallel.world_size
    size = f"{cfg.data.resolution} px, {cfg.train.micro_batch} per rank and pass"
    return f"{what}{rank}, base in {base}, {size}, {ranks} rank{'s' if ranks > 1 else ''}"


def verdict(found: MemoryPlan) -> str:
    """Whether the plan fits, in a sentence."""
    if found.card is None:
        fitting = [card.name for card in CARDS.values() if found.need <= card.memory]
        return f"no GPU here; it fits {fitting[0]} and larger" if fitting else "no GPU here; it fits none that is known"
    room = found.card.memory
    difference = abs(room - found.need) / GIB
    of = f"{room / GIB:.2f} GiB of {found.card.name}"
    if found.verdict == "does not fit":
        return f"does not fit: {difference:.2f} GiB more than the {of}"
    return f"{found.verdict}: leaves {difference:.2f} of the {of}"
