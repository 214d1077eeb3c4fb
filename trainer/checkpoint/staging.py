"""Staging: copies of a run's state in host memory, made on a thread while training goes on."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from trainer.distributed.threads import worker_threads


class Stager:
    """Copies the state into the memory of the previous copy, which is free again by then.

    torch's own stager clones each shard, which 8-bit optimizer states (a tensor subclass of torchao) do not support.
    Allocating new memory would take as long as the copy itself, and a GPU fills only pinned memory at full speed.

    Args:
        device: Of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = worker_threads(1, "snapshot", device)
        self._memory: list[Tensor] = []
        self._used = 0

    def take(self, state: dict[str, Any]) -> Future[dict[str, Any]]:
        """Begin to copy the tensors in nested dictionaries, with all that was computed before this call.

        They must not change before the future has its result.
        """
        # On the stream that computes, the copies would queue behind its kernels.
        aside = torch.cuda.Stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        if aside:
            aside.wait_stream(torch.cuda.current_stream())
        return self._thread.submit(self._copy, state, aside)

    def _copy(self, state: dict[str, Any], aside: torch.cuda.Stream | None) -> dict[str, Any]:
        self._used = 0
        with torch.cuda.stream(aside):  # None does nothing
            copy: dict[str, Any] = tree_map_only(Tensor, self._copy_of, state)
        if aside:
            aside.synchronize()
        return copy

    def _copy_of(self, tensor: Tensor) -> Tensor:
        """Copy to the host: a plain tensor, the shard of a DTensor, or the tensors inside another wrapper."""
        if isinstance(tensor, DTensor):
            # from_local would move the shard back to the mesh's device.
            local = self._copy_of(tensor.to_local())
            shard: Tensor = DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            return shard
        if not is_traceable_wrapper_subclass(tensor):
            return self._buffer_for(tensor).copy_(tensor.detach(), non_blocking=True)
        names, context = tensor.__tensor_flatten__()
        inner = {name: self._copy_of(getattr(tensor, name)) for name in names}
        copy: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        return copy

    def _buffer_for(self, tensor: Tensor) -> Tensor:
        """The memory that held this tensor the last time; the tensors come in the same order each time."""
        number, self._used = self._used, self._used + 1
        known = self._memory[number] if number < len(self._memory) else None
        if known is not None and _layout(known) == _layout(tensor):
            return known
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        self._memory[number:] = [buffer]
        return buffer


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    return tensor.shape, tensor.dtype, tensor.stride()
