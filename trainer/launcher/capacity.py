"""Whether this machine can hold a run: its GPUs, its memory and its disk, against what the run asks for.

See DECISIONS 121.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from trainer.config.load import stage_configs
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.plan.hardware import of_machine
from trainer.plan.memory import MemoryPlan
from trainer.plan.search.fixes import planned
from trainer.plan.simulate.phases import ASSUMED
from trainer.run.folder import freeing, shared_cache
from trainer.system import gpus
from trainer.system.amounts import GIB, MIB, file_size, memory_size
from trainer.system.errors import InputError, Problem
from trainer.system.gpus import Gpu, support, visible

MOST_DISK = 0.98
"""Share of the free disk space that a run may fill."""


def problems(
    cfg: RunConfig,
    runs: Path,
    listed: Sequence[Gpu] | None = None,
    plan: Callable[[RunConfig, Path], MemoryPlan | None] | None = None,
    chosen: Sequence[int] = (),
) -> Iterator[Problem]:
    """Yield what this machine lacks for a run.

    Args:
        cfg: The run's config.
        runs: Folder in which its run folder is made.
        listed: This machine's GPUs. None: nvidia-smi is asked.
        plan: Returns the plan of a config without a GPU, for callers that have it already. None: it is made here.
        chosen: Indices of the GPUs that the run may use; empty for all that are visible.
    """
    given: Sequence[Gpu] = ()
    try:
        given = _given(cfg, listed, chosen)
        yield from _wrong_gpus(cfg, given, listed)
    except InputError as error:
        yield _unknown_gpus(cfg, error)
    found = (plan or unplaced_plan)(cfg, runs)
    if found is None:
        return
    # On GPUs the plan says what fits; only ranks on the CPU take the host's memory for all.
    if not given and not _is_rocm():
        yield from _missing_memory(found)
    yield from _missing_pinned_memory(cfg, _placed(cfg, found, given, runs))
    yield from _missing_disk(cfg, found, runs)


def gpu_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Yield what is wrong with this machine's GPUs for a run, as `problems` does."""
    try:
        yield from _wrong_gpus(cfg, _given(cfg, None, ()), None)
    except InputError as error:
        yield _unknown_gpus(cfg, error)


def _unknown_gpus(cfg: RunConfig, error: InputError) -> Problem:
    return Problem("parallel.device", f"{cfg.parallel.device}: {error}; or set cpu")


def _given(cfg: RunConfig, listed: Sequence[Gpu] | None, chosen: Sequence[int]) -> Sequence[Gpu]:
    """The GPUs that the run gets, none on the CPU."""
    return () if cfg.parallel.device == "cpu" else visible.for_run(chosen, listed)


def _is_rocm() -> bool:
    build = support.installed()
    return build is not None and bool(build.hip)


def _wrong_gpus(cfg: RunConfig, given: Sequence[Gpu], listed: Sequence[Gpu] | None) -> Iterator[Problem]:
    device, wanted = cfg.parallel.device, cfg.parallel.devices
    if device == "cpu" or (_is_rocm() and not given):
        return
    if found := support.unusable(given, support.installed()):
        yield Problem("parallel.device", f"{device}: {found}")
    elif device == "cuda" and not given:
        why = visible.hidden(gpus.read() if listed is None else listed) or "this machine has no usable GPU"
        yield Problem("parallel.device", f"cuda: {why}; set cpu or auto, or see --doctor")
    elif given and wanted > 1 and given[0].is_slice:
        message = f"{wanted} are asked for, but a run trains on one MIG slice: NCCL connects none; set 1"
        yield Problem("parallel.devices", message)
    elif given and wanted > len(given):
        have = f"{len(given)} GPU" + ("s" if len(given) > 1 else "")
        yield Problem("parallel.devices", f"{wanted} are asked for, this run may use {have}; set {len(given)} or fewer")
    else:
        yield from _without_bf16(cfg, given)


def _without_bf16(cfg: RunConfig, given: Sequence[Gpu]) -> Iterator[Problem]:
    old = next((gpu for gpu in given[: cfg.parallel.devices] if support.lacks_bf16(gpu)), None)
    if old and any(part.train.precision == "bf16" for part in stage_configs(cfg)):
        yield Problem(
            "train.precision",
            f"bf16: {old.name} has compute capability {old.compute_cap}, and bf16 needs 8.0 or more; set fp32, or use "
            "a newer GPU",
        )


MOST_TAKEN = 0.5
"""Share of a GPU's memory that others may use before a run without a plan is warned."""


def warnings(cfg: RunConfig, runs: Path, listed: Sequence[Gpu] | None = None, chosen: Sequence[int] = ()) -> list[str]:
    """Return what this machine's user should know before the start. Nothing of it prevents the start.

    Args:
        cfg, runs, listed, chosen: As for `problems`.
    """
    if cfg.parallel.device == "cpu":
        return []
    try:
        listed = gpus.read() if listed is None else listed
        given = visible.for_run(chosen, listed)
        why = visible.hidden(listed)
    except InputError:  # `problems` names it
        return []
    found = [f"parallel.device: {cfg.parallel.device}: {why}; the run trains on the CPU"] if why else []
    if not given and (other := support.other_makers(support.installed())):
        found.append(f"parallel.device: {cfg.parallel.device}: {other}")
    return [*found, *_taken(cfg, runs, given[: cfg.parallel.devices])]


def _taken(cfg: RunConfig, runs: Path, given: Sequence[Gpu]) -> Iterator[str]:
    """Yield a sentence for each GPU whose memory other processes use."""
    used = [gpu for gpu in given if gpu.memory_used * MIB > GIB]
    hardware = of_machine(used)
    if hardware is None:
        return
    try:
        plan = planned(cfg, hardware.card, shared_cache(cfg, runs))
    except InputError:
        plan = None
    for gpu in used:
        free = (gpu.memory - gpu.memory_used) * MIB
        need = plan.need if plan else MOST_TAKEN * gpu.memory * MIB
        if free < need <= gpu.memory * MIB:
            wants = f"the plan needs {plan.need / GIB:.1f}" if plan else "the run's need is not known"
            yield (
                f"GPU {gpu.index}, {gpu.name}: other processes use {gpu.memory_used / 1024:.1f} of "
                f"{gpu.memory / 1024:.1f} GiB, and {wants}: memory may run out; end them (nvidia-smi lists them), or "
                "choose another GPU"
            )


def unplaced_plan(cfg: RunConfig, runs: Path) -> MemoryPlan | None:
    """Return the plan without a GPU, or None for a model that is not recorded yet."""
    try:
        return planned(cfg, None, shared_cache(cfg, runs), ASSUMED)
    except InputError:
        return None


def _placed(cfg: RunConfig, plan: MemoryPlan, given: Sequence[Gpu], runs: Path) -> MemoryPlan:
    """Return the plan for the GPUs of the run where they decide how much is offloaded. plan: without a GPU."""
    hardware = of_machine(given) if given and cfg.parallel.offload_blocks == "auto" else None
    return (hardware and planned(cfg, hardware.card, shared_cache(cfg, runs))) or plan


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


def _missing_pinned_memory(cfg: RunConfig, plan: MemoryPlan) -> Iterator[Problem]:
    """Offloaded weights must fit the host's memory, which is not swapped while it is pinned."""
    devices, parallel = cfg.parallel.devices, cfg.parallel
    need = devices * sum(item.size for item in plan.host if item.name == "offloaded")
    have = psutil.virtual_memory().total
    if need <= have:
        return
    lack = f"offloading on {devices} ranks needs" if devices > 1 else "offloading needs"
    lack += f" {memory_size(need)} of host memory, this machine has {memory_size(have)}"
    if parallel.cpu_offload:
        remedy = "set false and offload some blocks (parallel.offload_blocks), or quantize.format: nf4"
        if isinstance(cfg.adapter, NoAdapter):
            remedy = "set false, or train an adapter (adapter.type: lora)"
        yield Problem("parallel.cpu_offload", f"true: {lack}; {remedy}")
    else:
        remedy = "offload fewer blocks, or set quantize.format: nf4"
        yield Problem("parallel.offload_blocks", f"{parallel.offload_blocks}: {lack}; {remedy}")


def _missing_disk(cfg: RunConfig, plan: MemoryPlan, runs: Path) -> Iterator[Problem]:
    base = sum(item.size for item in plan.disk if item.name == "cached base")
    need = disk_need(cfg, plan)
    free = shutil.disk_usage(next(above for above in (runs, *runs.parents) if above.is_dir())).free
    if need > MOST_DISK * free:
        lack = f"{file_size(need)}, {runs} has {file_size(free)} free"
        if base > need / 2:
            parts = "the quantized base, checkpoints and export"
            message = f"true: {parts} take {lack}; set false, {freeing(runs)}, or choose another folder"
            yield Problem("quantize.cache", message)
            return
        yield Problem(
            "checkpoint.keep",
            f"{cfg.checkpoint.keep}: checkpoints and export take {lack}; "
            f"keep fewer, {freeing(runs)}, or choose another folder",
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
