"""Whether this machine can hold a run: its GPUs, its memory and its disk, against what the run asks for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from trainer.config.amounts import file_size, memory_size
from trainer.config.errors import InputError, Problem
from trainer.config.schema import RunConfig
from trainer.metrics import gpus
from trainer.metrics.gpus import Gpu
from trainer.plan.fixes import planned
from trainer.plan.memory import MemoryPlan
from trainer.plan.phases import ASSUMED
from trainer.run.folder import shared_cache

MOST_DISK = 0.98
"""Share of the free disk space that a run may fill."""


def problems(
    cfg: RunConfig,
    runs: Path,
    listed: Sequence[Gpu] | None = None,
    plan: Callable[[RunConfig, Path], MemoryPlan | None] | None = None,
) -> Iterator[Problem]:
    """Yield what this machine lacks for a run.

    Args:
        cfg: The run's config.
        runs: Folder in which its run folder is made.
        listed: This machine's GPUs. None: nvidia-smi is asked.
        plan: Returns the plan of a config without a GPU, for callers that have it already. None: it is made here.
    """
    usable = _num_gpus(gpus.read() if listed is None else listed)
    yield from _missing_gpus(cfg, usable)
    found = (plan or unplaced_plan)(cfg, runs)
    if found is None:
        return
    if cfg.parallel.device == "cpu" or not usable:
        yield from _missing_memory(found)
    yield from _missing_disk(cfg, found, runs)


def _num_gpus(listed: Sequence[Gpu]) -> int:
    """The number of GPUs that processes started here may use: CUDA_VISIBLE_DEVICES restricts them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(listed)
    return min(len(listed), len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def _missing_gpus(cfg: RunConfig, usable: int) -> Iterator[Problem]:
    wanted, device = cfg.parallel.devices, cfg.parallel.device
    if device == "cuda" and not usable:
        yield Problem("parallel.device", "cuda: this machine has no usable GPU; set cpu or auto, or see --doctor")
    elif device != "cpu" and usable and wanted > usable:
        have = f"{usable} GPU" + ("s" if usable > 1 else "")
        yield Problem("parallel.devices", f"{wanted} are asked for, this machine has {have}; set {usable} or fewer")


def unplaced_plan(cfg: RunConfig, runs: Path) -> MemoryPlan | None:
    """Return the plan without a GPU, or None for a model that is not recorded yet."""
    try:
        return planned(cfg, None, shared_cache(cfg, runs), ASSUMED)
    except InputError:
        return None


def _missing_memory(plan: MemoryPlan) -> Iterator[Problem]:
    """On CPU ranks the weights are in the host's memory. Other parts depend too much on the machine to be counted."""
    need = plan.ranks * sum(item.size for item in plan.training.items if item.name == "weights")
    have = psutil.virtual_memory().total
    if need > have:
        yield Problem(
            "parallel.device",
            f"without a GPU the weights alone take {memory_size(need)} of host memory, this machine has "
            f"{memory_size(have)}; choose a smaller model, or quantize.format: nf4",
        )


def _missing_disk(cfg: RunConfig, plan: MemoryPlan, runs: Path) -> Iterator[Problem]:
    base = sum(item.size for item in plan.disk if item.name == "cached base")
    need = disk_need(cfg, plan)
    free = shutil.disk_usage(_existing(runs)).free
    if need > MOST_DISK * free:
        lack = f"{file_size(need)}, {runs} has {file_size(free)} free"
        if base > need / 2:
            parts = "the quantized base, checkpoints and export"
            message = f"true: {parts} take {lack}; set false, free some space, or choose another folder"
            yield Problem("quantize.cache", message)
            return
        yield Problem(
            "checkpoint.keep",
            f"{cfg.checkpoint.keep}: checkpoints and export take {lack}; "
            "keep fewer, free some space, or choose another folder",
        )


def disk_need(cfg: RunConfig, plan: MemoryPlan) -> float:
    """Return the bytes that a run's checkpoints, export and kept quantized base take on the disk."""
    sizes = {item.name: item.size for item in plan.disk}
    return sizes.get("export", 0) + sizes.get("cached base", 0) + sizes.get("checkpoint", 0) * num_checkpoints(cfg)


def num_checkpoints(cfg: RunConfig) -> int:
    """Return the most checkpoints that a run has on the disk at the same time."""
    known = [steps for steps in cfg.stage_steps if steps is not None]
    saves = sum(known) // cfg.checkpoint.every + 1 if cfg.checkpoint.every else len(cfg.stage_steps)
    most = cfg.checkpoint.keep + cfg.checkpoint.keep_best + 1  # one more while it is being written
    # A run that is given in epochs may save any number of times.
    return most if len(known) < len(cfg.stage_steps) and cfg.checkpoint.every else min(saves, most)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest folder above it that exists."""
    return next(above for above in (folder, *folder.parents) if above.is_dir())
