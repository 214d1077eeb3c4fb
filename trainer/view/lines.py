"""The lines of charts, from the events of a run: what the report, the page and the notebooks draw. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trainer.run.events import StepEvent, ValidationEvent
from trainer.view.chart import Line, Look
from trainer.view.steps import STEP_PARTS, losses_by_name, step_parts


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
