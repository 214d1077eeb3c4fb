"""Finds the fastest config that fits the user's GPUs, from plans alone: nothing is tried. No torch.

The time of a step is the middle between its plan's time with full overlap and without. A config fits where its plan
says so. Points of the search are all combinations of `choices` that are not ladders. They are taken in the order of
their least possible time, which needs no plan; along a ladder the first choice that fits is found by bisection.

See DECISIONS 180.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.config.families import size_field
from trainer.config.schema import RunConfig, rules
from trainer.plan.calibration import calibrate
from trainer.plan.hardware import Card
from trainer.plan.memory import MemoryPlan, least_of, plan_of
from trainer.plan.search import choices
from trainer.plan.search.choices import Choice, Ladder, is_same, merged
from trainer.plan.search.decide import TIGHT
from trainer.plan.search.fixes import assigned
from trainer.plan.search.ladder import EFFECT_OF, nothing_left
from trainer.plan.simulate.phases import CAPTIONS
from trainer.plan.simulate.sizes import input_of, rank_of
from trainer.plan.simulate.tables import Model
from trainer.plan.store import known_model, recorded_formats
from trainer.system.amounts import GIB, memory_size

MOST = 3
"""Most configs that are proposed."""
RECORDED = ("none", "int8", "nf4", "fp8")
"""Formats that are recorded for published models."""
UNTIMED = (
    "train.micro_batch",
    "parallel.prefetch_forward",
    "parallel.prefetch_backward",
    "quantize.encoders",
)
"""Fields that are left as they are where that is as fast: a plan's time does not count all that they save."""
FASTER = 0.01
"""Share by which a config that does not fit must be faster to be named."""
TIES = 1e-6
"""Relative difference of bounds below which the one with less memory comes first."""
SAME = 1e-9
"""Relative difference of times that counts as none."""


@dataclass(frozen=True)
class Target:
    """The machine to fit and what may not change.

    Attributes:
        card: The GPU of each rank.
        gpus: GPUs of each machine.
        kept: Names of fields that stay as the config has them; of `quantize.format` only that the base is not stored
            in fewer bits.
        given: Names of fields that the user gave, which stay exactly.
        host: Bytes of host memory of each machine; None if unknown.
    """

    card: Card
    gpus: int
    kept: frozenset[str]
    given: frozenset[str] = frozenset()
    host: float | None = None


@dataclass(frozen=True)
class Faster:
    """A faster config that does not fit.

    Attributes:
        changes: {field: value} where it differs from the one that fits.
        seconds: Seconds of an optimizer step.
        lack: What it needs more of than there is.
    """

    changes: Mapping[str, Any]
    seconds: float
    lack: str

    def __str__(self) -> str:
        return f"{assigned(self.changes)} would take {self.seconds:.3g} s, but {self.lack}"


@dataclass(frozen=True)
class Proposal:
    """A config and what it takes.

    Attributes:
        changes: {field: (value before, value now)}.
        config: The config with the changes.
        plan: Its plan.
        faster: What keeps it from being faster; None where nothing is.
    """

    changes: Mapping[str, tuple[Any, Any]]
    config: RunConfig
    plan: MemoryPlan
    faster: Faster | None = None

    @property
    def seconds(self) -> float:
        """Seconds of an optimizer step."""
        assert self.plan.time is not None
        return self.plan.time.middle

    @property
    def per_second(self) -> float:
        """Images, or rows of text, per second."""
        return self.config.train.batch_size / self.seconds

    @property
    def host(self) -> float:
        """Bytes of host memory on a machine."""
        return host_bytes(self.config, self.plan)

    def hours(self, steps: int) -> float:
        """Return the hours of this many steps."""
        return steps * self.seconds / 3600

    def price(self, steps: int, per_gpu_hour: float) -> float:
        """Return what this many steps cost."""
        return self.hours(steps) * self.plan.ranks * per_gpu_hour

    def __str__(self) -> str:
        return assigned({field: now for field, (_, now) in self.changes.items()}) or "nothing changed"


@dataclass(frozen=True)
class Fit:
    """The result of a search.

    Attributes:
        proposals: Configs that fit, the fastest first.
        remedy: Where nothing fits: the smallest change that would help, which was not allowed, in a sentence.
        needed: The same as {field: value}; None where nothing would help.
        notes: Sentences about what the search left out.
        num_plans: Plans that were made.
    """

    proposals: tuple[Proposal, ...]
    remedy: str = ""
    needed: Choice | None = None
    notes: tuple[str, ...] = ()
    num_plans: int = 0

    @property
    def faster(self) -> str:
        """A sentence about what is faster than the first, and does not fit; empty if nothing is."""
        return str(self.proposals[0].faster or "") if self.proposals else ""


def fit(cfg: RunConfig, target: Target, cache: Path) -> Fit:
    """Find the configs with the least time per optimizer step that fit; `train.batch_size` stays.

    What changes the result is changed where it is allowed, nothing else fits, and as little as possible.

    Args:
        cfg: The config of a run without stages, or of one stage.
        target: The machine, and what may not change.
        cache: Folder shared by runs.
    """
    search = _Search(cfg, target, cache)
    lowered = search.lowered()
    if lowered is None:
        remedy, needed = _remedy(cfg, target, cache)
        return Fit((), remedy, needed, notes=tuple(search.notes()), num_plans=search.num_plans)
    proposals = tuple(search.proposal(changes) for changes in search.fastest(lowered))
    return Fit(proposals, notes=tuple(search.notes()), num_plans=search.num_plans)


def _remedy(cfg: RunConfig, target: Target, cache: Path) -> tuple[str, Choice | None]:
    """Return which fixed fields would have to change for anything to fit: the fewest, and the least harmful first.

    Returns:
        The sentence, and {field: value}; None where nothing helps.
    """
    sizes = {"data.resolution", "data.length"} - {size_field(cfg)}
    changing = [field for field in EFFECT_OF if field not in sizes]
    fixed = target.kept | target.given
    found = [field for field in choices.SEARCHED if field in fixed and field not in EFFECT_OF]
    found += [field for field in changing if field in fixed]
    for count in (1, 2, len(found)):
        for fields in itertools.combinations(found, count):
            freed = replace(target, kept=target.kept - set(fields), given=target.given - set(fields))
            search = _Search(cfg, freed, cache)
            lowered = search.lowered()
            if lowered is not None:
                changes = search.proposal(search.fastest(lowered)[0]).changes
                now = {field: changes[field][1] for field in fields if field in changes}
                return _remedy_sentence(now, target, changing), now
    return nothing_left(cfg), None


def _remedy_sentence(now: Mapping[str, Any], target: Target, changing: Sequence[str]) -> str:
    """Say what would fit if some fixed fields were free.

    Args:
        now: {field: its value then} of those fields.
        target: What is fixed.
        changing: Fields that change the result.
    """
    ways = []
    if given := [field for field in now if field in target.given]:
        ways.append(f"leave {' and '.join(given)} out of the command line")
    if any(field in target.kept for field in now):
        still = [field for field in (*changing, *sorted(target.kept)) if field in target.kept - set(now)]
        names = dict.fromkeys(
            field.rpartition(".")[2] for field in still if field != "data.length" or field in changing
        )
        ways.append(f"allow it with --keep {','.join(names) or repr('')}")
    result = ", which changes the result" if any(field in changing and field != "sample.size" for field in now) else ""
    return f"would fit with {assigned(now)}{result}: {', and '.join(ways)}"


class _Search:
    """The plans of the configs that can be made from one, each made once. Changes are {field: value} of all choices."""

    def __init__(self, cfg: RunConfig, target: Target, cache: Path) -> None:
        self.cfg, self.target, self.cache = cfg, target, cache
        self.card, self.reserve = calibrate(cache, target.card)
        self.fixed = target.given | target.kept - {"quantize.format"}
        self._models: dict[str, Model | None] = {}
        self._configs: dict[str, RunConfig | None] = {}
        self._bounds: dict[str, tuple[float, float] | None] = {}
        self._plans: dict[str, MemoryPlan | None] = {}
        self._planned: dict[str, Choice] = {}

    @property
    def num_plans(self) -> int:
        """Plans that were made."""
        return len(self._plans)

    def lowered(self) -> Choice | None:
        """Return the least change, of what is kept unless the user allows it, with which anything fits.

        Nothing where possible, else the fewest and least harmful fields. None where nothing fits.
        """
        found = [choices.allowed(values, self.cfg, self.fixed) for values in choices.reductions(self.cfg)]
        found = [values for values in found if values]
        if not any(self._model(cfg) for cfg in map(self._config, self._bases) if cfg):
            return None
        if self._can_fit({}):
            return {}
        if not self._can_fit(merged(*(values[-1] for values in found))):
            return None
        several = (fields for count in range(1, len(found) + 1) for fields in itertools.combinations(found, count))
        changes = (merged(*parts) for fields in several for parts in itertools.product(*fields))
        return next(filter(self._can_fit, changes), None)

    def _can_fit(self, lowered: Choice) -> bool:
        """Whether anything fits, by the choices that need the least memory."""
        parts = self._allowed(choices.devices(self.cfg, self.target.gpus))
        for num_devices in {part["parallel.devices"]: None for part in (parts[0], parts[-1])}:
            for point in self._points_of(lowered, num_devices, only_least=True):
                for ladder in self._rungs:
                    if any(self.fits(merged(point, more, ladder[-1])) for more in self._offloads(point)[::-1]):
                        return True
        return False

    def fastest(self, lowered: Choice) -> list[Choice]:
        """Return the changes that fit with the least time per step, of each way to train one, the fastest first."""
        points = [
            (*least, number, point)
            for number, point in enumerate(self._points(lowered))
            if (least := self._least_of_point(point)) is not None
        ]
        best: dict[tuple[Any, ...], Choice] = {}
        limit = math.inf
        for bound, _, _, point in sorted(points, key=lambda item: item[:3]):
            if bound > limit * (1 + SAME):
                break
            for changes in self._first_fitting(point, limit, best):
                way = self._way(changes)
                if way not in best or self._rank(changes) < self._rank(best[way]):
                    best[way] = changes
            if len(best) >= MOST:
                limit = sorted(self._seconds(changes) for changes in best.values())[MOST - 1]
        return sorted(best.values(), key=self._rank)[:MOST]

    def _first_fitting(self, point: Choice, limit: float, best: Mapping[tuple[Any, ...], Choice]) -> Iterator[Choice]:
        """Yield, for each ladder of a point, the first choice that fits, unless another point is provably faster.

        Along both ladders, of offload and of recomputing, memory falls and time grows: with more offload only less
        recomputing can be faster.

        Args:
            point: All choices that are not ladders.
            limit: Seconds beyond which nothing is of interest.
            best: {way to train: the fastest so far}.
        """
        for ladder in self._rungs:
            end = len(ladder)
            for more in self._offloads(point):
                rungs: Sequence[Choice] = [merged(point, more, rung) for rung in ladder[:end]]
                if not rungs or self._least(rungs[0]) is None:
                    continue
                so_far = best.get(self._way(rungs[0]))
                rungs = self._not_slower(rungs, min(limit, self._seconds(so_far) if so_far else math.inf))
                at = choices.first_fitting(rungs, self.fits)
                if at is not None:
                    self._plan_faster(rungs[: at + 1])
                    relief = None if self._fits(rungs[at]) else self._relief(rungs[at])
                    yield relief or rungs[at]
                    end = at

    def _plan_faster(self, rungs: Sequence[Choice]) -> None:
        """Plan the last choice of a ladder that is faster, by as much as is worth naming, than its end, which fits."""
        end = self._least(rungs[-1])
        if end is None:
            return
        enough = end[0] * (1 - FASTER)
        slower = choices.first_fitting(rungs, lambda changes: (self._least(changes) or (math.inf,))[0] > enough)
        if slower:
            self._plan(rungs[slower - 1])

    def _not_slower(self, rungs: Sequence[Choice], limit: float) -> Sequence[Choice]:
        """Return the choices of a ladder up to the first that takes more seconds than the limit for sure."""

        def is_slower(changes: Choice) -> bool:
            least = self._least(changes)
            return least is None or least[0] > limit * (1 + SAME)

        return rungs[: choices.first_fitting(rungs, is_slower)] if math.isfinite(limit) else rungs

    def _least_of_point(self, point: Choice) -> tuple[float, float] | None:
        """Return bounds of the seconds and bytes at a point, by what is fastest; None where it cannot fit.

        Of points that may be as fast, those with the least memory are taken first: what they reach leaves out others.
        """
        smallest = itertools.product(self._offloads(point)[::-1], self._rungs)
        bounds = (self._least(merged(point, more, ladder[-1])) for more, ladder in smallest)
        if not any(bound and not self._is_too_much(bound[1]) for bound in bounds):
            return None
        found = (self._least(merged(point, more, self._rungs[0][0])) for more in self._offloads(point))
        least = min(filter(None, found), default=None)
        return least and (float(f"{least[0]:.6g}") * (1 - TIES), least[1])

    def _is_too_much(self, need: float) -> bool:
        return need > TIGHT * self.card.memory

    def _points(self, lowered: Choice) -> Iterator[Choice]:
        for part in self._allowed(choices.devices(self.cfg, self.target.gpus)):
            yield from self._points_of(lowered, part["parallel.devices"])

    def _points_of(self, lowered: Choice, num_devices: int, only_least: bool = False) -> Iterator[Choice]:
        """Yield all combinations of choices that are not ladders. only_least: those that need the least memory."""
        parallel = self.cfg.parallel.model_copy(update={"devices": num_devices})
        sizes = self._allowed(choices.micro_batches(self.cfg, parallel.data_size))
        ahead = self._allowed(choices.prefetch(self.cfg))
        for spread, base, size, gathered in itertools.product(
            self._allowed(choices.sharding(self.cfg, num_devices)),
            self._bases,
            sizes[-1:] if only_least else sizes,
            ahead[-1:] if only_least else ahead,
        ):
            yield merged({"parallel.devices": num_devices}, spread, base, size, gathered, lowered)

    def _allowed(self, found: Sequence[Choice]) -> Ladder:
        """Return the choices that leave fixed fields as they are; the config's own where none does."""
        own = [{field: choices.value_of(self.cfg, field) for field in choice} for choice in found[:1]]
        return choices.allowed(found, self.cfg, self.fixed) or tuple(own)

    @cached_property
    def _bases(self) -> Ladder:
        keeps_bits = "quantize.format" in self.target.kept
        return self._allowed(choices.bases(self.cfg, recorded_formats(self.cfg), keeps_bits))

    @cached_property
    def _rungs(self) -> tuple[Ladder, ...]:
        """Ladders of recomputing."""
        model = next(filter(None, (self._model(cfg) for cfg in map(self._config, self._bases) if cfg)))
        units = model.table.training(input_of(self.cfg), rank_of(self.cfg), "none").units
        blocks = sum(not unit.is_root for unit in units)
        ladders = choices.recompute(self.cfg, blocks, model.table.has("selective"))
        found = [choices.allowed(ladder, self.cfg, self.fixed) for ladder in ladders]
        return tuple(filter(None, found)) or (self._allowed(ladders[0][:1]),)

    def _offloads(self, point: Choice) -> Ladder:
        """Return the ladder of offload at a point. FSDP on one rank is of use only where everything is offloaded."""
        ladder = self._allowed(choices.offload())
        is_alone = point["parallel.devices"] * self.cfg.parallel.nodes == 1
        if is_alone and point["parallel.strategy"] != "none" and "parallel.strategy" not in self.fixed:
            return tuple(more for more in ladder if _offloaded(more) == "everything")
        return ladder

    def _config(self, changes: Choice) -> RunConfig | None:
        """Return the config with changes; None where they are invalid together."""
        key = repr(changes)
        if key not in self._configs:
            self._configs[key] = self._made(changes)
        return self._configs[key]

    def _made(self, changes: Choice) -> RunConfig | None:
        values: dict[str, dict[str, Any]] = {}
        for field, value in changes.items():
            section, name = field.split(".")
            values.setdefault(section, {})[name] = value
        sections = {name: section.model_copy(update=values[name]) for name, section in self.cfg if name in values}
        cfg = self.cfg.model_copy(update=sections)
        return None if any(rules(cfg)) else cfg

    def _model(self, cfg: RunConfig) -> Model | None:
        """Return the tables of a config; None where they do not exist."""
        key = repr(cfg.quantize)
        if key not in self._models:
            self._models[key] = known_model(cfg, self.cache)
        return self._models[key]

    def _least(self, changes: Choice) -> tuple[float, float] | None:
        """Return bounds of seconds, and of bytes on a GPU; None where changes are invalid together or have no table."""
        key = repr(changes)
        if key not in self._bounds:
            cfg = self._config(changes)
            model = self._model(cfg) if cfg else None
            self._bounds[key] = None
            if cfg and model:
                seconds, allocated = least_of(cfg, model, self.card)
                self._bounds[key] = seconds, allocated + self.reserve.of(allocated, cfg.parallel.world_size)
        return self._bounds[key]

    def _plan(self, changes: Choice) -> MemoryPlan | None:
        """Return the plan with changes; None where they are invalid together or have no table."""
        key = repr(changes)
        if key not in self._plans:
            cfg = self._config(changes)
            model = self._model(cfg) if cfg else None
            self._plans[key] = plan_of(cfg, model, self.card, self.reserve) if cfg and model else None
            self._planned[key] = changes
        return self._plans[key]

    def fits(self, changes: Choice) -> bool:
        """Whether the run fits with changes, its text encoders quantized if need be."""
        least = self._least(changes)
        if least is None or self._is_too_much(least[1]):
            return False
        return self._fits(changes) or ((relieved := self._relief(changes)) is not None and self._fits(relieved))

    def _fits(self, changes: Choice) -> bool:
        plan = self._plan(changes)
        return plan is not None and plan.verdict == "fits" and not self._lacks_host(changes, plan)

    def _lacks_host(self, changes: Choice, plan: MemoryPlan) -> bool:
        cfg = self._config(changes)
        return self.target.host is not None and cfg is not None and host_bytes(cfg, plan) > self.target.host

    def _relief(self, changes: Choice) -> Choice | None:
        """Return the changes with quantized text encoders; None where those are not what is too much."""
        plan = self._plan(changes)
        field = "quantize.encoders"
        is_free = changes["quantize.format"] != "none" and not changes[field] and field not in self.fixed
        if plan is None or not is_free or plan.fullest.name != CAPTIONS:
            return None
        return {**changes, field: True}

    def _seconds(self, changes: Choice) -> float:
        plan = self._plan(changes)
        assert plan is not None and plan.time is not None
        return plan.time.middle

    def _rank(self, changes: Choice) -> tuple[Any, ...]:
        """Return by what changes that fit are sorted: printed seconds, fewer GPUs, seconds, fewer changes of UNTIMED,
        less memory."""
        plan, seconds = self._plan(changes), self._seconds(changes)
        assert plan is not None
        changed = sum(changes[field] != choices.value_of(self.cfg, field) for field in UNTIMED)
        return float(f"{seconds:.3g}"), plan.ranks, float(f"{seconds:.9g}"), changed, plan.need

    def _way(self, changes: Choice) -> tuple[Any, ...]:
        """Return what tells ways to train apart: of each, only the fastest config is proposed."""
        ranks = changes["parallel.devices"] * self.cfg.parallel.nodes
        strategy = changes["parallel.strategy"] if ranks > 1 else "none"
        return strategy, changes["quantize.format"], _offloaded(changes)

    def proposal(self, changes: Choice) -> Proposal:
        """Return changes that fit as a proposal."""
        cfg, plan = self._config(changes), self._plan(changes)
        assert cfg is not None and plan is not None and plan.time is not None
        before = {field: choices.value_of(self.cfg, field) for field in changes}
        different = {field: (before[field], now) for field, now in changes.items() if not is_same(before[field], now)}
        return Proposal(different, cfg, plan, self._next_faster(changes))

    def _next_faster(self, changes: Choice) -> Faster | None:
        """Return, of faster changes that do not fit, those that need the least memory; None where none is faster."""
        enough = self._seconds(changes) * (1 - FASTER)
        failed = [
            (plan.need, plan.time.middle, key)
            for key, plan in self._plans.items()
            if plan and plan.time and plan.time.middle <= enough and not self._fits(self._planned[key])
        ]
        if not failed:
            return None
        key = min(failed)[2]
        other, plan = self._planned[key], self._plans[key]
        assert plan is not None and plan.time is not None
        different = {field: value for field, value in other.items() if not is_same(changes.get(field), value)}
        return Faster(different, plan.time.middle, self._lack(other, plan))

    def _lack(self, changes: Choice, plan: MemoryPlan) -> str:
        room = self.card.memory
        if plan.verdict == "fits":
            cfg = self._config(changes)
            assert cfg is not None and self.target.host is not None
            return f"needs {memory_size(host_bytes(cfg, plan))} of {memory_size(self.target.host)} host memory"
        needs = f"needs {plan.need / GIB:.1f} of {room / GIB:.1f} GiB"
        return needs if plan.need > room else f"{needs}, more than {TIGHT:.0%}"

    def notes(self) -> Iterator[str]:
        """Yield what the search left out."""
        found = [(base["quantize.format"], self._config(base)) for base in self._bases]
        known = {format for format, cfg in found if cfg and self._model(cfg)}
        for format in dict.fromkeys(
            format for format, cfg in found if cfg and format in RECORDED and format not in known
        ):
            yield f"quantize.format={format} was left out: it is not recorded for this model; --plan records it"


def host_bytes(cfg: RunConfig, plan: MemoryPlan) -> float:
    """Return the bytes of host memory that a plan takes on one machine."""
    return sum(item.size * (1 if item.name == "export" else cfg.parallel.devices) for item in plan.host)


def _offloaded(changes: Choice) -> str:
    """Say how much is in host memory: nothing, a part of the blocks, or everything."""
    if changes["parallel.cpu_offload"]:
        return "everything"
    return "a part" if changes["parallel.offload_blocks"] else "nothing"
