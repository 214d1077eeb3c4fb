"""What was recorded of a model with one adapter and format, for every size, rank and way of checkpointing. No torch.

Bytes of a pass grow with the images and with the pixels of each, as do those of an adapter with its rank: a few
recorded passes give all others. Operations grow with the square of the pixels besides, where attention is.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from trainer.config.families import trains_on
from trainer.config.schema import RunConfig
from trainer.config.sections import LokrAdapter, RankAdapter
from trainer.plan.steps import Mark, Moment, Parameter, Run, Size, Step, Unit, lengthen

Sides = tuple[int, int, int]
"""Of the square images that are recorded, one at a time; two at a time of the second."""
SIDES: Sides = (256, 512, 1024)
SMALL_SIDES: Sides = (32, 64, 128)
"""For the demo and tiny models."""
TEXT_SIDES: Sides = (16, 32, 64)
"""For language models: 256, 1024 and 4096 tokens, where images have pixels."""
SMALL_TEXT_SIDES: Sides = (4, 8, 16)
REMEMBERED = 256
"""Steps that are kept: a search asks for the same again and again."""
RANKS = (16, 32)
"""Ranks of the adapters that are recorded, where they have one."""
Kind = Literal["kept", "recomputed", "drawn"]
"""Blocks keep their activations for backward, or compute them again; or there is no backward, as where samples are
drawn."""
KINDS: tuple[Kind, ...] = ("kept", "drawn", "recomputed")
"""In the order in which one model can do them."""
Moments = tuple[tuple[Moment, int], ...]
"""(moment, number of the unit) in order."""


def has_rank(cfg: RunConfig) -> bool:
    """Whether the adapter has a rank over which its sizes lie on a line."""
    return isinstance(cfg.adapter, RankAdapter) and not isinstance(cfg.adapter, LokrAdapter)


def ranks_of(cfg: RunConfig) -> tuple[int, ...]:
    """Ranks of the adapter that are recorded."""
    return RANKS if has_rank(cfg) else RANKS[:1]


def sides_of(cfg: RunConfig) -> Sides:
    """Of the images that are recorded."""
    is_small = cfg.model.path in ("tiny", "demo")
    if trains_on(cfg) == "text":
        return SMALL_TEXT_SIDES if is_small else TEXT_SIDES
    return SMALL_SIDES if is_small else SIDES


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


@dataclass(frozen=True, eq=False)
class Table:
    """versions: of the packages it was recorded with.  ranks: of the adapter; one of no meaning where it has none.

    moments: of a pass with backward.  drawn: of one without.  buffers: bytes.  recorded: for each rank.
    """

    versions: dict[str, str]
    sides: Sides
    ranks: tuple[int, ...]
    moments: Moments
    drawn: Moments
    runs: tuple[Run, ...]
    buffers: int
    recorded: tuple[Recorded, ...]

    def step(self, size: Size, rank: int, checkpointing: str | int) -> Step:
        """A pass of the whole model. checkpointing: `train.checkpointing`."""
        return _step(self, size, rank, checkpointing)

    def drawing(self, size: Size, rank: int) -> Step:
        """A pass of the whole model without backward."""
        return _drawing(self, size, rank)

    @cached_property
    def _whole_units(self) -> list[Unit]:
        return lengthen(self.recorded[0].units, (), self.runs)[0]

    def _units(self, rank: int) -> tuple[Unit, ...]:
        if rank not in self._units_of_rank:
            self._units_of_rank[rank] = self._units_between(rank)
        return self._units_of_rank[rank]

    @cached_property
    def _units_of_rank(self) -> dict[int, tuple[Unit, ...]]:
        return {}

    def _units_between(self, rank: int) -> tuple[Unit, ...]:
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
        values = [
            [a + part * (b - a) for a, b in zip(*both, strict=True)] for both in zip(found[0], found[-1], strict=True)
        ]
        order = self._drawn_order if kind == "drawn" else self._order
        return [Mark(moment, unit, *values[number]) for moment, unit, number in order]

    @cached_property
    def _order(self) -> list[tuple[Moment, int, int]]:
        """(moment, unit, number of the recorded moment) of the whole model."""
        return self._lengthened(self.moments)

    @cached_property
    def _drawn_order(self) -> list[tuple[Moment, int, int]]:
        return self._lengthened(self.drawn)

    def _lengthened(self, moments: Moments) -> list[tuple[Moment, int, int]]:
        marks = [Mark(moment, unit, number, 0) for number, (moment, unit) in enumerate(moments)]
        return [(m.moment, m.unit, int(m.change)) for m in lengthen(self.recorded[0].units, marks, self.runs)[1]]

    def _part(self, rank: int) -> float:
        """How far the rank is from the first recorded one to the second."""
        if len(self.ranks) == 1:
            return 0.0
        low, high = self.ranks
        return (rank - low) / (high - low)


@lru_cache(REMEMBERED)
def _step(table: Table, size: Size, rank: int, checkpointing: str | int) -> Step:
    blocks = [number for number, unit in enumerate(table._whole_units) if not unit.is_root]
    every = {"none": 0, "full": 1}.get(str(checkpointing), checkpointing)
    assert isinstance(every, int)
    recomputed = frozenset(blocks[::every]) if every else frozenset()
    if not recomputed:
        marks = table._marks(size, rank, "kept")
    elif len(recomputed) == len(blocks):
        marks = table._marks(size, rank, "recomputed")
    else:
        pairs = zip(table._marks(size, rank, "kept"), table._marks(size, rank, "recomputed"), strict=True)
        marks = [again if again.unit in recomputed else kept for kept, again in pairs]
    return Step(table._units(rank), tuple(marks), table.buffers, recomputed)


@lru_cache(REMEMBERED)
def _drawing(table: Table, size: Size, rank: int) -> Step:
    units = table._units(rank)
    return Step(units, tuple(table._marks(size, rank, "drawn")), table.buffers, frozenset(range(len(units))))


def _of_size(figures: Sequence[Figures], sides: Sides, size: Size) -> list[tuple[float, float, float]]:
    """(change, peak, flops) of each moment for a size."""
    at = [side * side for side in sides]
    lower, upper, part = _between(at, size.pixels)

    def of_bytes(values: tuple[float, ...]) -> float:
        single = values[lower] + part * (values[upper] - values[lower])
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


def _between(at: Sequence[int], x: float) -> tuple[int, int, float]:
    """The two of three places between which x lies, and how far from the first; beyond them, on the nearest's line."""
    upper = 1 if x <= at[1] else 2
    return upper - 1, upper, (x - at[upper - 1]) / (at[upper] - at[upper - 1])


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


@dataclass(frozen=True, eq=False)
class Encoders:
    """What turns images and captions into what is trained on, and latents into images.

    text: a pass of the text encoders with the longest caption.  whole: bytes of those that are not sharded.  caption:
    bytes of what it is encoded to.
    image: bytes of the autoencoder.  sides: of the square images it was given; for each of them encoding, decoding:
    bytes taken at most besides, and latents: bytes of what it is encoded to.
    """

    text: Step
    whole: int
    caption: int
    image: int
    sides: Sides
    encoding: tuple[float, ...]
    decoding: tuple[float, ...]
    latents: tuple[float, ...]

    def of_image(self, values: Sequence[float], pixels: int) -> float:
        """One of `encoding`, `decoding` and `latents` for an image of other sides."""
        low, high, part = _between([side * side for side in self.sides], pixels)
        return max(0.0, values[low] + part * (values[high] - values[low]))


@dataclass(frozen=True)
class Model:
    """Everything that a plan knows of a model."""

    table: Table
    encoders: Encoders


def encode(tables: Mapping[str, Table], encoders: Mapping[str, Encoders]) -> bytes:
    """What was recorded of a model, by its keys, as a file. The same tables give the same bytes."""
    content = {
        "tables": {name: _to_json(table) for name, table in sorted(tables.items())},
        "encoders": {name: _encoders_to_json(found) for name, found in sorted(encoders.items())},
    }
    return gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)


def decode(content: bytes) -> tuple[dict[str, Table], dict[str, Encoders]]:
    """What `encode` wrote."""
    found = json.loads(gzip.decompress(content))
    return (
        {name: _from_json(value) for name, value in found["tables"].items()},
        {name: _encoders_from_json(value) for name, value in found["encoders"].items()},
    )


def _encoders_to_json(found: Encoders) -> dict[str, Any]:
    text = found.text
    return vars(found) | {
        "text": {
            "units": _units_to_json(text.units),
            "marks": [list(vars(mark).values()) for mark in text.marks],
            "buffers": text.buffers,
        }
    }


def _encoders_from_json(value: dict[str, Any]) -> Encoders:
    text = value.pop("text")
    units = _units_from_json(text["units"])
    step = Step(units, tuple(Mark(*mark) for mark in text["marks"]), text["buffers"], frozenset(range(len(units))))
    rest: dict[str, Any] = {name: tuple(of) if isinstance(of, list) else of for name, of in value.items()}
    return Encoders(step, **rest)


def _units_to_json(units: Sequence[Unit]) -> list[Any]:
    return [[unit.name, [list(vars(p).values()) for p in unit.parameters], unit.is_root] for unit in units]


def _units_from_json(value: list[Any]) -> tuple[Unit, ...]:
    return tuple(Unit(name, tuple(Parameter(*p) for p in parameters), root) for name, parameters, root in value)


def _to_json(table: Table) -> dict[str, Any]:
    return {
        "versions": table.versions,
        "sides": table.sides,
        "ranks": table.ranks,
        "moments": table.moments,
        "drawn": table.drawn,
        "runs": [[run.first, run.count, run.kept] for run in table.runs],
        "buffers": table.buffers,
        "recorded": [
            {
                "units": _units_to_json(r.units),
                "figures": {k: [[f.change, f.peak, f.flops] for f in found] for k, found in r.figures.items()},
            }
            for r in table.recorded
        ],
    }


def _from_json(value: dict[str, Any]) -> Table:
    recorded = tuple(
        Recorded(
            _units_from_json(r["units"]),
            {kind: tuple(Figures(*map(tuple, f)) for f in found) for kind, found in r["figures"].items()},
        )
        for r in value["recorded"]
    )
    moments, drawn = (tuple((moment, unit) for moment, unit in value[name]) for name in ("moments", "drawn"))
    runs = tuple(Run(*run) for run in value["runs"])
    sides, ranks = tuple(value["sides"]), tuple(value["ranks"])
    return Table(value["versions"], sides, ranks, moments, drawn, runs, value["buffers"], recorded)
