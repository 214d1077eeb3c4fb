"""How torch takes memory on the ranks. Imports no torch. See DECISIONS 173."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from trainer.config.schema import RunConfig
from trainer.system.amounts import MIB

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that torch reads its settings from. What the user has set is left alone."""
VIRTUAL_GPU = re.compile(r"\bGRID\b|-\d+[ABCQ]$")
EXACT_ABOVE = 16 * MIB
"""Where pinned memory is exact, smaller amounts are rounded still, and kept for later use: those of a batch, which
would be pinned anew in each step. A power of two: torch looks for memory to use again by its rounded size, and with
another limit may find some that is too small (pytorch/pytorch, pull request 192722)."""


HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(256 * MIB)}
"""Variables of glibc's malloc for ranks on CPUs: memory that a step frees is kept for the next one. Otherwise each step
of a model of 129 M parameters faults 16,000 pages in again, 6 % of its CPU seconds."""


def heap_environment() -> dict[str, str]:
    """Return HEAP, or nothing where the user has set any of it."""
    is_set_by_user = any(name in os.environ for name in (*HEAP, "GLIBC_TUNABLES"))
    return {} if is_set_by_user else dict(HEAP)


def environment(pins_exactly: bool, gpu_names: Sequence[str]) -> dict[str, str]:
    """Return the variable with torch's settings for the ranks; empty to leave torch and the user as they are.

    Expandable segments keep blocks of many sizes from splitting a GPU's memory into pieces that are too small to use.

    Args:
        pins_exactly: As the function of this name says of the run.
        gpu_names: Of the machine's NVIDIA GPUs.
    """
    if is_set() or not gpu_names:
        return {}
    expandable = ["expandable_segments:True"] if can_expand(platform.release(), gpu_names) else []
    exact = [f"pinned_max_cached_size_mb:{EXACT_ABOVE // MIB}"] if pins_exactly else []
    settings = ",".join([*expandable, *exact])
    return {VARIABLES[0]: settings} if settings else {}


def can_expand(kernel: str, gpu_names: Sequence[str]) -> bool:
    """Whether expandable segments are safe to ask for. Where the driver lacks what they need, torch does not go without
    them: its first allocation fails (pytorch/pytorch, issue 192330).

    Args:
        kernel: The release of the machine's kernel: WSL's names Microsoft, and that of Jetsons Tegra.
        gpu_names: As nvidia-smi gives them; those of virtual GPUs begin or end so.
    """
    is_known_to_fail = re.search("microsoft|tegra", kernel, re.IGNORECASE)
    return not is_known_to_fail and not any(VIRTUAL_GPU.search(name) for name in gpu_names)


def pins_exactly(cfg: RunConfig) -> bool:
    """Whether a run takes as much pinned memory as it needs, and not up to twice that, as torch does otherwise.

    torch then keeps none of it for later use. Weights that stay in the host's memory need none: a frozen base that is
    offloaded. The gradients of a full fine-tuning would have to be pinned anew in each step.
    """
    offloads = cfg.parallel.cpu_offload or cfg.parallel.offload_blocks != 0
    return offloads and cfg.adapter.type != "none" and not is_set() and _has_setting()


def is_set() -> bool:
    """Whether the user has set torch's allocators, which are then left alone."""
    return any(name in os.environ for name in VARIABLES)


def pinned_bytes(size: int, is_exact: bool) -> int:
    """Bytes of pinned memory that torch takes for a tensor of `size` bytes: the next power of two, unless exact."""
    return size if size == 0 or (is_exact and size > EXACT_ABOVE) else 1 << (size - 1).bit_length()


@cache
def _has_setting() -> bool:
    """Whether the installed torch knows the setting. An earlier one ends with an error about it."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (2, 13)
