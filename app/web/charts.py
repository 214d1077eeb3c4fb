"""The content of a line chart as one JSON string. `assets/charts.js` draws it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from trainer.view.lines import Line, last_values

DIGITS = 7
"""Significant digits of a value, as fp32 has."""
MOST_POINTS = 2000
"""A line with more points is sent as the means of successive steps, with the lowest and the highest of each."""
MOST_SMALL_POINTS = 600
"""The same for a small chart, which is drawn 300 pixels wide."""


def chart_json(title: str, lines: Sequence[Line], source: str = "", most_points: int = MOST_POINTS) -> str:
    """Return the content of a chart.

    Args:
        title: Title of the chart, for its summary.
        lines: Its lines. Those without points are left out.
        source: What is drawn, such as the name of a run. When it changes, the zoom is reset; it names downloads.
        most_points: A line with more points is sent as the means of successive steps.
    """
    drawn = [line for line in lines if line.points]
    grids: list[dict[str, Any]] = []
    content = {
        "source": source,
        "summary": summary(title, drawn),
        "lines": [_packed(line, grids, most_points) for line in drawn],
    }
    return json.dumps({**content, "grids": grids}, separators=(",", ":"))


def summary(title: str, lines: Sequence[Line]) -> str:
    """Return the chart as a sentence, for screen readers."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return f"{title}: no data yet."
    return f"{title} up to step {drawn[0].points[-1][0]:,.0f}. Last: {last_values(drawn)}."


def _packed(line: Line, grids: list[dict[str, Any]], most_points: int) -> dict[str, Any]:
    """Return a line as columns. Its steps and minutes are a grid, which lines with equal steps share.

    A long line has `counts` (number of steps that each value is the mean of), `low` and `high`, and its steps are the
    last of each mean: smoothed with the decay raised to the counts, it is what the steps themselves would give.
    """
    steps, values = [step for step, _ in line.points], [value for _, value in line.points]
    # Where each mean begins, and the end of the last one. Means are of equally many steps but for the last.
    count = len(steps)
    stride = max(1, math.ceil(count / most_points))
    edges = [*range(0, count, stride), count]
    ends = [end - 1 for end in edges[1:]]
    grid = {
        "step": [round(steps[at], 6) for at in ends],
        "minutes": [round(line.minutes[at], 4) for at in ends] if line.minutes else [],
    }
    if grid not in grids:
        grids.append(grid)
    packed = {"label": line.label, "look": line.look, "decay": line.decay, "grid": grids.index(grid)}
    if len(ends) == len(steps):
        return packed | {"values": [_short(value) for value in values]}
    finite = [list(filter(math.isfinite, values[start:end])) for start, end in pairwise(edges)]
    return packed | {
        "values": [_short(math.fsum(few) / len(few)) if few else None for few in finite],
        "counts": [len(few) for few in finite],
        "low": [_short(min(few)) if few else None for few in finite],
        "high": [_short(max(few)) if few else None for few in finite],
    }


def _short(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
