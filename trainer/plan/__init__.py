"""Plans a run before it is launched: memory and time per rank, without weights, a GPU or torch.

trace           runs the trainer's own step on the fake device, in a process of its own (with torch)
encoders        does the same with the encoders of captions and images
fake_device     a device without memory (with torch)
memory_tracker  counts the bytes of tensors by purpose (with torch)
make_tables     turns traces into the tables of a model
tables          the traced passes of a model, for every size and rank of the adapter
store           finds the tables of a run
timeline        simulates the memory of a pass under FSDP2, for every sharding
decide          the least recompute with which a run fits
sizes           derives input and sharding from a config
phases          memory of each part of a run, from the first caption to the export
storage         host memory and files
hardware        the GPUs
calibration     memory measured on this machine
memory          adds up the plan, and says whether it fits
fixes           the plan of a config, and the largest run that fits
ladder          what saves memory, and what comes next
choices         what ladder and fit may change
fit             the fastest config that fits
picture         draws the memory over a training step as SVG
compare         plan and measurement of a running training
timesteps       noise levels of a config's images (with torch)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.plan.calibration import calibrate
from trainer.plan.hardware import Card
from trainer.plan.memory import MemoryPlan, plan_of
from trainer.plan.store import find_model

__all__ = ["MemoryPlan", "plan"]


def plan(
    cfg: RunConfig, card: Card | None, cache: Path, say: Callable[[str], None] = lambda sentence: None
) -> MemoryPlan:
    """Plan the memory and time of a run on each rank.

    Args:
        cfg: The run's config.
        card: The GPU of every rank; None if unknown.
        cache: Folder shared by runs.
        say: Called with a sentence before a model must be traced, which takes minutes.

    Raises:
        InputError: The model is neither known nor on this machine.
    """
    return plan_of(cfg, find_model(cfg, cache, say), *calibrate(cache, card))
