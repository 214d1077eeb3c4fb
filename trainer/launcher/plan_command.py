"""`--plan`: the memory, time and disk space that a run needs, as text or JSON. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.load import load_config, stage_configs
from trainer.config.schema import RunConfig
from trainer.models import distilled
from trainer.plan import plan
from trainer.plan.hardware import Card, detected, named
from trainer.plan.memory import MemoryPlan, Time, between, describe, describe_trace, history_of, verdict
from trainer.plan.search.compare import decisions
from trainer.plan.search.fixes import largest
from trainer.plan.search.ladder import Rung, nothing_left, ways_to_fit
from trainer.plan.simulate.phases import moment
from trainer.plan.store import find_model, traced_peak, unread_weights
from trainer.run.folder import shared_cache
from trainer.run.length import RunLength
from trainer.system.amounts import GIB, file_size, memory_size
from trainer.system.terminal import complain, say
from trainer.view.numbers import format_duration

SMALLEST_SHOWN = GIB / 100
"""Smaller items of a plan are not printed. In bytes."""


def show(
    preset: Path,
    overrides: Sequence[str],
    runs: Path,
    gpus: str | None,
    as_json: bool,
    exactly: bool,
    html: Path | None = None,
) -> int:
    """Print the plan of a preset.

    Args:
        preset: The config file.
        overrides: `key=value` changes to it.
        runs: Folder of the runs, for their shared cache.
        gpus: For example `4x24gb`. None: the GPUs of this machine, if any.
        as_json: Print JSON.
        exactly: Also trace the run to measure its peak.
        html: Also write a page about the plan into this file.

    Returns:
        1 if the run does not fit, 0 if it does or no GPU is known.

    Raises:
        InputError: The config or `gpus` is wrong, or `html` cannot be written.
    """
    if html:
        from trainer.plan import page as plan_page  # only here: a plan as text is to be printed at once

        plan_page.refuse(html)
    hardware = named(gpus) if gpus else detected()
    if hardware and hardware.count and gpus:
        overrides = (*overrides, f"parallel.devices={hardware.count}")
    loaded = load_config(preset, overrides)
    for note in loaded.notes:
        complain(f"note: {note}")
    cfg = loaded.config
    cache = shared_cache(cfg, runs)
    parts = stage_configs(cfg)
    loaded.refuse([problem for part in parts for problem in distilled.refused(part.model)])
    loaded.refuse([problem for part in parts for problem in unread_weights(part.model)])
    results = [_plan_part(part, hardware.card if hardware else None, cache, exactly) for part in parts]
    if as_json:
        plans = [
            to_json(result.plan, result.fixes, result.largest)
            | {"traced_peak": result.traced, "warnings": distilled.warnings(part)}
            for part, result in zip(parts, results, strict=True)
        ]
        names = [stage.name for stage in cfg.stages]
        say(json.dumps({"stages": dict(zip(names, plans, strict=True))} if names else plans[0], indent=1))
    else:
        titles = [f"stage {number} of {len(parts)}, {one.name}:\n" for number, one in enumerate(cfg.stages, 1)]
        texts = ["\n".join(_all_lines(part, result)) for part, result in zip(parts, results, strict=True)]
        whole = _all_stages(cfg, results)
        say("\n\n".join([*map("".join, zip(titles or [""], texts, strict=True)), *filter(None, [whole])]))
    if html:
        _write_page(html, cfg, results, cache)
        if not as_json:
            say(f"\nwritten as a page: {html}")
    return 1 if any(result.plan.verdict == "does not fit" for result in results) else 0


@dataclass(frozen=True)
class _PartPlan:
    """The plan of a run or stage.

    Attributes:
        plan: Its memory plan.
        fixes: Changes that would make it fit.
        largest: {field: largest value that fits}.
        traced: Peak in bytes, if it was traced.
    """

    plan: MemoryPlan
    fixes: list[Rung]
    largest: dict[str, int]
    traced: int | None


def _all_stages(cfg: RunConfig, results: Sequence[_PartPlan]) -> str:
    """Return the time of all stages as a sentence; "" for a run without stages, or where the time is not known."""
    total, low, high = 0, 0.0, 0.0
    for steps, result in zip(cfg.stage_steps, results, strict=True):
        if steps is None or result.plan.time is None:
            return ""
        total, low, high = total + steps, low + steps * result.plan.time.low, high + steps * result.plan.time.high
    took = between(format_duration(low), format_duration(high))
    return f"all stages: {total:,} steps in {took}" if cfg.stages else ""


def _write_page(file: Path, cfg: RunConfig, results: Sequence[_PartPlan], cache: Path) -> None:
    from trainer.plan.page import Section, write

    parts = stage_configs(cfg)
    names = [f"Stage {number} of {len(parts)}, {one.name}" for number, one in enumerate(cfg.stages, 1)]
    sections = [
        Section(
            name=name,
            title=_title(part, result.plan),
            plan=result.plan,
            facts=_facts(part, result.plan),
            points=history_of(part, find_model(part, cache), result.plan),
            ways=_ways(result),
            remarks=_remarks(part, result),
        )
        for name, part, result in zip(names or [""], parts, results, strict=True)
    ]
    write(file, cfg.name, _all_stages(cfg, results), sections)


def _plan_part(cfg: RunConfig, card: Card | None, cache: Path, exactly: bool) -> _PartPlan:
    memory = plan(cfg, card, cache, complain)
    ways, most = (ways_to_fit(cfg, card, cache, memory), largest(cfg, card, cache)) if card else ([], {})
    return _PartPlan(memory, ways, most, traced_peak(cfg, memory.strategy, cache) if exactly else None)


def _all_lines(cfg: RunConfig, result: _PartPlan) -> list[str]:
    ways, more = _ways(result), _remarks(cfg, result)
    return [*lines(cfg, result.plan), *(f"  {way}" for way in ways), *more]


def _ways(result: _PartPlan) -> list[str]:
    effects = (f"; {fix.in_words}" if fix.effect != "same" else "" for fix in result.fixes)
    pairs = zip(result.fixes, effects, strict=True)
    return [f"fits with {fix}: {fix.need / GIB:.2f} GiB, {fix.time}{effect}" for fix, effect in pairs]


def _remarks(cfg: RunConfig, result: _PartPlan) -> list[str]:
    text = []
    if result.plan.verdict == "does not fit" and not result.fixes:
        text.append(nothing_left(cfg))
    if result.largest:
        values = ", ".join(f"{field}={value}" for field, value in result.largest.items())
        text.append(f"largest that fit, each by itself: {values}")
    if result.traced:
        text.append(describe_trace(result.plan, result.traced))
    return [*text, *(f"warning: {sentence}" for sentence in distilled.warnings(cfg))]


def lines(cfg: RunConfig, found: MemoryPlan) -> list[str]:
    """Return a plan as lines of text."""
    text = [f"{cfg.name}: {_title(cfg, found)}", ""]
    most = found.fullest
    shown = [item for item in most.items if item.size >= SMALLEST_SHOWN]
    text += [f"  {item.size / GIB:8.2f} GiB  {item.name}: {item.sentence}" for item in shown]
    text += [f"  {most.need / GIB:8.2f} GiB  on each GPU at its fullest, in {moment(most)}", ""]
    text.append(f"{'GiB by part':16} {', '.join(f'{part.name} {part.need / GIB:.2f}' for part in found.phases)}")
    text += [f"{name:16} {fact}" for name, fact in _facts(cfg, found)]
    text += ["", verdict(found)]
    return text


def _title(cfg: RunConfig, found: MemoryPlan) -> str:
    auto = "".join(f", {decision}" for decision in decisions(cfg, found))
    return f"{describe(cfg)}, strategy {found.strategy}{auto}"


def _facts(cfg: RunConfig, found: MemoryPlan) -> list[tuple[str, str]]:
    """Return (name, text) of a plan: host memory, disk, links, operations and time."""
    facts = [
        (where, f"{size(item.size)} {item.name}: {item.sentence}")
        for where, size, items in (("on the host", memory_size, found.host), ("on disk", file_size, found.disk))
        for item in items
    ]
    if found.ranks > 1:
        facts.append(("through links", f"{found.received / GIB:.2f} GiB per rank and step"))
    facts.append(("computing", f"{found.flops / 1e12:.0f} TFLOP per rank and step"))
    if found.card and found.card.speed_of:
        facts.append(("speed", f"unknown for this GPU; assumed: {found.card.speed_of}"))
    if found.time:
        facts.append(("time", f"{found.time}, {found.time.origin}; {found.time.bound_by} decides"))
        facts.append(("length", _length(cfg, found.time)))
    return facts


def _length(cfg: RunConfig, time: Time) -> str:
    """Return the steps of a part and their time in words; "3 epochs" where the steps are not known yet."""
    length = RunLength(cfg)
    if not length.num_steps:
        return f"{length}; the steps are known once the data are read"
    took = between(*(format_duration(length.num_steps * seconds) for seconds in (time.low, time.high)))
    return f"{length} steps in {took}"


def to_json(found: MemoryPlan, ways: Sequence[Rung], most: Mapping[str, int]) -> dict[str, object]:
    """Return a plan as JSON data, in bytes and seconds.

    Args:
        found: The plan.
        ways: Changes that would make it fit.
        most: {field: largest value that fits}.
    """
    return dataclasses.asdict(found) | {
        "fullest": found.fullest.name,
        "need": found.need,
        "verdict": found.verdict,
        "fixes": [{"changes": dict(way.changes), "need": way.need} for way in ways],
        "largest": dict(most),
    }
