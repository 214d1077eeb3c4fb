"""The fastest settings of the form's run that fit its GPUs, searched on a thread. No gradio."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from app.form.plan_preview import THIS_MACHINE, Background
from trainer.config.schema import RunConfig
from trainer.plan.calibration import calibrate
from trainer.plan.hardware import CARDS, Hardware, of_machine
from trainer.plan.search.choices import KEPT, kept_fields
from trainer.plan.search.fit import Fit, Target, fit
from trainer.run.folder import shared_cache
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu

Allowed = Literal["format", "resolution", "rank"]
"""Fields that a search may change although it changes the result."""
WAIT_S = 0.3
"""Seconds for which a question waits for its search."""
MOST_FITS = 8
"""Results that are kept: of the configs and GPUs that windows asked for last."""
FAILED = "The search ended without a result: search again. If that happens again, the terminal of the page says why."


@dataclass(frozen=True)
class Question:
    """A config and the GPUs it is to fit.

    Attributes:
        cfg: The config.
        hardware: The GPUs, with their number.
        host: Bytes of host memory; None if unknown.
        cache: Folder shared by runs.
    """

    cfg: RunConfig
    hardware: Hardware
    host: float | None
    cache: Path

    @property
    def count(self) -> int:
        """GPUs of each machine."""
        return self.hardware.count or self.cfg.parallel.devices

    @property
    def key(self) -> str:
        """Changes when the search could find something else."""
        measured = calibrate(self.cache, self.hardware.card)
        parts = self.cfg.model_dump_json(exclude={"name": True}), measured, self.count, self.host, self.cache
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class FitPreviews:
    """Searches that windows of the form asked for."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._searches = Background[Fit](MOST_FITS)

    def question(self, cfg: RunConfig, target: str, gpus: Sequence[Gpu]) -> Question | None:
        """Return what a search would be about, for one of `plan_preview.TARGETS`; None without GPUs to fit.

        Args:
            cfg: The config.
            target: The GPUs; others than this machine's are as many as the config has.
            gpus: GPUs of this machine.
        """
        is_here = target == THIS_MACHINE
        hardware = of_machine(gpus) if is_here else Hardware(CARDS[target]) if target in CARDS else None
        if hardware is None:
            return None
        host = float(psutil.virtual_memory().total) if is_here else None
        return Question(cfg, hardware, host, shared_cache(cfg, self._runs))

    def search(self, question: Question, allowed: Collection[Allowed]) -> Fit | None:
        """Start a search, unless it is running or done, and return its result if it is there within WAIT_S."""
        kept = kept_fields(name for name in KEPT if name not in allowed)
        target = Target(question.hardware.card, question.count, kept, host=question.host)
        search = partial(fit, question.cfg, target, question.cache)
        self._searches.start(_key(question.key, allowed), search)
        return self.found(question.key, allowed)

    def found(self, key: str, allowed: Collection[Allowed]) -> Fit | None:
        """Return the result of a search; None while it is running, for at least WAIT_S.

        Raises:
            InputError: The search failed, or an earlier process of the page made it.
        """
        at = _key(key, allowed)
        self._searches.wait(at, WAIT_S)
        found = self.known(key, allowed)
        if found is None and not self._searches.is_running(at):
            raise InputError(self._searches.failure(at) or FAILED)
        return found

    def known(self, key: str, allowed: Collection[Allowed]) -> Fit | None:
        """Return the result of a search without waiting; None without one."""
        return self._searches.result(_key(key, allowed))


def _key(key: str, allowed: Collection[Allowed]) -> tuple[str, frozenset[Allowed]]:
    return key, frozenset(allowed)
