"""Bytes: what a model holds on this rank, and what the process has taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.distributed.world import World


@dataclass(frozen=True)
class MemoryReading:
    """Bytes on this rank. On CUDA the caching allocator's figures; on the CPU those of the process.

    allocated: live tensors (CPU: resident anonymous pages).  reserved: taken from the device (CPU: resident set).
    peak: highest `allocated` since the start.  limit: what there is.
    """

    allocated: int
    reserved: int
    peak: int
    limit: int


class MemoryMeter:
    """Reads this rank's memory; keeps the peak on the CPU, where nobody else does."""

    def __init__(self, world: World) -> None:
        self._device = world.device
        self._limit = world.memory
        self._process = psutil.Process()
        self._peak = 0

    def read(self) -> MemoryReading:
        """The figures of this moment."""
        if self._device.type == "cuda":
            return MemoryReading(
                torch.cuda.memory_allocated(self._device),
                torch.cuda.memory_reserved(self._device),
                torch.cuda.max_memory_allocated(self._device),
                self._limit,
            )
        memory = self._process.memory_info()
        # resident minus file-backed and shared pages: safetensors files are mapped and would count as ours.
        anonymous = int(memory.rss - memory.shared)
        self._peak = max(self._peak, anonymous)
        return MemoryReading(anonymous, int(memory.rss), self._peak, self._limit)


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors that lie on this rank."""
    return sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors)


def full_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the whole tensors, over all ranks that share them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
