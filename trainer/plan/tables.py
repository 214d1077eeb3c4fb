"""What was recorded of a model with one adapter and format, for every size, rank and way of checkpointing. No torch.

Bytes of a pass grow with the images and with the pixels of each, as do those of an adapter with its rank: a few
recorded passes give all others. Operations grow with the square of the pixels besides, where attention is.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from trainer.plan.steps import Mark, Moment, Parameter, Run, Size, Step, Unit, lengthen

Sides = tuple[int, int, int]
"""Of the square images that are recorded, one at a time; two at a time of the second."""
SIDES: Sides = (256, 512, 1024)
SMALL_SIDES: Sides = (32, 64, 128)
"""For the demo and tiny models."""
RANKS = (16, 32)
"""Ranks of the adapters that are recorded, where they have one."""
Kind = Literal["kept", "recomputed"]
"""Whether blocks keep their activations for backward."""


def recorded_sizes(sides: Sides) -> tuple[Size, ...]:
    """What is recorded, in the order in which a `Table` has it."""
    return (*(Size(side * side, 1) for side in sides), Size(sides[1] ** 2, 2))


@dataclass(frozen=True)
class Figures:
    """Of one moment. change, peak, flops: for each recorded size, as `Mark` has them."""

    change: tuple[float, ...]
    peak: tuple[float, ...]
    flops: tuple[float, ...]


@dataclass(frozen=True)
class Recorded:
    """A model with an adapter of one rank. figures: {kind: of each moment}."""

    units: tuple[Unit, ...]
    figures: dict[str, tuple[Figures, ...]]


@dataclass(frozen=True)
class Table:
    """versions: of the packages it was recorded with.  ranks: of the adapter; one of no meaning where it has none.

    moments: (moment, unit) in order.  buffers: bytes.  recorded: for each rank.
    """

    versions: dict[str, str]
    sides: Sides
    ranks: tuple[int, ...]
    moments: tuple[tuple[Moment, int], ...]
    runs: tuple[Run, ...]
    buffers: int
    recorded: tuple[Recorded, ...]

    def step(self, size: Size, rank: int, checkpointing: str | int) -> Step:
        """A pass of the whole model. checkpointing: `train.checkpointing`."""
        blocks = [number for number, unit in enumerate(self._whole_units) if not unit.is_root]
        every = {"none": 0, "full": 1}.get(str(checkpointing), checkpointing)
        assert isinstance(every, int)
        recomputed = frozenset(blocks[::every]) if every else frozenset()
        if not recomputed:
            marks = self._marks(size, rank, "kept")
        elif len(recomputed) == len(blocks):
            marks = self._marks(size, rank, "recomputed")
        else:
            pairs = zip(self._marks(size, rank, "kept"), self._marks(size, rank, "recomputed"), strict=True)
            marks = [again if again.unit in recomputed else kept for kept, again in pairs]
        return Step(self._units(rank), tuple(marks), self.buffers, recomputed)

    @cached_property
    def _whole_units(self) -> list[Unit]:
        return lengthen(self.recorded[0].units, (), self.runs)[0]

    def _units(self, rank: int) -> tuple[Unit, ...]:
        part = self._part(rank)
        if len(self.recorded) == 1 or part == 0:
            units: Iterable[Unit] = self.recorded[0].units
        else:
            pairs = zip(self.recorded[0].units, self.recorded[1].units, strict=True)
            units = [_unit_between(low, high, part) for low, high in pairs]
        return tuple(lengthen(tuple(units), (), self.runs)[0])

    def _marks(self, size: Size, rank: int, kind: Kind) -> list[Mark]:
        part = self._part(rank)
        found = [_of_size(recorded.figures[kind], self.sides, size) for recorded in self.recorded]
        marks = []
        for number, (moment, unit) in enumerate(self.moments):
            low = found[0][number]
            high = found[-1][number]
            values = [a + part * (b - a) for a, b in zip(low, high, strict=True)]
            marks.append(Mark(moment, unit, *values))
        return lengthen(self.recorded[0].units, marks, self.runs)[1]

    def _part(self, rank: int) -> float:
        """How far the rank is from the first recorded one to the second."""
        if len(self.ranks) == 1:
            return 0.0
        low, high = self.ranks
        return (rank - low) / (high - low)


def _of_size(figures: Sequence[Figures], sides: Sides, size: Size) -> list[tuple[float, float, float]]:
    """(change, peak, flops) of each moment for a size."""
    at = [side * side for side in sides]
    # Between the two nearest; beyond the last, on their line.
    upper = 1 if size.pixels <= at[1] else 2
    part = (size.pixels - at[upper - 1]) / (at[upper] - at[upper - 1])

    def of_bytes(values: tuple[float, ...]) -> float:
        single = values[upper - 1] + part * (values[upper] - values[upper - 1])
        if size.batch == 1:
            return single
        fixed = 2 * values[1] - values[3]  # what does not grow with the batch
        return fixed + size.batch * (single - fixed)

    weights = _through_three(at, size.pixels)
    return [
        (
            of_bytes(f.change),
            of_bytes(f.peak),
            size.batch * sum(weight * value for weight, value in zip(weights, f.flops[:3], strict=True)),
        )
        for f in figures
    ]


def _through_three(at: Sequence[int], x: float) -> list[float]:
    """Weights of the values at three places, for the parabola through them at x (Lagrange)."""
    weights = []
    for i, own in enumerate(at):
        weight = 1.0
        for j, other in enumerate(at):
            if i != j:
                weight *= (x - other) / (own - other)
        weights.append(weight)
    return weights


def _unit_between(low: Unit, high: Unit, part: float) -> Unit:
    """A unit whose adapter has another rank: its parameters' sizes lie on the line through two others'."""
    pairs = zip(low.parameters, high.parameters, strict=True)
    return Unit(low.name, tuple(_parameter_between(a, b, part) for a, b in pairs), low.is_root)


def _parameter_between(low: Parameter, high: Parameter, part: float) -> Parameter:
    rows = round(low.rows + part * (high.rows - low.rows))
    row = round(low.row + part * (high.row - low.row))
    return Parameter(rows, row, low.stored, low.gathered, low.is_trained, low.count)


def encode(tables: dict[str, Table]) -> bytes:
    """Tables as a file. The same tables give the same bytes."""
    text = json.dumps({name: _to_json(table) for name, table in sorted(tables.items())}, separators=(",", ":"))
    return gzip.compress(text.encode(), mtime=0)


def decode(content: bytes) -> dict[str, Table]:
    """What `encode` wrote."""
    return {name: _from_json(value) for name, value in json.loads(gzip.decompress(content)).items()}


def _to_json(table: Table) -> dict[str, Any]:
    return {
        "versions": table.versions,
        "sides": table.sides,
        "ranks": table.ranks,
        "moments": table.moments,
        "runs": [[run.first, run.count, run.kept] for run in table.runs],
        "buffers": table.buffers,
        "recorded": [
            {
                "units": [
                    [unit.name, [list(vars(p).values()) for p in unit.parameters], unit.is_root] for unit in r.units
                ],
                "figures": {k: [[f.change, f.peak, f.flops] for f in found] for k, found in r.figures.items()},
            }
            for r in table.recorded
        ],
    }


def _from_json(value: dict[str, Any]) -> Table:
    recorded = tuple(
        Recorded(
            tuple(Unit(name, tuple(Parameter(*p) for p in parameters), root) for name, parameters, root in r["units"]),
            {kind: tuple(Figures(*map(tuple, f)) for f in found) for kind, found in r["figures"].items()},
        )
        for r in value["recorded"]
    )
    moments = tuple((moment, unit) for moment, unit in value["moments"])
    runs = tuple(Run(*run) for run in value["runs"])
    return Table(
        value["versions"], tuple(value["sides"]), tuple(value["ranks"]), moments, runs, value["buffers"], recorded
    )
