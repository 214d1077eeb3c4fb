"""Tables of a model with one adapter and format, from traced passes, for every size, rank and checkpointing. No torch.

Bytes of a pass grow linearly with the number of images and the pixels of each, and those of an adapter with its rank: a
few traced passes give all others. Operations also grow with the square of the pixels, because of attention.

See DECISIONS 87.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from trainer.config.families import trains_on
from trainer.config.recompute import Recompute, modes_of
from trainer.config.schema import RunConfig
from trainer.config.sections import RankAdapter
from trainer.plan.simulate.steps import Mark, ModelPass, Moment, Parameter, PassInput, Run, Unit, lengthen

Sides = tuple[int, int, int]
"""Sides in pixels of the square images that are traced one at a time; the second is also traced two at a time."""
SIDES: Sides = (256, 512, 1024)
SMALL_SIDES: Sides = (32, 64, 128)
"""Sides for the demo and tiny models."""
TEXT_SIDES: Sides = (16, 23, 64)
"""Sides for language models, whose tokens count as pixels: 256, 529 and 4096 tokens. Up to 512 tokens the logits of all
are allocated, beyond that those of 512 (`CHUNK` in trainer/models/parts/language/chunked_loss.py)."""
SMALL_TEXT_SIDES: Sides = (4, 8, 16)
CACHED_PASSES = 256
"""Passes that are cached: a search needs the same ones many times."""
RANKS = (16, 32)
"""Ranks of the traced adapters, where they have one; lower ones where layers are narrower (`trace.traced_ranks`)."""
PassKind = Literal["kept", "selective", "recomputed", "drawn"]
"""Blocks keep their activations for backward, recompute the cheap ones, or recompute all; or backward does not run, as
in sampling."""
PASS_KINDS: tuple[PassKind, ...] = ("kept", "drawn", "selective", "recomputed")
"""All kinds."""
KIND_OF: dict[Recompute, PassKind] = {"none": "kept", "selective": "selective", "full": "recomputed"}
"""{what backward computes again in a block: the kind of its pass}"""
Moments = tuple[tuple[Moment, int], ...]
"""(moment, number of the unit) in order."""


def has_rank(cfg: RunConfig) -> bool:
    """Whether the adapter has a rank with which its sizes grow linearly."""
    return isinstance(cfg.adapter, RankAdapter) and cfg.adapter.is_linear_in_rank


def num_ranks(cfg: RunConfig) -> int:
    """Return how many ranks of the adapter are traced."""
    return len(RANKS) if has_rank(cfg) else 1


def sides_of(cfg: RunConfig) -> Sides:
    """Return the sides of the images that are traced."""
    is_small = cfg.model.path in ("tiny", "demo")
    if trains_on(cfg) == "text":
        return SMALL_TEXT_SIDES if is_small else TEXT_SIDES
    return SMALL_SIDES if is_small else SIDES


def traced_inputs(sides: Sides) -> tuple[PassInput, ...]:
    """Return the sizes that are traced, in the order of a `PassTable`."""
    return (*(PassInput(side * side, 1) for side in sides), PassInput(sides[1] ** 2, 2))


@dataclass(frozen=True, slots=True)
class MomentFigures:
    """Figures of one moment. change, peak, flops: as in `Mark`, for each traced size."""

    change: tuple[float, ...]
    peak: tuple[float, ...]
    flops: tuple[float, ...]


@dataclass(frozen=True)
class RankTable:
    """Units and figures of a model with an adapter of one rank. figures: {kind of pass: figures of each moment}."""

    units: tuple[Unit, ...]
    figures: dict[str, tuple[MomentFigures, ...]]


@dataclass(frozen=True, eq=False)
class PassTable:
    """The traced passes of a model with one adapter and format.

    Attributes:
        versions: {package: version} with which it was traced.
        sides: Sides of the traced images.
        ranks: Traced ranks of the adapter; a single meaningless one where it has no rank.
        moments: Moments of a pass with backward.
        drawn: Moments of a pass without backward.
        runs: Lists of blocks that were shortened.
        buffers: Bytes of the model's buffers.
        by_rank: Units and figures for each rank.
    """

    versions: dict[str, str]
    sides: Sides
    ranks: tuple[int, ...]
    moments: Moments
    drawn: Moments
    runs: tuple[Run, ...]
    buffers: int
    by_rank: tuple[RankTable, ...]

    @property
    def blocks(self) -> list[tuple[str, int, int]]:
        """(list of blocks, their number, parameters of each) of the whole model, in the order of its parameters."""
        units = self.by_rank[0].units
        counts = [1] * len(units)
        for run in self.runs:
            counts[run.first] += run.count - run.kept
        found: list[tuple[str, int, int]] = []
        for unit, count in zip(units, counts, strict=True):
            block = unit.name.rpartition(".")[0], sum(parameter.numbers for parameter in unit.parameters)
            if unit.is_root:
                continue
            if found and (found[-1][0], found[-1][2]) == block:
                count += found.pop()[1]
            found.append((block[0], count, block[1]))
        return found

    def training(self, size: PassInput, rank: int, checkpointing: str | int) -> ModelPass:
        """Return a pass of the whole model with backward. checkpointing: `train.checkpointing`."""
        return _training(self, size, rank, checkpointing)

    def sampling(self, size: PassInput, rank: int) -> ModelPass:
        """Return a pass of the whole model without backward."""
        return _sampling(self, size, rank)

    @cached_property
    def _whole_units(self) -> list[Unit]:
        return lengthen(self.by_rank[0].units, (), self.runs)[0]

    def _units(self, rank: int) -> tuple[Unit, ...]:
        if rank not in self._units_of_rank:
            self._units_of_rank[rank] = self._units_between(rank)
        return self._units_of_rank[rank]

    @cached_property
    def _units_of_rank(self) -> dict[int, tuple[Unit, ...]]:
        return {}

    def _units_between(self, rank: int) -> tuple[Unit, ...]:
        part = self._part(rank)
        if len(self.by_rank) == 1 or part == 0:
            units: Iterable[Unit] = self.by_rank[0].units
        else:
            pairs = zip(self.by_rank[0].units, self.by_rank[1].units, strict=True)
            units = [_unit_between(low, high, part) for low, high in pairs]
        return tuple(lengthen(tuple(units), (), self.runs)[0])

    def has(self, kind: PassKind) -> bool:
        """Whether passes of this kind were traced."""
        return kind in self.by_rank[0].figures

    def _marks(self, size: PassInput, rank: int, kind: PassKind) -> tuple[Mark, ...]:
        return _marks(self, size, rank, kind)

    def _marks_between(self, size: PassInput, rank: int, kind: PassKind) -> list[Mark]:
        part = self._part(rank)
        found = [_of_size(of_rank.figures[kind], self.sides, size) for of_rank in self.by_rank]
        values = [
            [a + part * (b - a) for a, b in zip(*both, strict=True)] for both in zip(found[0], found[-1], strict=True)
        ]
        order = self._drawn_order if kind == "drawn" else self._order
        return [Mark(moment, unit, *values[number]) for moment, unit, number in order]

    @cached_property
    def _order(self) -> list[tuple[Moment, int, int]]:
        """(moment, unit, number of the traced moment) of the whole model."""
        return self._lengthened(self.moments)

    @cached_property
    def _drawn_order(self) -> list[tuple[Moment, int, int]]:
        return self._lengthened(self.drawn)

    def _lengthened(self, moments: Moments) -> list[tuple[Moment, int, int]]:
        marks = [Mark(moment, unit, number, 0) for number, (moment, unit) in enumerate(moments)]
        return [(m.moment, m.unit, int(m.change)) for m in lengthen(self.by_rank[0].units, marks, self.runs)[1]]

    def _part(self, rank: int) -> float:
        """Return how far the rank is from the first traced one to the second: 0 for the first, 1 for the second."""
        if len(self.ranks) == 1:
            return 0.0
        low, high = self.ranks
        return (rank - low) / (high - low)


@lru_cache(CACHED_PASSES)
def _training(table: PassTable, size: PassInput, rank: int, checkpointing: str | int) -> ModelPass:
    blocks = [number for number, unit in enumerate(table._whole_units) if not unit.is_root]
    modes = dict(zip(blocks, modes_of(checkpointing, len(blocks)), strict=True))
    by_mode = {mode: table._marks(size, rank, KIND_OF[mode]) for mode in dict.fromkeys(["none", *modes.values()])}
    # Moments outside of blocks are those of the one mode that all blocks have, or of a pass that keeps everything.
    rest = next(iter(modes.values())) if len(set(modes.values())) == 1 else "none"
    marks = [by_mode[modes.get(mark.unit, rest)][number] for number, mark in enumerate(by_mode["none"])]
    again, repeated = (
        frozenset(n for n, mode in modes.items() if mode in of) for of in (("full", "selective"), ("full",))
    )
    # What a block does not keep is missing in forward, and again where backward would free it.
    freed = sum(
        abs(kept.change - mark.change) / 2
        for kept, mark in zip(by_mode["none"], marks, strict=True)
        if mark.unit in again - repeated
    )
    return ModelPass(table._units(rank), tuple(marks), table.buffers, again, repeated, freed)


@lru_cache(CACHED_PASSES)
def _marks(table: PassTable, size: PassInput, rank: int, kind: PassKind) -> tuple[Mark, ...]:
    return tuple(table._marks_between(size, rank, kind))


@lru_cache(CACHED_PASSES)
def _sampling(table: PassTable, size: PassInput, rank: int) -> ModelPass:
    units = table._units(rank)
    return ModelPass(units, tuple(table._marks(size, rank, "drawn")), table.buffers, frozenset(range(len(units))))


def _of_size(figures: Sequence[MomentFigures], sides: Sides, size: PassInput) -> list[tuple[float, float, float]]:
    """Return (change, peak, flops) of each moment for a size."""
    at = [side * side for side in sides]
    lower, upper, part = _between(at, size.pixels)

    def of_bytes(values: tuple[float, ...]) -> float:
        single = values[lower] + part * (values[upper] - values[lower])
        if size.batch == 1:
            return single
        fixed = 2 * values[1] - values[3]  # the part that does not grow with the batch
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
    """Return the two of three points between which x lies, and how far x is from the first to the second.

    Beyond the three points the nearest two are used, with a share below 0 or above 1.
    """
    upper = 1 if x <= at[1] else 2
    return upper - 1, upper, (x - at[upper - 1]) / (at[upper] - at[upper - 1])


def _through_three(at: Sequence[int], x: float) -> list[float]:
    """Return weights of the values at three points, for the parabola through them at x (Lagrange)."""
    weights = []
    for i, own in enumerate(at):
        weight = 1.0
        for j, other in enumerate(at):
            if i != j:
                weight *= (x - other) / (own - other)
        weights.append(weight)
    return weights


def _unit_between(low: Unit, high: Unit, part: float) -> Unit:
    """Return a unit whose adapter has another rank: sizes of parameters grow linearly with it."""
    pairs = zip(low.parameters, high.parameters, strict=True)
    return Unit(low.name, tuple(_parameter_between(a, b, part) for a, b in pairs), low.is_root)


def _parameter_between(low: Parameter, high: Parameter, part: float) -> Parameter:
    rows = round(low.rows + part * (high.rows - low.rows))
    row = round(low.row + part * (high.row - low.row))
    return Parameter(rows, row, low.stored, low.gathered, low.is_trained, low.count)


@dataclass(frozen=True, eq=False)
class Encoders:
    """The text encoders and the autoencoder.

    Attributes:
        text: A pass of the text encoders with the longest caption.
        whole: Bytes of text encoders that are not sharded.
        caption: Bytes of an encoded caption.
        image: Bytes of the autoencoder.
        sides: Sides of the traced square images.
        encoding: Most bytes of activations while an image is encoded, for each side.
        decoding: Most bytes of activations while an image is decoded, for each side.
        latents: Bytes of an encoded image, for each side.
        guides: Bytes of the components that guide samples.
    """

    text: ModelPass
    whole: int
    caption: int
    image: int
    sides: Sides
    encoding: tuple[float, ...]
    decoding: tuple[float, ...]
    latents: tuple[float, ...]
    guides: int = 0

    def of_image(self, values: Sequence[float], pixels: int) -> float:
        """Return one of `encoding`, `decoding` and `latents` for an image of another size."""
        low, high, part = _between([side * side for side in self.sides], pixels)
        return max(0.0, values[low] + part * (values[high] - values[low]))


@dataclass(frozen=True)
class Model:
    """Everything that a plan knows about a model."""

    table: PassTable
    encoders: Encoders


def encode(tables: Mapping[str, PassTable], encoders: Mapping[str, Encoders]) -> bytes:
    """Serialize a model's tables and encoders, by their keys. The same tables give the same bytes.

    Each is a text of its own, so that one is read without the others.
    """
    content = {
        "tables": {name: _text(_to_json(table)) for name, table in sorted(tables.items())},
        "encoders": {name: _text(_encoders_to_json(value)) for name, value in sorted(encoders.items())},
    }
    return gzip.compress(_text(content).encode(), mtime=0)


def texts_of(content: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """Return the texts of tables and of encoders in the bytes of `encode`, by their keys."""
    found = json.loads(gzip.decompress(content))
    return found["tables"], found["encoders"]


def table_of(text: str) -> PassTable:
    """Parse the text of a table."""
    return _from_json(json.loads(text))


def encoders_of(text: str) -> Encoders:
    """Parse the text of encoders."""
    return _encoders_from_json(json.loads(text))


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _encoders_to_json(encoders: Encoders) -> dict[str, Any]:
    text = encoders.text
    given = {name: value for name, value in vars(encoders).items() if name != "guides" or value}
    return given | {
        "text": {
            "units": _units_to_json(text.units),
            "marks": [astuple(mark) for mark in text.marks],
            "buffers": text.buffers,
        }
    }


def _encoders_from_json(value: dict[str, Any]) -> Encoders:
    text = value.pop("text")
    units = _units_from_json(text["units"])
    model_pass = ModelPass(
        units, tuple(Mark(*mark) for mark in text["marks"]), text["buffers"], frozenset(range(len(units)))
    )
    rest: dict[str, Any] = {name: tuple(of) if isinstance(of, list) else of for name, of in value.items()}
    return Encoders(model_pass, **rest)


def _units_to_json(units: Sequence[Unit]) -> list[Any]:
    return [[unit.name, [astuple(p) for p in unit.parameters], unit.is_root] for unit in units]


def _units_from_json(value: list[Any]) -> tuple[Unit, ...]:
    return tuple(Unit(name, tuple(Parameter(*p) for p in parameters), root) for name, parameters, root in value)


def _to_json(table: PassTable) -> dict[str, Any]:
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
            for r in table.by_rank
        ],
    }


def _from_json(value: dict[str, Any]) -> PassTable:
    by_rank = tuple(
        RankTable(
            _units_from_json(r["units"]),
            {kind: tuple(MomentFigures(*map(tuple, f)) for f in found) for kind, found in r["figures"].items()},
        )
        for r in value["recorded"]
    )
    moments, drawn = (tuple((moment, unit) for moment, unit in value[name]) for name in ("moments", "drawn"))
    runs = tuple(Run(*run) for run in value["runs"])
    sides, ranks = tuple(value["sides"]), tuple(value["ranks"])
    return PassTable(value["versions"], sides, ranks, moments, drawn, runs, value["buffers"], by_rank)
