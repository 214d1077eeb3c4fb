"""The report of a run: charts, samples, facts and config in one HTML file.

Charts are inline SVG and images are embedded, so the file can be mailed or archived, and loads nothing from a server.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trainer.config.fields import label_with_unit
from trainer.config.schema import RunConfig
from trainer.config.titles import METHODS, method_title, model_title
from trainer.run.events import (
    AnyEvent,
    ErrorEvent,
    EventReader,
    ExportEvent,
    RankReader,
    SampleEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
    by_prompt,
    last_state,
    latest_steps,
    losses_by_name,
    metrics_by_name,
    seconds_waited,
    step_parts,
)
from trainer.run.folder import RunDir
from trainer.run.length import RunLength
from trainer.run.pace import Clock
from trainer.run.samples import IMAGE
from trainer.system import files
from trainer.system.amounts import file_size
from trainer.system.errors import InputError
from trainer.view.charts import CHART_STYLE, chart, step_split
from trainer.view.colors import both_variables
from trainer.view.lines import Line, Point, line_of, loss_lines, metric_lines, seconds_lines, spread
from trainer.view.numbers import default_decay, format_duration, short, smoothed
from trainer.view.render import POLICY

SAMPLE_COLUMNS = 8
MOST_FILES = 20_000
"""Files of a folder that are counted: storage may be slow."""
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp"})


def write_report(run: RunDir) -> Path:
    """Write `report.html` of a run in any state, replacing an earlier report. Returns its path."""
    events = EventReader(run.events_file).read()
    files.replace(run.report, _page(run, events))
    return run.report


def _page(run: RunDir, events: Sequence[AnyEvent]) -> Markup:
    name, cfg = run.path.name, run.config()
    body = [
        Markup("<header><h1>{}</h1><p>{}</p></header>").format(name, " · ".join(_headline(cfg))),
        _facts(run, cfg, events),
        _messages(events),
        _samples(run, events),
        Markup('<section class="charts">{}</section>').format(Markup().join(_charts(run, cfg, events))),
        _split(latest_steps(events)),
        _config(run, cfg),
    ]
    return Markup(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>{name}</title><style>{style}</style></head><body><main>{body}</main></body></html>\n"
    ).format(policy=POLICY, name=name, style=Markup(STYLE), body=Markup().join(body))


def _headline(cfg: RunConfig) -> list[str]:
    """Return model, method, data and ranks of a run, each in a few words."""
    ranks = cfg.parallel.world_size
    model = model_title(cfg.model.path, cfg.model.family)
    return [model, method_title(cfg, is_sized=True), _data(cfg), f"{ranks} rank{'s' * (ranks > 1)}"]


def _data(cfg: RunConfig) -> str:
    """Return the number of images as they are now, of the first MOST_FILES of each folder, and the trigger."""
    folders = list(filter(None, [cfg.data.path, *(folder.path for folder in cfg.data.folders)]))
    found = [list(islice(Path(folder).rglob("*"), MOST_FILES)) for folder in folders]
    count = sum(file.suffix.lower() in IMAGE_SUFFIXES for files_there in found for file in files_there)
    at_least = "at least " if any(len(files_there) == MOST_FILES for files_there in found) else ""
    names = ", ".join(Path(folder).name for folder in folders)
    counted = f"{at_least}{count:,} images of {names}" if count else names or "no data"
    return f"{counted}, trigger {cfg.data.trigger}" if cfg.data.trigger else counted


def _facts(run: RunDir, cfg: RunConfig, events: Sequence[AnyEvent]) -> Markup:
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
    row = Markup("<div><dt>{}</dt><dd>{}</dd></div>")
    return Markup('<dl class="facts">{}</dl>').format(Markup().join(row.format(*fact) for fact in facts))


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


def _split(steps: Sequence[StepEvent]) -> Markup:
    return (
        Markup("<h2>A step</h2>{}").format(step_split(step_parts(steps), seconds_waited(steps))) if steps else Markup()
    )


def _config(run: RunDir, cfg: RunConfig) -> Markup:
    """Return the fields that are not the default, and the whole file, folded."""
    changed = {"adapter.type": cfg.adapter.type} | _flat(cfg.model_dump(mode="json", exclude_defaults=True))
    row = Markup('<tr><th scope="row">{} <small>{}</small></th><td>{}</td></tr>')
    rows = Markup().join(
        row.format(label_with_unit(name), name, METHODS[value] if name == "adapter.type" else _written(value))
        for name, value in sorted(changed.items())
    )
    return Markup(
        "<h2>Config</h2><p>Fields that differ from their defaults.</p>"
        '<div class="wide"><table class="config">{}</table></div>'
        "<details><summary>The whole config</summary><pre>{}</pre></details>"
    ).format(rows, run.config_file.read_text(encoding="utf-8"))


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


def _messages(events: Iterable[AnyEvent]) -> Markup:
    items = []
    for event in events:
        if isinstance(event, WarningEvent):
            items.append(Markup('<p class="warning">Warning, step {0.step}: {0.message}</p>').format(event))
        if isinstance(event, ErrorEvent):
            rank = "" if event.rank is None else f", rank {event.rank}"
            item = Markup('<p class="error" role="alert">Error{0}, step {1.step}: {1.message}<br>{1.remedy}</p>')
            items.append(item.format(rank, event))
    return Markup().join(items)


def _charts(run: RunDir, cfg: RunConfig, events: Sequence[AnyEvent]) -> Iterator[Markup]:
    steps, decay = latest_steps(events), default_decay(RunLength.of(cfg, events).typical)
    yield chart("Loss", [*loss_lines(steps, decay), Line("validation", _validation(events), "dots")])
    held_out = [event for event in events if isinstance(event, ValidationEvent)]
    for name in metrics_by_name(steps):
        yield chart(name.capitalize(), metric_lines(name, steps, held_out, decay))
    yield chart("Learning rate", [line_of("learning rate", steps, lambda step: step.lr)])
    yield chart("Gradient norm", [line_of("before clipping", steps, lambda step: step.grad_norm, "noisy", decay)])
    yield chart("Seconds per step", seconds_lines(steps, decay), "seconds")
    memory, problems = _memory(run, cfg.parallel.world_size)
    yield chart("Memory allocated", memory, "GiB")
    yield from map(Markup('<p class="warning">{}</p>').format, problems)


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


def _samples(run: RunDir, events: Iterable[AnyEvent]) -> Markup:
    """Return a table of samples: one row per prompt, one column per step. All steps of a row start from equal noise."""
    samples = by_prompt(event for event in events if isinstance(event, SampleEvent))
    if not samples:
        return Markup()
    all_steps = sorted({step for row in samples.values() for step in row})
    steps = spread(all_steps, SAMPLE_COLUMNS)
    head = Markup().join(map(Markup('<th scope="col">step {:,}</th>').format, steps))
    rows = []
    for (_, prompt), row in samples.items():
        cells = Markup().join(Markup("<td>{}</td>").format(_sample(run, row.get(step))) for step in steps)
        rows.append(Markup('<tr><th scope="row">{}</th>{}</tr>').format(prompt, cells))
    shown = f"{len(steps)} of {len(all_steps)} steps with samples" if len(steps) < len(all_steps) else ""
    return Markup(
        '<h2>Samples</h2><p>{}</p><div class="wide"><table class="samples"><tr><td></td>{}</tr>{}</table></div>'
    ).format(shown, head, Markup().join(rows))


def _sample(run: RunDir, event: SampleEvent | None) -> Markup:
    if event is None:
        return Markup()
    if event.kind.is_text:
        return Markup('<pre class="written">{}</pre>').format(event.text)
    try:
        file = run.own_file(event.picture or event.path)
        is_there = file.is_file() and (not event.picture or event.picture.endswith(IMAGE.suffix))
    except (InputError, OSError, ValueError):
        is_there = False
    if not is_there:
        return Markup('<span class="missing" title="{}">missing</span>').format(event.path)
    if not event.picture:  # it is heard: the report is one file without players
        return Markup("<span>{}</span>").format(event.path)
    data = base64.b64encode(file.read_bytes()).decode()
    return Markup('<img src="data:{};base64,{}" alt="{}, step {}">').format(IMAGE.mime, data, event.prompt, event.step)


STYLE = f"""
:root {{ color-scheme: light dark; {both_variables()} }}
body {{ margin: 0; font: 13px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; color: var(--ink);
  background: var(--bg); }}
main {{ max-width: 1376px; margin: auto; padding: 24px 16px 64px; }}
header p {{ color: var(--ink2); margin: 4px 0 0; overflow-wrap: anywhere; }}
h1 {{ font-size: 20px; line-height: 1.3; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 14px; margin: 24px 0 8px; }}
p {{ margin: 0 0 8px; color: var(--ink3); }}
.facts, .charts > figure, .split, .wide, details {{ background: var(--panel); border: 1px solid var(--line);
  border-radius: 10px; padding: 16px; }}
.facts {{ display: flex; flex-wrap: wrap; gap: 12px 28px; margin: 16px 0; }}
dt {{ font-size: 12px; color: var(--ink3); }} dd {{ margin: 0; font-size: 16px; font-weight: 600;
  overflow-wrap: anywhere; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px;
  margin-top: 24px; }}
{CHART_STYLE}
table {{ border-collapse: collapse; }} .wide {{ overflow-x: auto; }}
th {{ text-align: left; font-weight: 600; padding: 4px 16px 4px 0; vertical-align: top; }}
td {{ padding: 4px 6px; vertical-align: top; overflow-wrap: anywhere; }}
.samples th[scope=col] {{ font-weight: 400; color: var(--ink3); padding-left: 6px; }}
.samples th[scope=row] {{ min-width: 7rem; }}
.config small {{ display: block; font: 12px ui-monospace, monospace; color: var(--ink3); }}
img {{ width: 160px; display: block; border-radius: 6px; }}
.missing {{ display: inline-block; font-size: 12px; color: var(--bad); background: var(--badt); border-radius: 99px;
  padding: 0 8px; }}
p.error {{ color: var(--bad); background: var(--badt); }} p.warning {{ color: var(--warn); background: var(--warnt); }}
p.error, p.warning {{ border-radius: 6px; padding: 8px 12px; overflow-wrap: anywhere; }}
pre.written {{ white-space: pre-wrap; min-width: 14rem; max-height: 20rem; overflow: auto; margin: 0; }}
details {{ margin-top: 16px; }} summary {{ cursor: pointer; font-weight: 600; }}
pre {{ overflow-x: auto; font: 12px/1.5 ui-monospace, monospace; }}
:focus-visible {{ outline: 2px solid var(--acc); outline-offset: 2px; }}
"""
