"""`launch.py --plan`: what a run takes, printed or as JSON. No torch."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer import configfile
from trainer.config import RunConfig
from trainer.plan import plan
from trainer.plan.fixes import Fix, fixes, largest
from trainer.plan.hardware import GIB, detected, named
from trainer.plan.memory import MemoryPlan, compared, describe, verdict
from trainer.plan.phases import moment
from trainer.plan.storage import amount
from trainer.plan.store import traced_peak
from trainer.rundir import shared_cache

SHOWN = GIB / 100
"""Bytes of an item that is printed."""


def show(preset: Path, overrides: Sequence[str], runs: Path, gpus: str | None, as_json: bool, exactly: bool) -> int:
    """Print the plan of a preset. gpus: as `4x24gb`; None: this machine's, if it has any.  exactly: trace it too.

    Returns 0 when it fits or no GPU is known, 1 when it does not.
    """
    hardware = named(gpus) if gpus else detected()
    if hardware and hardware.count and gpus:
        overrides = (*overrides, f"parallel.devices={hardware.count}")
    cfg = configfile.load(preset, overrides).config
    cache = shared_cache(cfg, runs)
    found = plan(cfg, hardware.card if hardware else None, cache, lambda sentence: print(sentence, file=sys.stderr))
    ways = fixes(cfg, hardware.card, cache) if hardware else []
    most = largest(cfg, hardware.card, cache) if hardware else {}
    peak = traced_peak(cfg, found.strategy, cache) if exactly else None
    if as_json:
        print(json.dumps(to_json(found, ways, most) | {"traced_peak": peak}, indent=1))
    else:
        print("\n".join([*lines(cfg, found), *_ways(ways), *_most(most), *([compared(found, peak)] if peak else [])]))
    return 1 if found.verdict == "does not fit" else 0


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
