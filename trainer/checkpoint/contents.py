"""A checkpoint's table of contents: where its tensors lie in its files. Reading it executes nothing. No torch here.

`contents.json` is ours. torch's own table, `.metadata`, is a pickle, which can run any program when torch opens it. It
is written for torch's tools and never read. See DECISIONS 128.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from trainer.run.manifest import REMEDY, part
from trainer.system import files
from trainer.system.errors import InputError

CONTENTS = "contents.json"
ATTACK = "it may be made to run a program: remove this checkpoint"
MOST_BYTES = 2**30
"""Largest table that is read. A piece takes about 150 bytes: enough for a large model on some thousand ranks."""

Count = Annotated[int, Field(ge=0, strict=True)]
Shape = Annotated[tuple[Count, ...], Field(max_length=16)]
Name = Annotated[str, Field(max_length=1000, pattern=r"^[^\p{C}\p{Z}]*$")]
# fmt: off
Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
]
# fmt: on


@dataclass(frozen=True)
class Piece:
    """A range of bytes in a file of the checkpoint's folder."""

    file: str
    start: Count
    length: Count


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor that one rank wrote. offsets: where it begins in the tensor, per dim."""

    offsets: Shape
    shape: Shape
    stored: Piece


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor. dtype: by torch's name, for example `bfloat16`."""

    dtype: Dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """Where everything in a checkpoint lies, by name.

    Attributes:
        tensors: For example `trainables.a.weight`.
        values: Settings of the optimizer, which are numbers and names, for example `optimizer.param_groups.0.lr`.
    """

    tensors: Mapping[Name, StoredTensor]
    values: Mapping[Name, Piece]


_CONTENTS = TypeAdapter(Contents)


def write(contents: Contents) -> bytes:
    """The bytes of the file `contents.json`."""
    return _CONTENTS.dump_json(contents)


def from_torch(table: Any) -> Contents:
    """Convert torch's table, a `Metadata`."""
    pieces = {
        (index.fqn, index.offset): {"file": info.relative_path, "start": info.offset, "length": info.length}
        for index, info in table.storage_data.items()
    }
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, entry in table.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            values[name] = pieces[name, None]
            continue
        chunks = [
            {"offsets": chunk.offsets, "shape": chunk.sizes, "stored": pieces[name, chunk.offsets]}
            for chunk in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": entry.size, "chunks": chunks}
    return _CONTENTS.validate_python({"tensors": tensors, "values": values})


def read(checkpoint: Path) -> Contents:
    """Read the table of contents of a checkpoint.

    Raises:
        InputError: The table is missing, damaged, or does not agree with the checkpoint's files.
    """
    file = checkpoint / CONTENTS
    try:
        contents = files.read_json(file, _CONTENTS, REMEDY, MOST_BYTES)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); {REMEDY}") from error
    wrong = next(_contradictions(checkpoint, contents), None)
    if wrong:
        raise damaged(file, wrong)
    return contents


def damaged(file: Path, what: str) -> InputError:
    """The error for a file of a checkpoint whose content is wrong."""
    return InputError(f"{file}: damaged ({what}); {REMEDY}")


def _contradictions(checkpoint: Path, contents: Contents) -> Iterator[str]:
    """Yield each statement of the table that the files contradict."""
    sizes: dict[str, int] = {}
    for name, piece in _pieces(contents):
        if piece.file not in sizes:
            try:
                sizes[piece.file] = part(checkpoint, piece.file).stat().st_size
            except InputError as error:
                yield str(error)
                return
        if piece.start + piece.length > sizes[piece.file]:
            end, size = piece.start + piece.length, sizes[piece.file]
            yield f"'{name}' ends at byte {end} of {piece.file}, which has {size}"
    taken: dict[str, int] = {}
    for _, piece in sorted(_pieces(contents), key=lambda pair: pair[1].start):
        if piece.start < taken.get(piece.file, 0):
            yield f"byte {piece.start} of {piece.file} belongs to two pieces"
        taken[piece.file] = piece.start + piece.length
    for name, tensor in contents.tensors.items():
        if not _is_whole(tensor):
            yield f"the pieces of '{name}' do not make up its shape"
        for chunk in tensor.chunks:
            # Numbers take at least 8 bits: a table must not claim more memory than its files explain.
            if math.prod(chunk.shape) > chunk.stored.length:
                yield f"'{name}' has more numbers than bytes in {chunk.stored.file}"


def _pieces(contents: Contents) -> Iterator[tuple[str, Piece]]:
    yield from contents.values.items()
    for name, tensor in contents.tensors.items():
        yield from ((name, chunk.stored) for chunk in tensor.chunks)


def _is_whole(tensor: StoredTensor) -> bool:
    """Whether each chunk lies inside the tensor, and together they have as many numbers as it."""
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.shape) == len(tensor.shape):
            return False
        ends = (offset + size for offset, size in zip(chunk.offsets, chunk.shape, strict=True))
        if any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            return False
    return sum(math.prod(chunk.shape) for chunk in tensor.chunks) == math.prod(tensor.shape)
