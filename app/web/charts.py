"""Line charts for the page: their content as one JSON string, and what draws it on a canvas (`chart.js`, `chart.css`).

A string, because gradio observes every number of a list: at 10,000 points that took 12 times as long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.run.report import Line, last_values

DIGITS = 7
"""Of a value, as fp32 has."""
MOST_POINTS = 2000
"""A line with more points is sent as the means of successive steps, with the lowest and the highest of each."""
UNITS: Mapping[str, str] = {"Seconds per step": "seconds", "Loss, smoothed": "loss"}
"""{title of a chart: unit of its y axis}; default: the title in lower case."""


def chart_json(
    title: str,
    lines: Sequence[Line],
    axis: str = "step",
    is_log: bool = False,
    is_small: bool = False,
    source: str = "",
) -> str:
    """Return the value of a chart.

    Args:
        axis: "step" or "minute": x axis at first; the chart has a switch that is remembered.
        is_log: Whether the y axis is logarithmic at first.
        is_small: Whether it is 124 px high and shows its tools in full screen only.
        source: What is drawn, such as the name of a run. When it changes, the zoom is reset; it names downloads.
    """
    drawn = [line for line in lines if line.points]
    grids: list[dict[str, Any]] = []
    return json.dumps(
        {
            "title": title,
            "unit": UNITS.get(title, title.lower()),
            "axis": "minutes" if axis == "minute" else "step",
            "log": is_log,
            "small": is_small,
            "source": source,
            "summary": summary(title, drawn, "step"),
            "lines": [_packed(line, grids) for line in drawn],
            "grids": grids,
        },
        separators=(",", ":"),
    )


def summary(title: str, lines: Sequence[Line], axis: str) -> str:
    """Return the chart as a sentence, for screen readers."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return f"{title}: no data yet."
    return f"{title} up to {axis} {drawn[0].points[-1][0]:,.0f}. Last: {last_values(drawn)}."


def _packed(line: Line, grids: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a line as columns. Its steps and minutes are a grid, which lines with equal steps share.

    A long line has `counts` (number of steps that each value is the mean of), `low` and `high`, and its steps are the
    last of each mean: smoothed with the decay raised to the counts, it is what the steps themselves would give.
    """
    steps, values = [step for step, _ in line.points], [value for _, value in line.points]
    edges = _edges(len(steps))
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


def _edges(count: int) -> list[int]:
    """Return where each mean begins, and the end of the last one. Means are of equally many steps but for the last."""
    stride = max(1, math.ceil(count / MOST_POINTS))
    return [*range(0, count, stride), count]


def _short(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


TEMPLATE = """<figure class="chart"><figcaption><h3></h3><b class="now"></b><div class="tools">
<label class="smoothing">Smoothing <input type="range" min="0" max="0.99" step="0.01"><b></b></label>
<label class="log"><input type="checkbox">log</label>
<span class="axes" role="group" aria-label="X axis"><button type="button" data-axis="step">step</button><button
 type="button" data-axis="minutes">time</button></span>
<button type="button" class="reset" title="Also: double click">Reset</button>
<button type="button" class="csv" title="Download what is drawn as numbers">CSV</button>
<button type="button" class="png" title="Download as an image">PNG</button>
<button type="button" class="full" aria-label="Full screen" title="Full screen"><svg
 viewBox="0 0 12 12" aria-hidden="true"><path d="M1 4V1h3M8 1h3v3M11 8v3H8M4 11H1V8"/></svg></button></div></figcaption>
<ul class="readout"></ul><div class="area"><canvas role="img" tabindex="0"></canvas><i class="cross"></i><i
 class="chosen"></i></div><p class="sr" role="status"></p></figure>"""

CSS = Path(__file__).with_name("chart.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("chart.js").read_text(encoding="utf-8")
