"""The plan beside the form: what the run takes and what would make it fit, on GPUs here or others. No gradio."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.metrics.gpus import Gpu
from trainer.plan.fixes import Fix, fixes, planned
from trainer.plan.hardware import CARDS, Card, of_machine
from trainer.plan.memory import MemoryPlan, describe_trace
from trainer.plan.store import find_model, key_of, name_of, traced_peak
from trainer.run.folder import shared_cache

T = TypeVar("T")
HERE = "this machine"
PLACES = (HERE, *CARDS)
"""What a plan can be for."""


@dataclass(frozen=True)
class Preflight:
    """plan: None where there is none, and note says why.  ways: what would make it fit.

    can_record: whether the model can be recorded.  can_verify: whether the plan can be compared with a trace; checked
    says what came of it.  is_waiting: whether something is being recorded or traced.
    """

    plan: MemoryPlan | None = None
    ways: tuple[Fix, ...] = ()
    note: str = ""
    can_record: bool = False
    can_verify: bool = False
    checked: str = ""
    is_waiting: bool = False


class Preflights:
    """Plans of what a form shows. runs: the folder of runs, whose cache holds what was recorded."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._recorded, self._traced = Asked[None](), Asked[int]()

    def of(self, cfg: RunConfig, place: str, gpus: Sequence[Gpu]) -> Preflight:
        """The plan for one of PLACES. gpus: of this machine."""
        card, cache = _card(place, gpus), shared_cache(cfg, self._runs)
        try:
            found = planned(cfg, card, cache)
            if found:
                return self._compared(cfg, found, tuple(fixes(cfg, card, cache)) if card else ())
            name, key = at = _recorded_as(cfg)
        except InputError as error:
            return Preflight(note=str(error))
        if self._recorded.is_awaited(at):
            return Preflight(note=f"{name} is being recorded: half a minute to a few.", is_waiting=True)
        note = self._recorded.failed(at) or f"What {name} with {key} takes was not recorded yet."
        return Preflight(note=note, can_record=True)

    def record(self, cfg: RunConfig) -> None:
        """Begin to record the model of a config. Raises InputError for one that is not on this machine."""

        def record() -> None:
            find_model(cfg, shared_cache(cfg, self._runs))

        self._recorded.begin(_recorded_as(cfg), record)

    def verify(self, cfg: RunConfig, place: str, gpus: Sequence[Gpu]) -> None:
        """Begin to trace the whole model of a config, as its plan would train it."""
        cache = shared_cache(cfg, self._runs)
        found = planned(cfg, _card(place, gpus), cache)
        if found:
            self._traced.begin(_trained_as(cfg, found), partial(traced_peak, cfg, found.strategy, cache))

    def _compared(self, cfg: RunConfig, found: MemoryPlan, ways: tuple[Fix, ...]) -> Preflight:
        at = _trained_as(cfg, found)
        if self._traced.is_awaited(at):
            return Preflight(found, ways, checked="the whole model is being traced, block by block", is_waiting=True)
        peak = self._traced.answer(at)
        if peak is not None:
            return Preflight(found, ways, checked=describe_trace(found, peak))
        return Preflight(found, ways, can_verify=True, checked=self._traced.failed(at))


class Asked(Generic[T]):
    """What is found out on threads, each thing once. A failure is kept until it is asked for again."""

    def __init__(self) -> None:
        self._threads: dict[Hashable, threading.Thread] = {}
        self._answers: dict[Hashable, T] = {}
        self._failures: dict[Hashable, str] = {}

    def begin(self, what: Hashable, find: Callable[[], T]) -> None:
        """Begin to find it out, unless that goes on or is done."""
        if what in self._answers or self.is_awaited(what):
            return
        self._failures.pop(what, None)
        self._threads[what] = threading.Thread(target=self._find, args=(what, find), daemon=True)
        self._threads[what].start()

    def is_awaited(self, what: Hashable) -> bool:
        """Whether it is being found out."""
        return what in self._threads and self._threads[what].is_alive()

    def answer(self, what: Hashable) -> T | None:
        """What was found; None where nothing was."""
        return self._answers.get(what)

    def failed(self, what: Hashable) -> str:
        """Why nothing was found; empty where that is not known."""
        return self._failures.get(what, "")

    def _find(self, what: Hashable, find: Callable[[], T]) -> None:
        try:
            self._answers[what] = find()
        except (InputError, OSError) as error:
            self._failures[what] = str(error)


def _recorded_as(cfg: RunConfig) -> tuple[str, str]:
    return name_of(cfg), key_of(cfg)


def _trained_as(cfg: RunConfig, found: MemoryPlan) -> tuple[str, str]:
    return found.strategy, cfg.model_dump_json(exclude={"name": True, "sample": True})


def _card(place: str, gpus: Sequence[Gpu]) -> Card | None:
    if place in CARDS:
        return CARDS[place]
    hardware = of_machine(gpus)
    return hardware.card if hardware else None
