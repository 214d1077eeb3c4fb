"""Triton kernels that decode a quantized weight in one pass: records are read once, and the weight is written once.

Each equals `Format.decode` of `trainer.weights.quantization`, its reference, bit for bit on every card and in Triton's
interpreter: scales are read by bytes, fp8 is decoded and bf16 is rounded by integers, and a product is a single one in
fp32. `quantization` imports this module where it uses it, since Triton comes with torch for GPUs only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.weights.quantization import BLOCK, FORMATS, NF4_LEVELS

BLOCKS = 16
"""Blocks of weights that a program decodes: 1024 weights, eight for each thread."""


def decode(records: Tensor, weight: Tensor, format: str) -> None:
    """Decode records into a weight.

    Args:
        records: (rows, row bytes), uint8.
        weight: (rows, inputs), fp32 or bf16, contiguous.
        format: Name of the format.
    """
    rows, inputs = weight.shape
    if not weight.numel():
        return
    assert weight.dtype in (torch.float32, torch.bfloat16)
    assert weight.is_contiguous()
    is_bf16, records = weight.dtype == torch.bfloat16, records.contiguous()
    parts = triton.cdiv(inputs, BLOCKS * BLOCK)
    into = weight.view(torch.int16) if is_bf16 else weight
    sizes = inputs, records.shape[1], FORMATS[format].code_bytes(inputs), parts
    with torch.cuda.device_of(records):
        _KERNELS[format][(rows * parts,)](records, into, _levels(records.device), *sizes, is_bf16, BLOCKS)


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4_LEVELS, device=device)


@triton.jit
def _scales(scales: Any, number: Any, mask: Any) -> Any:
    """Read scales with these numbers: two bytes each, the lower one first, at any address."""
    low = tl.load(scales + 2 * number, mask=mask, other=0).to(tl.int32)
    high = tl.load(scales + 2 * number + 1, mask=mask, other=0).to(tl.int32)
    return ((low | (high << 8)) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store(to: Any, values: Any, mask: Any, is_bf16: tl.constexpr) -> None:
    """Write fp32 values, or their bits in bf16, rounded to nearest even."""
    if is_bf16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(values == values, rounded, 0x7FC0)  # noqa: PLR0124  # a NaN equals nothing
        tl.store(to, rounded.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(to, values, mask=mask)


@triton.jit
def _nf4(
    records: Any,
    weight: Any,
    levels: Any,
    inputs: Any,
    row_bytes: Any,
    code_bytes: Any,
    parts: Any,
    is_bf16: tl.constexpr,
    blocks: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // parts).to(tl.int64)
    block = (tl.program_id(0) % parts) * blocks + tl.arange(0, blocks)
    record, has_block = records + row * row_bytes, block * 32 < code_bytes
    scale = _scales(record + code_bytes, block, has_block)[:, None]
    codes = tl.load(record + block[:, None] * 32 + tl.arange(0, 32)[None, :], mask=has_block[:, None], other=0)
    codes = codes.to(tl.int32)
    values = tl.interleave(tl.load(levels + (codes >> 4)) * scale, tl.load(levels + (codes & 15)) * scale)
    column = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    _store(weight + row * inputs + column, values, column < inputs, is_bf16)


@triton.jit
def _int8(
    records: Any,
    weight: Any,
    levels: Any,
    inputs: Any,
    row_bytes: Any,
    code_bytes: Any,
    parts: Any,
    is_bf16: tl.constexpr,
    blocks: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // parts).to(tl.int64)
    block = (tl.program_id(0) % parts) * blocks + tl.arange(0, blocks)
    record = records + row * row_bytes
    scale = _scales(record + code_bytes, block, block * 64 < inputs)[:, None]
    column = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    codes = tl.load(record + column, mask=column < inputs, other=0).to(tl.int8, bitcast=True)
    _store(weight + row * inputs + column, codes.to(tl.float32) * scale, column < inputs, is_bf16)


@triton.jit
def _fp8(
    records: Any,
    weight: Any,
    levels: Any,
    inputs: Any,
    row_bytes: Any,
    code_bytes: Any,
    parts: Any,
    is_bf16: tl.constexpr,
    blocks: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = (tl.program_id(0) % parts) * blocks * 64 + tl.arange(0, blocks * 64)
    record = records + row * row_bytes
    codes = tl.load(record + column, mask=column < inputs, other=0).to(tl.int32)
    # Exponents count from 7, those of fp32 from 127. An exponent of 0 means 2 ** -6 without the leading bit.
    normal = ((codes & 0x7F) + (120 << 3)) << 20
    small = ((codes & 7).to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    bits = tl.where((codes & 0x78) == 0, small, normal) | ((codes & 0x80) << 24)
    values = bits.to(tl.float32, bitcast=True) * _scales(record + code_bytes, 0, True)
    _store(weight + row * inputs + column, values, column < inputs, is_bf16)


_KERNELS: Mapping[str, Any] = {"nf4": _nf4, "int8": _int8, "fp8": _fp8}
