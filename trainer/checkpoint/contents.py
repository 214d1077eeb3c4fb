"""A checkpoint's table of contents: where its tensors lie in its files. Reading it executes nothing. No torch here.

`contents.json` is ours. torch's own table, `.metadata`, is a pickle, which can run any program when torch opens it. It
is still written, for torch's tools and earlier versions of this program. It is read only in checkpoints of those
versions, by `_Unpickler`, which knows no class and no function but its own records.
"""

from __future__ import annotations

import io
import math
import operator
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

from trainer.run.manifest import REMEDY, part
from trainer.system import files
from trainer.system.errors import InputError

CONTENTS, TORCH_CONTENTS = "contents.json", ".metadata"
ATTACK = "it may be made to run a program: remove this checkpoint"
MOST_BYTES = 2**30
"""Largest table that is read. A piece takes about 150 bytes: enough for a large model on some thousand ranks."""

_OTHER_CONTAINERS = pickle.SETITEM + pickle.DICT + pickle.EMPTY_SET + pickle.ADDITEMS + pickle.FROZENSET
_NUMBERS_AS_TEXT = pickle.PUT + pickle.GET + pickle.INT + pickle.LONG
UNUSED = frozenset(_OTHER_CONTAINERS + _NUMBERS_AS_TEXT)
"""Pickle instructions that torch's table does not use."""

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
    """Convert torch's table.

    Args:
        table: torch's `Metadata`, or a record of one.

    Raises:
        ValidationError: An entry has no place in a file, or values of another kind. Anything that is not such a table
            may raise other errors.
    """
    pieces = {
        _key(index.fqn, index.offset): {"file": info.relative_path, "start": info.offset, "length": info.length}
        for index, info in table.storage_data.items()
    }
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, entry in table.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            values[name] = pieces.get(_key(name, None))
            continue
        chunks = [
            {"offsets": chunk.offsets, "shape": chunk.sizes, "stored": pieces.get(_key(name, chunk.offsets))}
            for chunk in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": entry.size, "chunks": chunks}
    return _CONTENTS.validate_python({"tensors": tensors, "values": values})


def _key(name: str, offsets: Iterable[int] | None) -> str:
    """A dictionary key as text: an attacker can choose any number of tuples of integers with the same hash."""
    return name if offsets is None else f"{name} {','.join(str(operator.index(offset)) for offset in offsets)}"


def read(checkpoint: Path) -> Contents:
    """Read the table of contents of a checkpoint of this or an earlier version.

    Raises:
        InputError: The table is missing, damaged, would run a program, or does not agree with the checkpoint's files.
    """
    file = checkpoint / CONTENTS
    try:
        if file.exists():
            contents = files.read_json(file, _CONTENTS, REMEDY, MOST_BYTES)
        else:
            file = checkpoint / TORCH_CONTENTS
            contents = _from_pickle(file)
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


def _from_pickle(file: Path) -> Contents:
    """Read a `.metadata`. Raises OSError, and InputError as `read` does."""
    content = files.read(file, MOST_BYTES)
    try:
        return from_torch(_Unpickler(file, content).load())
    except InputError:
        raise
    except ValidationError as error:
        raise damaged(file, files.first_problem(error)) from error
    except Exception as error:  # bytes from elsewhere may be wrong in any way
        raise damaged(file, "it is not a table of contents") from error


class _Record:
    """Stands for an object in torch's table: holds its stored attributes and does nothing."""

    offset: Any = None  # torch leaves out what is None

    def __init__(self, *_: Any) -> None:
        pass


class _Properties(_Record):
    """torch's TensorProperties, stored as a tuple that begins with the dtype."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, *_ = state


def _records() -> dict[tuple[str, str], Any]:
    """{(module, name) in a pickle: the class to make instead}, new for each file, as a file may change them."""
    record, properties = type("Record", (_Record,), {}), type("Properties", (_Properties,), {})
    classes = {
        "torch.distributed.checkpoint.metadata": (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        "pathlib": ("PosixPath",),
    }
    return {
        **{(module, name): record for module, names in classes.items() for name in names},
        **{("torch", dtype): dtype for dtype in get_args(Dtype)},
        ("torch.distributed.checkpoint.metadata", "TensorProperties"): properties,
        ("torch", "Size"): tuple,
    }


class _Unpickler(pickle._Unpickler):
    """Makes records in place of the objects in a pickle: it reaches no class or function outside of this file.

    It is Python's unpickler in Python, not in C, which six bytes can make fill 34 GB. Keys of dictionaries are texts or
    records, as in torch's, and sets are refused: an attacker can choose keys with the same hash, of which 20,000 take
    half a minute.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code not in UNUSED
    }

    def __init__(self, file: Path, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._file, self._records = file, _records()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._records:
            raise InputError(f"{self._file}: asks for {f'{module}.{name}'!r}, which no checkpoint needs; {ATTACK}")
        return self._records[module, name]

    def _load_items(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        if not all(isinstance(key, str | _Record) for key in items[::2]):
            raise TypeError("a key that is neither a text nor a record")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))  # type: ignore[attr-defined]

    dispatch[pickle.SETITEMS[0]] = _load_items
