"""The lines of a chart: what the report, the page and the notebooks draw. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from trainer.run.events import StepEvent, ValidationEvent
from trainer.view.numbers import short, smoothed
from trainer.view.steps import STEP_PARTS, losses_by_name, step_parts

POINTS_PER_LINE = 600

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


def loss_lines(steps: Sequence[StepEvent], decay: float) -> list[Line]:
    """Return the line of the loss, and those of named losses of a model with several."""
    named = losses_by_name(steps)
    return [
        line_of("each step", steps, lambda step: step.loss, "noisy", decay),
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
        lines.append(line_of("each step", steps, lambda step: step.metrics.get(name, math.nan), "noisy", decay))
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
        line_of("whole step", steps, lambda step: step.seconds, "noisy", decay),
        *(
            _column(name, steps, values, decay)
            for name, values in columns.items()
            if any(value > 0 for value in values)
        ),
    ]


def line_of(
    label: str, steps: Sequence[StepEvent], value: Callable[[StepEvent], float], look: Look = "line", decay: float = 0.9
) -> Line:
    return Line(label, [(step.step, value(step)) for step in steps], look, decay)


def _column(label: str, steps: Sequence[StepEvent], values: Sequence[float], decay: float) -> Line:
    return Line(label, [(step.step, value) for step, value in zip(steps, values, strict=True)], "smoothed", decay)


def legend(line: Line) -> list[tuple[str, str]]:
    """Return (class, name) of each path of a line."""
    match line.look:
        case "noisy":
            return [("raw", line.label), ("smoothed", "smoothed")]
        case "smoothed":
            return [("smoothed", line.label)]
    return [(line.look, line.label)]


def last_values(lines: Iterable[Line]) -> str:
    """Return the last value of each line, and of its smoothed mean, as text."""
    last = [(name, line, kind) for line in lines if line.points for kind, name in legend(line)]
    return ", ".join(
        f"{name} {short((line.means if kind == 'smoothed' else line.points)[-1][1])}" for name, line, kind in last
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


def spread(steps: Sequence[int], limit: int) -> list[int]:
    """Return at most `limit` steps, evenly spaced, including the first and the last."""
    if len(steps) <= limit:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (limit - 1))] for at in range(limit)]
