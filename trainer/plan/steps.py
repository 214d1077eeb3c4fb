"""A recorded training step: what a model allocates between the moments at which FSDP gathers and frees its blocks.

Measured once, without FSDP's own memory (see `record`), and played again for any number of ranks (see `timeline`). No
torch: it is read by commands that must answer at once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

GRAIN = 512
"""CUDA's allocator gives multiples of so many bytes."""


def grains(num_bytes: int) -> int:
    """Bytes that an allocation takes."""
    return -(-num_bytes // GRAIN) * GRAIN


Moment = Literal["forward", "forward_end", "backward", "backward_end", "reduced", "end"]
"""Before a unit's forward, after it, before its backward, when its gradients are there, when they are reduced; and the
end of a pass."""


@dataclass(frozen=True)
class Parameter:
    """Parameters of one shape. rows: length of the dim that is sharded.  row: numbers per row.

    stored, gathered: bytes per number, at rest and while the unit computes.  count: how many there are.
    """

    rows: int
    row: int
    stored: int
    gathered: int
    is_trained: bool
    count: int = 1

    @property
    def numbers(self) -> int:
        """Of all of them, whole."""
        return self.count * self.rows * self.row

    def shard_rows(self, ranks: int) -> int:
        """Rows of rank 0, which has the most; FSDP fills up the others'."""
        return -(-self.rows // ranks)


@dataclass(frozen=True)
class Unit:
    """What is gathered together: a block, or the root with what no block holds."""

    name: str
    parameters: tuple[Parameter, ...]
    is_root: bool = False


@dataclass(frozen=True)
class Mark:
    """A moment, and what was allocated and freed since the one before: bytes of activations and of gradients.

    unit: its number; -1 for the end.  change: more than before.  peak: most there was, above what there was before.
    flops: floating-point operations.
    """

    moment: Moment
    unit: int
    change: float
    peak: float
    flops: float = 0.0


@dataclass(frozen=True)
class Size:
    """What a pass is given. pixels: of each image.  batch: images.

    text_tokens: of captions, for families that do not pad them to a length of their own.
    """

    pixels: int
    batch: int
    text_tokens: int = 512


@dataclass(frozen=True)
class Run:
    """Units that stand for more: a list of `count` equal blocks of which so many were kept. The last but one stands for
    those left out.

    first: number of the first unit.
    """

    first: int
    count: int
    kept: int


@dataclass(frozen=True, eq=False)
class Step:
    """One pass of a model. buffers: bytes of buffers on the device.  recomputed: units that compute forward again."""

    units: tuple[Unit, ...]
    marks: tuple[Mark, ...]
    buffers: int
    recomputed: frozenset[int] = frozenset()

    @cached_property
    def at_rest(self) -> Step:
        """The model, and no pass."""
        return replace(self, marks=())


def lengthen(units: Sequence[Unit], marks: Sequence[Mark], runs: Sequence[Run]) -> tuple[list[Unit], list[Mark]]:
    """Units and marks of the whole model: each run at its full length."""
    units, marks = list(units), list(marks)
    for run in sorted(runs, key=lambda run: -run.first):
        units, marks = _longer(units, marks, run)
    return _numbered(units), marks


def _longer(units: list[Unit], marks: list[Mark], run: Run) -> tuple[list[Unit], list[Mark]]:
    more, middle = run.count - run.kept, run.first + run.kept - 2
    longer: list[Mark] = []
    for unit, group in itertools.groupby(marks, key=lambda mark: mark.unit):
        found = list(group)
        if unit != middle:
            longer += [replace(mark, unit=unit + more) if unit > middle else mark for mark in found]
            continue
        numbers = range(middle, middle + more + 1)
        # In forward the first comes first, in backward last.
        for number in numbers if found[0].moment == "forward" else reversed(numbers):
            longer += [replace(mark, unit=number) for mark in found]
    return units[: middle + 1] + [units[middle]] * more + units[middle + 1 :], longer


def _numbered(units: Sequence[Unit]) -> list[Unit]:
    """Units of one list with names by their place in it."""
    counts: Counter[str] = Counter()
    numbered = []
    for unit in units:
        above, _, number = unit.name.rpartition(".")
        name = f"{above}.{counts[above]}" if number.isdigit() else unit.name
        counts[above] += 1
        numbered.append(replace(unit, name=name))
    return numbered
