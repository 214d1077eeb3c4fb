"""What a run's config asks of its model: how much it is given, and over what it is spread. No torch."""

from __future__ import annotations

from trainer.config.families import trains_on
from trainer.config.schema import RunConfig
from trainer.config.sections import RankAdapter
from trainer.parallel.strategy import TRAINED_BYTES, Strategy, choose_strategy, reshard_after_forward, shard_ranks
from trainer.plan.hardware import GIB, Card
from trainer.plan.steps import Size, Step
from trainer.plan.timeline import Sharding

STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2.0 + 8 / 256, "schedulefree": 8.0}
"""Optimizer state per trained number: two moments in fp32, in 8 bits with a scale per 256, or one and a second copy."""
BITS = {"nf4": 4.25, "int8": 8.25, "fp8": 8.0}
"""Per weight, scales included."""


def size_of(cfg: RunConfig) -> Size:
    """What a pass is given; reference images are further pixels. Tokens of text are counted as pixels."""
    if trains_on(cfg) == "text":
        return Size(cfg.data.length, cfg.train.micro_batch)
    references = 1 if cfg.data.references else 0
    return Size((1 + references) * cfg.data.resolution**2, cfg.train.micro_batch)


def sample_size_of(cfg: RunConfig) -> Size:
    """What the model is given where a sample is drawn."""
    if trains_on(cfg) == "text":
        return Size(cfg.sample.tokens, 1)
    width, height = cfg.sample.size
    return Size((2 if cfg.sample.references else 1) * width * height, 1)


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


def checkpoint_bytes(cfg: RunConfig, step: Step) -> float:
    """Of a checkpoint: what is trained in fp32, and what the optimizer remembers of it."""
    return trained(step) * (4 + optimizer_bytes(cfg))


def trained(step: Step) -> int:
    """Numbers that are trained, of the whole model."""
    return sum(p.numbers for unit in step.units for p in unit.parameters if p.is_trained)


def _state_bytes(step: Step) -> int:
    """As the trainer counts it when it decides."""
    frozen = sum(p.numbers * p.stored for unit in step.units for p in unit.parameters if not p.is_trained)
    return frozen + TRAINED_BYTES * trained(step)
