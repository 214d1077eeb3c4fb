"""Columns of steps: the parts of their time, and their losses and metrics by name. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from trainer.run.events import StepEvent, ValidationEvent

T = TypeVar("T")
STEP_PARTS = ("data", "forward", "backward", "optimizer", "other")
"""The parts of a step, in order; see `step_parts`."""


def step_parts(steps: Iterable[StepEvent]) -> dict[str, float]:
    """Return the mean seconds of each of STEP_PARTS, which add up to the mean seconds of a whole step.

    They follow each other and do not overlap. Communication is not among them, since it overlaps them: weights are
    gathered in forward and backward, gradients reduced in backward, and the loss agreed on in "optimizer". "other" is
    the rest of the step. On a GPU the parts are times of the device and the step is a time of the host; where the parts
    are the longer, they are scaled to the step. A part that is not finite is 0, and its time belongs to "other".
    """
    means = dict.fromkeys(STEP_PARTS, 0.0)
    steps = [step for step in steps if math.isfinite(step.seconds)]
    for step in steps:
        for part, seconds in _parts(step).items():
            means[part] += seconds / len(steps)
    return means


def _parts(step: StepEvent) -> dict[str, float]:
    measured = {
        "data": step.seconds_data,
        "forward": step.seconds_forward,
        "backward": step.seconds_backward,
        "optimizer": step.seconds_optimizer,
    }
    parts = {part: seconds if math.isfinite(seconds) else 0.0 for part, seconds in measured.items()}
    total = sum(parts.values())
    if total > step.seconds:
        parts = {part: seconds * step.seconds / total for part, seconds in parts.items()}
    return parts | {"other": max(0.0, step.seconds - total)}


def seconds_waited(steps: Iterable[StepEvent]) -> float:
    """Return the mean seconds of a step in which the computation waited for other ranks; NaN where not measured.

    They are inside the parts of `step_parts`.
    """
    waited = [step.seconds_communication for step in steps if math.isfinite(step.seconds_communication)]
    return sum(waited) / len(waited) if waited else math.nan


def losses_by_name(steps: Iterable[StepEvent]) -> dict[str, list[float]]:
    """Return {name: losses of all steps} for a model with several losses, else {}. A missing loss is NaN."""
    return _by_name([step.losses for step in steps])


def metrics_by_name(events: Iterable[StepEvent | ValidationEvent]) -> dict[str, list[float]]:
    """Return {name: values of all events} for an objective that measures more than its loss, else {}. A missing value
    is NaN."""
    return _by_name([event.metrics for event in events])


def _by_name(columns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for values in columns for name in values)
    return {name: [values.get(name, math.nan) for values in columns] for name in names}


def spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]
