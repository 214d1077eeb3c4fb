"""How torch takes memory on the ranks. Imports no torch."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from trainer.config.amounts import MIB
from trainer.config.schema import RunConfig

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that torch reads its settings from. What the user has set is left alone."""
EXACT_ABOVE = MIB
"""Where pinned memory is exact, smaller amounts are rounded still. A power of two: torch looks for memory to use again
by its rounded size, and with another limit may find some that is too small (pytorch/pytorch, pull request 192722)."""


def settings(pins_exactly: bool) -> str:
    """The value of `PYTORCH_ALLOC_CONF` for the ranks.

    Expandable segments keep blocks of many sizes from splitting a GPU's memory into pieces that are too small to use.
    """
    exact = f",pinned_max_cached_size_mb:{EXACT_ABOVE // MIB}" if pins_exactly else ""
    return f"expandable_segments:True{exact}"


def pins_exactly(cfg: RunConfig) -> bool:
    """Whether a run takes as much pinned memory as it needs, and not up to twice that, as torch does otherwise.

    torch then keeps none of it for later use. Weights that stay in the host's memory need none: a frozen base that is
    offloaded. The gradients of a full fine-tuning would have to be pinned anew in each step.
    """
    return cfg.parallel.cpu_offload and cfg.adapter.type != "none" and _has_setting()


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
