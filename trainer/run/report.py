"""The report of a run: charts, samples, facts and config in one HTML file.

Charts are inline SVG and images are embedded, so the file can be mailed or archived, and loads nothing from a server.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from trainer.config import files
from trainer.config.amounts import file_size
from trainer.config.errors import InputError
from trainer.config.fields import label_with_unit
from trainer.config.schema import RunConfig
from trainer.config.titles import METHODS, method_title, model_title
from trainer.run.colors import LINES, both_variables
from trainer.run.events import (
    STEP_PARTS,
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
    default_decay,
    format_duration,
    last_state,
    latest_steps,
    losses_by_name,
    metrics_by_name,
    seconds_waited,
    smoothed,
    step_parts,
)
from trainer.run.folder import RunDir
from trainer.run.length import RunLength
from trainer.run.pace import Clock
from trainer.run.samples import IMAGE

POINTS_PER_LINE = 600
SAMPLE_COLUMNS = 8
MOST_FILES = 20_000
"""Files of a folder that are counted: storage may be slow."""
NEAR_ZERO = 0.35
"""An axis begins at 0 if its lowest value is below this share of the highest."""
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 80, 12, 12, 46
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp"})

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The Content-Security-Policy of the file: inline style and embedded images only, no scripts and no network."""

Point = tuple[float, float]
Look = Literal["line", "noisy", "smoothed", "dots"]
"""How the points of a line are drawn: as they are; faintly, with their smoothed mean over them; their smoothed mean
alone; or as dots with a line through them."""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: Its name in the legend.
        points: (step, value) in order of the steps, as measured. A NaN value leaves a gap.
        look: How it is drawn. Smoothing is done where it is drawn, before points are left out.
        decay: Decay of the smoothed mean.
        minutes: Minutes since the first step, of each point; empty where they are not known.
    """

    label: str
    points: Sequence[Point]
    look: Look = "line"
    decay: float = 0.9
    minutes: Sequence[float] = ()

    @property
    def means(self) -> list[Point]:
        """The points with smoothed values."""
        values = smoothed((value for _, value in self.points), self.decay)
        return [(step, mean) for (step, _), mean in zip(self.points, values, strict=True)]


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
        facts.append(("Loss, smoothed", _short(smoothed((step.loss for step in steps), decay)[-1])))
        facts += [(f"of {name}", _short(smoothed(losses, decay)[-1])) for name, losses in losses_by_name(steps).items()]
        metrics = metrics_by_name(steps).items()
        facts += [(f"{name.capitalize()}, smoothed", _short(smoothed(values, decay)[-1])) for name, values in metrics]
    if validation:
        step, lowest = min(validation, key=lambda point: (not math.isfinite(point[1]), point[1]))
        facts.append(("Lowest validation loss", f"{_short(lowest)} at step {step:,.0f}"))
    if steps:
        unit = steps[-1].speed[1]
        facts.append((f"{unit.capitalize()} per second", _short(sum(step.speed[0] for step in steps) / len(steps))))
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


def step_split(parts: Mapping[str, float], waited: float) -> Markup:
    """Return the seconds of a step as a bar of parts that add up, and in words. It is styled by CHART_STYLE.

    Args:
        parts: Those of `step_parts`.
        waited: Seconds within them in which the computation waited for other ranks; NaN where not measured.
    """
    whole = sum(parts.values())
    shares = {part: seconds / whole if whole else 0.0 for part, seconds in parts.items()}
    bar = Markup('<i class="{}" style="width:{:.2f}%"></i>')
    word = Markup('<li><i class="{}"></i>{} <b>{}</b></li>')
    return Markup(
        '<div class="split"><div class="parts" role="img" aria-label="{spoken}">{bars}</div>'
        "<ul>{words}</ul>{waits}</div>"
    ).format(
        spoken=", ".join(f"{part} {format_seconds(seconds)}" for part, seconds in parts.items()),
        bars=Markup().join(bar.format(f"p{at}", 100 * share) for at, share in enumerate(shares.values())),
        words=Markup().join(
            word.format(f"p{at}", part, format_seconds(seconds)) for at, (part, seconds) in enumerate(parts.items())
        ),
        waits=Markup("<p>of which waiting for other ranks <b>{}</b></p>").format(format_seconds(waited))
        if waited > 0
        else "",
    )


def format_seconds(seconds: float) -> str:
    """Return the time of a part of a step: `6.9 s`, `0.20 s`, `0.004 s`."""
    digits = 1 if seconds >= 1 else 2 if seconds >= 0.0995 else 3 if seconds >= 0.0005 else 0
    return f"{seconds:.{digits}f} s"


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
    yield chart("Learning rate", [_line("learning rate", steps, lambda step: step.lr)])
    yield chart("Gradient norm", [_line("before clipping", steps, lambda step: step.grad_norm, "noisy", decay)])
    yield chart("Seconds per step", seconds_lines(steps, decay), "seconds")
    memory, problems = _memory(run, cfg.parallel.world_size)
    yield chart("Memory allocated", memory, "GiB")
    yield from map(Markup('<p class="warning">{}</p>').format, problems)


def _line(
    label: str, steps: Sequence[StepEvent], value: Callable[[StepEvent], float], look: Look = "line", decay: float = 0.9
) -> Line:
    return Line(label, [(step.step, value(step)) for step in steps], look, decay)


def loss_lines(steps: Sequence[StepEvent], decay: float) -> list[Line]:
    """Return the line of the loss, and those of named losses of a model with several."""
    named = losses_by_name(steps)
    return [
        _line("each step", steps, lambda step: step.loss, "noisy", decay),
        *(_column(name, steps, losses, decay) for name, losses in named.items()),
    ]


def metric_lines(
    name: str, steps: Sequence[StepEvent], held_out: Sequence[ValidationEvent], decay: float
) -> list[Line]:
    """Return the lines of a metric, in training and on held-out examples; none where it was not measured.

    Args:
        name: Key of `StepEvent.metrics`.
        steps: The steps.
        held_out: The validations.
        decay: Decay of the smoothed line.
    """
    lines = []
    if any(name in step.metrics for step in steps):
        lines.append(_line("each step", steps, lambda step: step.metrics.get(name, math.nan), "noisy", decay))
    if any(name in event.metrics for event in held_out):
        points = [(event.step, event.metrics.get(name, math.nan)) for event in held_out]
        lines.append(Line("validation", points, "dots"))
    return lines


def seconds_lines(steps: Sequence[StepEvent], decay: float) -> list[Line]:
    """Return the lines of the seconds of each step and its parts, without those that were not measured."""
    parts = [step_parts([step]) for step in steps]
    columns = {part: [found[part] for found in parts] for part in STEP_PARTS}
    columns["waiting for other ranks"] = [step.seconds_communication for step in steps]
    return [
        _line("whole step", steps, lambda step: step.seconds, "noisy", decay),
        *(
            _column(name, steps, values, decay)
            for name, values in columns.items()
            if any(value > 0 for value in values)
        ),
    ]


def _column(label: str, steps: Sequence[StepEvent], values: Sequence[float], decay: float) -> Line:
    return Line(label, [(step.step, value) for step, value in zip(steps, values, strict=True)], "smoothed", decay)


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


def chart(title: str, lines: Sequence[Line], unit: str = "") -> Markup:
    """Return a line chart over steps as a figure with inline SVG; nothing if no line has a finite value.

    It is styled by CHART_STYLE.

    Args:
        unit: Title of the y axis; default: the chart's title in lower case.
    """
    measured = [line for line in lines if any(math.isfinite(value) for _, value in line.points)]
    if not measured:
        return Markup()
    axes = _Axes.around([point for line in measured for point in _in_view(line)])
    label = Markup('<li class="c{} {}">{}</li>')
    unit = unit or title.lower()
    return Markup(
        '<figure class="chart"><h2>{title}</h2>'
        '<svg role="img" viewBox="0 0 {width} {height}"><title>{title} by step. Last: {last}</title>'
        "{grid}{titles}{paths}</svg><figcaption><ul>{legend}</ul></figcaption></figure>"
    ).format(
        title=title,
        width=WIDTH,
        height=HEIGHT,
        last=last_values(measured),
        grid=axes.grid(),
        titles=_axis_titles(unit),
        paths=Markup().join(_drawn(axes, line, at % len(LINES)) for at, line in enumerate(measured)),
        legend=Markup().join(
            label.format(at % len(LINES), kind, name)
            for at, line in enumerate(measured)
            for kind, name in _legend(line)
        ),
    )


def last_values(lines: Iterable[Line]) -> str:
    """Return the last value of each line, and of its smoothed mean, as text."""
    last = [(name, line, kind) for line in lines if line.points for kind, name in _legend(line)]
    return ", ".join(
        f"{name} {_short((line.means if kind == 'smoothed' else line.points)[-1][1])}" for name, line, kind in last
    )


def _legend(line: Line) -> list[tuple[str, str]]:
    """Return (class, name) of each path of a line."""
    match line.look:
        case "noisy":
            return [("raw", line.label), ("smoothed", "smoothed")]
        case "smoothed":
            return [("smoothed", line.label)]
    return [(line.look, line.label)]


def _in_view(line: Line) -> list[Point]:
    """Return the finite points that the axes are made for: of noise, all but the lowest and the highest percent."""
    finite = [point for point in line.points if math.isfinite(point[1])]
    means = [point for point in line.means if math.isfinite(point[1])]
    if line.look == "smoothed":
        return means
    if line.look == "noisy" and finite:
        ranked = sorted(finite, key=lambda point: point[1])
        last = len(ranked) - 1
        inner = ranked[round(last * 0.01) : round(last * 0.99) + 1]
        return [*means, *inner]
    return finite


def _drawn(axes: _Axes, line: Line, color: int) -> Markup:
    path = Markup('<path class="c{} {}" d="{}"/>')
    found = [
        path.format(color, kind, axes.path(thin(line.means if kind == "smoothed" else line.points)))
        for kind, _ in _legend(line)
    ]
    if line.look == "dots":
        dot = Markup('<circle class="dots" cx="{}" cy="{}" r="3"/>')
        found += [dot.format(*axes.position(*point).split()) for point in line.points if math.isfinite(point[1])]
    return Markup().join(found)


def _axis_titles(unit: str) -> Markup:
    across, middle = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    return Markup(
        '<text class="axis" x="{}" y="{}" text-anchor="middle">step</text>'
        '<text class="axis" transform="translate(14 {}) rotate(-90)" text-anchor="middle">{}</text>'
    ).format(f"{across:.0f}", HEIGHT - 4, f"{middle:.0f}", unit)


def thin(points: Sequence[Point], limit: int = POINTS_PER_LINE) -> Sequence[Point]:
    """Return at most `limit` points: the lowest and the highest of each interval, so that no spike is lost."""
    if len(points) <= limit:
        return points
    num_buckets = limit // 2
    edges = [round(at * len(points) / num_buckets) for at in range(num_buckets + 1)]
    return [point for start, end in pairwise(edges) for point in _extremes(points[start:end])]


def _extremes(points: Sequence[Point]) -> list[Point]:
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return [points[0]]
    return sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})


@dataclass(frozen=True)
class _Axes:
    """Maps (step, value) to coordinates in the SVG."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float

    @classmethod
    def around(cls, points: Sequence[Point]) -> _Axes:
        """Return axes that contain all points, with a margin; from 0 if all are equal or one is near."""
        steps, values = [point[0] for point in points], [point[1] for point in points]
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or abs(low) * 0.05 or 1.0
        bottom = 0.0 if 0 <= low < NEAR_ZERO * high or low == high > 0 else low - margin
        return cls(min(steps), max(max(steps), min(steps) + 1), bottom, high + margin)

    def position(self, step: float, value: float) -> str:
        value = min(max(value, self.y_min), self.y_max)
        x = LEFT + (step - self.x_min) / (self.x_max - self.x_min) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (value - self.y_min) / (self.y_max - self.y_min) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f} {y:.1f}"

    def path(self, points: Sequence[Point]) -> str:
        """Return an SVG path with a gap where a value is not finite. `h0` makes an isolated point visible."""
        commands, pen = [], "M"
        for step, value in points:
            if not math.isfinite(value):
                pen = "M"
                continue
            commands.append(f"{pen}{self.position(step, value)}" + ("h0" if pen == "M" else ""))
            pen = "L"
        return "".join(commands)

    def grid(self) -> Markup:
        """Return grid lines and labels at round values of both axes."""
        across = Markup().join(self._value_mark(value) for value in _round_values(self.y_min, self.y_max))
        steps = [step for step in _round_values(self.x_min, self.x_max) if step == round(step)]
        return across + Markup().join(self._step_mark(step) for step in steps)

    def _value_mark(self, value: float) -> Markup:
        _, y = self.position(self.x_min, value).split()
        line = Markup('<path class="grid" d="M{} {}H{}"/>').format(LEFT, y, WIDTH - RIGHT)
        label = Markup('<text x="{}" y="{}" dy="4" text-anchor="end">{}</text>').format(LEFT - 8, y, _short(value))
        return line + label

    def _step_mark(self, step: float) -> Markup:
        x, _ = self.position(step, self.y_min).split()
        anchor = "end" if float(x) > WIDTH - 40 else "middle"  # a label is never cut by the edge
        label = Markup('<text x="{}" y="{}" text-anchor="{}">{:,.0f}</text>')
        return label.format(x, HEIGHT - BOTTOM + 18, anchor, step)


def _round_values(low: float, high: float) -> list[float]:
    """Return about five multiples of 1, 2 or 5 times a power of ten between low and high."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [distance * at for at in range(math.ceil(low / distance), math.floor(high / distance) + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


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


def spread(steps: Sequence[int], limit: int) -> list[int]:
    """Return at most `limit` steps, evenly spaced, including the first and the last."""
    if len(steps) <= limit:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (limit - 1))] for at in range(limit)]


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


CHART_STYLE = f"""
.chart {{ margin: 0; container-type: inline-size; }}
.chart h2 {{ font-size: 14px; margin: 0 0 8px; }}
.chart svg {{ display: block; width: 100%; overflow: visible; }} .chart text {{ font-size: 12px; fill: var(--ink3); }}
@container (max-width: 460px) {{ .chart text {{ font-size: 18px; }} }}
.chart path {{ fill: none; stroke: currentColor; stroke-width: 2; stroke-linecap: round; stroke-linejoin: round; }}
.chart path.grid {{ stroke: var(--line); stroke-width: 1; }}
.chart path.raw {{ stroke-width: 1; opacity: .25; }} .chart path.dots {{ stroke: var(--ink); stroke-width: 1.5; }}
.chart circle {{ fill: var(--ink); }}
{" ".join(f".chart path.c{at} {{ color: var(--line-{at}); }}" for at in range(len(LINES)))}
.chart path.c1, .chart path.c4 {{ stroke-dasharray: 8 4; }} .chart path.c2, .chart path.c5 {{ stroke-dasharray: 2 4; }}
.chart path.c3 {{ stroke-dasharray: 12 4 2 4; }} .chart path.c6 {{ stroke-dasharray: 4 4; }}
 .chart path.raw, .chart path.dots {{ stroke-dasharray: none; }}
.chart ul {{ display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 8px 0 0; padding: 0; font-size: 12px;
  list-style: none; }}
.chart li::before {{ content: ""; display: inline-block; width: 14px; margin-right: 6px; vertical-align: middle;
  border-top: 2px solid currentColor; }}
.chart li {{ color: var(--ink2); }} .chart li.raw::before {{ border-width: 1px; opacity: .45; }}
.chart li.dots::before {{ border-color: var(--ink); }}
{" ".join(f".chart li.c{at}:not(.dots)::before {{ border-color: var(--line-{at}); }}" for at in range(len(LINES)))}
.split .parts {{ display: flex; gap: 2px; height: 12px; border-radius: 4px; overflow: hidden; }}
.split ul {{ display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; margin: 8px 0 0; padding: 0;
  list-style: none; color: var(--ink2); }}
.split li i {{ display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 6px; }}
.split p {{ font-size: 12px; margin: 4px 0 0; color: var(--ink3); }}
{
    " ".join(
        f".split .p{at} {{ background: color-mix(in srgb, var(--acc) {share}%, var(--sunk)); }}"
        for at, share in enumerate((18, 100, 72, 50, 32))
    )
}
"""
"""Style that a chart needs on any page. The `color-scheme` of the surrounding element selects light or dark."""

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
