"""Finds the changes that make a run fit with the least loss of time, and the largest run that fits. No torch."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.families import of, size_field, trains_on
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter, RankAdapter
from trainer.plan.calibration import calibrate
from trainer.plan.hardware import Card
from trainer.plan.memory import MemoryPlan, plan_of
from trainer.plan.search.decide import TIGHT, is_open, thriftiest
from trainer.plan.simulate.phases import CAPTIONS, SAMPLING, Reserve
from trainer.plan.store import known_model

MOST = 3
"""Most changes of one fix, and most fixes that are proposed."""
STEPS = {"data.resolution": 64, "data.length": 64, "train.micro_batch": 1, "adapter.rank": 4}
"""{field: its largest values are multiples of this}."""
SIDES = (1024, 768, 512)
"""Proposed sides of smaller images."""
LENGTHS = (8192, 4096, 2048, 1024, 512)
"""Proposed lengths of shorter rows of text."""
OFFLOAD = "parallel.offload_blocks"
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Proposed shares of blocks whose frozen weights are offloaded."""
SIZE_FIELDS = ("data.resolution", "data.length", "sample.size")
LIMITS = {"data.resolution": 4096, "data.length": 1 << 17, "train.micro_batch": 512, "adapter.rank": 512}


@dataclass(frozen=True)
class Fix:
    """Fields to change, and the plan with these changes."""

    changes: Mapping[str, Any]
    plan: MemoryPlan

    def __str__(self) -> str:
        return " ".join(f"{name}={written(value)}" for name, value in self.changes.items())


def written(value: Any) -> str:
    """Write a value as it is typed on a command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return shlex.quote(json.dumps(value) if isinstance(value, bool | dict | None) else str(value))


def fixes(cfg: RunConfig, card: Card, cache: Path, now: MemoryPlan | None = None) -> list[Fix]:
    """Find the smallest changes that make the run fit.

    Changes that alter the result, such as smaller images, are proposed only where nothing else helps. A change that
    needs a table which does not exist yet is not proposed.

    Args:
        cfg: The run's config.
        card: The GPU of each rank.
        cache: Folder shared by runs.
        now: The plan of the run as it is, where that is known.

    Returns:
        The changes, fastest first; empty if the run fits or nothing helps.
    """
    card, reserve = _calibrated(cache, card)
    now = now or planned(cfg, card, cache, reserve)
    if now is None or now.verdict == "fits":
        return []
    same, other = _same_result(cfg, now), _other_result(cfg)
    for choices, needed in ((same, same), (same | other, other)):
        for count in range(1, MOST + 1):
            tried = (_fix(cfg, card, cache, reserve, changes) for changes in _combinations(choices, needed, count))
            fitting = [fix for fix in tried if fix]
            if fitting:
                return sorted(_least_changed(fitting), key=_seconds)[:MOST]
    return []


def largest(cfg: RunConfig, card: Card, cache: Path) -> dict[str, int]:
    """Return {field: largest value with which the run fits, other fields unchanged}, without fields that have none."""
    fields = [*_size_field(cfg), "train.micro_batch"]
    fields += ["adapter.rank"] if isinstance(cfg.adapter, RankAdapter) else []
    card, reserve = _calibrated(cache, card)

    def fits(field: str) -> Callable[[int], bool]:
        def check(value: int) -> bool:
            # A larger pass needs a larger batch.
            batch = {"train.batch_size": value * cfg.parallel.data_size} if field == "train.micro_batch" else {}
            changed = _changed(cfg, {field: value} | batch)
            return changed is not None and _can_fit(changed, card, cache, reserve)

        return check

    known = of(cfg.model.family)
    limits = LIMITS | ({"data.resolution": known.longest_side} if known and known.longest_side else {})
    found = {field: _last(limits[field] // STEPS[field], STEPS[field], fits(field)) for field in fields}
    return {field: value for field, value in found.items() if value}


def planned(cfg: RunConfig, card: Card | None, cache: Path, reserve: Reserve | None = None) -> MemoryPlan | None:
    """Return the plan, or None where the model has no table yet.

    Args:
        cfg: The run's config.
        card: The GPU of each rank.
        cache: Folder shared by runs.
        reserve: That of a card which was calibrated. None: both are, with the runs of this machine.
    """
    model = known_model(cfg, cache)
    if reserve is None:
        card, reserve = calibrate(cache, card)
    return plan_of(cfg, model, card, reserve) if model else None


def _calibrated(cache: Path, card: Card) -> tuple[Card, Reserve]:
    found, reserve = calibrate(cache, card)
    return found or card, reserve


def _same_result(cfg: RunConfig, plan: MemoryPlan) -> dict[str, tuple[Any, ...]]:
    """Return {field: other values} with the same result, or nearly: a base in fewer bits is rounded."""
    choices: dict[str, tuple[Any, ...]] = {}
    if cfg.train.checkpointing not in ("full", "auto"):
        choices["train.checkpointing"] = ("auto",)
    if plan.strategy not in ("full", "none"):
        choices["parallel.strategy"] = ("full",)
    if cfg.quantize.format == "none" and not isinstance(cfg.adapter, NoAdapter):
        choices["quantize.format"] = ("int8", "nf4")
    if not cfg.quantize.encoders and _is_too_much(plan, CAPTIONS):
        choices["quantize.encoders"] = (True,)
    if not cfg.parallel.cpu_offload:
        choices[OFFLOAD] = SHARES
        choices["parallel.cpu_offload"] = (True,)
    if cfg.train.micro_batch > 1:
        choices["train.micro_batch"] = (1,)
    if _is_too_much(plan, SAMPLING) and trains_on(cfg) == "images":
        choices["sample.size"] = tuple((side, side) for side in SIDES if side**2 < math.prod(cfg.sample.size))
    return {field: values for field, values in choices.items() if values}


def _least_changed(fitting: Sequence[Fix]) -> Iterable[Fix]:
    """Keep, of fixes that differ only in the size of images or in the offloaded share, the one that was tried first:
    with the largest images, and the fewest blocks."""
    kept: dict[tuple[Any, ...], Fix] = {}
    for fix in fitting:
        others = {name: value for name, value in fix.changes.items() if name not in SIZE_FIELDS}
        others |= dict.fromkeys(others.keys() & {OFFLOAD})
        kept.setdefault(tuple(others.items()), fix)
    return kept.values()


def _is_too_much(plan: MemoryPlan, name: str) -> bool:
    """Whether this part of the run does not fit."""
    assert plan.card is not None
    return any(phase.name == name and phase.need > TIGHT * plan.card.memory for phase in plan.phases)


def _other_result(cfg: RunConfig) -> dict[str, tuple[Any, ...]]:
    sizes, now = (SIDES, cfg.data.resolution) if trains_on(cfg) == "images" else (LENGTHS, cfg.data.length)
    smaller = tuple(size for size in sizes if size < now)
    return {field: smaller for field in _size_field(cfg) if smaller}


def _size_field(cfg: RunConfig) -> list[str]:
    """The field with the size of an example, if it alone decides."""
    return [size_field(cfg)] if trains_on(cfg) == "text" or cfg.data.has_one_resolution else []


def _combinations(
    choices: Mapping[str, tuple[Any, ...]], needed: Collection[str], count: int
) -> Iterator[dict[str, Any]]:
    """Yield changes of `count` fields, at least one of them in `needed`."""
    for fields in itertools.combinations(choices, count):
        if any(field in needed for field in fields):
            for values in itertools.product(*(choices[field] for field in fields)):
                yield dict(zip(fields, values, strict=True))


def _fix(cfg: RunConfig, card: Card, cache: Path, reserve: Reserve, changes: Mapping[str, Any]) -> Fix | None:
    """Return the fix; None where the changes are invalid together, do not fit, or have no table."""
    changed = _changed(cfg, changes)
    # Of one that leaves something open, the plan that decides costs many times as much.
    if changed is None or (is_open(changed) and not _can_fit(changed, card, cache, reserve)):
        return None
    plan = planned(changed, card, cache, reserve)
    return Fix(changes, plan) if plan and plan.verdict == "fits" else None


def _can_fit(cfg: RunConfig, card: Card, cache: Path, reserve: Reserve) -> bool:
    """Whether the run fits. Where it leaves something to the plan, the thriftiest decision mostly says so at once."""
    model = known_model(cfg, cache)
    if model is None:
        return False
    verdict = plan_of(thriftiest(cfg, model), model, card, reserve).verdict
    if verdict == "tight" and is_open(cfg):  # another decision may take a little less
        verdict = plan_of(cfg, model, card, reserve).verdict
    return verdict == "fits"


def _changed(cfg: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
    """Return the config with other values; None where they are invalid together."""
    tree = cfg.model_dump()
    for field, value in changes.items():
        section, name = field.split(".")
        tree[section][name] = value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError:
        return None


def _last(count: int, step: int, fits: Callable[[int], bool]) -> int:
    """Return the largest multiple of step, up to `count` times step, that fits; 0 for none.

    A binary search: a larger value never needs less memory.
    """
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle - 1
    return low * step


def _seconds(fix: Fix) -> float:
    assert fix.plan.time is not None
    return fix.plan.time.middle
