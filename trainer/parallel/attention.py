"""Which of torch's kernels computes attention on a GPU. See DECISIONS 187."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""By `train.attention`, but for `auto`."""
_FLASH3 = "FA3"
_NAMES = {
    "FLASH_ATTENTION": "flash",
    "CUDNN_ATTENTION": "cuDNN",
    "EFFICIENT_ATTENTION": "memory-efficient",
    "MATH": "math",
}
_SHAPE = (1, 2, 256, 128)
"""Shape of the trial: heads of 128 numbers, as in FLUX and most language models."""


@contextmanager
def preferred(
    wanted: str, device: torch.device, dtype: torch.dtype, note: Callable[[str], None], warn: Callable[[str], None]
) -> Iterator[None]:
    """Inside, attention on a GPU is computed by the kernel that is wanted, where it can: with a mask, others follow it.

    Args:
        wanted: `train.attention`.
        device: Where the run trains. On a CPU torch has one kernel.
        dtype: The type that computes.
        note: Takes the sentence that says which kernel is used.
        warn: Takes the sentence that says why it is not the one that is wanted.
    """
    if device.type != "cuda":
        if wanted != "auto":
            warn(f"train.attention: {wanted} is a kernel of GPUs; torch's own choice is used")
        yield
        return
    # `flash3` is activated for the whole process, not for a context: it is taken back at the end.
    before = current_flash_attention_impl()
    problem = _problem(wanted, device, dtype) if wanted != "auto" else ""
    if problem:
        _restore(before)
        warn(f"train.attention: this GPU cannot use {wanted} ({problem}); torch's own choice is used")
        wanted = "auto"
    try:
        if wanted == "auto":
            note(f"attention is computed by torch's {chosen(device, dtype)} kernel")
            yield
            return
        note(f"attention is computed by {wanted}, and with a mask that it does not take by another kernel")
        first = KERNELS[wanted]
        others = [kernel for kernel in (*KERNELS.values(), SDPBackend.MATH) if kernel != first]
        with sdpa_kernel([first, *dict.fromkeys(others)], set_priority=True):
            yield
    finally:
        _restore(before)


def _restore(before: str | None) -> None:
    """Take back the kernel that was put in the place of torch's own flash attention."""
    if current_flash_attention_impl() != before:
        restore_flash_attention_impl()


def chosen(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the kernel that torch chooses for attention without a mask."""
    query = torch.empty(_SHAPE, device=device, dtype=dtype)
    name = SDPBackend(torch._fused_sdp_choice(query, query, query)).name
    return _NAMES.get(name, name.lower())


def _problem(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Try a kernel, forward and backward. Returns the first line of why it fails; empty if it does not."""
    try:
        if wanted == "flash3":
            activate_flash_attention_impl(_FLASH3)
        query = torch.ones(_SHAPE, device=device, dtype=dtype, requires_grad=True)
        with sdpa_kernel(KERNELS[wanted]):
            attended: Tensor = F.scaled_dot_product_attention(query, query, query)
            attended.sum().backward()  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - of a package that may be there in part, or of CUDA
        return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    return ""
