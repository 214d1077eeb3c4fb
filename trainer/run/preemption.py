"""Preemption: signals with which a person or a job scheduler asks a run to save a checkpoint and exit.

See DECISIONS 96, 100.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals on which a rank saves and exits. SLURM sends either of them before the time limit or a preemption."""


class Preemption:
    """Whether this process received a preemption signal, and which one. Known at once, even during a collective."""

    def __init__(self, pipe: socket.socket | None = None) -> None:
        self._pipe = pipe
        self._by = ""

    def __bool__(self) -> bool:
        return bool(self.by)

    @property
    def by(self) -> str:
        """Name of the first preemption signal, for example SIGTERM; empty if there was none."""
        with suppress(BlockingIOError):
            while self._pipe and not self._by:
                for number in self._pipe.recv(16):
                    if number in PREEMPTION_SIGNALS:
                        self._by = signal.Signals(number).name
        return self._by


@contextmanager
def catch_preemption() -> Iterator[Preemption]:
    """Catch preemption signals inside the block, so that the run can end after its step, with a checkpoint."""
    reads, writes = socket.socketpair()
    for end in (reads, writes):
        end.setblocking(False)
    # Python runs a handler only after torch has returned to the main thread; the number is in the pipe at once.
    former_pipe = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    former = {number: signal.signal(number, _do_nothing) for number in PREEMPTION_SIGNALS}
    try:
        yield Preemption(reads)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_pipe)
        reads.close()
        writes.close()


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal in place of the default action, which would end the process."""
