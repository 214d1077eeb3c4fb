"""Compares the plan of a running training with what it measures. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.plan.calibration import Measured, calibrate
from trainer.plan.hardware import like
from trainer.plan.memory import MemoryPlan, plan_of
from trainer.plan.search.decide import decided
from trainer.plan.search.fixes import planned
from trainer.plan.search.ladder import ways_to_fit
from trainer.plan.store import find_model, known_model
from trainer.system.amounts import GIB
from trainer.system.errors import InputError


def plan_here(cfg: RunConfig, cache: Path, gpu: str, memory: int) -> MemoryPlan | None:
    """Return the plan for the GPU on which the run trains, or None if its model was not traced.

    Args:
        cfg: The run's config.
        cache: Folder shared by runs.
        gpu: The GPU's name.
        memory: The GPU's bytes.
    """
    try:
        return planned(cfg, like(gpu, memory), cache)
    except InputError:
        return None


def decide_here(cfg: RunConfig, cache: Path, gpu: str | None, memory: int, say: Callable[[str], None]) -> RunConfig:
    """Return the config with decided `train.checkpointing` and `parallel.offload_blocks`.

    For a GPU a model that was not traced yet is traced first, which takes 10 to 30 s; where that
    fails, all blocks are recomputed. On the CPU such a model recomputes nothing.

    Args:
        cfg: The run's config.
        cache: Folder shared by runs.
        gpu: The GPU's name; None for the CPU.
        memory: Bytes of the device.
        say: Called with sentences for the log.
    """
    try:
        model = find_model(cfg, cache, say) if gpu else known_model(cfg, cache)
    except InputError as error:
        say(f"auto became the most that saves memory, as the run could not be planned: {error}")
        return _without_plan(cfg, "full", 1.0)
    if model is None:
        return _without_plan(cfg, "none", 0)
    card, reserve = calibrate(cache, like(gpu or "CPU", memory))
    found = plan_of(cfg, model, card, reserve)
    say(
        f"auto became {' and '.join(decisions(cfg, found))}: by the plan, training takes "
        f"{found.training.need / GIB:.2f} of {memory / GIB:.2f} GiB"
    )
    return decided(cfg, found.checkpointing, found.offload_blocks)


def _without_plan(cfg: RunConfig, checkpointing: str, offload_blocks: float) -> RunConfig:
    again, offload = cfg.train.checkpointing, cfg.parallel.offload_blocks
    return decided(cfg, checkpointing if again == "auto" else again, offload_blocks if offload == "auto" else offload)


def decisions(cfg: RunConfig, plan: MemoryPlan) -> list[str]:
    """Return what the plan decided, as `train.checkpointing selective`."""
    found = {"train.checkpointing": plan.checkpointing, "parallel.offload_blocks": plan.offload_blocks}
    given = {"train.checkpointing": cfg.train.checkpointing, "parallel.offload_blocks": cfg.parallel.offload_blocks}
    return [f"{field} {value}" for field, value in found.items() if given[field] == "auto"]


def describe_plan(plan: MemoryPlan) -> str:
    """Return the plan as a line for the log."""
    assert plan.card is not None
    return (
        f"plan: {plan.training.peak / GIB:.2f} GiB of tensors on each GPU at most in training; at most "
        f"{plan.need / GIB:.2f} in all, in {plan.fullest.name}, of {plan.card.memory / GIB:.2f}"
    )


def warning(cfg: RunConfig, plan: MemoryPlan, cache: Path) -> str:
    """Return a warning before the first step if the run will not fit, else an empty text."""
    if plan.verdict != "does not fit":
        return ""
    assert plan.card is not None
    ways = ways_to_fit(cfg, plan.card, cache, plan)
    remedy = f"; it would fit with {ways[0]}" if ways else ""
    return (
        f"the plan needs {plan.need / GIB:.2f} GiB on each GPU, which has {plan.card.memory / GIB:.2f}: memory will "
        f"probably run out{remedy}"
    )


def describe_measured(measured: Measured) -> str:
    """Return plan and measurement as a line for the log."""
    return (
        f"memory: {measured.planned / GIB:.2f} GiB planned, {measured.allocated / GIB:.2f} allocated at most "
        f"({measured.allocated / measured.planned - 1:+.1%}), {measured.reserved / GIB:.2f} reserved; "
        f"{measured.seconds:.2f} s per step"
    )
