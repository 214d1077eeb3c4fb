"""How fast the steps of a run follow each other, for the time that is left."""

from __future__ import annotations

import math
import statistics
from collections import deque

from trainer.run.events import StepEvent

AVERAGED_STEPS = 50
"""Steps at the end of a run over which seconds and speed are averaged."""


class Pace:
    """The steps of the latest start of a run: how long they took, and the pauses between them.

    A pause holds samples, validation or a checkpoint. Pauses are averaged over all steps, since they are rare.
    """

    def __init__(self) -> None:
        self._first: StepEvent | None = None  # a slow step: kernels are compiled and caches filled
        self._recent: deque[StepEvent] = deque(maxlen=AVERAGED_STEPS)
        self._num_pauses = 0
        self._pauses_s = 0.0

    def add(self, event: StepEvent) -> None:
        """Add the step that follows."""
        if self._recent and math.isfinite(event.seconds):
            self._num_pauses += 1
            self._pauses_s += max(0.0, event.time - self._recent[-1].time - event.seconds)
        self._first = self._first or event
        self._recent.append(event)

    def seconds(self) -> float:
        """Return the seconds from one step to the next; NaN where they were not measured."""
        finite = [event for event in self._recent if math.isfinite(event.seconds)]
        steady = [event for event in finite if event is not self._first] or finite
        if not steady:
            return math.nan
        return statistics.fmean(event.seconds for event in steady) + self._pauses_s / max(1, self._num_pauses)
