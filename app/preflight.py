"""The plan beside the form: what the run takes and what would make it fit, on GPUs here or others. No gradio."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import InputError, RunConfig
from trainer.gpus import Gpu
from trainer.plan.fixes import Fix, fixes, planned
from trainer.plan.hardware import CARDS, Card, of_machine
from trainer.plan.memory import MemoryPlan
from trainer.plan.store import find_table, key_of, name_of
from trainer.rundir import shared_cache

HERE = "this machine"
PLACES = (HERE, *CARDS)
"""What a plan can be for."""


@dataclass(frozen=True)
class Preflight:
    """plan: None where there is none, and note says why.  ways: what would make it fit.

    can_record: whether the model can be recorded.  is_recording: whether that goes on.
    """

    plan: MemoryPlan | None = None
    ways: tuple[Fix, ...] = ()
    note: str = ""
    can_record: bool = False
    is_recording: bool = False


class Preflights:
    """Plans of what a form shows. runs: the folder of runs, whose cache holds what was recorded."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._recording: dict[tuple[str, str], threading.Thread] = {}
        self._failed: dict[tuple[str, str], str] = {}

    def of(self, cfg: RunConfig, place: str, gpus: Sequence[Gpu]) -> Preflight:
        """The plan for one of PLACES. gpus: of this machine."""
        card, cache = _card(place, gpus), shared_cache(cfg, self._runs)
        try:
            found = planned(cfg, card, cache)
            if found:
                return Preflight(found, tuple(fixes(cfg, card, cache)) if card else ())
            at = (name_of(cfg), key_of(cfg))
        except InputError as error:
            return Preflight(note=str(error))
        if at in self._recording and self._recording[at].is_alive():
            return Preflight(note=f"{at[0]} is being recorded: about half a minute.", is_recording=True)
        note = self._failed.get(at) or f"What {at[0]} with {at[1]} takes was not recorded yet."
        return Preflight(note=note, can_record=True)

    def record(self, cfg: RunConfig) -> None:
        """Begin to record the model of a config. Raises InputError for one that is not on this machine."""
        at = (name_of(cfg), key_of(cfg))
        self._failed.pop(at, None)
        if at not in self._recording or not self._recording[at].is_alive():
            self._recording[at] = threading.Thread(target=self._record, args=(cfg, at), daemon=True)
            self._recording[at].start()

    def _record(self, cfg: RunConfig, at: tuple[str, str]) -> None:
        try:
            find_table(cfg, shared_cache(cfg, self._runs))
        except (InputError, OSError) as error:
            self._failed[at] = str(error)


def _card(place: str, gpus: Sequence[Gpu]) -> Card | None:
    if place in CARDS:
        return CARDS[place]
    hardware = of_machine(gpus)
    return hardware.card if hardware else None
