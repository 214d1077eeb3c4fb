"""The report of a run: charts, samples, facts and config in one HTML file.

Charts are inline SVG and images are embedded, so the file can be mailed or archived, and loads nothing from a server.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trainer.config.fields import label_with_unit
from trainer.config.schema import RunConfig
from trainer.config.titles import METHODS, method_title, model_title
from trainer.run.drawings import MOST_REFERENCES
from trainer.run.events import (
    AnyEvent,
    ErrorEvent,
    EventReader,
    ExportEvent,
    RankReader,
    SampleEvent,
    ValidationEvent,
    WarningEvent,
    by_prompt,
    last_state,
    latest_steps,
    since_start,
)
from trainer.run.folder import RunDir
from trainer.run.length import RunLength
from trainer.run.pace import Clock
from trainer.run.samples import IMAGE, film_of
from trainer.system import files
from trainer.system.amounts import file_size
from trainer.system.errors import InputError
from trainer.view import render, svg
from trainer.view.chart import Chart, Line, Point
from trainer.view.lines import line_of, loss_lines, metric_lines, seconds_lines
from trainer.view.numbers import default_decay, format_duration, short, smoothed
from trainer.view.steps import losses_by_name, metrics_by_name, spread

SAMPLE_COLUMNS = 8
MOST_SHEETS = 8
"""Sheets of the film that are embedded, of some 300 kB each."""
MOST_FILES = 20_000
"""Files of a folder that are counted: storage may be slow."""
IMAGE_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
"""{suffix of an image: its media type}"""
MOST_REFERENCE_BYTES = 2 * 2**20
"""Size of a reference image that is embedded."""
AddRemedy = Callable[[RunDir, ErrorEvent], ErrorEvent]


def write_report(run: RunDir, add_remedy: AddRemedy = lambda run, error: error) -> Path:
    """Write `report.html` of a run in any state, replacing an earlier report. Returns its path.

    Args:
        run: The run.
        add_remedy: Returns the error that ended a failed run with what to do about it, as the launcher knows it.
    """
    events = EventReader(run.events_file).read()
    files.replace(run.report, _page(run, events, _messages(run, events, add_remedy)))
    return run.report


def _messages(run: RunDir, events: Sequence[AnyEvent], add_remedy: AddRemedy) -> list[WarningEvent | ErrorEvent]:
    """Return the warnings and errors. Only the error that ended a failed run needs a remedy."""
    messages = [event for event in events if isinstance(event, WarningEvent | ErrorEvent)]
    errors = [event for event in since_start(events) if isinstance(event, ErrorEvent)]
    if last_state(events) != "failed" or not errors:
        return messages
    return [add_remedy(run, errors[-1]) if event is errors[-1] else event for event in messages]


def _page(run: RunDir, events: Sequence[AnyEvent], messages: Sequence[WarningEvent | ErrorEvent]) -> str:
    cfg, steps = run.config(), latest_steps(events)
    memory, problems = _memory(run, cfg.parallel.world_size)
    return render.VIEW.page(
        "report.html",
        name=run.title,
        headline=_headline(cfg),
        facts=_facts(run, cfg, events),
        messages=messages,
        sheets=_sheets(run),
        samples=_samples(run, events),
        charts=_charts(cfg, events, memory),
        problems=problems,
        split=svg.step_split(steps) if steps else None,
        changed=_changed(cfg),
        config=run.config_file.read_text(encoding="utf-8"),
    )


def _headline(cfg: RunConfig) -> list[str]:
    """Return model, method, data and ranks of a run, each in a few words."""
    ranks = cfg.parallel.world_size
    model = model_title(cfg.model.path, cfg.model.family)
    return [model, method_title(cfg, is_sized=True), _data(cfg), f"{ranks} rank{'s' * (ranks > 1)}"]


def _data(cfg: RunConfig) -> str:
    """Return the number of images as they are now, of the first MOST_FILES of each folder, and the trigger."""
    folders = list(filter(None, [cfg.data.path, *(folder.path for folder in cfg.data.folders)]))
    found = [list(islice(Path(folder).rglob("*"), MOST_FILES)) for folder in folders]
    count = sum(file.suffix.lower() in IMAGE_TYPES for files_there in found for file in files_there)
    at_least = "at least " if any(len(files_there) == MOST_FILES for files_there in found) else ""
    names = ", ".join(Path(folder).name for folder in folders)
    counted = f"{at_least}{count:,} images of {names}" if count else names or "no data"
    return f"{counted}, trigger {cfg.data.trigger}" if cfg.data.trigger else counted


def _facts(run: RunDir, cfg: RunConfig, events: Sequence[AnyEvent]) -> list[tuple[str, str]]:
    steps, validation = latest_steps(events), _validation(events)
    length = RunLength.of(cfg, events)
    done = steps[-1].step if steps else 0
    epoch = length.epoch_in_words(done)
    facts = [
        ("State", last_state(events)),
        ("Steps", f"{done:,} of {length}" + (f", {epoch}" if epoch else "")),
        ("Started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(events[0].time)) if events else "never"),
        ("Duration", format_duration(_duration_s(events))),
    ]
    if steps:
        decay = default_decay(length.typical)
        facts.append(("Loss, smoothed", short(smoothed((step.loss for step in steps), decay)[-1])))
        facts += [(f"of {name}", short(smoothed(losses, decay)[-1])) for name, losses in losses_by_name(steps).items()]
        metrics = metrics_by_name(steps).items()
        facts += [(f"{name.capitalize()}, smoothed", short(smoothed(values, decay)[-1])) for name, values in metrics]
    if validation:
        step, lowest = min(validation, key=lambda point: (not math.isfinite(point[1]), point[1]))
        facts.append(("Lowest validation loss", f"{short(lowest)} at step {step:,.0f}"))
    if steps:
        unit = steps[-1].speed[1]
        facts.append((f"{unit.capitalize()} per second", short(sum(step.speed[0] for step in steps) / len(steps))))
    facts += [("Exported", _exported(run, event)) for event in _exports(events)]
    return facts


def _exports(events: Iterable[AnyEvent]) -> list[ExportEvent]:
    """Return the last export of each file."""
    return list({event.path: event for event in events if isinstance(event, ExportEvent)}.values())


def _exported(run: RunDir, event: ExportEvent) -> str:
    """Return the name and size of an exported file or folder, or that it is missing."""
    try:
        found = run.own_file(event.path)
        inside = [file for file in found.rglob("*") if file.is_file()] if found.is_dir() else [found]
        size = sum(file.stat().st_size for file in inside)
    except (InputError, OSError, ValueError):
        return f"{event.path}, missing"
    return f"{event.path}, {file_size(size)}"


def _changed(cfg: RunConfig) -> list[tuple[str, str, str]]:
    """Return (label, name, value) of the fields that are not the default."""
    changed = {"adapter.type": cfg.adapter.type} | _flat(cfg.model_dump(mode="json", exclude_defaults=True))
    return [
        (label_with_unit(name), name, METHODS[value] if name == "adapter.type" else _written(value))
        for name, value in sorted(changed.items())
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"section.field": value} of nested values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _duration_s(events: Sequence[AnyEvent]) -> float:
    clock = Clock()
    for event in events:
        clock.add(event)
    return clock.seconds


def _charts(cfg: RunConfig, events: Sequence[AnyEvent], memory: Sequence[Line]) -> list[Markup]:
    steps, decay = latest_steps(events), default_decay(RunLength.of(cfg, events).typical)
    held_out = [event for event in events if isinstance(event, ValidationEvent)]
    charts = [
        Chart("Loss", [*loss_lines(steps, decay), Line("validation", _validation(events), "dots")]),
        *(Chart(name.capitalize(), metric_lines(name, steps, held_out, decay)) for name in metrics_by_name(steps)),
        Chart("Learning rate", [line_of("learning rate", steps, lambda step: step.lr)]),
        Chart("Gradient norm", [line_of("before clipping", steps, lambda step: step.grad_norm, "noisy", decay)]),
        Chart("Seconds per step", seconds_lines(steps, decay), "seconds"),
        Chart("Memory allocated", memory, "GiB"),
    ]
    return list(map(svg.draw, charts))


def _validation(events: Iterable[AnyEvent]) -> list[Point]:
    last_per_step = {event.step: event.loss for event in events if isinstance(event, ValidationEvent)}
    return sorted(last_per_step.items())


def _memory(run: RunDir, world_size: int) -> tuple[list[Line], list[str]]:
    """Return (a line per rank, a sentence per rank whose file cannot be read)."""
    lines, problems = [], []
    for rank in range(world_size):
        try:
            read = RankReader(run.rank_file(rank)).read()
        except InputError as error:
            problems.append(str(error))
            continue
        last_per_step = {line.step: line.allocated / 2**30 for line in read}
        lines.append(Line(f"rank {rank}", sorted(last_per_step.items())))
    return lines, problems


def _sheets(run: RunDir) -> list[tuple[str, str]]:
    """Return (prompt, JPEG in base64) of the sheets of the run's film."""
    film, found = film_of(run), []
    for one in film.prompts[:MOST_SHEETS]:
        with suppress(InputError):  # removed or changed
            found.append((one.prompt, base64.b64encode(film.file(run, one.sheet).read_bytes()).decode()))
    return found


@dataclass(frozen=True)
class _Samples:
    """The table of samples: a row for each prompt, a column for each step. `shown` says which steps are left out."""

    shown: str
    steps: list[int]
    rows: list[tuple[str, list[_Reference], list[_Cell | None]]]


@dataclass(frozen=True)
class _Reference:
    """A reference image of a prompt. data: in base64; "" for one that is missing or large, which is named."""

    name: str
    mime: str
    data: str


@dataclass(frozen=True)
class _Cell:
    """A sample in the table. data: its picture in base64; "" where it is missing, or where it has none."""

    step: int
    path: str
    text: str | None = None
    data: str = ""
    is_missing: bool = False
    mime: str = IMAGE.mime


def _samples(run: RunDir, events: Iterable[AnyEvent]) -> _Samples | None:
    samples = by_prompt(event for event in events if isinstance(event, SampleEvent))
    if not samples:
        return None
    all_steps = sorted({step for row in samples.values() for step in row})
    steps = spread(all_steps, SAMPLE_COLUMNS)
    shown = f"{len(steps)} of {len(all_steps)} steps with samples" if len(steps) < len(all_steps) else ""
    rows = [
        (prompt, _references(run, row[max(row)]), [_cell(run, row.get(step)) for step in steps])
        for (_, prompt), row in samples.items()
    ]
    return _Samples(shown, steps, rows)


def _references(run: RunDir, event: SampleEvent) -> list[_Reference]:
    found = []
    for path in event.references[:MOST_REFERENCES]:
        suffix, data = Path(path).suffix.lower(), ""
        with suppress(InputError, OSError, ValueError):  # a stranger's event names any file
            file = run.own_file(path)
            if suffix in IMAGE_TYPES and file.is_file() and file.stat().st_size <= MOST_REFERENCE_BYTES:
                data = base64.b64encode(file.read_bytes()).decode()
        found.append(_Reference(path.rpartition("/")[2], IMAGE_TYPES.get(suffix, ""), data))
    return found


def _cell(run: RunDir, event: SampleEvent | None) -> _Cell | None:
    if event is None:
        return None
    if event.kind.is_text:
        return _Cell(event.step, event.path, text=event.text)
    try:
        file = run.own_file(event.picture or event.path)
        is_there = file.is_file() and (not event.picture or event.picture.endswith(IMAGE.suffix))
    except (InputError, OSError, ValueError):
        is_there = False
    data = base64.b64encode(file.read_bytes()).decode() if is_there and event.picture else ""
    return _Cell(event.step, event.path, data=data, is_missing=not is_there)
