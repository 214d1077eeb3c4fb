"""Decides what a config leaves to the plan: how much is recomputed, and how many blocks are offloaded. No torch.

See DECISIONS 177, 191.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from trainer.config.recompute import checkpointing_of
from trainer.config.schema import RunConfig
from trainer.plan.hardware import Card
from trainer.plan.simulate.phases import Reserve, sampling
from trainer.plan.simulate.sizes import input_of, rank_of, sharding_of, strategy_of
from trainer.plan.simulate.steps import ModelPass
from trainer.plan.simulate.tables import Model
from trainer.plan.simulate.timeline import Sharding, least, simulate

TIGHT = 0.92
"""Above this share of a GPU's memory a plan is tight: memory that the plan does not count may exceed the rest."""
STEPS = 8
"""Amounts of recompute that are compared where the blocks to offload are decided too."""

Seconds = Callable[[RunConfig], float]
"""Seconds of a step with a config."""


def is_open(cfg: RunConfig) -> bool:
    """Whether a config leaves something to the plan."""
    return "auto" in (cfg.train.checkpointing, cfg.parallel.offload_blocks)


def decided(cfg: RunConfig, checkpointing: str | int, offload_blocks: int | float | str) -> RunConfig:
    """Return the config with these values of `train.checkpointing` and `parallel.offload_blocks`."""
    train = cfg.train.model_copy(update={"checkpointing": checkpointing})
    parallel = cfg.parallel.model_copy(update={"offload_blocks": offload_blocks})
    return cfg.model_copy(update={"train": train, "parallel": parallel})


def decide(cfg: RunConfig, model: Model, card: Card | None, reserve: Reserve, seconds: Seconds) -> RunConfig:
    """Return the config with the least recompute and the fewest offloaded blocks with which training and sampling fit.

    From the first block on, more and more blocks recompute what is cheap, then everything. The blocks at the end follow
    last: backward begins with them, when memory is fullest. Where both are open, the fastest of some pairs is taken.
    Where nothing fits, everything is recomputed and offloaded that may be.

    Args:
        cfg: The run's config.
        model: The tables of its model.
        card: The GPU of each rank. None: everything is recomputed and offloaded that may be, so that the plan says what
            the run takes at least.
        reserve: Memory of the allocator and the driver.
        seconds: Seconds of a step.
    """
    if card is None:
        return thriftiest(cfg, model)
    search = _Search(cfg, model, card, reserve)
    most_again = 2 * search.blocks if cfg.train.checkpointing == "auto" else 0
    most_offloaded = search.blocks if cfg.parallel.offload_blocks == "auto" else 0
    if not most_offloaded:
        return search.config(_first(most_again, lambda amount: search.fits(amount, 0)), 0)
    # A few amounts instead of all: each pair costs a simulated step.
    amounts = sorted({most_again * step // STEPS for step in range(STEPS + 1)})
    fewest = _first(most_offloaded, search.can_draw)
    if not search.can_draw(fewest):
        fewest = 0
    counts = _falling(amounts, most_offloaded, search.fits)
    pairs = [(amount, max(fewest, count)) for amount, count in zip(amounts, counts, strict=True)]
    fitting = [pair for pair in pairs if search.fits(*pair)]
    if not fitting:
        return search.config(most_again, most_offloaded)
    amount, count = min(fitting, key=lambda pair: (seconds(search.config(*pair)), pair))
    return search.config(_first(amount, lambda less: search.fits(less, count)), count)


def thriftiest(cfg: RunConfig, model: Model) -> RunConfig:
    """Return the config with everything recomputed and offloaded that may be.

    A block less may take a little less memory, since backward begins with the last one.
    """
    if not is_open(cfg):
        return cfg
    blocks = _blocks_of(cfg, model)
    return _with(cfg, blocks, 2 * blocks, blocks)


def _blocks_of(cfg: RunConfig, model: Model) -> int:
    units = model.table.training(input_of(cfg), rank_of(cfg), "none").units
    return sum(not unit.is_root for unit in units)


def _with(cfg: RunConfig, blocks: int, amount: int, count: int) -> RunConfig:
    """Return the config with an amount of recompute (`checkpointing_of`) and a number of offloaded blocks. What it does
    not leave open stays as it is."""
    again, offload = cfg.train.checkpointing, cfg.parallel.offload_blocks
    return decided(
        cfg,
        checkpointing_of(amount, blocks) if again == "auto" else again,
        count if offload == "auto" else offload,
    )


class _Search:
    """Amounts of recompute and numbers of offloaded blocks with which a config is tried."""

    def __init__(self, cfg: RunConfig, model: Model, card: Card, reserve: Reserve) -> None:
        self._cfg, self._model, self._card, self._reserve = cfg, model, card, reserve
        self._room = TIGHT * card.memory
        self.blocks = _blocks_of(cfg, model)
        self.fits, self.can_draw = cache(self._fits), cache(self._can_draw)

    def config(self, amount: int, count: int) -> RunConfig:
        """Return the config with these."""
        return _with(self._cfg, self.blocks, amount, count)

    def _can_draw(self, count: int) -> bool:
        """Whether samples can be generated with a number of offloaded blocks."""
        cfg = self.config(0, count)
        model_pass, sharding = self._spread(cfg)
        drawing = sampling(cfg, self._model, model_pass, sharding)
        return drawing is None or self._has_room(cfg, drawing.peak)

    def _fits(self, amount: int, count: int) -> bool:
        cfg = self.config(amount, count)
        model_pass, sharding = self._spread(cfg)
        if not self._has_room(cfg, least(model_pass, sharding).peak):  # at a small part of the cost
            return False
        return self._has_room(cfg, simulate(model_pass, sharding).peak)

    def _spread(self, cfg: RunConfig) -> tuple[ModelPass, Sharding]:
        model_pass = self._model.table.training(input_of(cfg), rank_of(cfg), cfg.train.checkpointing)
        return model_pass, sharding_of(cfg, strategy_of(cfg, model_pass, self._card))

    def _has_room(self, cfg: RunConfig, peak: float) -> bool:
        return peak + self._reserve.of(peak, cfg.parallel.world_size) <= self._room


def _falling(amounts: Sequence[int], last: int, fits: Callable[[int, int], bool]) -> list[int]:
    """Return, for each amount in ascending order, the first number from 0 to `last` that fits with it: never more than
    for a smaller amount."""
    found = dict.fromkeys(amounts, last)

    def search(begin: int, end: int, low: int, high: int) -> None:
        if begin < end:
            middle = (begin + end) // 2
            amount = amounts[middle]
            found[amount] = low + _first(high - low, lambda more: fits(amount, low + more))
            search(begin, middle, found[amount], high)
            search(middle + 1, end, low, found[amount])

    search(0, len(amounts), 0, last)
    return [found[amount] for amount in amounts]


def _first(last: int, fits: Callable[[int], bool]) -> int:
    """Return the first number from 0 to `last` that fits, or `last`: more never takes more memory, or hardly."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
