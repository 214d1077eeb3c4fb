"""The fields that `fit` may choose without changing the result, and their values. No torch.

Each function returns choices as {field: value}. One that is added here is searched, printed and written like the rest.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from trainer.config.families import size_field, trains_on
from trainer.config.fields import all_names
from trainer.config.recompute import checkpointing_of
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter, QuantizeConfig, RankAdapter
from trainer.plan.simulate.sizes import BITS, PROPOSED
from trainer.system.errors import InputError

Choice = Mapping[str, Any]
"""{field: value}"""
Ladder = tuple[Choice, ...]
"""Choices from the fastest to the one that needs the least memory: each needs no more than the one before."""
KEPT = ("resolution", "rank", "format")
"""Fields that change the result, and are kept unless the user allows them. `format`: the base is not stored in
fewer than 8 bits, unless it is already."""
SEARCHED = (
    "parallel.devices",
    "parallel.strategy",
    "parallel.shard_size",
    "parallel.reshard_after_forward",
    "parallel.prefetch_forward",
    "parallel.prefetch_backward",
    "parallel.cpu_offload",
    "parallel.offload_blocks",
    "quantize.format",
    "quantize.encoders",
    "train.checkpointing",
    "train.micro_batch",
    "data.resolution",
    "data.length",
    "adapter.rank",
    "sample.size",
)
"""Fields whose short name means them rather than others of the same name."""
BLOCKS_APART = (16, 12, 8, 6, 5, 4, 3, 2)
"""Every how many blocks one is recomputed: blocks at the end too, which may take more memory."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the blocks whose frozen weights are offloaded."""
SMALLEST_RANK = 4
SIDES = (1024, 768, 512)
"""Sides of smaller images."""
LENGTHS = (8192, 4096, 2048, 1024, 512)
"""Lengths of shorter rows of text."""


def kept_fields(names: Iterable[str]) -> frozenset[str]:
    """Return the full names of fields that are named in short, as `rank`, or in full.

    Raises:
        InputError: There is no such field.
    """
    known = all_names()
    found: set[str] = set()
    for given in names:
        meant = [field for field in known if field == given or field.rpartition(".")[2] == given]
        if not meant:
            short = {field.rpartition(".")[2]: field for field in (*known, *SEARCHED)}
            near = difflib.get_close_matches(given, [*short, *known], 1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; for example {','.join(KEPT)}"
            raise InputError(f"--keep: '{given}' is not a field{hint}")
        found.update([field for field in meant if field in SEARCHED] or meant)
        if "data.resolution" in found:  # the size of what a model of text reads
            found.add("data.length")
    return frozenset(found)


def value_of(cfg: RunConfig, field: str) -> Any:
    """Return the value of a field, `train.micro_batch`."""
    section, name = field.split(".")
    return dict(dict(cfg)[section])[name]


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of a field mean the same: 1 is one block and 1.0 all of them, though they are equal."""
    return one == other and isinstance(one, float) == isinstance(other, float)


def merged(*parts: Choice) -> dict[str, Any]:
    """Return all choices as one; the later of two of one field counts."""
    return {field: value for part in parts for field, value in part.items()}


def allowed(choices: Iterable[Choice], cfg: RunConfig, fixed: Set[str]) -> Ladder:
    """Return the choices that leave fixed fields as they are.

    Args:
        choices: The choices.
        cfg: The config they would change.
        fixed: Names of fields.
    """
    return tuple(
        choice
        for choice in choices
        if all(is_same(value_of(cfg, field), value) for field, value in choice.items() if field in fixed)
    )


def devices(cfg: RunConfig, count: int) -> Ladder:
    """GPUs of each machine: all, or fewer that need no more passes for a step than some number of them. count: those it
    has."""
    if cfg.parallel.nodes > 1:
        return ({"parallel.devices": count},)
    passes = {math.ceil(cfg.train.batch_size / part): part for part in range(count, 0, -1)}
    parts = {count, 1, *passes.values(), *(part for part in range(1, count) if count % part == 0)}
    return tuple({"parallel.devices": part} for part in sorted(parts, reverse=True))


def sharding(cfg: RunConfig, num_devices: int) -> Ladder:
    """How the model is spread over the ranks."""
    nodes, own = cfg.parallel.nodes, cfg.parallel
    world = num_devices * nodes
    if world == 1:
        return _sharding("none"), _sharding("full"), _sharding("grad_op")  # the last two are for offload
    reshard = own.reshard_after_forward if own.strategy in ("full", "hybrid") else None
    found = [_sharding("ddp"), _sharding("grad_op"), _sharding("full", reshard=reshard)]
    if nodes > 1:
        sizes = [None, *(num_devices * part for part in range(2, nodes) if nodes % part == 0)]
        found += [_sharding("hybrid", size, freed) for size in sizes for freed in (None, False)]
    if own.strategy == "hybrid":
        found.append(_sharding("hybrid", own.shard_size, reshard))
    return tuple(found)


def _sharding(strategy: str, size: int | None = None, reshard: bool | int | None = None) -> Choice:
    return {
        "parallel.strategy": strategy,
        "parallel.shard_size": size,
        "parallel.reshard_after_forward": reshard,
    }


def bases(cfg: RunConfig, recorded: Collection[Mapping[str, Any]], keeps_bits: bool) -> Ladder:
    """Formats of the frozen base.

    Args:
        cfg: The config.
        recorded: Values of `quantize` with formats per layer that were recorded for this model.
        keeps_bits: Whether each layer of the base is kept from being stored in fewer than 8 bits, if it is not already.
    """
    own = cfg.quantize
    found = [_base(own)]
    if own.format != "none":
        found.append(_base(QuantizeConfig()))
    if not isinstance(cfg.adapter, NoAdapter):
        found += [_base(own.model_copy(update={"format": format})) for format in PROPOSED if format != own.format]
        if not own.keep and "none" not in own.formats.values():
            found += [_base(own.model_copy(update={"format": format, "formats": {}})) for format in PROPOSED]
            found += [_base(own.model_copy(update=dict(values))) for values in recorded]
    different = [base for number, base in enumerate(found) if base not in found[:number]]
    return tuple(base for base in different if not keeps_bits or _keeps_bits(base, own))


def can_lose_bits(cfg: RunConfig) -> bool:
    """Whether a layer of the frozen base is stored in 8 bits or more, and could be in fewer."""
    return not isinstance(cfg.adapter, NoAdapter) and max(_all_bits(cfg.quantize.format, cfg.quantize.formats)) >= 8


def _base(quantize: QuantizeConfig) -> Choice:
    names = ("format", "keep", "formats", "encoders", "cache")
    return {f"quantize.{name}": value for name, value in quantize if name in names}


def _keeps_bits(base: Choice, own: QuantizeConfig) -> bool:
    """Whether a base stores no layer in fewer than 8 bits that now has them. Which layers a pattern means is unknown
    here: where patterns differ, all must have as many bits as the layer with most of them."""
    format, formats = base["quantize.format"], base["quantize.formats"]
    if formats == own.formats:
        return _bits(format) >= min(8.0, _bits(own.format))
    return min(_all_bits(format, formats)) >= min(8.0, max(_all_bits(own.format, own.formats)))


def _bits(format: str) -> float:
    return BITS.get(format, 16.0)


def _all_bits(format: str, formats: Mapping[str, str]) -> list[float]:
    return [_bits(one) for one in (format, *formats.values())]


def micro_batches(cfg: RunConfig, data_size: int) -> Ladder:
    """Samples per rank and pass that divide those of a rank and step, which stay."""
    most = math.ceil(cfg.train.batch_size / data_size)
    sizes = [size for size in range(most, 0, -1) if most % size == 0]
    return tuple({"train.micro_batch": size} for size in sizes)


def prefetch(cfg: RunConfig) -> Ladder:
    """Blocks gathered ahead: as they are, or none. The plan's time does not count what gathering ahead saves."""
    own = {name: value_of(cfg, name) for name in ("parallel.prefetch_forward", "parallel.prefetch_backward")}
    return (own, dict.fromkeys(own, 0)) if any(own.values()) else (own,)


def recompute(cfg: RunConfig, blocks: int, has_selective: bool) -> tuple[Ladder, ...]:
    """Ladders of `train.checkpointing`: along each, more is recomputed. The first begins with nothing.

    Args:
        cfg: The config.
        blocks: Number of blocks of the model.
        has_selective: Whether it is recorded what a block takes that recomputes only what is cheap.
    """
    cheap: list[str | int] = [checkpointing_of(amount, blocks) for amount in range(2 * blocks + 1)]
    whole: list[str | int] = ["none", *(f"full {count}, none" for count in range(1, blocks)), "full"]
    ladders: list[list[str | int]] = [cheap, whole] if has_selective else [whole, [*BLOCKS_APART, "full"]]
    own = cfg.train.checkpointing
    if own != "auto" and not any(own in values for values in ladders):
        ladders.append([own])
    return tuple(tuple({"train.checkpointing": value} for value in values) for values in ladders)


def offload() -> Ladder:
    """A ladder of what is kept in host memory: along it, more."""
    shares = tuple({"parallel.offload_blocks": share, "parallel.cpu_offload": False} for share in SHARES)
    everything = {"parallel.offload_blocks": 0, "parallel.cpu_offload": True}
    return {"parallel.offload_blocks": 0, "parallel.cpu_offload": False}, *shares, everything


def reductions(cfg: RunConfig) -> Iterator[tuple[Choice, ...]]:
    """Yield choices that change the result or the samples, from what changes least, each from the largest value."""
    if trains_on(cfg) == "images" and cfg.sample.every and cfg.sample.prompts:
        yield tuple({"sample.size": (side, side)} for side in SIDES if side**2 < math.prod(cfg.sample.size))
    if isinstance(cfg.adapter, RankAdapter):
        yield tuple(_ranks(cfg.adapter))
    if trains_on(cfg) == "images" and not cfg.data.has_one_resolution:
        return  # how several shall become smaller is the user's to say
    sizes, now = (SIDES, cfg.data.resolution) if trains_on(cfg) == "images" else (LENGTHS, cfg.data.length)
    yield tuple({size_field(cfg): size} for size in sizes if size < now)


def _ranks(adapter: RankAdapter) -> Iterator[Choice]:
    rank = adapter.rank // 2
    while rank >= SMALLEST_RANK:
        scaled = {} if adapter.alpha is None else {"adapter.alpha": adapter.alpha * rank / adapter.rank}
        yield {"adapter.rank": rank, **scaled}
        rank //= 2


def first_fitting(rungs: Sequence[Choice], fits: Callable[[Choice], bool]) -> int | None:
    """Return the place of the first choice of a ladder that fits, by bisection; None where the last does not fit."""
    if not rungs or not fits(rungs[-1]):
        return None
    low, high = 0, len(rungs) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(rungs[middle]):
            high = middle
        else:
            low = middle + 1
    return low
