"""Writes a safetensors file tensor by tensor: its header needs only names, types and shapes. See DECISIONS 66."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainer.weights.tensors import layout

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""
FileSpec = Mapping[str, TensorSpec]
"""The tensors of a file by name, in their order."""


def write_stream(file: Path, specs: FileSpec, tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, holding one tensor at a time.

    Args:
        file: The file.
        specs: {name: type and shape}.
        tensors: The tensors of `specs`, in its order.
        metadata: Pairs of strings for the header.

    Raises:
        ValueError: A tensor has another shape than in `specs`.
    """
    announced = {name: (NAMES[dtype], shape, num_bytes((dtype, shape))) for name, (dtype, shape) in specs.items()}
    with file.open("wb") as stream:
        stream.write(layout(announced, metadata).head)
        for (name, (dtype, shape)), tensor in zip(specs.items(), tensors, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: {list(tensor.shape)} was announced as {list(shape)}")
            stream.write(_bytes_of(tensor, dtype))


def num_bytes(spec: TensorSpec) -> int:
    """Return the bytes that a tensor takes in the file."""
    dtype, shape = spec
    return math.prod(shape) * dtype.itemsize


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    """Return the tensor's numbers in `dtype`, row by row. 8-bit floats are clamped to the type's range."""
    if dtype == torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        tensor = tensor.float().clamp(-limit, limit)
    return tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data
