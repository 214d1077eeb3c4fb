"""A traced pass: what a model allocates between the moments at which FSDP gathers and frees its blocks.

It is measured once, without FSDP's own memory (see `trace`), and simulated for any number of ranks (see `timeline`). No
torch: commands that must answer at once read it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

GRAIN = 512
"""CUDA's allocator gives multiples of this number of bytes."""


def grains(num_bytes: int) -> int:
    """Return the bytes that an allocation takes."""
    return -(-num_bytes // GRAIN) * GRAIN


Moment = Literal["forward", "forward_end", "backward", "backward_end", "reduced", "end"]
"""Before a unit's forward, after it, before its backward, when its gradients are computed, when they are reduced; and
the end of a pass."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameters of one shape.

    Attributes:
        rows: Length of the sharded dim.
        row: Numbers per row.
        stored: Bytes per number at rest.
        gathered: Bytes per number while the unit computes.
        is_trained: Whether they are trained.
        count: Number of parameters of this shape.
    """

    rows: int
    row: int
    stored: int
    gathered: int
    is_trained: bool
    count: int = 1

    @property
    def numbers(self) -> int:
        """Numbers of all parameters, unsharded."""
        return self.count * self.rows * self.row

    def shard_rows(self, ranks: int) -> int:
        """Return the rows of rank 0, which has the most; FSDP pads those of the other ranks."""
        return -(-self.rows // ranks)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together: a block, or the root with all parameters outside of blocks."""

    name: str
    parameters: tuple[Parameter, ...]
    is_root: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, and the bytes of activations and gradients that were allocated and freed since the one before.

    Attributes:
        moment: The moment.
        unit: Number of the unit; -1 for the end of the pass.
        change: Bytes more than at the moment before.
        peak: Most bytes in between, above those at the moment before.
        flops: Floating-point operations in between.
    """

    moment: Moment
    unit: int
    change: float
    peak: float
    flops: float = 0.0


@dataclass(frozen=True)
class PassInput:
    """The input of a pass.

    Attributes:
        pixels: Pixels of each image, or of all frames of each clip; tokens for language models.
        batch: Number of images.
        text_tokens: Tokens of each caption, for families that do not pad captions to a fixed length.
    """

    pixels: int
    batch: int
    text_tokens: int = 512


@dataclass(frozen=True)
class Run:
    """A list of `count` equal blocks of which `kept` were traced. The last but one stands for those left out.

    Attributes:
        first: Number of the first unit.
        count: Blocks in the whole model.
        kept: Blocks in the trace.
    """

    first: int
    count: int
    kept: int


@dataclass(frozen=True, eq=False)
class ModelPass:
    """One pass of a model: forward, or forward and backward.

    Attributes:
        units: The model's units.
        marks: The moments in order.
        buffers: Bytes of buffers on the device.
        recomputed: Numbers of units that compute forward again in backward, or the cheap part of it.
        repeated: Those of them that compute all of it again, products with the base's weights included.
        freed: Bytes that the others of them do not keep, and compute again.
    """

    units: tuple[Unit, ...]
    marks: tuple[Mark, ...]
    buffers: int
    recomputed: frozenset[int] = frozenset()
    repeated: frozenset[int] = frozenset()
    freed: float = 0.0

    @cached_property
    def most_activations(self) -> float:
        """Most bytes of activations and gradients of one pass, without FSDP's own memory."""
        allocated = most = 0.0
        for mark in self.marks:
            most = max(most, allocated + mark.peak, allocated + mark.change)
            allocated += mark.change
        return most

    @cached_property
    def at_rest(self) -> ModelPass:
        """The model without a pass."""
        return replace(self, marks=())


def lengthen(units: Sequence[Unit], marks: Sequence[Mark], runs: Sequence[Run]) -> tuple[list[Unit], list[Mark]]:
    """Return units and marks of the whole model, each run at its full length."""
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
        # In forward the first unit comes first, in backward last.
        for number in numbers if found[0].moment == "forward" else reversed(numbers):
            longer += [replace(mark, unit=number) for mark in found]
    return units[: middle + 1] + [units[middle]] * more + units[middle + 1 :], longer


def _numbered(units: Sequence[Unit]) -> list[Unit]:
    """Number the units of each list by their position in it."""
    counts: Counter[str] = Counter()
    numbered = []
    for unit in units:
        above, _, number = unit.name.rpartition(".")
        name = f"{above}.{counts[above]}" if number.isdigit() else unit.name
        counts[above] += 1
        numbered.append(replace(unit, name=name))
    return numbered
