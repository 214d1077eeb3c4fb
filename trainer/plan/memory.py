"""What a run takes: bytes per rank by what they are for, bytes through the links, operations and time. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.families import trains_on
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter, RankAdapter
from trainer.parallel.strategy import Strategy, ring_share
from trainer.plan.hardware import CARDS, GIB, NETWORK, Card
from trainer.plan.phases import ASSUMED, TRAINING, Item, Phase, Reserve, phases_of
from trainer.plan.sizes import BITS, rank_of, sharding_of, size_of, strategy_of
from trainer.plan.steps import Step
from trainer.plan.storage import disk_of, host_of
from trainer.plan.tables import Model
from trainer.plan.timeline import Memory, Sharding, simulate

Verdict = Literal["fits", "tight", "does not fit"]
TIGHT = 0.92
"""Above this share of a card's memory a plan is tight: what is not counted may be more on the day."""
DECODING_TRAFFIC = 4
"""Bytes that go to and from a GPU's memory for each byte of bf16 that is decoded: codes, the weight and its pieces."""
FIXED_STEP_S = 0.4
"""Seconds of a step that no operation explains, as launching kernels (read off published steps, see DECISIONS.md)."""


@dataclass(frozen=True)
class Time:
    """Seconds of an optimizer step, from everything at once to one after the other. bound_by: what takes longest."""

    low: float
    high: float
    bound_by: str


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes. Sizes in bytes.

    phases: in their order.  host: host memory per rank.  disk: files.  received: through links per rank and optimizer
    step.  flops: of a rank and step.  time: where the card is known.
    """

    strategy: Strategy
    ranks: int
    phases: tuple[Phase, ...]
    host: tuple[Item, ...]
    disk: tuple[Item, ...]
    received: float
    flops: float
    card: Card | None
    time: Time | None

    @property
    def fullest(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.need)

    @property
    def training(self) -> Phase:
        """The steps themselves."""
        return next(phase for phase in self.phases if phase.name == TRAINING)

    @property
    def need(self) -> float:
        """Bytes on each GPU at the fullest moment of all."""
        return self.fullest.need

    @property
    def verdict(self) -> Verdict | None:
        """Whether it fits the card; None without one."""
        if self.card is None:
            return None
        if self.need > self.card.memory:
            return "does not fit"
        return "tight" if self.need > TIGHT * self.card.memory else "fits"


def plan_of(cfg: RunConfig, model: Model, card: Card | None, reserve: Reserve = ASSUMED) -> MemoryPlan:
    """The plan of a run by what was recorded of its model.

    card: each rank's. None: not known; `parallel.strategy` auto is then decided as for 80 GB.
    """
    step = model.table.step(size_of(cfg), rank_of(cfg), cfg.train.checkpointing)
    strategy = strategy_of(cfg, step, card)
    sharding = sharding_of(cfg, strategy)
    memory = simulate(step, sharding)
    received = _received(memory, sharding)
    return MemoryPlan(
        strategy=strategy,
        ranks=cfg.parallel.world_size,
        phases=phases_of(cfg, model, step, sharding, memory, reserve),
        host=host_of(cfg, step, memory, sharding),
        disk=disk_of(cfg, model, step),
        received=received,
        flops=memory.flops,
        card=card,
        time=_time(cfg, step, memory, sharding, card) if card else None,
    )


def _received(memory: Memory, sharding: Sharding) -> float:
    """By ring algorithms (see `trainer.parallel.strategy`)."""
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
    stored = [sum(p.numbers for p in unit.parameters if p.stored == 1) for unit in step.units]
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
    example = f"{cfg.data.resolution} px" if trains_on(cfg) == "images" else f"{cfg.data.length} tokens"
    size = f"{example}, {cfg.train.micro_batch} per rank and pass"
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


def compared(found: MemoryPlan, peak: int) -> str:
    """The plan beside a trace of the whole model. peak: bytes of tensors that it took in training."""
    planned = found.training.peak
    return (
        f"training traced, block by block: {peak / GIB:.2f} GiB of tensors; planned {planned / GIB:.2f} "
        f"({planned / peak - 1:+.2%})"
    )
