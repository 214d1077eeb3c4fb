"""Derives from a run's config the input of its model and how the model is spread. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainer.config.families import of as families_of
from trainer.config.families import trains_on
from trainer.config.schema import RunConfig
from trainer.config.sections import RankAdapter
from trainer.parallel.strategy import TRAINED_BYTES, Strategy, choose_strategy, reshard_after_forward, shard_ranks
from trainer.plan.hardware import Card
from trainer.plan.simulate.references import references_of
from trainer.plan.simulate.steps import ModelPass, PassInput
from trainer.plan.simulate.timeline import Sharding
from trainer.run.allocator import pins_exactly
from trainer.system.amounts import GIB

BITS = {"nf4": 4.25, "int8": 8.25, "fp8": 8.0}
"""Bits per weight, scales included."""
PROPOSED = ("nf4", "int8")
"""Formats that a base is proposed in. With a scale for each row, int8 is nearer to bf16 than fp8 at the same size: of
normally distributed weights, a seventh of the squared error. A base that is in fp8 stays so."""


def input_of(cfg: RunConfig) -> PassInput:
    """Return the input of a pass; reference images add pixels, and both images of a pair are in one pass. Tokens of
    text count as pixels, and a packed token as the pixels of a drawn one, the largest."""
    if trains_on(cfg) == "text":
        return PassInput(cfg.data.length, cfg.train.micro_batch)
    if cfg.data.pack_tokens is not None:
        known = families_of(cfg.model.family)
        return PassInput(cfg.data.pack_tokens * (known.size_multiple if known else 1) ** 2, cfg.train.micro_batch)
    references = references_of(cfg) * _images_per_reference(cfg)
    pair = 2 if cfg.objective.compares_pairs else 1
    side, images = _largest_pass(cfg)
    return PassInput((1 + references) * side**2, pair * images)


def passes_of(cfg: RunConfig) -> int:
    """Return the passes of a step on the images of `input_of`: more where their folder has fewer in a pass."""
    if trains_on(cfg) == "text" or cfg.data.pack_tokens is not None:
        return cfg.micro_steps
    _, images = _largest_pass(cfg)
    return math.ceil(math.ceil(cfg.train.batch_size / cfg.parallel.data_size) / images)


def _largest_pass(cfg: RunConfig) -> tuple[int, int]:
    """(resolution, images) of the pass that needs the most memory."""
    return max(_passes(cfg), key=lambda one: (one[1] * one[0] ** 2, one))


def _passes(cfg: RunConfig) -> Iterator[tuple[int, int]]:
    """(resolution, images) of the passes of each folder: images of `data.path` may be as large as any."""
    for folder in cfg.data.folders:
        for side in folder.resolutions or cfg.data.sides:
            yield side, folder.micro_batch or cfg.train.micro_batch
    if cfg.data.path or cfg.data.questions or not cfg.data.folders:
        for side in cfg.data.sides:
            yield side, cfg.train.micro_batch


def sample_input_of(cfg: RunConfig) -> PassInput:
    """Return the model's input when a sample is generated."""
    if trains_on(cfg) == "text":
        return PassInput(cfg.sample.tokens, 1)
    references = _images_per_reference(cfg) if cfg.sample.references else 0
    return PassInput((1 + references) * cfg.sample.full_size.pixels, 1)


def _images_per_reference(cfg: RunConfig) -> int:
    """Images that the model reads of a reference: models that answer questions also look at it."""
    known = families_of(cfg.model.family)
    return 2 if known and known.reads("data.questions") else 1


def rank_of(cfg: RunConfig) -> int:
    """Return the adapter's rank; an arbitrary number where it has none."""
    return cfg.adapter.rank if isinstance(cfg.adapter, RankAdapter) else 1


def strategy_of(cfg: RunConfig, model_pass: ModelPass, card: Card | None) -> Strategy:
    """Decide `parallel.strategy` as the trainer does."""
    if cfg.parallel.strategy != "auto":
        return cfg.parallel.strategy
    frozen = sum(p.numbers * p.stored for unit in model_pass.units for p in unit.parameters if not p.is_trained)
    state_bytes = frozen + TRAINED_BYTES * trained(model_pass)
    memory = card.memory if card else 80 * GIB
    parallel = cfg.parallel
    return choose_strategy(parallel, parallel.world_size, parallel.devices, state_bytes, memory)


def sharding_of(cfg: RunConfig, strategy: Strategy) -> Sharding:
    """Return how training is spread over the ranks."""
    parallel = cfg.parallel
    ranks = shard_ranks(parallel, strategy, parallel.world_size)
    return Sharding(
        ranks=ranks,
        replicas=parallel.world_size // ranks,
        is_one_node=parallel.nodes == 1,
        is_sharded=strategy != "none",
        reshard=reshard_after_forward(parallel, strategy),
        offload=parallel.cpu_offload,
        offload_blocks=parallel.offload_blocks,
        pins_exactly=pins_exactly(cfg),
        prefetch=(parallel.prefetch_forward, parallel.prefetch_backward),
        passes=passes_of(cfg),
        is_reduced_each_pass=cfg.shards_gradients(strategy),
        optimizer_bytes=optimizer_bytes(cfg),
    )


def optimizer_bytes(cfg: RunConfig) -> float:
    """Return the bytes of state per trained number, including the moving average."""
    return cfg.optim.state_bytes[cfg.optim.type] + (4.0 if cfg.optim.ema else 0.0)


def checkpoint_bytes(cfg: RunConfig, model_pass: ModelPass) -> float:
    """Return the bytes of a checkpoint: the trained weights in fp32 and their optimizer state."""
    return trained(model_pass) * (4 + optimizer_bytes(cfg))


def trained(model_pass: ModelPass) -> int:
    """Return how many numbers of the whole model are trained."""
    return sum(p.numbers for unit in model_pass.units for p in unit.parameters if p.is_trained)
