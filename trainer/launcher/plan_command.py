"""`--plan`: what a run takes, printed or as JSON. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.load import load_config, stage_configs
from trainer.config.schema import RunConfig
from trainer.config.terminal import complain, say
from trainer.launcher import preflight
from trainer.models import distilled
from trainer.plan import plan
from trainer.plan.fixes import Fix, fixes, largest
from trainer.plan.hardware import GIB, Card, detected, named
from trainer.plan.memory import MemoryPlan, describe, describe_trace, verdict
from trainer.plan.phases import moment
from trainer.plan.storage import amount
from trainer.plan.store import traced_peak
from trainer.run.folder import shared_cache

SHOWN = GIB / 100
"""Bytes of an item that is printed."""


def show(preset: Path, overrides: Sequence[str], runs: Path, gpus: str | None, as_json: bool, exactly: bool) -> int:
    """Print the plan of a preset. gpus: as `4x24gb`; None: this machine's, if it has any.  exactly: trace it too.

    Returns 0 when it fits or no GPU is known, 1 when it does not.
    """
    hardware = named(gpus) if gpus else detected()
    if hardware and hardware.count and gpus:
        overrides = (*overrides, f"parallel.devices={hardware.count}")
    loaded = load_config(preset, overrides)
    preflight.check_rules(loaded)
    for note in loaded.notes:
        complain(f"note: {note}")
    cfg = loaded.config
    cache = shared_cache(cfg, runs)
    parts = stage_configs(cfg)
    loaded.refuse([problem for part in parts for problem in distilled.refused(part.model)])
    looks = [_look(part, hardware.card if hardware else None, cache, exactly) for part in parts]
    if as_json:
        found = [
            to_json(look.plan, look.ways, look.most)
            | {"traced_peak": look.traced, "warnings": distilled.warnings(part)}
            for part, look in zip(parts, looks, strict=True)
        ]
        names = [stage.name for stage in cfg.stages]
        say(json.dumps({"stages": dict(zip(names, found, strict=True))} if names else found[0], indent=1))
    else:
        titles = [f"stage {number} of {len(parts)}, {one.name}:\n" for number, one in enumerate(cfg.stages, 1)]
        told = ["\n".join(_told(part, look)) for part, look in zip(parts, looks, strict=True)]
        say("\n\n".join(f"{title}{text}" for title, text in zip(titles or [""], told, strict=True)))
    return 1 if any(look.plan.verdict == "does not fit" for look in looks) else 0


@dataclass(frozen=True)
class _Look:
    """The plan of a run or stage, what would make it fit, the largest values that fit, and the traced peak in bytes."""

    plan: MemoryPlan
    ways: list[Fix]
    most: dict[str, int]
    traced: int | None


def _look(cfg: RunConfig, card: Card | None, cache: Path, exactly: bool) -> _Look:
    found = plan(cfg, card, cache, complain)
    ways, most = (fixes(cfg, card, cache), largest(cfg, card, cache)) if card else ([], {})
    return _Look(found, ways, most, traced_peak(cfg, found.strategy, cache) if exactly else None)


def _told(cfg: RunConfig, look: _Look) -> list[str]:
    traced = [describe_trace(look.plan, look.traced)] if look.traced else []
    warnings = [f"warning: {sentence}" for sentence in distilled.warnings(cfg)]
    return [*lines(cfg, look.plan), *_ways(look.ways), *_most(look.most), *traced, *warnings]


def lines(cfg: RunConfig, found: MemoryPlan) -> list[str]:
    """A plan for people."""
    text = [f"{cfg.name}: {describe(cfg)}, strategy {found.strategy}", ""]
    most = found.fullest
    text += [f"  {item.size / GIB:8.2f} GiB  {item.name}: {item.sentence}" for item in most.items if item.size >= SHOWN]
    text += [f"  {most.need / GIB:8.2f} GiB  on each GPU at its fullest, in {moment(most)}", ""]
    text.append(f"parts of the run {', '.join(f'{part.name} {part.need / GIB:.2f}' for part in found.phases)} GiB")
    for where, items in (("on the host", found.host), ("on disk", found.disk)):
        text += [f"{where:16} {amount(item.size)} {item.name}: {item.sentence}" for item in items]
    if found.ranks > 1:
        text.append(f"through links    {found.received / GIB:.2f} GiB per rank and step")
    text.append(f"computing        {found.flops / 1e12:.0f} TFLOP per rank and step")
    if found.time:
        text.append(
            f"time             {found.time.low:.1f} to {found.time.high:.1f} s per step; {found.time.bound_by} decides"
        )
    text += ["", verdict(found)]
    return text


def _ways(ways: Sequence[Fix]) -> list[str]:
    """Each with what it needs and how long a step then takes."""
    text = []
    for way in ways:
        assert way.plan.time is not None
        low, high = way.plan.time.low, way.plan.time.high
        text.append(f"  fits with {way}: {way.plan.need / GIB:.2f} GiB, {low:.1f} to {high:.1f} s per step")
    return text


def _most(most: Mapping[str, int]) -> list[str]:
    found = ", ".join(f"{field}={value}" for field, value in most.items())
    return [f"largest that fit, each by itself: {found}"] if found else []


def to_json(found: MemoryPlan, ways: Sequence[Fix], most: Mapping[str, int]) -> dict[str, object]:
    """A plan for programs: bytes, seconds, the verdict, what would make it fit, and the largest values that fit."""
    return dataclasses.asdict(found) | {
        "fullest": found.fullest.name,
        "need": found.need,
        "verdict": found.verdict,
        "fixes": [{"changes": dict(way.changes), "need": way.plan.need} for way in ways],
        "largest": dict(most),
    }
