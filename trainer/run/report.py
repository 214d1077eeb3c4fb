"""The report of a run: charts, samples, facts and config in one HTML file.

Charts are inline SVG and images are embedded, so the file can be mailed or archived, and loads nothing from a server.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from markupsafe import Markup, escape

from trainer.config import files
from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.run.events import (
    AnyEvent,
    ErrorEvent,
    EventReader,
    RankReader,
    SampleEvent,
    StatusEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
    by_prompt,
    last_state,
    latest_steps,
    losses_by_name,
    smoothed,
)
from trainer.run.folder import RunDir

POINTS_PER_LINE = 600
SAMPLE_COLUMNS = 8
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 28
LINE_COLORS = (
    ("#1d4ed8", "#93c5fd"),
    ("#c2410c", "#fdba74"),
    ("#15803d", "#86efac"),
    ("#7e22ce", "#d8b4fe"),
    ("#be123c", "#fda4af"),
    ("#0e7490", "#67e8f9"),
)
"""(in light mode, in dark mode)"""
IMAGE_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The Content-Security-Policy of the file: inline style and embedded images only, no scripts and no network."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: Its name in the legend.
        points: (step, value) in order of the steps. A NaN value leaves a gap.
    """

    label: str
    points: Sequence[Point]


def write_report(run: RunDir) -> Path:
    """Write `report.html` of a run in any state, replacing an earlier report. Returns its path."""
    events = EventReader(run.events_file).read()
    files.replace(run.report, _page(run, events))
    return run.report


def _page(run: RunDir, events: Sequence[AnyEvent]) -> Markup:
    name, cfg = run.path.name, run.config()
    body = [
        Markup("<h1>{}</h1>").format(name),
        _facts(cfg, events),
        _messages(events),
        Markup("<section>{}</section>").format(Markup().join(_charts(run, cfg, events))),
        _samples(run, events),
        Markup("<h2>Config</h2><pre>{}</pre>").format(run.config_file.read_text(encoding="utf-8")),
    ]
    return Markup(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>{name}</title><style>{style}</style></head><body><main>{body}</main></body></html>\n"
    ).format(policy=POLICY, name=name, style=Markup(STYLE), body=Markup().join(body))


def _facts(cfg: RunConfig, events: Sequence[AnyEvent]) -> Markup:
    steps = latest_steps(events)
    facts = [
        ("State", last_state(events)),
        ("Steps", f"{steps[-1].step if steps else 0} of {sum(cfg.stage_steps)}"),
        ("Started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(events[0].time)) if events else "never"),
        ("Duration", str(timedelta(seconds=round(_duration_s(events))))),
        ("Ranks", str(cfg.parallel.world_size)),
    ]
    if steps:
        facts.append(("Loss, smoothed", _short(smoothed(step.loss for step in steps)[-1])))
        facts += [(f"of {name}", _short(smoothed(losses)[-1])) for name, losses in losses_by_name(steps).items()]
        unit = steps[-1].speed[1]
        facts.append((f"{unit.capitalize()} per second", _short(sum(step.speed[0] for step in steps) / len(steps))))
    row = Markup('<tr><th scope="row">{}</th><td>{}</td></tr>')
    return Markup("<table>{}</table>").format(Markup().join(row.format(*fact) for fact in facts))


def _duration_s(events: Sequence[AnyEvent]) -> float:
    """Running time, without the pauses before the run was resumed."""
    return sum(
        later.time - earlier.time
        for earlier, later in pairwise(events)
        if not (isinstance(later, StatusEvent) and later.state == "starting")
    )


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
    steps = latest_steps(events)
    loss = _line("each step", steps, lambda step: step.loss)
    means = smoothed(step.loss for step in steps)
    parts = {f"{name}, smoothed": smoothed(losses) for name, losses in losses_by_name(steps).items()}
    lines = [
        Line(label, [(step.step, mean) for step, mean in zip(steps, values, strict=True)])
        for label, values in ({"smoothed": means} | parts).items()
    ]
    yield chart("Loss", [loss, *lines])
    yield chart("Validation loss", [Line("held out", _validation(events))])
    yield chart("Learning rate", [_line("learning rate", steps, lambda step: step.lr)])
    yield chart("Gradient norm", [_line("before clipping", steps, lambda step: step.grad_norm)])
    yield chart("Seconds per step", _step_time(steps))
    memory, problems = _memory(run, cfg.parallel.world_size)
    yield chart("Memory allocated, GiB", memory)
    yield from map(Markup('<p class="warning">{}</p>').format, problems)


def _line(label: str, steps: Sequence[StepEvent], value: Callable[[StepEvent], float]) -> Line:
    return Line(label, [(step.step, value(step)) for step in steps])


def _validation(events: Iterable[AnyEvent]) -> list[Point]:
    last_per_step = {event.step: event.loss for event in events if isinstance(event, ValidationEvent)}
    return sorted(last_per_step.items())


def _step_time(steps: Sequence[StepEvent]) -> list[Line]:
    return [
        _line("whole step", steps, lambda step: step.seconds),
        _line("data", steps, lambda step: step.seconds_data),
        _line("forward", steps, lambda step: step.seconds_forward),
        _line("backward", steps, lambda step: step.seconds_backward),
        _line("optimizer", steps, lambda step: step.seconds_optimizer),
        _line("communication", steps, lambda step: step.seconds_communication),
    ]


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


def chart(title: str, lines: Sequence[Line]) -> Markup:
    """Return a line chart over steps as a figure with inline SVG; nothing if no line has a finite value.

    It is styled by CHART_STYLE.
    """
    drawn = [Line(line.label, thin(line.points)) for line in lines if line.points]
    finite = [point for line in drawn for point in line.points if math.isfinite(point[1])]
    if not finite:
        return Markup()
    axes = _Axes.around(finite)
    last = ", ".join(f"{line.label} {_short(line.points[-1][1])}" for line in drawn)
    path, label = Markup('<path class="c{}" d="{}"/>'), Markup('<li class="c{}">{}</li>')
    return Markup(
        '<figure class="chart"><h2>{title}</h2>'
        '<svg role="img" viewBox="0 0 {width} {height}"><title>{title} by step. Last: {last}</title>'
        "{grid}{paths}</svg><figcaption><ul>{legend}</ul></figcaption></figure>"
    ).format(
        title=title,
        width=WIDTH,
        height=HEIGHT,
        last=last,
        grid=axes.grid(),
        paths=Markup().join(path.format(at % 6, axes.path(line.points)) for at, line in enumerate(drawn)),
        legend=Markup().join(label.format(at % 6, line.label) for at, line in enumerate(drawn)),
    )


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
        """Return axes that contain all points, with a margin above and below."""
        steps, values = [point[0] for point in points], [point[1] for point in points]
        margin = (max(values) - min(values)) * 0.05 or abs(values[0]) * 0.05 or 1.0
        return cls(min(steps), max(max(steps), min(steps) + 1), min(values) - margin, max(values) + margin)

    def position(self, step: float, value: float) -> str:
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
        label = Markup('<text x="{}" y="{}" dy="4" text-anchor="end">{}</text>').format(LEFT - 6, y, _short(value))
        return line + label

    def _step_mark(self, step: float) -> Markup:
        x, _ = self.position(step, self.y_min).split()
        return Markup('<text x="{}" y="{}" text-anchor="middle">{:.0f}</text>').format(x, HEIGHT - 8, step)


def _round_values(low: float, high: float) -> list[float]:
    """Return about five multiples of 1, 2 or 5 times a power of ten between low and high."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [distance * at for at in range(math.ceil(low / distance), math.floor(high / distance) + 1)]


def _short(value: float) -> str:
    return f"{value:.4g}"


def _samples(run: RunDir, events: Iterable[AnyEvent]) -> Markup:
    """Return a table of samples: one row per prompt, one column per step. All steps of a row start from equal noise."""
    samples = by_prompt(event for event in events if isinstance(event, SampleEvent))
    if not samples:
        return Markup()
    all_steps = sorted({step for row in samples.values() for step in row})
    steps = spread(all_steps, SAMPLE_COLUMNS)
    head = Markup().join(map(Markup('<th scope="col">step {}</th>').format, steps))
    rows = []
    for (_, prompt), row in samples.items():
        cells = Markup().join(Markup("<td>{}</td>").format(_sample(run, row.get(step))) for step in steps)
        rows.append(Markup('<tr><th scope="row">{}</th>{}</tr>').format(prompt, cells))
    shown = f"{len(steps)} of {len(all_steps)} sample steps"
    return Markup("<h2>Samples</h2><p>{}</p><div><table><tr><td></td>{}</tr>{}</table></div>").format(
        shown, head, Markup().join(rows)
    )


def spread(steps: Sequence[int], limit: int) -> list[int]:
    """Return at most `limit` steps, evenly spaced, including the first and the last."""
    if len(steps) <= limit:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (limit - 1))] for at in range(limit)]


def _sample(run: RunDir, event: SampleEvent | None) -> Markup:
    if event is None:
        return Markup()
    if event.is_text:
        return Markup('<pre class="written">{}</pre>').format(event.text)
    kind = IMAGE_TYPES.get(Path(event.path).suffix.lower())
    try:
        file = run.own_file(event.path)
        is_image = kind is not None and file.is_file()
    except (InputError, OSError, ValueError):
        is_image = False
    if not is_image:
        return escape(f"{event.path}: no image")
    data = base64.b64encode(file.read_bytes()).decode()
    return Markup('<img src="data:{};base64,{}" alt="{}, step {}">').format(kind, data, event.prompt, event.step)


CHART_STYLE = f"""
.chart {{ margin: 0; --faint: light-dark(#d4d4d4, #444);
  {" ".join(f"--c{at}: light-dark({day}, {night});" for at, (day, night) in enumerate(LINE_COLORS))} }}
.chart h2 {{ font-size: 1.1rem; margin: 1rem 0 .25rem; }}
.chart svg {{ width: 100%; }} .chart text {{ font-size: 12px; fill: currentColor; }}
.chart path {{ fill: none; stroke: currentColor; stroke-width: 1.5; stroke-linecap: round; stroke-linejoin: round; }}
.chart path.grid {{ stroke: var(--faint); stroke-width: 1; }}
.chart .c0 {{ color: var(--c0); }} .chart .c1 {{ color: var(--c1); stroke-dasharray: 8 3; }}
.chart .c2 {{ color: var(--c2); stroke-dasharray: 2 4; }} .chart .c3 {{ color: var(--c3); stroke-dasharray: 12 4 2 4; }}
.chart .c4 {{ color: var(--c4); stroke-dasharray: 4 4; }} .chart .c5 {{ color: var(--c5); }}
.chart ul {{ display: flex; flex-wrap: wrap; gap: 0 1.5rem; margin: 0; padding: 0 0 0 64px; }}
.chart li::marker {{ content: "\\2014  "; }}
"""
"""Style that a chart needs on any page. The `color-scheme` of the surrounding element selects light or dark."""

STYLE = f"""
:root {{ color-scheme: light dark; --ink: light-dark(#1a1a1a, #ededed); --paper: light-dark(#fff, #161616);
  --faint: light-dark(#d4d4d4, #444); --error: light-dark(#b91c1c, #fca5a5); --warning: light-dark(#92400e, #fcd34d); }}
body {{ margin: 0; font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }}
main {{ max-width: 1320px; margin: auto; padding: 1rem; }}
h1 {{ overflow-wrap: anywhere; }} h2 {{ font-size: 1.1rem; margin: 1rem 0 .25rem; }}
section {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 0 1.5rem; }}
{CHART_STYLE}
th {{ text-align: left; font-weight: 600; padding: .1rem 1rem .1rem 0; vertical-align: top; }}
td {{ padding: .1rem .25rem; }} div {{ overflow-x: auto; }} img {{ width: 192px; display: block; }}
.error {{ color: var(--error); }} .warning {{ color: var(--warning); }}
pre.written {{ white-space: pre-wrap; min-width: 14rem; max-height: 20rem; overflow: auto; margin: 0; }}
pre {{ overflow-x: auto; border: 1px solid var(--faint); padding: .75rem; }}
"""
