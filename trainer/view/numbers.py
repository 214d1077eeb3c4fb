"""Numbers as people read them: durations, speeds, losses, and smoothed curves. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import repeat

DECAYS = (0.5, 0.99)
"""Least and most decay of a smoothed curve, where none is chosen."""


def format_duration(seconds: float) -> str:
    """Return a duration as text: `45 s`, `2 min 45 s`, `3 h 4 min`, `2 d 5 h`."""
    seconds = round(seconds)
    units = (("d", 86_400, 86_400), ("h", 3600, 24), ("min", 60, 60), ("s", 1, 60))
    first = next((at for at, (_, size, _) in enumerate(units) if seconds >= size), 3)
    counts = [(seconds // size if size == 86_400 else seconds // size % most, unit) for unit, size, most in units]
    shown = counts[first : first + 2]
    return " ".join(f"{count} {unit}" for count, unit in shown if count or unit == shown[0][1])


def format_speed(rate: float, unit: str) -> str:
    """Return a throughput as text, for example `4.00 images/s`. The arguments are those of `StepEvent.speed`."""
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.2f} {unit}/s"


def format_losses(losses: Mapping[str, float]) -> str:
    """Return for example ` (images 0.5000, text 1.2000)`, and nothing for a model with one loss."""
    return f" ({', '.join(f'{name} {loss:.4f}' for name, loss in losses.items())})" if losses else ""


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return for example `, margins 0.5000, accuracies 0.7500`, and nothing where the loss is all that is measured."""
    return "".join(f", {name} {value:.4f}" for name, value in metrics.items())


def format_seconds(seconds: float) -> str:
    """Return the time of a part of a step: `6.9 s`, `0.20 s`, `0.004 s`."""
    digits = 1 if seconds >= 1 else 2 if seconds >= 0.0995 else 3 if seconds >= 0.0005 else 0
    return f"{seconds:.{digits}f} s"


def short(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def default_decay(num_steps: int) -> float:
    """Return the decay for smoothed curves: 0.74 for a run of 60 steps, 0.9 for 300, 0.96 for 1,500, 0.99 for 10,000.

    The loss of a short run falls within a few steps, and a mean over many would lag behind it; that of a long run has
    more noise to average away. On simulated runs (a fall by half within an eighth of the run, 20 % noise) the mean is,
    at each of these lengths, within 2 % as near to the trend as with the best decay; a fixed 0.9 is up to 2.2 times as
    far from it.

    Args:
        num_steps: Planned steps of the run, at least 1, so that the curve keeps its shape while the run goes on.
    """
    least, most = DECAYS
    return min(most, max(least, round(1 - 3 * math.pow(num_steps, -0.6), 2)))


def smoothed(values: Iterable[float], decay: float, counts: Iterable[int] | None = None) -> list[float]:
    """Return the exponential moving average with bias correction (Adam, arXiv 1412.6980, algorithm 1: m_t / (1 - d^t)).

    NaNs are skipped.

    Args:
        values: A value per step, or the means of successive steps.
        decay: 0 to below 1; 0 returns the values.
        counts: Number of steps that each value is the mean of; default: 1 each. The decay is raised to it.

    See DECISIONS 148.
    """
    mean = weight = 0.0
    means = []
    for value, count in zip(values, repeat(1) if counts is None else counts):  # noqa: B905  # `repeat` has no end
        if math.isfinite(value):
            kept = decay**count
            mean = kept * mean + (1 - kept) * value
            weight = kept * weight + (1 - kept)
        means.append(mean / weight if weight else math.nan)
    return means
