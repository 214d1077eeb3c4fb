"""Memory plan of the form's config on this machine's GPUs or others, and the fixes that make it fit. No gradio."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from trainer.config.schema import RunConfig
from trainer.plan.calibration import calibrate
from trainer.plan.hardware import CARDS, Card, of_machine
from trainer.plan.memory import MemoryPlan, describe_trace, history_of
from trainer.plan.picture import Outline, outline
from trainer.plan.search.fixes import planned
from trainer.plan.search.ladder import Rung, ways_to_fit
from trainer.plan.simulate.references import references_of
from trainer.plan.store import USUAL_TRACE_S, find_model, key_of, known_model, name_of, traced_peak, unread_weights
from trainer.run.folder import shared_cache
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu

T = TypeVar("T")
MOST_PLANS = 8
"""Plans that are kept: of the configs and GPUs that windows asked for last."""
NUM_BARS = 160
"""Parts of a training step that are drawn in the width of the panel."""
THIS_MACHINE = "this machine"
TARGETS = (THIS_MACHINE, *CARDS)
"""GPUs that a plan can be made for."""


@dataclass(frozen=True)
class PlanPreview:
    """The plan of a config as far as it is known.

    Attributes:
        plan: None where there is none; `note` says why.
        fixes: Changes of the config that would make it fit.
        can_record: Whether the model's allocations can be recorded, which the plan needs.
        can_verify: Whether the plan can be compared with a trace of the whole model.
        checked: The result of that comparison.
        is_waiting: Whether a recording or a trace is running.
        has_failed: Whether a recording has; `note` says why.
        share: Share of the recording that is done.
    """

    plan: MemoryPlan | None = None
    fixes: tuple[Rung, ...] = ()
    note: str = ""
    can_record: bool = False
    can_verify: bool = False
    checked: str = ""
    is_waiting: bool = False
    has_failed: bool = False
    share: float = 0.0


class _Replaced(InputError):
    """The config was changed before its recording began."""


class PlanPreviews:
    """Plans of the configs that a form shows. Recordings are kept in the cache of the folder `runs`."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._recordings, self._traces = Background[None](0), Background[int]()
        self._recorder = threading.Lock()  # one at a time: each takes all cores
        self._wanted: Hashable = None
        self._progress: tuple[Hashable, float, float] = (None, 0.0, 0.0)
        self._plans: dict[Hashable, tuple[MemoryPlan, tuple[Rung, ...]]] = {}

    def of(self, cfg: RunConfig, target: str, gpus: Sequence[Gpu]) -> PlanPreview:
        """Return the plan for one of TARGETS. `gpus` are those of this machine."""
        card, cache = _card(target, gpus), shared_cache(cfg, self._runs)
        try:
            found = self._planned(cfg, card, cache)
            if found:
                return self._compared(cfg, *found)
            name, key = recording = name_of(cfg), key_of(cfg)
        except InputError as error:
            return PlanPreview(note=str(error))
        if self._recordings.is_running(recording):
            traced, share, left_s = self._progress
            if traced != recording:
                share, left_s = 0.0, left_s + USUAL_TRACE_S  # it waits for that one
            note = f"Being worked out, once for this combination: about {left_s:.0f} s more."
            return PlanPreview(note=note, is_waiting=True, share=share)
        failure = self._recordings.failure(recording)
        note = failure or f"No recording of {name} with {key} yet."
        return PlanPreview(note=note, can_record=True, has_failed=bool(failure))

    def unplaced(self, cfg: RunConfig, runs: Path) -> MemoryPlan | None:
        """Return the plan without a GPU, as `capacity.unplaced_plan` does."""
        try:
            found = self._planned(cfg, None, shared_cache(cfg, runs))
        except InputError:
            return None
        return found[0] if found else None

    def outline(self, cfg: RunConfig, target: str, gpus: Sequence[Gpu]) -> tuple[MemoryPlan, Outline] | None:
        """Return the plan for one of TARGETS and the memory over one of its training steps; None without a plan."""
        cache = shared_cache(cfg, self._runs)
        found, model = self._planned(cfg, _card(target, gpus), cache), known_model(cfg, cache)
        if found is None or model is None:
            return None
        return found[0], outline(history_of(cfg, model, found[0]), NUM_BARS)

    def _planned(self, cfg: RunConfig, card: Card | None, cache: Path) -> tuple[MemoryPlan, tuple[Rung, ...]] | None:
        """The plan and its fixes, made once for what a form shows again and again; None for a model without a table.
        Raises InputError for a model that is not known, or whose weights are in a form that is not read."""
        card, reserve = calibrate(cache, card)
        key = cfg.model_dump_json(), references_of(cfg), card, reserve, cache
        known = self._plans.pop(key, None)
        if known is None:
            if problems := unread_weights(cfg.model):
                raise InputError("\n".join(map(str, problems)))
            plan = planned(cfg, card, cache, reserve)
            if plan is None:
                return None
            known = plan, tuple(ways_to_fit(cfg, card, cache, plan)) if card else ()
        self._plans[key] = known
        for old in list(self._plans)[:-MOST_PLANS]:
            self._plans.pop(old, None)
        return known

    def record(self, cfg: RunConfig) -> None:
        """Start recording the model of a config, after one that is running. Of several that wait only the last is
        recorded. Raises InputError for a model that is not on this machine."""
        self._wanted = recording = name_of(cfg), key_of(cfg)

        def report(share: float, left_s: float) -> None:
            self._progress = recording, share, left_s

        def record() -> None:
            with self._recorder:
                if recording != self._wanted:
                    raise _Replaced
                report(0.0, USUAL_TRACE_S)
                find_model(cfg, shared_cache(cfg, self._runs), report=report)

        self._recordings.start(recording, record)

    def verify(self, cfg: RunConfig, target: str, gpus: Sequence[Gpu]) -> None:
        """Start tracing the whole model of a config with its plan's strategy."""
        cache = shared_cache(cfg, self._runs)
        found = self._planned(cfg, _card(target, gpus), cache)
        if found:
            plan, _ = found
            self._traces.start(_trace_key(cfg, plan), partial(traced_peak, cfg, plan.strategy, cache))

    def _compared(self, cfg: RunConfig, plan: MemoryPlan, fixes: tuple[Rung, ...]) -> PlanPreview:
        key = _trace_key(cfg, plan)
        if self._traces.is_running(key):
            return PlanPreview(plan, fixes, checked="tracing the whole model, block by block", is_waiting=True)
        peak = self._traces.result(key)
        if peak is not None:
            return PlanPreview(plan, fixes, checked=describe_trace(plan, peak))
        return PlanPreview(plan, fixes, can_verify=True, checked=self._traces.failure(key))


class Background(Generic[T]):
    """Computations on threads, each done once. A failure is kept until the computation is started again.

    Args:
        most: How many results are kept, the last ones; None for all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._threads: dict[Hashable, threading.Thread] = {}
        self._results: dict[Hashable, T] = {}
        self._failures: dict[Hashable, str] = {}

    def start(self, key: Hashable, compute: Callable[[], T]) -> None:
        """Start a computation, unless it is running or done."""
        if key in self._results or self.is_running(key):
            return
        self._failures.pop(key, None)
        self._threads[key] = threading.Thread(target=self._run, args=(key, compute), daemon=True)
        self._threads[key].start()

    def is_running(self, key: Hashable) -> bool:
        return key in self._threads and self._threads[key].is_alive()

    def wait(self, key: Hashable, timeout_s: float) -> None:
        """Wait for a computation, if it is running."""
        if thread := self._threads.get(key):
            thread.join(timeout_s)

    def result(self, key: Hashable) -> T | None:
        """Return the result, or None before the computation has succeeded."""
        return self._results.get(key)

    def failure(self, key: Hashable) -> str:
        """Return the message of the last failure, or "" without one."""
        return self._failures.get(key, "")

    def _run(self, key: Hashable, compute: Callable[[], T]) -> None:
        try:
            self._results[key] = compute()
        except (InputError, OSError) as error:
            self._failures[key] = str(error)
        if self._most is not None:
            for old in list(self._results)[: max(0, len(self._results) - self._most)]:
                self._results.pop(old, None)


def _trace_key(cfg: RunConfig, plan: MemoryPlan) -> tuple[str, str]:
    return plan.strategy, cfg.model_dump_json(exclude={"name": True, "sample": True})


def _card(target: str, gpus: Sequence[Gpu]) -> Card | None:
    if target in CARDS:
        return CARDS[target]
    hardware = of_machine(gpus)
    return hardware.card if hardware else None
