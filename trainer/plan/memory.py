"""Plans a run: bytes per rank by purpose, bytes through the links, operations and time. No torch. See DECISIONS 91."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.families import trains_on
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter, RankAdapter
from trainer.config.titles import size_title
from trainer.parallel.strategy import Strategy, ring_share
from trainer.plan.hardware import CARDS, NETWORK, Card, Source
from trainer.plan.search.decide import TIGHT, decide, decided, is_open
from trainer.plan.simulate.phases import ASSUMED, TRAINING, Item, Phase, Reserve, phases_of
from trainer.plan.simulate.references import references_of
from trainer.plan.simulate.sizes import BITS, input_of, rank_of, sharding_of, strategy_of, trained
from trainer.plan.simulate.steps import ModelPass
from trainer.plan.simulate.storage import disk_of, host_of
from trainer.plan.simulate.tables import Model
from trainer.plan.simulate.timeline import Memory, Point, Sharding, history, least, simulate
from trainer.system.amounts import GIB, counted

Verdict = Literal["fits", "tight", "does not fit"]
DECODING_TRAFFIC = 3
"""The time of a decoded byte of bf16, as bytes to and from a GPU's memory. Measured with layers of FLUX.2 dev on an
H200: nf4 3.2, int8 2.3, fp8 3.0 (tests/benchmarks/RESULTS.md, GPU)."""
RECOMPUTING_TRAFFIC = 21
"""Bytes to and from a GPU's memory for each byte that is not kept, where norms, modulation, rotary embeddings and the
like are computed again. Measured with FLUX.2 klein-4B on an H200 (tests/benchmarks/RESULTS.md, GPU)."""
HOST_OPTIMIZER_BANDWIDTH = 30e9
"""Bytes per second of host memory that AdamW reaches on a processor's one thread, which each rank has (measured)."""
FIXED_STEP_S = 0.4
"""Seconds of a step beyond its operations, such as kernel launches (from published step times; see DECISIONS 91)."""


def between(low: str, high: str) -> str:
    """Say a range of two values, as one where they are the same."""
    return low if low == high else f"{low} to {high}"


_ORIGINS = {
    "measured here": "as measured in runs here",
    "measured": "as measured on such a GPU",
    "scaled": "by the speed of other steps on such a GPU",
    "assumed": "by an assumed speed",
}


@dataclass(frozen=True)
class Time:
    """Seconds of an optimizer step.

    Attributes:
        low: If everything overlaps.
        high: If nothing overlaps.
        bound_by: The part that takes longest.
        source: Where the GPU's speed is from: measured in steps like this one, by runs here or by others; in steps of
            another size; or assumed.
    """

    low: float
    high: float
    bound_by: str
    source: Source = "assumed"

    @property
    def middle(self) -> float:
        """The middle between `low` and `high`, by which plans are compared."""
        return (self.low + self.high) / 2

    @property
    def origin(self) -> str:
        """The source in words."""
        return _ORIGINS[self.source]

    def __str__(self) -> str:
        digits = 1 if self.low >= 1 else 2
        return f"{between(*(f'{seconds:.{digits}f}' for seconds in (self.low, self.high)))} s per step"


@dataclass(frozen=True)
class MemoryPlan:
    """The resources that a run needs. Sizes in bytes.

    Attributes:
        strategy: The decided `parallel.strategy`.
        checkpointing: The decided `train.checkpointing`.
        offload_blocks: The decided `parallel.offload_blocks`.
        ranks: Number of ranks.
        phases: Parts of the run in their order.
        host: Host memory per rank.
        disk: Files.
        received: Bytes through links per rank and optimizer step.
        flops: Floating-point operations per rank and optimizer step.
        card: The GPU of each rank, if known.
        time: Time of an optimizer step, if the GPU is known.
    """

    strategy: Strategy
    checkpointing: str | int
    offload_blocks: int | float | str
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
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.need)

    @property
    def training(self) -> Phase:
        """The phase of the training steps."""
        return next(phase for phase in self.phases if phase.name == TRAINING)

    @property
    def need(self) -> float:
        """Bytes on each GPU at the fullest moment of the run."""
        return self.fullest.need

    @property
    def verdict(self) -> Verdict | None:
        """Whether the run fits the GPU; None without one."""
        if self.card is None:
            return None
        if self.need > self.card.memory:
            return "does not fit"
        return "tight" if self.need > TIGHT * self.card.memory else "fits"


def plan_of(cfg: RunConfig, model: Model, card: Card | None, reserve: Reserve = ASSUMED) -> MemoryPlan:
    """Make the plan of a run.

    Args:
        cfg: The run's config.
        model: The tables of its model.
        card: The GPU of each rank. None: unknown; `parallel.strategy: auto` is then decided as for 80 GB.
        reserve: Memory of the allocator and the driver.
    """
    if is_open(cfg):
        cfg = decide(cfg, model, card, reserve, lambda found: _middle(found, model, card, reserve))
    model_pass = model.table.training(input_of(cfg), rank_of(cfg), cfg.train.checkpointing)
    strategy = strategy_of(cfg, model_pass, card)
    sharding = sharding_of(cfg, strategy)
    memory = simulate(model_pass, sharding)
    if cfg.objective.compares_pairs:
        _add_reference(model_pass, memory)
    # The bytes that a rank receives, by ring algorithms (see `trainer.parallel.strategy`).
    inside = ring_share(sharding.ranks) * (memory.gathered + memory.scattered)
    received = inside + 2 * ring_share(sharding.replicas) * memory.reduced
    return MemoryPlan(
        strategy=strategy,
        checkpointing=cfg.train.checkpointing,
        offload_blocks=cfg.parallel.offload_blocks,
        ranks=cfg.parallel.world_size,
        phases=phases_of(cfg, model, model_pass, sharding, memory, reserve),
        host=host_of(cfg, model_pass, memory, sharding),
        disk=disk_of(cfg, model, model_pass),
        received=received,
        flops=memory.flops,
        card=card,
        time=_time(cfg, model_pass, memory, sharding, card) if card else None,
    )


def _middle(cfg: RunConfig, model: Model, card: Card | None, reserve: Reserve) -> float:
    """Return the seconds of a step by which plans are compared."""
    time = plan_of(cfg, model, card, reserve).time
    assert time is not None
    return time.middle


def least_of(cfg: RunConfig, model: Model, card: Card) -> tuple[float, float]:
    """Return bounds that no plan of the run is below, without simulating its memory.

    Args:
        cfg, model, card: As for `plan_of`.

    Returns:
        Seconds of an optimizer step (`Time.middle`), and bytes of tensors on a GPU in training.
    """
    again = "none" if cfg.train.checkpointing == "auto" else cfg.train.checkpointing
    model_pass = model.table.training(input_of(cfg), rank_of(cfg), again)
    sharding = sharding_of(cfg, strategy_of(cfg, model_pass, card))
    memory = least(model_pass, sharding)
    if cfg.objective.compares_pairs:
        _add_reference(model_pass, memory)
    allocated = 0.0 if cfg.parallel.offload_blocks == "auto" else memory.peak
    return _time(cfg, model_pass, memory, sharding, card).middle, allocated


def history_of(cfg: RunConfig, model: Model, plan: MemoryPlan) -> tuple[Point, ...]:
    """Return the moments of a training step with what its plan has decided. The forward of a reference, which takes
    less memory than training, is not among them.

    Args:
        cfg: The run's config.
        model: The tables of its model.
        plan: The plan of both.
    """
    cfg = decided(cfg, plan.checkpointing, plan.offload_blocks)
    model_pass = model.table.training(input_of(cfg), rank_of(cfg), plan.checkpointing)
    return history(model_pass, sharding_of(cfg, plan.strategy))


def _add_reference(model_pass: ModelPass, memory: Memory) -> None:
    """Add the forward of the model without its adapter to what a step computes and gathers. Of a frozen base, forward
    and backward cost the same; recomputed blocks are run forward twice. It holds less memory than training."""
    blocks = sum(not unit.is_root for unit in model_pass.units)
    passes = 2 + len(model_pass.repeated) / blocks
    memory.flops *= (passes + 1) / passes
    memory.gathered *= 3 / 2
    memory.copied *= 3 / 2


def _time(cfg: RunConfig, model_pass: ModelPass, memory: Memory, sharding: Sharding, card: Card) -> Time:
    """Return a roofline: from full overlap, as when gathers hide behind computing, to no overlap."""
    crosses = cfg.parallel.nodes > 1 and sharding.ranks > cfg.parallel.devices
    link = NETWORK if crosses else card.link
    gathers = ring_share(sharding.ranks) * (memory.gathered + memory.scattered) / link
    between = 2 * ring_share(sharding.replicas) * memory.reduced / (NETWORK if cfg.parallel.nodes > 1 else card.link)
    computing, fixed = memory.flops / (card.tflops * 1e12 * card.share), FIXED_STEP_S
    source: Source = "assumed"
    known = card.speed(memory.flops, cfg.train.compiles_on("cuda")) if cfg.train.precision == "bf16" else None
    if known:
        computing, fixed, source = memory.flops / known[0], 0.0, known[1]
    traffic = DECODING_TRAFFIC * _decoded(cfg, model_pass) * sharding.passes
    traffic += RECOMPUTING_TRAFFIC * model_pass.freed * sharding.passes
    parts = {
        "computing": computing + traffic / card.bandwidth,
        "gathering weights": gathers + between,
        "copies from host memory": memory.copied / card.host_link,
    }
    fixed += _on_host(model_pass, sharding, card)
    low, high = max(parts.values()) + fixed, sum(parts.values()) + fixed
    return Time(low, high, max(parts, key=parts.__getitem__), source)


def _on_host(model_pass: ModelPass, sharding: Sharding, card: Card) -> float:
    """Return the seconds of a step in which a GPU waits for an optimizer on the CPU, and for gradients to get there."""
    if not sharding.offload:
        return 0.0
    numbers = trained(model_pass) / sharding.ranks
    # Weights and state are read and written, the gradient is read.
    traffic = 4 * 3 + 2 * sharding.optimizer_bytes
    return 4 * numbers / card.host_link + traffic * numbers / HOST_OPTIMIZER_BANDWIDTH


def _decoded(cfg: RunConfig, model_pass: ModelPass) -> float:
    """Return the bytes of bf16 that a pass decodes: in forward and backward, where forward is recomputed, and in the
    forward of a reference."""
    if cfg.quantize.format == "none":
        return 0.0
    stored = [sum(p.numbers for p in unit.parameters if p.stored == 1) for unit in model_pass.units]
    reference = cfg.objective.compares_pairs
    passes = sum(size * (2 + (number in model_pass.repeated) + reference) for number, size in enumerate(stored))
    return passes * 16 / BITS[cfg.quantize.format]


def describe(cfg: RunConfig) -> str:
    """Describe the run in a line: `lora rank 16, base in nf4, 1024 px, 1 per rank and pass, 2 ranks`."""
    what = "full fine-tune" if isinstance(cfg.adapter, NoAdapter) else cfg.adapter.type
    rank = f" rank {cfg.adapter.rank}" if isinstance(cfg.adapter, RankAdapter) else ""
    base = "bf16" if cfg.quantize.format == "none" else cfg.quantize.format
    ranks = cfg.parallel.world_size
    example = size_title(cfg.data.all_sides) if trains_on(cfg) == "images" else f"{cfg.data.length} tokens"
    size = f"{example}, {cfg.train.micro_batch} per rank and pass"
    if references := references_of(cfg):
        size += f", {counted(references, 'reference')} of each"
    return f"{what}{rank}, base in {base}, {size}, {ranks} rank{'s' if ranks > 1 else ''}"


def verdict(plan: MemoryPlan) -> str:
    """Say in a sentence whether the plan fits."""
    if plan.card is None:
        fitting = [card.name for card in CARDS.values() if plan.need <= card.memory]
        if not fitting:
            return "no GPU here; does not fit on any known GPU"
        return f"no GPU here; it fits {fitting[0]} and larger"
    room = plan.card.memory
    difference = abs(room - plan.need) / GIB
    of = f"{room / GIB:.2f} GiB of {plan.card.name}"
    if plan.verdict == "does not fit":
        return f"does not fit: {difference:.2f} GiB more than the {of}"
    return f"{plan.verdict}: leaves {difference:.2f} of the {of}"


def describe_trace(plan: MemoryPlan, peak: int) -> str:
    """Compare the plan with a trace of the whole model. peak: most bytes of tensors in the traced training step."""
    planned = plan.training.peak
    return (
        f"training traced, block by block: {peak / GIB:.2f} GiB of tensors; planned {planned / GIB:.2f} "
        f"({planned / peak - 1:+.2%})"
    )
