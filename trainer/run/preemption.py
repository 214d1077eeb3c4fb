"""Being told to leave: by a person, by the job scheduler before it takes the machine away."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

LEAVE = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a rank to save and leave. SLURM sends either before the time is up or the job is pre-empted."""


class Preemption:
    """Whether this process was told to leave, and by which signal. Known at once, also while a collective waits."""

    def __init__(self, pipe: socket.socket | None = None) -> None:
        self._pipe = pipe
        self._by = ""

    def __bool__(self) -> bool:
        return bool(self.by)

    @property
    def by(self) -> str:
        """The name of the first such signal, empty without one."""
        with suppress(BlockingIOError):
            while self._pipe and not self._by:
                for number in self._pipe.recv(16):
                    if number in LEAVE:
                        self._by = signal.Signals(number).name
        return self._by


@contextmanager
def noted() -> Iterator[Preemption]:
    """Inside, a signal of LEAVE ends nothing: it is noted, and the run leaves after the step with a checkpoint."""
    reads, writes = socket.socketpair()
    for end in (reads, writes):
        end.setblocking(False)
    # Python runs a handler only when the main thread is back from torch; the number is in the pipe at once.
    former_pipe = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    former = {number: signal.signal(number, _go_on) for number in LEAVE}
    try:
        yield Preemption(reads)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_pipe)
        reads.close()
        writes.close()


def _go_on(_number: int, _frame: FrameType | None) -> None:
    pass
