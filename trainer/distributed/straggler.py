"""Find the rank that all others wait for."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

STEPS = 20
"""Steps that are compared together: one slow step means nothing."""
FACTOR = 1.5
LEAST_S = 0.02
"""A rank that is slower by less than this per step is not reported."""


class Stragglers:
    """Compares the time that each rank works by itself in a step: reading its examples and computing its blocks.

    The length of a step says nothing, as all ranks wait for the slowest in each collective.

    Args:
        hosts: That of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._recent: deque[Sequence[float]] = deque(maxlen=STEPS)
        self._reported: set[int] = set()

    def add(self, seconds: Sequence[float]) -> str | None:
        """Add one step, in seconds per rank. Returns a sentence when a rank has become slow, None otherwise."""
        self._recent.append(seconds)
        if len(self._recent) < STEPS or len(seconds) < 2:
            return None
        typical = [statistics.median(rank) for rank in zip(*self._recent, strict=True)]
        slow = {rank for rank in range(len(typical)) if _is_slow(typical, rank)}
        new = sorted(slow - self._reported)
        self._reported = slow
        if not new:
            return None
        return "; ".join(self._sentence(typical, rank) for rank in new)

    def _sentence(self, typical: Sequence[float], rank: int) -> str:
        return (
            f"rank {rank} on {self._hosts[rank]} is slow, and the others wait for it: {typical[rank]:.2f} s of its own "
            f"per step, {_median_of_others(typical, rank):.2f} s on the others (reading examples, and forward of the "
            "blocks); check that machine for other programs, heat, or slow storage"
        )


def _is_slow(typical: Sequence[float], rank: int) -> bool:
    others = _median_of_others(typical, rank)
    return typical[rank] > FACTOR * others and typical[rank] - others > LEAST_S


def _median_of_others(typical: Sequence[float], rank: int) -> float:
    return statistics.median(seconds for other, seconds in enumerate(typical) if other != rank)
