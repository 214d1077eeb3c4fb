"""Triton kernels that decode a quantized weight in one pass: records are read once, and the weight is written once.

Each equals `Format.decode` of `trainer.weights.quantization`, its reference, bit for bit on every card and in Triton's
interpreter: scales are read by bytes, fp8 is decoded and bf16 is rounded by integers, and a product is a single one in
fp32. `quantization` imports this module where it uses it, since Triton comes with torch for GPUs only.

See DECISIONS 184.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.weights.nf4 import BLOCK, NF4_LEVELS

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
    sizes = inputs, records.shape[1], parts
    with torch.cuda.device_of(records):  # type: ignore[no-untyped-call]
        _decode[(rows * parts,)](records, into, _levels(records.device), *sizes, format, is_bf16, BLOCKS)


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4_LEVELS, device=device)


@triton.jit
def _decode(
    records: tl.tensor,
    weight: tl.tensor,
    levels: tl.tensor,
    inputs: tl.tensor,
    row_bytes: tl.tensor,
    parts: tl.tensor,
    format: tl.constexpr,
    is_bf16: tl.constexpr,
    blocks: tl.constexpr,
) -> None:
    """Decode some blocks of a row, which is stored in so many parts."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    block = (tl.program_id(0) % parts) * blocks + tl.arange(0, blocks)
    column = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    record, has_block, has_column = records + row * row_bytes, block * 64 < inputs, column < inputs
    if format == "nf4":
        at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        codes = tl.load(record + at, mask=has_block[:, None], other=0).to(tl.int32)
        values = tl.interleave(tl.load(levels + (codes >> 4)), tl.load(levels + (codes & 15)))
        scale = _scale(record + tl.cdiv(inputs, 64) * 32, block, has_block)[:, None]
    elif format == "int8":
        values = tl.load(record + column, mask=has_column, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        scale = _scale(record + inputs, block, has_block)[:, None]
    else:
        values = _of_fp8(tl.load(record + column, mask=has_column, other=0).to(tl.int32))
        scale = _scale(record + inputs, 0, True)
    values *= scale
    _store(weight + row * inputs + column, values, has_column, is_bf16)


@triton.jit
def _scale(scales: tl.tensor, number: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Read scales with these numbers: two bytes each, the lower one first, at any address."""
    low = tl.load(scales + 2 * number, mask=mask, other=0).to(tl.int32)
    high = tl.load(scales + 2 * number + 1, mask=mask, other=0).to(tl.int32)
    return ((low | (high << 8)) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _of_fp8(codes: tl.tensor) -> tl.tensor:
    """Decode e4m3fn, whose exponents count from 7, not 127; an exponent of 0 is 2 ** -6 without the leading bit."""
    normal = ((codes & 0x7F) + (120 << 3)) << 20
    small = ((codes & 7).to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    bits = tl.where((codes & 0x78) == 0, small, normal) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store(to: tl.tensor, values: tl.tensor, mask: tl.tensor, is_bf16: tl.constexpr) -> None:
    """Write fp32 values, or their bits in bf16, rounded to nearest even."""
    if is_bf16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(values == values, rounded, 0x7FC0)  # a NaN equals nothing
        tl.store(to, rounded.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(to, values, mask=mask)
