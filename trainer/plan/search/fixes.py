"""The plan of a config, and the largest values with which it fits. No torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.families import of, size_field, trains_on
from trainer.config.schema import RunConfig
from trainer.config.sections import RankAdapter
from trainer.plan.calibration import calibrate
from trainer.plan.hardware import Card
from trainer.plan.memory import MemoryPlan, plan_of
from trainer.plan.search.decide import is_open, thriftiest
from trainer.plan.simulate.phases import Reserve
from trainer.plan.store import known_model

STEPS = {"data.resolution": 64, "data.length": 64, "train.micro_batch": 1, "adapter.rank": 4}
"""{field: its largest values are multiples of this}."""
LIMITS = {"data.resolution": 4096, "data.length": 1 << 17, "train.micro_batch": 512, "adapter.rank": 512}


def written(value: Any) -> str:
    """Write a value as it is typed on a command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return shlex.quote(json.dumps(value) if isinstance(value, bool | dict | None) else str(value))


def assigned(changes: Mapping[str, Any]) -> str:
    """Write {field: value} as `key=value` of a command line."""
    return " ".join(f"{field}={written(value)}" for field, value in changes.items())


def largest(cfg: RunConfig, card: Card, cache: Path) -> dict[str, int]:
    """Return {field: largest value with which the run fits, other fields unchanged}, without fields that have none."""
    # Of several resolutions none decides alone, so that there is no largest one to name.
    fields = [size_field(cfg)] if trains_on(cfg) == "text" or cfg.data.has_one_resolution else []
    fields += ["train.micro_batch"]
    fields += ["adapter.rank"] if isinstance(cfg.adapter, RankAdapter) else []
    card, reserve = calibrate(cache, card)

    def fits(field: str) -> Callable[[int], bool]:
        def check(value: int) -> bool:
            # A larger pass needs a larger batch.
            batch = {"train.batch_size": value * cfg.parallel.data_size} if field == "train.micro_batch" else {}
            larger = changed(cfg, {field: value} | batch)
            return larger is not None and _can_fit(larger, card, cache, reserve)

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


def _can_fit(cfg: RunConfig, card: Card, cache: Path, reserve: Reserve) -> bool:
    """Whether the run fits. Where it leaves something to the plan, the thriftiest decision mostly says so at once."""
    model = known_model(cfg, cache)
    if model is None:
        return False
    verdict = plan_of(thriftiest(cfg, model), model, card, reserve).verdict
    if verdict == "tight" and is_open(cfg):  # another decision may take a little less
        verdict = plan_of(cfg, model, card, reserve).verdict
    return verdict == "fits"


def changed(cfg: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
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
