"""A frozen base in 4 or 8 bits: linear layers whose weights are bytes, which FSDP2 shards and gathers unchanged.

The format, version 1. A weight (out, in) is stored as one uint8 matrix (out, row bytes): a record per row, so that any
rows can be written, read, sharded and gathered by themselves. A record is the codes of the row, then its scales:

  nf4   4 bits per weight: the index of the nearest of the 16 levels of NF4 (arXiv 2305.14314, appendix E); of two
        neighbours the first is in the upper half of their byte. A scale per block of 64 weights: the largest magnitude.
        A row that ends within a block is padded with zeros.
  int8  8 bits per weight: a whole number from -127 to 127, two's complement. A scale per block of 64: the largest
        magnitude / 127. The last block may be shorter.
  fp8   8 bits per weight: a float of 4 bits exponent and 3 bits mantissa (e4m3fn). A scale per row: the largest
        magnitude / 448.

Scales are bf16, little-endian. A code encodes weight / scale, with the stored scale, ties to even; for nf4 with the
scale before it is rounded, ties to the lower level. The weight of a code is level * scale, multiplied in fp32 and
rounded once to the wanted type. See DECISIONS 70, 72.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.weights.nf4 import BLOCK, NF4_LEVELS

VERSION = 1
"""Version of the format: raise it when equal weights are to give other bytes."""
SCALE = torch.bfloat16
CELLS = 64
PIECE = {"cpu": 1 << 19, "cuda": 1 << 23}
"""Weights that are decoded at a time, by kind of device: fp32 copies of more would not stay in a core's cache, and take
48 MiB of a GPU."""
KERNEL_DEVICES = ("cuda",)
"""Kinds of devices on which `kernels` decodes."""


class Format(ABC):
    """Encodes a row of a weight as a record of bytes, and decodes it. One instance per format, in FORMATS.

    Attributes:
        largest: Magnitude of the level that encodes the largest weight of a block.
        codes_by_exact_scale: Whether codes are chosen with the scale before it is rounded to bf16.
        divisor: `to_levels` returns the levels divided by this power of two.

    See DECISIONS 69.
    """

    name: ClassVar[str]
    largest: ClassVar[float]
    codes_by_exact_scale: ClassVar[bool] = False
    divisor: ClassVar[int] = 1

    @abstractmethod
    def block(self, inputs: int) -> int:
        """Number of weights that share a scale."""

    @abstractmethod
    def code_bytes(self, inputs: int) -> int:
        """Bytes of a row's codes."""

    @abstractmethod
    def to_codes(self, levels: Tensor) -> Tensor:
        """Encode levels, (rows, weights of whole blocks) in units of the scale, fp32, as uint8, (rows, bytes)."""

    @abstractmethod
    def to_levels(self, codes: Tensor, table: Tensor) -> Tensor:
        """Decode codes, (rows, bytes), to a new tensor of levels, (rows, weights), fp32. table: from `table()`."""

    def table(self) -> Tensor:
        """The table that `to_levels` looks up, on the CPU; empty where it needs none."""
        return torch.empty(0, device="cpu")

    def num_blocks(self, inputs: int) -> int:
        """Scales per row."""
        return -(-inputs // self.block(inputs))

    def row_bytes(self, inputs: int) -> int:
        """Length of a record."""
        return self.code_bytes(inputs) + self.num_blocks(inputs) * SCALE.itemsize

    def encode(self, weight: Tensor, scale_of_fp8: float | None = None) -> Tensor:
        """Encode some rows: (rows, inputs), any floating type -> records (rows, row bytes), uint8.

        Args:
            scale_of_fp8: The scale that the weight was stored with, if it was stored in fp8: fp8 then keeps its codes.

        Raises:
            ValueError: A weight is not finite.
        """
        rows, inputs = weight.shape
        block, count = self.block(inputs), self.num_blocks(inputs)
        blocks = F.pad(weight.float(), (0, count * block - inputs)).view(rows, count, block)
        exact = self.scales(blocks, scale_of_fp8)
        stored = exact.to(SCALE)
        if not torch.isfinite(stored).all():
            raise ValueError("holds numbers that are not finite")
        scale = exact if self.codes_by_exact_scale else stored.float()
        levels = blocks / torch.where(stored == 0, 1, scale)  # all zero where the scale is
        return self.pack(self.to_codes(levels.view(rows, -1)), stored.view(rows, count), inputs)

    def scales(self, blocks: Tensor, scale_of_fp8: float | None) -> Tensor:
        """The scales (rows, blocks, 1), fp32, of blocks (rows, blocks, weights)."""
        # Not divided by a number: a GPU would multiply by its reciprocal, which rounds differently than a CPU.
        return blocks.abs().amax(dim=-1, keepdim=True) / torch.full_like(blocks[:1, :1, :1], self.largest)

    def pack(self, codes: Tensor, scales: Tensor, inputs: int) -> Tensor:
        """Join codes (rows, bytes of whole blocks) and stored scales (rows, blocks) to records."""
        return torch.cat([codes[:, : self.code_bytes(inputs)], scales.view(torch.uint8)], dim=1)

    def decode(self, records: Tensor, inputs: int, dtype: torch.dtype, table: Tensor) -> Tensor:
        """Decode some rows: (rows, row bytes) -> (rows, inputs). Temporaries take several times as much memory."""
        weight = torch.empty(len(records), inputs, dtype=dtype, device=records.device)
        self.decode_into(records, weight, table)
        return weight

    def decode_into(self, records: Tensor, weight: Tensor, table: Tensor) -> None:
        """Decode some rows, (rows, row bytes), into a weight (rows, inputs)."""
        rows, inputs = weight.shape
        end, block, count = self.code_bytes(inputs), self.block(inputs), self.num_blocks(inputs)
        levels = self.to_levels(records[:, :end], table)
        # A copy: a row by itself is contiguous, but may begin at an odd byte.
        scales = records[:, end:].clone(memory_format=torch.contiguous_format).view(SCALE).float()
        if self.divisor != 1:
            scales *= self.divisor
        if count * block != levels.shape[1]:  # codes of 8 bits are not padded
            levels = F.pad(levels, (0, count * block - levels.shape[1]))
        levels.view(rows, count, block).mul_(scales.unsqueeze(-1))
        weight.copy_(levels[:, :inputs])


class _Nf4(Format):
    name, largest = "nf4", 1.0
    codes_by_exact_scale = True  # as bitsandbytes does, whose codes are thus the same

    def block(self, inputs: int) -> int:
        return BLOCK

    def code_bytes(self, inputs: int) -> int:
        return self.num_blocks(inputs) * BLOCK // 2

    def to_codes(self, levels: Tensor) -> Tensor:
        low, inside = _cells(levels.device)
        cell = (levels * CELLS + CELLS).int().clamp_(0, 2 * CELLS).flatten()
        codes = low.index_select(0, cell) + (levels.flatten() > inside.index_select(0, cell))
        return ((codes[0::2] << 4) | codes[1::2]).view(len(levels), -1)

    def to_levels(self, codes: Tensor, table: Tensor) -> Tensor:
        return table.index_select(0, codes.int().flatten()).view(torch.float32).view(len(codes), 2 * codes.shape[1])

    def table(self) -> Tensor:
        """(256,): the two levels of a byte, as one number of 8 bytes. It is only copied; of pairs, `index_select` and
        `F.embedding` copy one after the other, which takes four times as long."""
        byte = torch.arange(256, device="cpu")
        pairs = torch.tensor(NF4_LEVELS, device="cpu")[torch.stack([byte >> 4, byte & 15], dim=1)]
        return pairs.view(torch.float64).flatten()


class _Int8(Format):
    name, largest = "int8", 127.0

    def block(self, inputs: int) -> int:
        return BLOCK

    def code_bytes(self, inputs: int) -> int:
        return inputs

    def to_codes(self, levels: Tensor) -> Tensor:
        return levels.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)

    def to_levels(self, codes: Tensor, table: Tensor) -> Tensor:
        return codes.view(torch.int8).to(torch.float32, memory_format=torch.contiguous_format)


class _Fp8(Format):
    name, largest, divisor = "fp8", 448.0, 256

    def block(self, inputs: int) -> int:
        return inputs

    def code_bytes(self, inputs: int) -> int:
        return inputs

    def scales(self, blocks: Tensor, scale_of_fp8: float | None) -> Tensor:
        largest = super().scales(blocks, None)  # not finite where a weight is not
        return largest if scale_of_fp8 is None else torch.where(largest.isfinite(), scale_of_fp8, largest)

    def to_codes(self, levels: Tensor) -> Tensor:
        return levels.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)

    def to_levels(self, codes: Tensor, table: Tensor) -> Tensor:
        """Decode a base's fp8 weights: move sign, exponent and mantissa to where fp16 has them, whose exponent counts
        from 15 instead of 7. On a CPU torch converts fp16 eight times as fast as fp8. No weight's code is a NaN."""
        bits = codes.view(torch.int8).to(torch.int16, memory_format=torch.contiguous_format)
        return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float()


FORMATS: Mapping[str, Format] = {kind.name: kind() for kind in (_Nf4, _Int8, _Fp8)}


@cache
def _cells(device: torch.device) -> tuple[Tensor, Tensor]:
    """A lookup grid of CELLS per unit for NF4: the code at the lower end of each cell, and where in it the next begins.

    A code begins half way between two levels, and no cell holds two such points. Five times as fast as a search.
    """
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float64, device="cpu")
    bounds = ((levels[1:] + levels[:-1]) / 2).float()
    grid = torch.arange(-CELLS, CELLS + 1, device="cpu") / CELLS
    inside = torch.full_like(grid, torch.inf)
    inside[torch.searchsorted(grid, bounds) - 1] = bounds
    return torch.bucketize(grid, bounds).to(torch.uint8).to(device), inside.to(device)


class QuantLinear(nn.Linear):
    """A frozen linear layer whose weight is stored as bytes: `qweight`, (out, row bytes).

    It is an `nn.Linear` for all code that looks for one; `weight` is decoded at each access.

    Attributes:
        dtype: Of `weight` and `bias`.
    """

    qweight: nn.Parameter

    def __init__(self, inputs: int, outputs: int, bias: bool, format: Format, dtype: torch.dtype, device: Any) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.format, self.dtype = inputs, outputs, format, dtype
        records = torch.empty(outputs, format.row_bytes(inputs), dtype=torch.uint8, device=device)
        self.qweight = nn.Parameter(records, requires_grad=False)
        values = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device), requires_grad=False) if bias else None
        self.register_parameter("bias", values)

    @classmethod
    def of(cls, layer: nn.Linear, format: Format) -> QuantLinear:
        """Convert a layer to this format; on the meta device without values.

        Raises ValueError for a weight that is not finite.
        """
        weight = layer.weight
        bias = layer.bias is not None
        made = cls(layer.in_features, layer.out_features, bias, format, weight.dtype, weight.device)
        with torch.no_grad():
            if not weight.is_meta:
                made.qweight.copy_(format.encode(weight))
            if bias:
                made.bias.copy_(layer.bias)
        return made

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight that `forward` multiplies with, (out, in), decoded anew: writes to it are lost."""
        if self.qweight.is_meta:
            return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")
        decode = decoded if is_traced(self.qweight) else decode_records
        weight: Tensor = decode(self.qweight.detach(), self.format.name, self.in_features, self.dtype)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        multiply: Callable[..., Tensor] = _linear if is_traced(x) else _Linear.apply
        return multiply(x, self.qweight, self.bias, self.format.name, self.in_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format.name}"


@cache
def _table(format: str, device: torch.device) -> Tensor:
    """A format's table on a device. Kept outside the layers, where `model.to(dtype)` would round it."""
    return FORMATS[format].table().to(device)


def decode_records(records: Tensor, format: str, inputs: int, dtype: torch.dtype) -> Tensor:
    """Decode records to the weight (rows, inputs): by a kernel in one pass over memory, or else some rows at a time."""
    records = records.detach()
    weight = torch.empty(len(records), inputs, dtype=dtype, device=records.device)
    decode = _kernel(format, dtype, records.device)[0] or decode_in_pieces
    decode(records, weight, format)
    return weight


def decode_in_pieces(records: Tensor, weight: Tensor, format: str) -> None:
    """Decode records into a weight (rows, inputs), some rows at a time."""
    kind, table = FORMATS[format], _table(format, records.device)
    rows = piece_rows(records.device, weight.shape[1])
    for piece, into in zip(torch.split(records, rows), torch.split(weight, rows), strict=True):
        kind.decode_into(piece, into, table)


def piece_rows(device: torch.device, inputs: int) -> int:
    """Rows that are decoded at a time."""
    return max(1, PIECE.get(device.type, PIECE["cuda"]) // inputs)


@cache
def _kernel(format: str, dtype: torch.dtype, device: torch.device) -> tuple[Callable[..., None] | None, str]:
    """Return the kernel that decodes on a device, compiled and compared with `Format.decode`; or None and why."""
    if device.type not in KERNEL_DEVICES or dtype not in (torch.float32, torch.bfloat16):
        return None, ""
    try:
        from trainer.weights.kernels import decode

        problem = _difference(decode, format, dtype, device)
    except Exception as error:  # noqa: BLE001  # Triton is absent or broken, or finds no compiler: whatever it raises
        problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}".removesuffix(": ")
    return (None, problem) if problem else (decode, "")


def _difference(decode: Callable[..., None], format: str, dtype: torch.dtype, device: torch.device) -> str:
    """Decode a weight by a kernel and by pieces. Returns a sentence if they differ.

    The rows are of 512 weights, as those of real layers are multiples of 16: Triton compiles these by themselves.
    """
    weight = torch.linspace(-1, 1, 4 * 512, device="cpu").view(4, 512)
    records = FORMATS[format].encode(weight).to(device)
    found, expected = (torch.empty(4, 512, dtype=dtype, device=device) for _ in range(2))
    decode(records, found, format)
    decode_in_pieces(records, expected, format)
    return "" if torch.equal(found, expected) else "it does not give the bits that it should"


def decoding_note(formats: Iterable[str], dtype: torch.dtype, device: torch.device) -> str:
    """Compile the kernels for some formats. Returns a sentence for the log, which is empty unless one failed.

    Args:
        formats: Names of formats.
        dtype: What the weights are decoded to.
        device: The device of the model.
    """
    problems = sorted({_kernel(format, dtype, device)[1] for format in formats} - {""})
    if not problems:
        return ""
    return f"quantized layers are decoded piece by piece, which takes longer: Triton's kernel failed ({problems[0]})"


def is_traced(tensor: Tensor) -> bool:
    """Whether operations are traced, and not only run: by torch.compile, or by the plan, whose tensors are fake."""
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, nn.Parameter)


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias. Only the bytes are kept: backward decodes them again. The weight has no gradient.

    `_linear` computes the same, but takes the host 80 us longer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, records: Tensor, bias: Tensor | None, format: str, inputs: int) -> Tensor:
        """Decode and multiply."""
        ctx.save_for_backward(records)
        ctx.how = format, inputs
        return F.linear(x, decode_records(records, format, inputs, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Decode again and multiply."""
        (records,), (format, inputs) = ctx.saved_tensors, ctx.how
        of_x = gradient @ decode_records(records, format, inputs, gradient.dtype) if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None, None


# Operators of our own, opaque to torch.compile: it would see that forward and backward decode the same weight, and keep
# it in between. The plan counts each as what a GPU does.


@torch.library.custom_op("shardstudio::decoded", mutates_args=())
def decoded(records: Tensor, format: str, inputs: int, dtype: torch.dtype) -> Tensor:
    """`decode_records`, where operations are traced."""
    return decode_records(records, format, inputs, dtype)


@decoded.register_fake
def _(records: Tensor, format: str, inputs: int, dtype: torch.dtype) -> Tensor:
    return records.new_empty(records.shape[0], inputs, dtype=dtype)


@torch.library.custom_op("shardstudio::linear", mutates_args=())
def _linear(x: Tensor, records: Tensor, bias: Tensor | None, format: str, inputs: int) -> Tensor:
    """`_Linear`, where operations are traced."""
    return F.linear(x, decode_records(records, format, inputs, x.dtype), bias)


@_linear.register_fake
def _(x: Tensor, records: Tensor, bias: Tensor | None, format: str, inputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], records.shape[0])


@torch.library.custom_op("shardstudio::linear_backward", mutates_args=())
def _linear_backward(gradient: Tensor, records: Tensor, format: str, inputs: int) -> Tensor:
    """The gradient of x."""
    return gradient @ decode_records(records, format, inputs, gradient.dtype)


@_linear_backward.register_fake
def _(gradient: Tensor, records: Tensor, format: str, inputs: int) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], inputs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, records, _, *ctx.how = inputs
    ctx.save_for_backward(records)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (records,) = ctx.saved_tensors
    of_x = _linear_backward(gradient, records, *ctx.how) if ctx.needs_input_grad[0] else None
    of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
    return of_x, None, of_bias, None, None


_linear.register_autograd(_gradients, setup_context=_keep)


def quantize_layers(model: nn.Module, formats: Mapping[str, Format]) -> None:
    """Replace linear layers by `QuantLinear`. A weight that several share is stored once, in the format of the first.

    Args:
        formats: {name of a layer: its format}.

    See DECISIONS 68.
    """
    first: dict[Tensor, QuantLinear] = {}
    for name, format in formats.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        shared = first.get(layer.weight)
        made = QuantLinear.of(layer, shared.format if shared else format)
        if shared:
            made.qweight = shared.qweight
        first.setdefault(layer.weight, made)
        model.set_submodule(name, made)


def quantized_layers(model: nn.Module) -> dict[str, QuantLinear]:
    """The layers that are stored as bytes, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
