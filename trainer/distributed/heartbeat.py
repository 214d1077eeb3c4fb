"""When a rank last moved on, and where it was then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Heartbeat:
    """Set by the thread that trains, a few hundred nanoseconds each time; read by the one that watches.

    step: of the run.  where: as "forward of transformer_blocks.0".  moves: whether that part moves on at every block,
    so that standing still means something is wrong; False for reading weights, encoding, saving.  line: the last
    heartbeat, as it is written to the rank's file.  waits_in: a collective of all ranks that is under way, also while
    only the accelerator works on it.
    """

    def __init__(self) -> None:
        self.step = 0
        self.where = ""
        self.moves = False
        self.at = time.monotonic()
        self.line: dict[str, Any] | None = None
        self.waits_in = ""

    def beat(self) -> None:
        """Something was done."""
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
        """Something else begins."""
        self.where, self.moves = where, moves
        self.beat()
