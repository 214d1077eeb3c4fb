"""What a run takes, before anything is launched: memory and time per rank, without weights, a GPU or torch.

record    runs the trainer's own step on a device that holds nothing, in a process of its own (with torch)
tables    what was recorded of a model, for every size and rank of the adapter
timeline  plays it with FSDP2's memory in it, for every way of sharding
encoders  does the same with what encodes captions and images
sizes     what a config asks of its model
phases    what is held from the first caption to the export
storage   host memory and files
memory    adds up what a run takes, and says whether it fits
hardware  the GPUs
store     finds the table of a run
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.plan.calibration import reserve_of
from trainer.plan.hardware import Card
from trainer.plan.memory import MemoryPlan, plan_of
from trainer.plan.store import find_model

__all__ = ["MemoryPlan", "plan"]


def plan(
    cfg: RunConfig, card: Card | None, cache: Path, say: Callable[[str], None] = lambda sentence: None
) -> MemoryPlan:
    """What the run takes on each rank. card: the GPU of every rank.  cache: folder shared by runs.

    say: told before the model must be recorded first, which takes minutes. Raises InputError for a model that is
    neither known nor on this machine.
    """
    return plan_of(cfg, find_model(cfg, cache, say), card, reserve_of(cache, card))
