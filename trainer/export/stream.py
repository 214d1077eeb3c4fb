"""A safetensors file written tensor by tensor: its header needs only names, types and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainer.weights.tensors import layout

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}

Planned = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""
Plan = Mapping[str, Planned]
"""The tensors of a file by name, in their order."""


def write_stream(file: Path, plan: Plan, tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, holding one tensor at a time. tensors: those of `plan`, in its order."""
    announced = {name: (NAMES[dtype], shape, num_bytes((dtype, shape))) for name, (dtype, shape) in plan.items()}
    with file.open("wb") as stream:
        stream.write(layout(announced, metadata).head)
        for (name, (dtype, shape)), tensor in zip(plan.items(), tensors, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: {list(tensor.shape)} was announced as {list(shape)}")
            stream.write(_bytes_of(tensor, dtype))


def num_bytes(planned: Planned) -> int:
    """What a tensor takes in the file."""
    dtype, shape = planned
    return math.prod(shape) * dtype.itemsize


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    """The tensor's numbers in `dtype`, row by row. Numbers beyond the range of an 8-bit float become its largest."""
    if dtype == torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        tensor = tensor.float().clamp(-limit, limit)
    return tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data
