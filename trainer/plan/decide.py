"""Decides what a config leaves to the plan: the least recompute with which training fits. No torch."""

from __future__ import annotations

from trainer.config.amounts import GIB
from trainer.config.recompute import checkpointing_of
from trainer.config.schema import RunConfig
from trainer.plan.hardware import Card
from trainer.plan.phases import Reserve
from trainer.plan.sizes import rank_of, sharding_of, size_of, strategy_of
from trainer.plan.tables import Model
from trainer.plan.timeline import simulate

TIGHT = 0.92
"""Above this share of a GPU's memory a plan is tight: memory that the plan does not count may exceed the rest."""
UNKNOWN = 80 * GIB
"""Memory for which a plan decides without a GPU."""


def recompute_of(cfg: RunConfig, model: Model, card: Card | None, reserve: Reserve) -> str | int:
    """Return `train.checkpointing`; where it is `auto`, the least recompute with which training fits, or `full`.

    From the first block on, more and more blocks recompute what is cheap, then everything. The blocks at the end follow
    last: backward begins with them, when memory is fullest.

    Args:
        cfg: The run's config.
        model: The tables of its model.
        card: The GPU of each rank. None: as for UNKNOWN bytes.
        reserve: Memory of the allocator and the driver.
    """
    if cfg.train.checkpointing != "auto":
        return cfg.train.checkpointing
    size, rank = size_of(cfg), rank_of(cfg)
    units = model.table.training(size, rank, "none").units
    blocks = sum(not unit.is_root for unit in units)
    memory = TIGHT * (card.memory if card else UNKNOWN)

    def fits(amount: int) -> bool:
        model_pass = model.table.training(size, rank, checkpointing_of(amount, blocks))
        peak = simulate(model_pass, sharding_of(cfg, strategy_of(cfg, model_pass, card))).peak
        return peak + reserve.of(peak, cfg.parallel.world_size) <= memory

    low, high = 0, 2 * blocks  # more recompute never takes more memory
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return checkpointing_of(low, blocks)
