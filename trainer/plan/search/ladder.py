"""The one ladder of what saves memory: which change comes next, and what it needs by the plan. No torch.

Changes are taken in the order of EFFECTS: as long as one is left that keeps the result, none is proposed that
changes it. Each rung needs less than the one before. How much is recomputed and offloaded is decided together
(`decide`), for each change anew, and both are written into a rung: a field that is left open would be decided
otherwise next to a changed neighbour. See DECISIONS 214.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as remembered
from pathlib import Path
from typing import Any, Literal, get_args

from trainer.config.families import trains_on
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.plan.calibration import calibrate
from trainer.plan.hardware import Card
from trainer.plan.memory import MemoryPlan, Time, plan_of
from trainer.plan.search.choices import Choice, Ladder, is_same, merged, micro_batches, reductions, value_of
from trainer.plan.search.decide import TIGHT, decided, is_open, thriftiest
from trainer.plan.search.fixes import assigned, changed, planned
from trainer.plan.simulate.phases import CAPTIONS, EXPORT, SAMPLING, TRAINING, Phase
from trainer.plan.simulate.sizes import BITS, PROPOSED
from trainer.plan.store import known_model
from trainer.run.events import State
from trainer.system.errors import InputError

Effect = Literal["same", "samples", "rounding", "result"]
EFFECTS: tuple[Effect, ...] = get_args(Effect)
"""Effects of a change on the result, from nothing to most: nothing; samples are smaller; the frozen base is rounded;
the model learns something else."""
IN_WORDS: Mapping[Effect, str] = {
    "same": "the result stays the same",
    "samples": "samples are smaller, training stays the same",
    "rounding": "the frozen base is rounded, which changes the result a little",
    "result": "which changes the result",
}
EFFECT_OF: Mapping[str, Effect] = {
    "sample.size": "samples",
    "quantize.format": "rounding",
    "quantize.encoders": "rounding",
    "adapter.rank": "result",
    "data.resolution": "result",
    "data.length": "result",
}
"""{field: the effect of less of it}, for fields that have one, from the least."""
CHECKPOINTING, OFFLOAD = "train.checkpointing", "parallel.offload_blocks"
DECIDED = (CHECKPOINTING, OFFLOAD)
"""The fields that are decided together, and are in each rung."""
CPU = "CPU"
"""Name of the card that stands for host memory: what is offloaded from it stays in it."""
MOST = 3
"""Most ways that are proposed."""
LEAST_MISSING = 0.05
"""Share of a GPU's memory that is taken to be missing at least: less is soon missing again."""
LEAST_SAVED = 0.005
"""Share of the planned tensors that a change must save to count."""
NEARLY = 1.02
"""Times the memory of the thriftiest decision may be above the best one's: backward begins with the last block."""
PARTS: Mapping[State, str] = {
    "encoding": CAPTIONS,
    "training": TRAINING,
    "saving": TRAINING,
    "sampling": SAMPLING,
    "exporting": EXPORT,
}
"""{state of a run: the part of its plan}"""


@dataclass(frozen=True)
class Rung:
    """A change that saves memory.

    Attributes:
        changes: {field: value}; `auto` where the plan decides.
        plan: The plan with the change; None for a model that was not recorded.
        effect: What the change does to the result.
        need: Bytes on each GPU that the part of the run needs by the plan where memory ran out; of the whole run where
            none did. 0 without a plan.
    """

    changes: Choice
    plan: MemoryPlan | None
    effect: Effect
    need: float = 0.0

    @property
    def settings(self) -> tuple[str, ...]:
        """The change as `key=value` for a config, with what the plan has decided."""
        both = (self.plan.checkpointing, self.plan.offload_blocks) if self.plan else map(self.changes.get, DECIDED)
        others = {field: value for field, value in self.changes.items() if field not in DECIDED}
        values = others | dict(zip(DECIDED, both, strict=True))
        return tuple(
            f"{field}={value if isinstance(value, str) else json.dumps(value)}" for field, value in values.items()
        )

    @property
    def time(self) -> Time | None:
        """Time of an optimizer step."""
        return self.plan.time if self.plan else None

    @property
    def in_words(self) -> str:
        """The effect of the change on the result."""
        return IN_WORDS[self.effect]

    def __str__(self) -> str:
        return assigned(self.changes)


def ways_to_fit(cfg: RunConfig, card: Card, cache: Path, now: MemoryPlan | None = None) -> list[Rung]:
    """Find the smallest changes that make a run fit, before it is started.

    Args:
        cfg: The run's config.
        card: The GPU of each rank.
        cache: Folder shared by runs.
        now: The plan of the run as it is, where that is known.

    Returns:
        The changes with the least effect, the fastest first; empty if the run fits or nothing helps.
    """
    now = now or planned(cfg, card, cache)
    if now is None or now.verdict == "fits":
        return []
    search = _Search(cfg, card, cache, now, None, TIGHT * card.memory)
    return next(filter(None, map(search.fitting, EFFECTS)), [])[:MOST]


def next_rung(
    cfg: RunConfig,
    card: Card,
    cache: Path,
    missing: float = 0.0,
    state: State = "training",
    most: Effect = "result",
) -> Rung | None:
    """Return the next change after memory ran out.

    Args:
        cfg: The config with which it did.
        card: The GPU of each rank.
        cache: Folder shared by runs.
        missing: Bytes that were missing; 0 if unknown. Memory in addition to the plan's is reserved for them.
        state: What the run did.
        most: The most effect that a change may have.

    Returns:
        The change; None where nothing is left.
    """
    try:
        now = planned(cfg, card, cache)
    except InputError:  # the model is not on this machine
        now = None
    if now is None:
        return _unplanned(cfg, card)
    part = PARTS.get(state)
    limit = min(TIGHT * card.memory, _phase(now, part).need) - max(missing, LEAST_MISSING * card.memory)
    search = _Search(decided(cfg, now.checkpointing, now.offload_blocks), card, cache, now, part, limit)
    for effect in EFFECTS[: EFFECTS.index(most) + 1]:
        if found := search.fitting(effect):
            return found[0]
        if least := search.least(effect):
            return least
    return None


def nothing_left(cfg: RunConfig) -> str:
    """Say what the user can do where no change saves enough memory."""
    ways = ["more GPUs", "larger ones", "a smaller model"]
    if cfg.parallel.device == "cpu":
        fewer = ["fewer ranks on this machine (parallel.devices)"] if cfg.parallel.devices > 1 else []
        ways = ["more host memory", *fewer, "a smaller model"]
    if isinstance(cfg.adapter, NoAdapter):
        ways.append("an adapter in place of all weights (adapter.type: lora)")
    if trains_on(cfg) == "images" and not cfg.data.has_one_resolution:
        ways.append("data.resolutions without the largest")
    return f"nothing that is searched makes it fit: take {', '.join(ways[:-1])}, or {ways[-1]}"


def effect_of(fields: Iterable[str]) -> Effect:
    """Return the largest effect of some fields."""
    return max((EFFECT_OF.get(field, "same") for field in fields), key=EFFECTS.index)


def _unplanned(cfg: RunConfig, card: Card) -> Rung | None:
    """Return what saves memory for sure, without a plan: first all is recomputed and offloaded."""
    own = cfg.parallel.offload_blocks
    offloads = _can_offload(cfg, card) and not isinstance(cfg.adapter, NoAdapter)
    most: Choice = {CHECKPOINTING: "full", OFFLOAD: 1.0 if offloads else 0 if own == "auto" else own}
    for choice in ({}, *itertools.chain.from_iterable(_neutral(cfg, card, cfg.parallel.strategy))):
        changes = {**most, **choice}
        if _different(cfg, changes) and changed(cfg, changes):
            others = {field: value for field, value in _different(cfg, choice).items() if field not in DECIDED}
            return Rung(others | {field: changes[field] for field in DECIDED}, None, "same")
    return None


def _can_offload(cfg: RunConfig, card: Card) -> bool:
    return card.name != CPU and not cfg.parallel.cpu_offload


def _neutral(cfg: RunConfig, card: Card, strategy: str) -> Iterator[Ladder]:
    """Yield what leaves the result, in addition to recompute and offloaded blocks: each kind of change, with its values
    from the one that changes least. strategy: the decided one, or `auto`."""
    is_whole = strategy in ("ddp", "none")
    sizes = micro_batches(cfg, cfg.parallel.data_size)
    yield tuple(size for size in sizes if size["train.micro_batch"] < cfg.train.micro_batch)
    if cfg.parallel.world_size > 1:
        spread = {"parallel.shard_size": None, "parallel.reshard_after_forward": None}
        yield tuple({"parallel.strategy": one, **spread} for one in (("grad_op", "full") if is_whole else ("full",)))
    yield ({"parallel.prefetch_forward": 0, "parallel.prefetch_backward": 0},)
    if _can_offload(cfg, card):
        sharded = {"parallel.strategy": "full"} if is_whole else {}
        yield ({"parallel.cpu_offload": True, OFFLOAD: 0, **sharded},)


def _different(cfg: RunConfig, choice: Choice) -> Choice:
    """Return the fields of a choice that change a config."""
    return {field: value for field, value in choice.items() if not is_same(value_of(cfg, field), value)}


def _phase(plan: MemoryPlan, part: str | None) -> Phase:
    """Return a part of a run; the fullest where it has none of that name."""
    return next((phase for phase in plan.phases if phase.name == part), plan.fullest)


class _Search:
    """The changes of one config, each planned once.

    Args:
        now: The plan of the config.
        part: The part of the run whose memory is to fall; None for the fullest.
        limit: Bytes that it may need.
    """

    def __init__(
        self, cfg: RunConfig, card: Card, cache: Path, now: MemoryPlan, part: str | None, limit: float
    ) -> None:
        self._cfg, self._now, self._part, self._limit = cfg, now, part, limit
        self._card, self._reserve = calibrate(cache, card)
        self._cache = cache
        # What is decided leaves as much room as is missing.
        lift = max(0, math.ceil(TIGHT * card.memory - limit))
        self._raised = replace(self._reserve, context=self._reserve.context + lift)
        self._kinds = [
            (effect_of(kind[0]), kind) for kind in self._all_kinds() if any(_different(cfg, one) for one in kind)
        ]
        self._least = remembered(self._find_least)
        self._plans: dict[tuple[Any, ...], MemoryPlan | None] = {}
        self._counts = LEAST_SAVED * _phase(now, part).peak

    def _all_kinds(self) -> Iterator[Ladder]:
        """Yield the values of each kind of change, from the one that changes least."""
        cfg = self._cfg
        blocks = {CHECKPOINTING: "auto"}
        if _can_offload(cfg, self._card) and not isinstance(cfg.adapter, NoAdapter):
            blocks[OFFLOAD] = "auto"
        yield (blocks,)
        yield from _neutral(cfg, self._card, self._now.strategy)
        if not isinstance(cfg.adapter, NoAdapter):
            bits = BITS.get(cfg.quantize.format, 16.0)
            fewer = sorted((name for name in PROPOSED if BITS[name] < bits), key=lambda name: -BITS[name])
            yield tuple({"quantize.format": name} for name in fewer)
        if not cfg.quantize.encoders and self._is_too_much(CAPTIONS):
            yield ({"quantize.encoders": True},)
        for ladder in reductions(cfg):
            if not any("sample.size" in choice for choice in ladder) or self._is_too_much(SAMPLING):
                yield ladder

    def _need(self, plan: MemoryPlan) -> float:
        return _phase(plan, self._part).need

    def _rung(self, choice: Choice, plan: MemoryPlan) -> Rung:
        changes = _different(self._cfg, choice)
        return Rung(changes, plan, effect_of(changes), self._need(plan))

    def _is_too_much(self, name: str) -> bool:
        if self._part not in (None, name):
            return False
        return any(phase.name == name and phase.need > self._limit for phase in self._now.phases)

    def fitting(self, effect: Effect) -> list[Rung]:
        """Return the changes up to an effect with which the run stays within the limit, the fastest first.

        Of each effect, from the largest, as little is changed as lets those of less effect do the rest; of those that
        keep the result, the fewest.
        """
        if not self._reaches(self._up_to(effect)):
            return []
        chosen: list[Ladder] = []
        for level in EFFECTS[EFFECTS.index(effect) : 0 : -1]:
            own = [ladder for one, ladder in self._kinds if one == level]
            less = self._up_to(EFFECTS[EFFECTS.index(level) - 1])
            options = ([(choice,) for choice in option] for option in _options(own))
            chosen += next(option for option in options if self._reaches([*less, *option, *chosen]))
        neutral = self._up_to("same")
        for count in range(len(neutral) + 1):
            several = itertools.combinations(neutral, count)
            if found := list(filter(None, (self._first_fitting([*some, *chosen]) for some in several))):
                return sorted(found, key=_seconds)
        return []

    def _reaches(self, ladders: Sequence[Ladder]) -> bool:
        """Whether the last choices of all ladders bring the need below the limit."""
        return any(self._fits(merged(*some)) for some, _ in self._deepest(ladders))

    def least(self, effect: Effect) -> Rung | None:
        """Return the changes up to an effect that need the least; None where they save nothing."""
        found = self._least(effect)
        if found is None:
            return None
        choice, plan = found
        saved = self._need(self._now) - self._need(plan)
        return self._rung(choice, plan) if saved > self._counts else None

    def _up_to(self, effect: Effect) -> list[Ladder]:
        most = EFFECTS.index(effect)
        kinds = sorted(self._kinds, key=lambda kind: EFFECTS.index(kind[0]))
        return [ladder for one, ladder in kinds if EFFECTS.index(one) <= most]

    def _first_fitting(self, ladders: Sequence[Ladder]) -> Rung | None:
        for choice in itertools.starmap(merged, itertools.product(*ladders)):
            if plan := self._fits(choice):
                return self._rung(choice, plan)
        return None

    def _fits(self, choice: Choice) -> MemoryPlan | None:
        """Return the plan of a change that stays within the limit, else None."""
        thrifty = self._plan(choice, thriftiest_only=True)
        if thrifty is None or not self._is_within(thrifty, NEARLY):
            return None
        plan = self._plan(choice)
        return plan if plan and self._is_within(plan) else None

    def _is_within(self, plan: MemoryPlan, times: float = 1.0) -> bool:
        """Whether the part stays within the limit, and no other outgrows the GPU or what it was."""
        most = max(TIGHT * self._card.memory, self._now.need)
        return self._need(plan) <= times * self._limit and plan.need <= times * most

    def _find_least(self, effect: Effect) -> tuple[Choice, MemoryPlan] | None:
        """Return the changes up to an effect that need the least, without those that save nothing."""
        found = self._deepest(self._up_to(effect))
        if not found:
            return None
        kept, plan = min(found, key=lambda one: self._need(one[1]))
        enough = self._need(plan) + self._counts / 2
        for part in kept[::-1]:
            rest = [one for one in kept if one is not part]
            fewer = self._thrifty(rest)
            if fewer and self._need(fewer) <= enough:
                kept, plan = rest, fewer
        return merged(*kept), plan

    def _deepest(self, ladders: Sequence[Ladder]) -> list[tuple[list[Choice], MemoryPlan]]:
        """Return the last choices of all ladders with their plan, with blocks or everything offloaded."""
        blockwise = [ladder for ladder in ladders if "parallel.cpu_offload" not in ladder[-1]]
        return [(some, plan) for some in map(self._ends, (blockwise, ladders)) if (plan := self._thrifty(some))]

    def _ends(self, ladders: Sequence[Ladder]) -> list[Choice]:
        """Return the last choice of each ladder that is valid with those before, and recorded."""
        found: list[Choice] = []
        for ladder in ladders:
            valid = (one for one in ladder[::-1] if self._plan(merged(*found, one), thriftiest_only=True))
            found += itertools.islice(valid, 1)
        return found

    def _thrifty(self, parts: Sequence[Choice]) -> MemoryPlan | None:
        """Return the plan of changes that need the least; None where another part of the run outgrows the GPU."""
        plan = self._plan(merged(*parts), thriftiest_only=True)
        return plan if plan and plan.need <= max(TIGHT * self._card.memory, self._now.need) else None

    def _plan(self, choice: Choice, thriftiest_only: bool = False) -> MemoryPlan | None:
        """Return the plan of a change; None where it is invalid or the model was not recorded."""
        key = (*choice.items(), thriftiest_only)
        if key not in self._plans:
            self._plans[key] = self._planned(choice, thriftiest_only)
        return self._plans[key]

    def _planned(self, choice: Choice, thriftiest_only: bool) -> MemoryPlan | None:
        cfg = changed(self._cfg, choice)
        model = known_model(cfg, self._cache) if cfg else None
        if cfg is None or model is None:
            return None
        if is_open(cfg) and thriftiest_only:
            cfg = thriftiest(cfg, model)
        elif is_open(cfg):
            found = plan_of(cfg, model, self._card, self._raised)
            cfg = decided(cfg, found.checkpointing, found.offload_blocks)
        return plan_of(cfg, model, self._card, self._reserve)


def _options(ladders: Sequence[Ladder]) -> Iterator[tuple[Choice, ...]]:
    """Yield choices of some ladders: none, then of one, then of several, each from what changes least."""
    for count in range(len(ladders) + 1):
        for some in itertools.combinations(ladders, count):
            yield from itertools.product(*some)


def _seconds(rung: Rung) -> float:
    assert rung.time is not None
    return rung.time.middle
