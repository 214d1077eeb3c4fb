"""A covering array: few rows of choices in which every pair of values occurs that may occur."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

Row = Mapping[str, str]
"""{choice: its value}; a choice that is missing has its first value."""
Pair = tuple[tuple[str, str], tuple[str, str]]
Refuse = Callable[[Row], str | None]
"""Why a row may not be, or None."""

TRIES = 4
"""Rows that are made for a pair, of which the one with most new pairs is kept."""


@dataclass
class Array:
    """The rows of choices, made one after the other.

    Attributes:
        choices: {choice: its values}. The first is the plainest; it is taken where no other brings a new pair.
        refuse: Which rows may not be. A row of first values may.
        refused: {pair: why it cannot occur}, of those that the rows so far were not made for.
    """

    choices: Mapping[str, Sequence[str]]
    refuse: Refuse
    seed: int = 0
    refused: dict[Pair, str] = field(default_factory=dict)
    uncovered: set[Pair] = field(init=False)

    def __post_init__(self) -> None:
        self.uncovered = set(pairs({name: tuple(values) for name, values in self.choices.items()}))

    def rows(self) -> Iterator[dict[str, str]]:
        """Make rows until every pair occurs or is refused. Each has a value for every choice."""
        draw = random.Random(self.seed)
        waiting = sorted(self.uncovered)
        draw.shuffle(waiting)
        for pair in waiting:
            if pair not in self.uncovered:
                continue
            begun = self._begun(pair)
            if begun is None:
                continue
            row = max((self._filled(begun, draw) for _ in range(TRIES)), key=self._gain)
            self.uncovered -= set(pairs_of(row))
            yield row

    def _begun(self, pair: Pair) -> dict[str, str] | None:
        """The pair, with the values that it needs; None for a pair that is refused."""
        why = self.refuse(dict(pair))
        if why is None:
            return dict(pair)
        row = self._mended(dict(pair), why, 2)
        if row is None:
            self.refused[pair] = why
            self.uncovered.discard(pair)
        return row

    def _mended(self, row: dict[str, str], why: str, changes: int) -> dict[str, str] | None:
        """A row that is refused, with so many more values that it is not."""
        others: list[tuple[dict[str, str], str]] = []
        for name, values in self.choices.items():
            for value in values[1:] if name not in row else ():
                changed = {**row, name: value}
                reason = self.refuse(changed)
                if reason is None:
                    return changed
                if reason != why:
                    others.append((changed, reason))
        tries = (self._mended(changed, reason, changes - 1) for changed, reason in others if changes > 1)
        return next((found for found in tries if found), None)

    def _filled(self, begun: Row, draw: random.Random) -> dict[str, str]:
        row = dict(begun)
        rest = [name for name in self.choices if name not in row]
        draw.shuffle(rest)
        for name in rest:
            gains = {value: self._new(row, name, value) for value in self.choices[name]}
            for value in sorted(gains, key=lambda value: -gains[value]):
                if self.refuse({**row, name: value}) is None:
                    row[name] = value
                    break
        return row

    def _new(self, row: Row, name: str, value: str) -> int:
        return sum(ordered((name, value), other) in self.uncovered for other in row.items())

    def _gain(self, row: Row) -> int:
        return sum(pair in self.uncovered for pair in pairs_of(row))


def ordered(one: tuple[str, str], other: tuple[str, str]) -> Pair:
    """A pair of values, as it is counted."""
    return (one, other) if one < other else (other, one)


def pairs_of(row: Row) -> Iterator[Pair]:
    """The pairs of values in a row."""
    return (ordered(one, other) for one, other in combinations(row.items(), 2))


def pairs(choices: Mapping[str, Sequence[str]]) -> Iterator[Pair]:
    """All pairs of values of different choices."""
    for one, other in combinations(choices, 2):
        for value in choices[one]:
            yield from (ordered((one, value), (other, with_it)) for with_it in choices[other])
