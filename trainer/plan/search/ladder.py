"""The one ladder of what saves memory: which change comes next, and what it needs by the plan. No torch.

Changes are taken in the order of EFFECTS: as long as one is left that keeps what is learned, none is proposed that
changes it. Each rung needs less than the one before. How much is recomputed and offloaded is decided together
(`decide`), for each change anew, and both are written into a rung: a field that is left open would be decided
otherwise next to a changed neighbour.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as remembered
from pathlib import Path
from typing import Literal, get_args

from trainer.config.families import trains_on
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.plan.calibration import calibrate
from trainer.plan.hardware import Card
from trainer.plan.memory import MemoryPlan, Time, plan_of
from trainer.plan.search.choices import Choice, Ladder, micro_batches, reductions, value_of
from trainer.plan.search.decide import TIGHT, decided, is_open, thriftiest
from trainer.plan.search.fixes import changed, planned, written
from trainer.plan.simulate.phases import CAPTIONS, EXPORT, SAMPLING, TRAINING, Phase
from trainer.plan.simulate.sizes import BITS
from trainer.plan.store import known_model
from trainer.run.events import State
from trainer.system.errors import InputError

Effect = Literal["same", "samples", "rounding", "learned"]
EFFECTS: tuple[Effect, ...] = get_args(Effect)
"""What a change does to the result, from nothing to most: nothing; samples are smaller; the frozen base is rounded;
the model learns something else."""
IN_WORDS: Mapping[Effect, str] = {
    "same": "the result stays the same",
    "samples": "samples are smaller, what is learned stays the same",
    "rounding": "the frozen base is rounded, which changes the result a little",
    "learned": "which changes the result",
}
EFFECT_OF: Mapping[str, Effect] = {
    "sample.size": "samples",
    "quantize.format": "rounding",
    "quantize.encoders": "rounding",
    "adapter.rank": "learned",
    "data.resolution": "learned",
    "data.length": "learned",
}
"""{field: the effect of less of it}, for fields that have one, from the least."""
CHECKPOINTING, OFFLOAD = "train.checkpointing", "parallel.offload_blocks"
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
        values = dict(self.changes)
        if self.plan:
            values |= {CHECKPOINTING: self.plan.checkpointing, OFFLOAD: self.plan.offload_blocks}
        return tuple(
            f"{field}={value if isinstance(value, str) else json.dumps(value)}" for field, value in values.items()
        )

    @property
    def time(self) -> Time | None:
        """Time of an optimizer step."""
        return self.plan.time if self.plan else None

    def __str__(self) -> str:
        return " ".join(f"{field}={written(value)}" for field, value in self.changes.items())


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
    found = (search.fitting(effect) for effect in EFFECTS if search.can_reach(effect))
    return next((ways[:MOST] for ways in found if ways), [])


def next_rung(
    cfg: RunConfig,
    card: Card,
    cache: Path,
    missing: float = 0.0,
    state: State = "training",
    most: Effect = "learned",
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
        if search.can_reach(effect) and (found := search.fitting(effect)):
            return found[0]
        if least := search.least(effect):
            return least
    return None


def nothing_left(cfg: RunConfig) -> str:
    """Say what the user can do where no change saves enough memory."""
    ways = ["more GPUs", "larger ones", "a smaller model"]
    if isinstance(cfg.adapter, NoAdapter):
        ways.append("an adapter in place of all weights (adapter.type: lora)")
    if trains_on(cfg) == "images" and not cfg.data.has_one_resolution:
        ways.append("data.resolutions without the largest")
    return f"nothing that is searched makes it fit: take {', '.join(ways[:-1])}, or {ways[-1]}"


def effect_of(fields: Iterable[str]) -> Effect:
    """Return the largest effect of some fields."""
    return max((EFFECT_OF.get(field, "same") for field in fields), key=EFFECTS.index)


def _unplanned(cfg: RunConfig, card: Card) -> Rung | None:
    """Return what saves memory for sure, without a plan: all is recomputed and offloaded, then passes are smaller."""
    can_offload = card.name != CPU and not isinstance(cfg.adapter, NoAdapter) and not cfg.parallel.cpu_offload
    own = cfg.parallel.offload_blocks
    both = {CHECKPOINTING: "full", OFFLOAD: 1.0 if can_offload else 0 if own == "auto" else own}
    if any(value_of(cfg, field) != value for field, value in both.items()):
        return Rung(both, None, "same")
    return next((Rung({**size, **both}, None, "same") for size in _smaller_passes(cfg)), None)


def _smaller_passes(cfg: RunConfig) -> Ladder:
    """Fewer samples per pass, and more passes for the same batch."""
    sizes = micro_batches(cfg, cfg.parallel.data_size)
    return tuple(size for size in sizes if size["train.micro_batch"] < cfg.train.micro_batch)


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
        found, self._reserve = calibrate(cache, card)
        self._card, self._cache = found or card, cache
        # What is decided leaves as much room as is missing.
        lift = max(0, math.ceil(TIGHT * card.memory - limit))
        self._raised = replace(self._reserve, context=self._reserve.context + lift)
        self._kinds = [(effect_of(kind[0]), kind) for kind in self._all_kinds() if any(map(self._different, kind))]
        self._least = remembered(self._find_least)
        self._counts = LEAST_SAVED * _phase(now, part).peak

    def _all_kinds(self) -> Iterator[Ladder]:
        """Yield the values of each kind of change, from the one that changes least."""
        cfg, now, own = self._cfg, self._now, self._cfg.parallel
        can_offload = self._card.name != CPU and not own.cpu_offload
        blocks = {CHECKPOINTING: "auto"}
        if can_offload and not isinstance(cfg.adapter, NoAdapter):
            blocks[OFFLOAD] = "auto"
        yield (blocks,)
        yield _smaller_passes(cfg)
        if own.world_size > 1:
            shared = ("grad_op", "full") if now.strategy in ("ddp", "none") else ("full",)
            spread = {"parallel.shard_size": None, "parallel.reshard_after_forward": None}
            yield tuple({"parallel.strategy": one, **spread} for one in shared)
        yield ({"parallel.prefetch_forward": 0, "parallel.prefetch_backward": 0},)
        if can_offload:
            sharded = {"parallel.strategy": "full"} if now.strategy in ("ddp", "none") else {}
            yield ({"parallel.cpu_offload": True, OFFLOAD: 0, **sharded},)
        if not isinstance(cfg.adapter, NoAdapter):
            bits = BITS.get(cfg.quantize.format, 16.0)
            fewer = sorted((name for name in BITS if BITS[name] < bits), key=lambda name: -BITS[name])
            yield tuple({"quantize.format": name} for name in fewer)
        if not cfg.quantize.encoders and self._is_too_much(CAPTIONS):
            yield ({"quantize.encoders": True},)
        for ladder in reductions(cfg):
            if not any("sample.size" in choice for choice in ladder) or self._is_too_much(SAMPLING):
                yield ladder

    def _need(self, plan: MemoryPlan) -> float:
        return _phase(plan, self._part).need

    def _rung(self, choice: Choice, plan: MemoryPlan, effect: Effect) -> Rung:
        return Rung(self._different(choice), plan, effect, self._need(plan))

    def _different(self, choice: Choice) -> Choice:
        return {field: value for field, value in choice.items() if value_of(self._cfg, field) != value}

    def _is_too_much(self, name: str) -> bool:
        if self._part not in (None, name):
            return False
        return any(phase.name == name and phase.need > self._limit for phase in self._now.phases)

    def can_reach(self, effect: Effect) -> bool:
        """Whether changes up to an effect can bring the need below the limit."""
        found = self._least(effect)
        return found is not None and self._need(found[1]) <= NEARLY * self._limit

    def fitting(self, effect: Effect) -> list[Rung]:
        """Return the fewest changes with which the run stays within the limit, the fastest first."""
        kinds = self._up_to(effect)
        for count in range(1, len(kinds) + 1):
            several = (some for some in itertools.combinations(kinds, count) if some[-1][0] == effect)
            found = [rung for some in several if (rung := self._first_fitting([ladder for _, ladder in some], effect))]
            if found:
                return sorted(found, key=_seconds)
        return []

    def least(self, effect: Effect) -> Rung | None:
        """Return the changes up to an effect that need the least; None where they save nothing."""
        found = self._least(effect)
        if found is None:
            return None
        choice, plan = found
        saved = self._need(self._now) - self._need(plan)
        return self._rung(choice, plan, effect) if saved > self._counts else None

    def _up_to(self, effect: Effect) -> list[tuple[Effect, Ladder]]:
        kinds = [kind for kind in self._kinds if EFFECTS.index(kind[0]) <= EFFECTS.index(effect)]
        return sorted(kinds, key=lambda kind: EFFECTS.index(kind[0]))

    def _first_fitting(self, ladders: Sequence[Ladder], effect: Effect) -> Rung | None:
        for parts in itertools.product(*ladders):
            choice = _merged(parts)
            thrifty = self._plan(choice, thriftiest_only=True)
            if thrifty is None or not self._is_within(thrifty, NEARLY):
                continue
            plan = self._plan(choice)
            if plan is not None and self._is_within(plan):
                return self._rung(choice, plan, effect)
        return None

    def _is_within(self, plan: MemoryPlan, times: float = 1.0) -> bool:
        """Whether the part stays within the limit, and no other outgrows the GPU or what it was."""
        most = max(TIGHT * self._card.memory, self._now.need)
        return self._need(plan) <= times * self._limit and plan.need <= times * most

    def _find_least(self, effect: Effect) -> tuple[Choice, MemoryPlan] | None:
        """Return the changes up to an effect that need the least, without those that save nothing."""
        ladders = [ladder for _, ladder in self._up_to(effect)]
        blockwise = [ladder for ladder in ladders if "parallel.cpu_offload" not in ladder[-1]]
        found = [(some, plan) for some in map(self._ends, (blockwise, ladders)) if (plan := self._thrifty(some))]
        if not found:
            return None
        kept, plan = min(found, key=lambda one: self._need(one[1]))
        enough = self._need(plan) + self._counts / 2
        for part in kept[::-1]:
            rest = [one for one in kept if one is not part]
            fewer = self._thrifty(rest)
            if fewer and self._need(fewer) <= enough:
                kept, plan = rest, fewer
        return _merged(kept), plan

    def _ends(self, ladders: Sequence[Ladder]) -> list[Choice]:
        """Return the last choice of each ladder that is valid with those before, and recorded."""
        found: list[Choice] = []
        for ladder in ladders:
            valid = (one for one in ladder[::-1] if self._plan(_merged([*found, one]), thriftiest_only=True))
            found += itertools.islice(valid, 1)
        return found

    def _thrifty(self, parts: Sequence[Choice]) -> MemoryPlan | None:
        """Return the plan of changes that need the least; None where another part of the run outgrows the GPU."""
        plan = self._plan(_merged(parts), thriftiest_only=True)
        return plan if plan and plan.need <= max(TIGHT * self._card.memory, self._now.need) else None

    def _plan(self, choice: Choice, thriftiest_only: bool = False) -> MemoryPlan | None:
        """Return the plan of a change; None where it is invalid or the model was not recorded."""
        cfg = changed(self._cfg, choice)
        model = known_model(cfg, self._cache) if cfg else None
        if cfg is None or model is None:
            return None
        if is_open(cfg):
            if thriftiest_only:
                cfg = thriftiest(cfg, model)
            else:
                found = plan_of(cfg, model, self._card, self._raised)
                cfg = decided(cfg, found.checkpointing, found.offload_blocks)
        return plan_of(cfg, model, self._card, self._reserve)


def _merged(parts: Sequence[Choice]) -> Choice:
    return {field: value for part in parts for field, value in part.items()}


def _seconds(rung: Rung) -> float:
    assert rung.time is not None
    return rung.time.middle
