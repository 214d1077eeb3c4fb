"""Bytes of tensors on this rank, and the memory that its process uses."""

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
    """Bytes on this rank: on CUDA by the caching allocator, on the CPU by the process.

    Attributes:
        allocated: Live tensors (CPU: resident anonymous pages).
        reserved: Taken from the device (CPU: resident set).
        peak: Highest `allocated` since the start.
        limit: What this rank may use, see `World.memory`.
    """

    allocated: int
    reserved: int
    peak: int
    limit: int


class MemoryMeter:
    """Reads this rank's memory; on the CPU it also tracks the peak, which no allocator does there."""

    def __init__(self, world: World) -> None:
        self._device = world.device
        self._limit = world.memory
        self._process = psutil.Process()
        self._peak = 0

    def read(self) -> MemoryReading:
        """Read the memory now."""
        if self._device.type == "cuda":
            return MemoryReading(
                torch.cuda.memory_allocated(self._device),
                torch.cuda.memory_reserved(self._device),
                torch.cuda.max_memory_allocated(self._device),
                self._limit,
            )
        memory = self._process.memory_info()
        # Resident minus file-backed and shared pages: safetensors files are mapped and would count as ours.
        anonymous = int(memory.rss - memory.shared)
        self._peak = max(self._peak, anonymous)
        return MemoryReading(anonymous, int(memory.rss), self._peak, self._limit)


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors on this rank; of a DTensor, those of `to_local()`. Offloaded ones have empty storage."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in local)


def full_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the whole tensors; of a DTensor, those of `full_tensor()`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
