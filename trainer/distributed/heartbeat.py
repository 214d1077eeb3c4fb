"""When a rank last moved on, and what it did then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Heartbeat:
    """Set by the thread that trains, a few hundred nanoseconds each time; read by the watchdog's thread.

    Attributes:
        step: Optimizer steps so far.
        where: Phase and block, for example "forward of transformer_blocks.0".
        moves: Whether this phase moves on at every block, so that a standstill means a hang; False for reading weights,
            encoding and saving.
        at: When the rank last moved on, by `time.monotonic`.
        line: The last heartbeat, as written to the rank's file.
        writing: Held while a line is written, so that the rank's file never goes back to an older one.
        waits_in: The collective of all ranks that is under way, also while only the accelerator works on it.
    """

    def __init__(self) -> None:
        self.step = 0
        self.where = ""
        self.moves = False
        self.at = time.monotonic()
        self.line: dict[str, Any] | None = None
        self.writing = threading.Lock()
        self.waits_in = ""

    def beat(self) -> None:
        """Note that the rank moved on."""
        self.at = time.monotonic()

    @contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Inside, the rank is in a collective."""
        self.waits_in = collective
        self.beat()
        try:
            yield
        finally:
            self.waits_in = ""
            self.beat()

    def enter(self, where: str, moves: bool = True) -> None:
        """Note that another phase or block begins."""
        self.where, self.moves = where, moves
        self.beat()
