"""Line charts as SVG, and the parts of a step as a bar, for files that load no script. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainer.view.colors import LINES
from trainer.view.lines import Line, Point, last_values, legend, thin
from trainer.view.numbers import format_seconds, short

NEAR_ZERO = 0.35
"""An axis begins at 0 if its lowest value is below this share of the highest."""
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 80, 12, 12, 46


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
            label.format(at % len(LINES), kind, name) for at, line in enumerate(measured) for kind, name in legend(line)
        ),
    )


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
        for kind, _ in legend(line)
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
        label = Markup('<text x="{}" y="{}" dy="4" text-anchor="end">{}</text>').format(LEFT - 8, y, short(value))
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
