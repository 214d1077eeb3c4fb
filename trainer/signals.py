"""Being told to leave: by a person, by the job scheduler before it takes the machine away."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LEAVE = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a rank to save and leave. SLURM sends either before the time is up or the job is pre-empted."""


class Told:
    """Whether this process was told to leave, and by which signal."""

    def __init__(self) -> None:
        self.by: str | None = None

    def __bool__(self) -> bool:
        return self.by is not None

    def note(self, number: int, _frame: FrameType | None) -> None:
        self.by = signal.Signals(number).name


@contextmanager
def noted() -> Iterator[Told]:
    """Inside, a signal of LEAVE ends nothing: it is noted, and the run leaves after the step with a checkpoint."""
    told = Told()
    former = {number: signal.signal(number, told.note) for number in LEAVE}
    try:
        yield told
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
