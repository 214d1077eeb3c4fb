"""A covering array: few rows of choices in which every pair of values occurs that may occur."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any

Row = Mapping[str, str]
"""{choice: its value}; a choice that is missing has its first value."""
Pair = tuple[tuple[str, str], tuple[str, str]]
Refuse = Callable[[Row], str | None]
"""Why a row may not be, or None."""

TRIES = 4
"""Rows that are made for a pair, of which the one with most new pairs is kept."""
MOST_OTHERS = 2
"""Other values that are tried to find out whether a value is the cause of a refusal."""


@dataclass
class Array:
    """The rows of choices, made one after the other.

    Attributes:
        choices: {choice: its values}. The first is the plainest; it is taken where no other brings a new pair.
        refuse: Which rows may not be. A row of first values may.
        examine: Which of the others may not be either. It is asked about whole rows only, as it takes longer.
        refused: {pair: why it cannot occur}, of those that the rows so far were not made for.
        causes: What `examine` refused, as the values that matter, and why.
        examples: The rows that it refused, one for each cause.
        is_even: Whether, where no value brings a new pair, the one that was used least is taken in place of the first.
    """

    choices: Mapping[str, Sequence[str]]
    refuse: Refuse
    examine: Refuse = field(default=lambda row: None)
    seed: int = 0
    refused: dict[Pair, str] = field(default_factory=dict)
    causes: list[tuple[Row, str]] = field(default_factory=list)
    examples: list[dict[str, str]] = field(default_factory=list)
    is_even: bool = False
    uncovered: set[Pair] = field(init=False)
    _used: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.uncovered = set(pairs(self.choices))

    def rows(self) -> Iterator[dict[str, str]]:
        """Make rows until every pair occurs or is refused. Each has a value for every choice."""
        draw = random.Random(self.seed)
        waiting = sorted(self.uncovered)
        draw.shuffle(waiting)
        for pair in waiting:
            while pair in self.uncovered and (begun := self._begun(pair)):
                row = max((self._filled(begun, draw) for _ in range(TRIES)), key=self._gain)
                why = self.examine(row)
                if why is None:
                    self.uncovered -= set(pairs_of(row))
                    self._used.update(row.items() if self.is_even else ())
                    yield row
                else:
                    self.causes.append((self._cause(row), why))
                    self.examples.append(row)

    def _why(self, row: Row) -> str | None:
        """Why a row may not be, by `refuse` and the causes that are known."""
        whole = {name: values[0] for name, values in self.choices.items()} | dict(row)
        known = (why for cause, why in self.causes if cause.items() <= whole.items())
        return next(known, None) or self.refuse(row)

    def _cause(self, row: Row) -> Row:
        """The values of a row that `examine` refuses which matter: with others it is not refused.

        It may have several reasons. As many values as can be are made the first ones, so that one reason is left.
        """
        plain, left = {name: values[0] for name, values in self.choices.items()}, dict(row)
        for name in row:
            changed = {**left, name: plain[name]}
            if left[name] != plain[name] and self.refuse(changed) is None and self.examine(changed) is not None:
                left = changed
        return {name: row[name] for name in row if left[name] != plain[name] or self._matters(left, name)}

    def _matters(self, row: Row, name: str) -> bool:
        """Whether a refused row is not refused with another value of a choice."""
        changed = ({**row, name: other} for other in self.choices[name] if other != row[name])
        allowed = (other for other in changed if self.refuse(other) is None)
        return any(self.examine(other) is None for other in islice(allowed, MOST_OTHERS))

    def _begun(self, pair: Pair) -> dict[str, str] | None:
        """The pair, with the values that it needs; None for a pair that is refused."""
        why = self._why(dict(pair))
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
                reason = self._why(changed)
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
            for value in sorted(gains, key=lambda value: (-gains[value], self._used[name, value])):
                if self._why({**row, name: value}) is None:
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


def covering(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows for `parametrize` with one value of each axis, such that every pair of values of two axes is in one."""
    tables = [list(axis) for axis in axes]
    choices = {str(number): [str(index) for index in range(len(axis))] for number, axis in enumerate(tables)}
    rows = Array(choices, lambda row: None, is_even=True).rows()
    return [tuple(axis[int(row[str(number)])] for number, axis in enumerate(tables)) for row in rows]
