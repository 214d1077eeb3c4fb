"""The plan of a run that trains, told beside what it takes. No torch."""

from __future__ import annotations

from pathlib import Path

from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.plan.calibration import Measured
from trainer.plan.fixes import fixes, planned
from trainer.plan.hardware import GIB, like
from trainer.plan.memory import MemoryPlan


def plan_here(cfg: RunConfig, cache: Path, gpu: str, memory: int) -> MemoryPlan | None:
    """The plan for the GPU the run trains on, None where its model was not recorded.

    gpu: its name.  memory: its bytes.
    """
    try:
        return planned(cfg, like(gpu, memory), cache)
    except InputError:
        return None


def told(found: MemoryPlan) -> str:
    """The plan in a line of the log."""
    assert found.card is not None
    return (
        f"plan: {found.training.peak / GIB:.2f} GiB of tensors on each GPU at most in training; at most "
        f"{found.need / GIB:.2f} in all, in {found.fullest.name}, of {found.card.memory / GIB:.2f}"
    )


def warning(cfg: RunConfig, found: MemoryPlan, cache: Path) -> str:
    """What to say before the first step where it will not fit; empty where it does."""
    if found.verdict != "does not fit":
        return ""
    assert found.card is not None
    ways = fixes(cfg, found.card, cache)
    remedy = f"; it would fit with {ways[0]}" if ways else ""
    return (
        f"the plan needs {found.need / GIB:.2f} GiB on each GPU, which has {found.card.memory / GIB:.2f}: memory will "
        f"probably run out{remedy}"
    )


def compared(measured: Measured) -> str:
    """Plan and measurement in a line of the log."""
    return (
        f"memory: {measured.planned / GIB:.2f} GiB planned, {measured.allocated / GIB:.2f} allocated at most "
        f"({measured.allocated / measured.planned - 1:+.1%}), {measured.reserved / GIB:.2f} reserved; "
        f"{measured.seconds:.2f} s per step"
    )
