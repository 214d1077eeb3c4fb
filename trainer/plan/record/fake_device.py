"""A fake device without memory: torch computes shapes on it and FSDP2 shards over it, without a GPU.

Tensors are torch's fake ones on a device of the backend that torch keeps for others ("privateuseone"), so that autograd
and FSDP2 take the paths they take on CUDA. Ranks are those of torch's fake process group, of which this is rank 0.

The changes to torch made here cannot be undone in a process: use a process that traces and ends. See DECISIONS 178.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from trainer.distributed.world import World
from trainer.models.parts.language import document_attention
from trainer.plan.record.fake_mode import FakeMode, Watch

NAME = "fakedevice"  # DeviceMesh accepts letters only


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream(_Event):
    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def record_event(self, _: Any = None) -> _Event:
        return _Event()


class _Module:
    """The functions that torch expects in `torch.<device>`."""

    Stream, Event = _Stream, _Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, _: Any) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, _: int) -> None:
        pass

    def manual_seed(self, _: int) -> None:
        pass

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, *_: Any) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def stream(self, _: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def device(self, _: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream()

    def synchronize(self, *_: Any) -> None:
        pass


_KERNELS = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
"""Kernels that CUDA has and this device lacks: torch would compute them by several, which allocate more. They are not
called: of fake tensors only the shapes are computed."""


def _never(*_: Any) -> Any:
    raise AssertionError("a fake device computes nothing")


@cache
def install() -> torch.device:
    """Register the device with torch and return it."""
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
    dist.Backend.default_device_backend_map[NAME] = "fake"
    # FSDP2 calls it for a gathered block that backward did not reach; torch's own function returns streams of real
    # devices.
    torch.accelerator.current_stream = lambda *_: _Stream()  # type: ignore[assignment]
    for name in ("_fused_rms_norm", "silu_backward", "mish_backward"):
        _KERNELS.impl(name, _never, "PrivateUse1")  # type: ignore[no-untyped-call]
    return torch.device(NAME, 0)


@contextmanager
def ranks(size: int, device: torch.device) -> Iterator[World]:
    """Make a process group of `size` ranks on one machine, of which only this one exists. device: this rank's."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield World(0, size, 0, size, device, dist.group.WORLD, None)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors(device: torch.device, watch: Watch) -> Iterator[None]:
    """Inside, tensors have no values, and on the fake device attention is the kernel that CUDA uses.

    A row is attended to as if it were one document, for where documents begin is a value. Attention is replaced as
    functions because torch's modes are off in backward, where checkpointing recomputes forward. `watch` is called in
    the mode of fake tensors itself, since a second mode doubles the time per operation.

    Args:
        device: The device of the model.
        watch: Called with each operation.
    """
    mode = FakeMode(watch)
    attention = F.scaled_dot_product_attention
    varlen, by_document = document_attention.varlen, document_attention.by_document
    if device.type == NAME:
        F.scaled_dot_product_attention, document_attention.varlen = _attention, _kernel_on_rows
    document_attention.by_document = _on_rows
    try:
        with mode, torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        F.scaled_dot_product_attention = attention
        document_attention.varlen, document_attention.by_document = varlen, by_document


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call CUDA's fused kernels: flash attention, or with a mask the memory-efficient one."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (key, value))
    if attn_mask is None:
        out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    else:
        bias = attn_mask
        # As `scaled_dot_product_attention` does it: the kernel adds a bias, and a mask becomes one.
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
        out = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
    attended: Tensor = out[0]
    return attended


def _kernel_on_rows(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, longest: int, scale: float | None, before: int
) -> Tensor:
    """Call flash attention on whole rows, which takes the memory that it takes for their documents."""
    query, key, value = (tensor.view(-1, longest, *tensor.shape[1:]).transpose(1, 2) for tensor in (query, key, value))
    # Looked up, as recompute replaces it while a block runs.
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return attended.transpose(1, 2).flatten(0, 1)


def _on_rows(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Attend to whole rows on a CPU."""
    is_grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)
