"""Reads rows of a tensor in a safetensors file, whatever its stored format. See DECISIONS 71."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, FiniteFloat, PositiveInt, ValidationError
from safetensors import safe_open
from torch import Tensor

from trainer.system.errors import InputError
from trainer.system.files import first_problem
from trainer.weights.forms import NOT_READ, SCALES, LayerForm

VERSION = 2
"""Version of the reading: raise it when equal files are to give other numbers."""
ALIGNMENT = 8
PIECE = 1 << 20
"""Numbers that are decoded at a time: their codes and scales take several times their memory."""


def layout(tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> Layout:
    """Lay out a safetensors file with these tensors.

    Source: the format's description in the safetensors repository (8 bytes of length, JSON header, bytes).

    Args:
        tensors: {name: (type such as `BF16`, shape, bytes)}, in the order of the file.
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        starts[name], end = end, end + num_bytes
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return Layout(head, {name: len(head) + start for name, start in starts.items()}, len(head) + end)


@dataclass(frozen=True)
class Layout:
    """A safetensors file to be written.

    Attributes:
        head: Its first bytes, up to the tensors.
        places: {name: offset at which the tensor begins}.
        size: Of the whole file, in bytes.
    """

    head: bytes
    places: Mapping[str, int]
    size: int


class OpenFiles:
    """safetensors files that stay open, mapped, while their tensors are read. Threads may share it."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._lock = threading.Lock()

    def slice(self, file: Path, key: str) -> Any:
        """The tensor `key` as a slice of safetensors: nothing is read until it is indexed."""
        with self._lock:
            if file not in self._open:
                self._open[file] = safe_open(file, "pt")
            return self._open[file].get_slice(key)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor on disk.

    Attributes:
        shape: Its full shape.
        dtype: By safetensors' name, for example `BF16`.
        start: Row of the stored tensor at which it begins; after the last row it continues with the first.
        transposed: Its rows are the stored tensor's columns.
        flattened: The numbers of all its rows are stored one after another.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    transposed: bool = False
    flattened: bool = False

    def rows(self, files: OpenFiles, begin: int, end: int) -> Tensor:
        """Read rows `begin` to `end`."""
        if self.transposed:
            columns = slice(self.start + begin, self.start + end)
            return self._stored_rows(files, 0, self._num_rows(files))[:, columns].T
        if self.flattened:
            width = math.prod(self.shape[1:])
            first, last = (width * (self.start + row) for row in (begin, end))
            return self._stored_rows(files, first, last).reshape(-1, *self.shape[1:])
        total = self._num_rows(files) or 1
        first = (self.start + begin) % total
        last = first + end - begin
        rows = self._stored_rows(files, first, min(last, total))
        if last > total:
            rows = torch.cat([rows, self._stored_rows(files, 0, last - total)])
        # The original may store a matrix as a convolution of one pixel.
        return rows.reshape(-1, *self.shape[1:])

    def rows_of_matrix(self, files: OpenFiles, index: int, begin: int, end: int) -> Tensor:
        """Read some rows of one matrix of a stack of them: (1, rows, columns)."""
        first = (self.start + index) % self._num_rows(files)
        rows: Tensor = files.slice(self.file, self.key)[first : first + 1, begin:end]
        return rows

    def _num_rows(self, files: OpenFiles) -> int:
        """Number of rows of the stored tensor."""
        return int(files.slice(self.file, self.key).get_shape()[0])

    def _stored_rows(self, files: OpenFiles, begin: int, end: int) -> Tensor:
        rows: Tensor = files.slice(self.file, self.key)[begin:end]
        return rows

    def whole(self, files: OpenFiles) -> Tensor:
        """Read the whole tensor."""
        if not self.shape:
            scalar: Tensor = files.slice(self.file, self.key)[()]
            return scalar
        return self.rows(files, 0, self.shape[0])

    def scale(self, files: OpenFiles) -> float | None:
        """The factor of the stored codes, for 8-bit floats of the format e4m3; None for other formats."""
        return 1.0 if self.dtype == "F8_E4M3" else None

    def stored_bytes(self, rows: int) -> float:
        """Bytes on disk of this number of rows."""
        return rows * math.prod(self.shape[1:]) * _ITEM_BYTES.get(self.dtype, 8)

    def sources(self) -> frozenset[Path]:
        """The files that it is read from."""
        return frozenset((self.file,))

    def identity(self) -> tuple[object, ...]:
        """The fields that determine which numbers of its files it has."""
        return type(self).__name__, self.key, self.shape, self.dtype, self.start, self.transposed


@dataclass(frozen=True, kw_only=True)
class ScaledEntry(TensorEntry):
    """Codes of 8 bits with one scale, or with one for each row, which is a tensor of its own.

    Attributes:
        scale_entry: One number, or (rows,) or (rows, 1).
        rotated: Numbers of a row that were rotated together before they became codes; 1 for none.
    """

    scale_entry: TensorEntry
    rotated: int = 1

    def rows_of_matrix(self, files: OpenFiles, index: int, begin: int, end: int) -> Tensor:
        return super().rows_of_matrix(files, index, begin, end).float() * float(self.scale_entry.whole(files))

    def scale(self, files: OpenFiles) -> float | None:
        is_one = math.prod(self.scale_entry.shape) == 1
        return float(self.scale_entry.whole(files)) if is_one and self.dtype == "F8_E4M3" else None

    def _stored_rows(self, files: OpenFiles, begin: int, end: int) -> Tensor:
        codes = super()._stored_rows(files, begin, end).float()
        if self.rotated > 1:
            turned = codes.view(-1, self.rotated) @ _rotation(self.rotated)
            codes = turned.view(codes.shape) / math.sqrt(self.rotated)
        if math.prod(self.scale_entry.shape) == 1:
            return codes * float(self.scale_entry.whole(files))
        return codes * self.scale_entry.rows(files, begin, end).float().view(-1, 1)


@cache
def _rotation(group: int) -> Tensor:
    """The matrix of ComfyUI's ConvRot times sqrt(group): ones with signs, symmetric, and its own inverse when divided.

    Products with codes are sums of integers below 2^24, thus exact in fp32, whatever order a machine adds them in.
    """
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    return four if group == 4 else torch.kron(_rotation(group // 4), four)


@dataclass(frozen=True, kw_only=True)
class FourBitEntry(TensorEntry):
    """A weight as bitsandbytes stores it: 4-bit codes of all its numbers in one sequence, and a scale per block.

    Attributes:
        num_rows: Of the stored weight.
        levels: The 16 values of the codes.
        scales: One per `block` numbers. If `scale_levels` is given, they are codes themselves: the level of each is
            multiplied by one of `scale_scales`, of which there is one per `scale_block` scales, and added to `offset`.
    """

    num_rows: int
    levels: TensorEntry
    scales: TensorEntry
    block: int
    scale_levels: TensorEntry | None = None
    scale_scales: TensorEntry | None = None
    scale_block: int = 1
    offset: float = 0.0

    def stored_bytes(self, rows: int) -> float:
        return rows * self.shape[1] / 2

    def _num_rows(self, files: OpenFiles) -> int:
        return self.num_rows

    def _stored_rows(self, files: OpenFiles, begin: int, end: int) -> Tensor:
        rows, step = torch.empty(end - begin, self.shape[1]), max(1, PIECE // self.shape[1])
        for first in range(begin, end, step):
            last = min(first + step, end)
            rows[first - begin : last - begin] = self._decoded(files, first, last)
        return rows

    def _decoded(self, files: OpenFiles, begin: int, end: int) -> Tensor:
        first, last = begin * self.shape[1], end * self.shape[1]
        codes = self._codes(files, first, last)
        blocks = torch.arange(first, last) // self.block
        first_block = first // self.block
        scales = self._scales(files, first_block, -(-last // self.block))
        numbers = self.levels.whole(files)[codes] * scales[blocks - first_block]
        return numbers.view(end - begin, self.shape[1])

    def _codes(self, files: OpenFiles, first: int, last: int) -> Tensor:
        stored = files.slice(self.file, self.key)
        per_item = _ITEM_BYTES[self.dtype] * 2  # whatever type the bytes are declared as
        begin, end = first // per_item, -(-last // per_item)
        packed = stored[begin:end].contiguous().view(-1).view(torch.uint8)
        codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()
        return codes[first - begin * per_item :][: last - first].int()

    def _scales(self, files: OpenFiles, begin: int, end: int) -> Tensor:
        stored: Tensor = files.slice(self.scales.file, self.scales.key)[begin:end]
        if self.scale_levels is None or self.scale_scales is None:
            return stored
        outer = self.scale_scales.whole(files)[torch.arange(begin, end) // self.scale_block]
        return self.scale_levels.whole(files)[stored.int()] * outer + self.offset


@dataclass(frozen=True, kw_only=True)
class NewRowsEntry(TensorEntry):
    """A tensor with a row per token, some of them for tokens that its file does not know.

    Each new row is the mean of the rows before it: where transformers resizes embeddings, it draws around that mean
    with a covariance of 1e-9 times theirs.

    Attributes:
        stored: The tensor in the file.
        known: Rows before the new ones.
        new: Number of new rows; rows after them are the stored ones.
    """

    stored: TensorEntry
    known: int
    new: int

    def rows(self, files: OpenFiles, begin: int, end: int) -> Tensor:
        last = self.known + self.new
        parts = []
        if begin < self.known:
            parts.append(self.stored.rows(files, begin, min(end, self.known)))
        if begin < last and end > self.known:
            parts.append(self.mean.expand(min(end, last) - max(begin, self.known), *self.shape[1:]))
        if end > last:
            parts.append(self.stored.rows(files, max(begin, last), end))
        return torch.cat(parts)

    def stored_bytes(self, rows: int) -> float:
        return self.stored.stored_bytes(rows)

    @cached_property
    def mean(self) -> Tensor:
        """The mean of the known rows, fp32, read piece by piece: only a rank with new rows needs it."""
        files, step = OpenFiles(), max(1, PIECE // max(1, math.prod(self.shape[1:])))
        total = torch.zeros(self.shape[1:], dtype=torch.float64)
        for begin in range(0, self.known, step):
            total += self.stored.rows(files, begin, min(begin + step, self.known)).double().sum(dim=0)
        return (total / self.known).float()


@dataclass(frozen=True, kw_only=True, eq=False)
class ReducedEntry(TensorEntry):
    """A matrix from which a product of two small ones is subtracted, in fp32.

    Attributes:
        stored: The matrix in the file.
        down: (r, in), fp32.
        up: (out, r), fp32.
    """

    stored: TensorEntry
    down: Tensor
    up: Tensor

    def rows(self, files: OpenFiles, begin: int, end: int) -> Tensor:
        rows = self.stored.rows(files, begin, end).to(torch.float32, copy=True)
        # Not a matrix product: that may round a row otherwise when it is computed with others, as on another rank.
        for one, other in zip(self.up[begin:end].T, self.down, strict=True):
            rows -= one[:, None] * other
        return rows

    def scale(self, files: OpenFiles) -> float | None:
        return None

    def stored_bytes(self, rows: int) -> float:
        return self.stored.stored_bytes(rows)


_ITEM_BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BF16": 2, "F16": 2, "F32": 4}
_BITSANDBYTES = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(?P<kind>nf4|fp4)")


def without_codings(stored: Mapping[str, TensorEntry], forms: Mapping[str, LayerForm]) -> dict[str, TensorEntry]:
    """The tensors of a model, each as it is to be read: scales and tables become part of the entries that they decode.

    Args:
        stored: Tensors of which none is in a form that is not read.
        forms: ComfyUI's descriptions of some layers.

    Raises:
        InputError: Weights in bitsandbytes' 4 bits are damaged.
    """
    parts: set[str] = {key for key in stored if key.endswith(NOT_READ) or key.rpartition(".")[2] == "scaled_fp8"}
    coded: dict[str, TensorEntry] = {}
    for key, entry in stored.items():
        found = _BITSANDBYTES.fullmatch(key)
        if found:
            weight = found["weight"]
            coded[weight] = _four_bits(stored, weight, entry)
            parts |= {other for other in stored if other.startswith(f"{weight}.")}
        elif key.endswith(SCALES):
            layer = key.rpartition(".")[0]
            codes, rotated = stored[f"{layer}.weight"], forms[layer].rotated if layer in forms else 1
            coded[f"{layer}.weight"] = ScaledEntry(**vars(codes), scale_entry=entry, rotated=rotated)
            parts.add(key)
    return {key: coded.get(key, entry) for key, entry in stored.items() if key not in parts}


class _State(BaseModel):
    """The state that bitsandbytes writes about a weight: JSON, stored as a tensor of bytes."""

    shape: tuple[PositiveInt, PositiveInt]
    blocksize: PositiveInt
    nested_blocksize: PositiveInt | None = None
    nested_offset: FiniteFloat = 0.0


def _four_bits(stored: Mapping[str, TensorEntry], weight: str, state: TensorEntry) -> TensorEntry:
    """Make the entry of a weight from the state that bitsandbytes stores with it."""
    if state.dtype != "U8":
        raise InputError(f"{state.file}: '{state.key}' is {state.dtype}, not bytes of JSON; download it again")
    try:
        parsed = _State.model_validate_json(state.whole(OpenFiles()).numpy().tobytes())
        packed, levels, scales = (stored[key] for key in (weight, f"{weight}.quant_map", f"{weight}.absmax"))
        entry = FourBitEntry(
            packed.file,
            packed.key,
            parsed.shape,
            packed.dtype,
            num_rows=parsed.shape[0],
            levels=levels,
            scales=scales,
            block=parsed.blocksize,
        )
        if parsed.nested_blocksize is not None:
            entry = replace(
                entry,
                scale_levels=stored[f"{weight}.nested_quant_map"],
                scale_scales=stored[f"{weight}.nested_absmax"],
                scale_block=parsed.nested_blocksize,
                offset=parsed.nested_offset,
            )
    except KeyError as error:
        raise InputError(
            f"{state.file}: '{weight}' is in bitsandbytes' 4 bits, but {error} is missing; download it again"
        ) from error
    except ValidationError as error:
        raise InputError(
            f"{state.file}: '{state.key}' is damaged ({first_problem(error)}); download it again"
        ) from error
    _check_sizes(entry, packed)
    return entry


def _check_sizes(entry: FourBitEntry, packed: TensorEntry) -> None:
    """Raise InputError if codes or scales are fewer than the weight needs, or the levels do not fit the codes."""
    num_codes = 2 * _ITEM_BYTES.get(packed.dtype, 0) * math.prod(packed.shape)
    num_blocks = -(-math.prod(entry.shape) // entry.block)
    fits = num_codes >= math.prod(entry.shape) and entry.levels.shape == (16,) and _holds(entry.scales, num_blocks)
    if entry.scale_levels is not None and entry.scale_scales is not None:
        num_outer = -(-num_blocks // entry.scale_block)
        fits = fits and entry.scale_levels.shape == (256,) and _holds(entry.scale_scales, num_outer)
    if not fits:
        raise InputError(
            f"{entry.file}: '{entry.key}' in bitsandbytes' 4 bits does not have the codes, scales and levels of a "
            f"weight of {entry.shape[0]} x {entry.shape[1]}; download it again"
        )


def _holds(entry: TensorEntry, count: int) -> bool:
    """Whether it is a vector of at least `count` numbers."""
    return len(entry.shape) == 1 and entry.shape[0] >= count
