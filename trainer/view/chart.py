"""A chart as data: its lines, how they are smoothed and thinned, its axes and their marks. No torch.

`svg.py` draws it for files that load no script; the page gets it as JSON, and `app/web/assets/charts.js` draws that
(DECISIONS 219).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from trainer.view.numbers import short, smoothed

NEAR_ZERO = 0.35
"""An axis begins at 0 if its lowest value is below this share of the highest."""
NUM_MARKS = 5
MOST_DRAWN = 600
"""Points of a line in a file; see `thin`."""
MOST_SENT = 2000
"""Values of a line on the page; see `Chart.json`."""
MOST_SENT_SMALL = 600
"""The same for a small chart, which is drawn 300 pixels wide."""
DIGITS = 7
"""Significant digits of a value on the page, as fp32 has."""

Point = tuple[float, float]
Look = Literal["line", "noisy", "smoothed", "dots"]
"""How the points of a line are drawn: as they are; faintly, with their smoothed mean over them; their smoothed mean
alone; or as dots with a line through them."""


@dataclass(frozen=True)
class Curve:
    """One of the curves by which a line is drawn: a noisy line has two.

    Attributes:
        kind: "raw", "smoothed", "line" or "dots".
        name: Its name in the legend.
        points: Its points.
    """

    kind: str
    name: str
    points: Sequence[Point]


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

    @cached_property
    def means(self) -> list[Point]:
        """The points with smoothed values."""
        values = smoothed((value for _, value in self.points), self.decay)
        return [(step, mean) for (step, _), mean in zip(self.points, values, strict=True)]

    @property
    def curves(self) -> list[Curve]:
        """What is drawn of it, the faint curve first."""
        match self.look:
            case "noisy":
                return [Curve("raw", self.label, self.points), Curve("smoothed", "smoothed", self.means)]
            case "smoothed":
                return [Curve("smoothed", self.label, self.means)]
        return [Curve(self.look, self.label, self.points)]

    @property
    def in_view(self) -> list[Point]:
        """The finite points that the axes are made for: of noise, all but the lowest and the highest percent."""
        found: list[Point] = []
        for curve in self.curves:
            finite = [point for point in curve.points if math.isfinite(point[1])]
            if curve.kind == "raw" and finite:
                last = len(finite) - 1
                finite = sorted(finite, key=lambda point: point[1])[round(last * 0.01) : round(last * 0.99) + 1]
            found += finite
        return found


@dataclass(frozen=True)
class Axis:
    """The values from one end of an axis to the other."""

    low: float
    high: float

    @classmethod
    def of_steps(cls, steps: Sequence[float]) -> Axis:
        return cls(min(steps), max(max(steps), min(steps) + 1))

    @classmethod
    def of_values(cls, values: Sequence[float]) -> Axis:
        """Return an axis that contains all values, with a margin; from 0 if all are equal or one is near."""
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or abs(low) * 0.05 or 1.0
        return cls(0.0 if 0 <= low < NEAR_ZERO * high or low == high > 0 else low - margin, high + margin)

    def share(self, value: float) -> float:
        """Return where a value is, from 0 at the low end to 1 at the high end, where values beyond it are too."""
        return (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)

    def marks(self, count: int = NUM_MARKS) -> list[float]:
        """Return about `count` round values on the axis, at equal distances."""
        distance = round_distance((self.high - self.low) / count)
        first, last = math.ceil(self.low / distance), math.floor(self.high / distance)
        return [distance * at for at in range(first, last + 1)]


def round_distance(least: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


@dataclass(frozen=True)
class Chart:
    """A chart of values over steps.

    Attributes:
        title: Its title.
        lines: Its lines.
        unit: Title of the y axis; "" for the title in lower case.
        source: What is drawn, such as the name of a run. When it changes, the page resets the zoom; it names downloads.
    """

    title: str
    lines: Sequence[Line]
    unit: str = ""
    source: str = ""

    @property
    def last_values(self) -> str:
        """The last value of each curve as text."""
        curves = [curve for line in self.lines if line.points for curve in line.curves]
        return ", ".join(f"{curve.name} {short(curve.points[-1][1])}" for curve in curves)

    @property
    def summary(self) -> str:
        """The chart as a sentence, for screen readers."""
        last = next((line.points[-1][0] for line in self.lines if line.points), None)
        if last is None:
            return f"{self.title}: no data yet."
        return f"{self.title} up to step {last:,.0f}. Last: {self.last_values}."

    def json(self, most_points: int = MOST_SENT) -> str:
        """Return the content for the page's script.

        Lines without points are left out; one with more than `most_points` is sent as the means of successive steps.
        """
        grids: list[dict[str, Any]] = []
        lines = [_packed(line, grids, most_points) for line in self.lines if line.points]
        content = {"source": self.source, "summary": self.summary, "lines": lines, "grids": grids}
        return json.dumps(content, separators=(",", ":"))


def _packed(line: Line, grids: list[dict[str, Any]], most_points: int) -> dict[str, Any]:
    """Return a line as columns. Its steps and minutes are a grid, which lines with equal steps share.

    A long line has `counts` (number of steps that each value is the mean of), `low` and `high`, and its steps are the
    last of each mean: smoothed with the decay raised to the counts, it is what the steps themselves would give.
    """
    steps, values = [step for step, _ in line.points], [value for _, value in line.points]
    stride = max(1, math.ceil(len(steps) / most_points))
    edges = [*range(0, len(steps), stride), len(steps)]  # the last mean may be of fewer steps
    ends = [end - 1 for end in edges[1:]]
    grid = {
        "step": [round(steps[at], 6) for at in ends],
        "minutes": [round(line.minutes[at], 4) for at in ends] if line.minutes else [],
    }
    if grid not in grids:
        grids.append(grid)
    packed = {"label": line.label, "look": line.look, "decay": line.decay, "grid": grids.index(grid)}
    if stride == 1:
        return packed | {"values": [_sent(value) for value in values]}
    finite = [list(filter(math.isfinite, values[start:end])) for start, end in pairwise(edges)]
    return packed | {
        "values": [_sent(math.fsum(few) / len(few)) if few else None for few in finite],
        "counts": [len(few) for few in finite],
        "low": [_sent(min(few)) if few else None for few in finite],
        "high": [_sent(max(few)) if few else None for few in finite],
    }


def _sent(value: float) -> float | None:
    """Return a value as JSON can hold it: None where it is not finite."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def thin(points: Sequence[Point], limit: int = MOST_DRAWN) -> Sequence[Point]:
    """Return at most `limit` points: the lowest and the highest of each interval, so that no spike is lost."""
    if len(points) <= limit:
        return points
    num_buckets = limit // 2
    edges = [round(at * len(points) / num_buckets) for at in range(num_buckets + 1)]
    found: list[Point] = []
    for start, end in pairwise(edges):
        finite = [point for point in points[start:end] if math.isfinite(point[1])]
        extremes = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])} if finite else ()
        found += sorted(extremes) or [points[start]]  # a gap stays one
    return found
