"""How long a run has been running, and how fast its steps follow each other, for the time that is left."""

from __future__ import annotations

import math
import statistics
from collections import deque

from trainer.run.events import ENDS, AnyEvent, ErrorEvent, ExportEvent, State, StatusEvent, StepEvent, is_start
from trainer.run.process import MAX_SILENCE_S

AVERAGED_STEPS = 50
"""Steps at the end of a run over which seconds and speed are averaged."""


class Clock:
    """The running time of a run: from each of its starts to the end or error that follows.

    What is written to a run that is not running, such as a later export, takes no time of it.

    Attributes:
        seconds: Running time.
        last: When the run last wrote an event while it was running, in Unix seconds; 0 without one.
    """

    def __init__(self) -> None:
        self.seconds = self.last = 0.0
        self._state: State = "created"
        self._is_over = False

    def add(self, event: AnyEvent) -> None:
        """Add the event that follows."""
        if is_start(event) or not self.last:
            self._is_over = False
        elif self._is_over or (isinstance(event, ExportEvent) and self._state != "exporting"):
            return
        else:
            # Whoever finds the process gone records the error, which may be days after a power cut.
            most = MAX_SILENCE_S if isinstance(event, ErrorEvent) else math.inf
            self.seconds += min(max(0.0, event.time - self.last), most)
        self.last = event.time
        if isinstance(event, StatusEvent):
            self._state = event.state
        self._is_over = self._state in ENDS or isinstance(event, ErrorEvent)


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
