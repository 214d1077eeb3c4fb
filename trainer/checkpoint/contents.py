"""A checkpoint's table of contents: where its tensors lie in its files. Reading it executes nothing. No torch here.

`contents.json` is ours. torch's own table, `.metadata`, is a pickle, which may run any program when it is opened as
torch opens it. It is still written, for torch's tools and earlier versions of this program, but read only of
checkpoints of those versions, and then by `_Unpickler`, which knows no class and no function but its own records.
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

from trainer.config import files
from trainer.config.errors import InputError
from trainer.run.manifest import REMEDY, part

CONTENTS, TORCH_CONTENTS = "contents.json", ".metadata"
ATTACK = "it may be made to run a program: remove this checkpoint"
MOST_BYTES = 2**30
"""A piece takes about 150 bytes: this is for all tensors and moments of a large model on some thousand ranks."""

_OTHER_CONTAINERS = pickle.SETITEM + pickle.DICT + pickle.EMPTY_SET + pickle.ADDITEMS + pickle.FROZENSET
_NUMBERS_AS_TEXT = pickle.PUT + pickle.GET + pickle.INT + pickle.LONG
UNUSED = frozenset(_OTHER_CONTAINERS + _NUMBERS_AS_TEXT)
"""Instructions of pickles that torch's table has no use for."""

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
    """Bytes of a file. file: its name in the checkpoint's folder.  start, length: in bytes."""

    file: str
    start: Count
    length: Count


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, which a rank wrote. offsets: where in the tensor it begins.  shape: its own."""

    offsets: Shape
    shape: Shape
    stored: Piece


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor. dtype: torch's name of it, as `bfloat16`."""

    dtype: Dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """{name: where it lies}. tensors: as `trainables.a.weight`.  values: settings of the optimizer, which are numbers
    and names, as `optimizer.param_groups.0.lr`."""

    tensors: Mapping[Name, StoredTensor]
    values: Mapping[Name, Piece]


_CONTENTS = TypeAdapter(Contents)


def write(contents: Contents) -> bytes:
    """The file `contents.json`."""
    return _CONTENTS.dump_json(contents)


def from_torch(table: Any) -> Contents:
    """The contents that torch's table tells. table: its `Metadata`, or a record of one.

    Raises ValidationError for an entry that lies nowhere or has other values, and others for what is not such a table.
    """
    pieces = {
        _place(index.fqn, index.offset): {"file": info.relative_path, "start": info.offset, "length": info.length}
        for index, info in table.storage_data.items()
    }
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, entry in table.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            values[name] = pieces.get(_place(name, None))
            continue
        chunks = [
            {"offsets": chunk.offsets, "shape": chunk.sizes, "stored": pieces.get(_place(name, chunk.offsets))}
            for chunk in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": entry.size, "chunks": chunks}
    return _CONTENTS.validate_python({"tensors": tensors, "values": values})


def _place(name: str, offsets: Iterable[int] | None) -> str:
    """A key for a dictionary: a text, since a stranger can choose any number of tuples of integers with one hash."""
    return name if offsets is None else f"{name} {','.join(str(operator.index(offset)) for offset in offsets)}"


def read(checkpoint: Path) -> Contents:
    """The table of contents of a checkpoint of this or an earlier version.

    Raises InputError, naming the file, where it is missing, damaged, asks for a program to be run or does not agree
    with the files of the checkpoint.
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
    """The error about a file of a checkpoint whose content is wrong."""
    return InputError(f"{file}: damaged ({what}); {REMEDY}")


def _contradictions(checkpoint: Path, contents: Contents) -> Iterator[str]:
    """What cannot be true of the files that are there."""
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
            # Numbers of 8 bits are the smallest: what a table claims must not take more memory than its files explain.
            if math.prod(chunk.shape) > chunk.stored.length:
                yield f"'{name}' has more numbers than bytes in {chunk.stored.file}"


def _pieces(contents: Contents) -> Iterator[tuple[str, Piece]]:
    yield from contents.values.items()
    for name, tensor in contents.tensors.items():
        yield from ((name, chunk.stored) for chunk in tensor.chunks)


def _is_whole(tensor: StoredTensor) -> bool:
    """Whether each chunk lies in the tensor, and all have as many numbers as it has."""
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.shape) == len(tensor.shape):
            return False
        ends = (offset + size for offset, size in zip(chunk.offsets, chunk.shape, strict=True))
        if any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            return False
    return sum(math.prod(chunk.shape) for chunk in tensor.chunks) == math.prod(tensor.shape)


def _from_pickle(file: Path) -> Contents:
    """The contents of a `.metadata`. Raises OSError, and InputError as `read` does."""
    content = files.read(file, MOST_BYTES)
    try:
        return from_torch(_Unpickler(file, content).load())
    except InputError:
        raise
    except ValidationError as error:
        raise damaged(file, files.first_problem(error)) from error
    except Exception as error:  # the bytes of a stranger may be wrong in any way
        raise damaged(file, "it is not a table of contents") from error


class _Record:
    """Stands for an object in torch's table: holds what was stored of it, and does nothing."""

    offset: Any = None  # torch leaves out what is None

    def __init__(self, *_: Any) -> None:
        pass


class _Properties(_Record):
    """torch's TensorProperties, which are stored as a tuple that begins with the type of the numbers."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, *_ = state


def _records() -> dict[tuple[str, str], Any]:
    """{(module, name) in a pickle: what is made in its place}, new for each file, which may change them."""
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
    """Makes records of what a pickle asks for: it reaches no class or function outside of this file.

    The one in Python, not in C: six bytes can make that one fill 34 GB. Dictionaries have texts and records for keys,
    as torch's do, and there are no sets: a stranger can choose keys with one hash, of which 20,000 take half a minute.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code not in UNUSED
    }

    def __init__(self, file: Path, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._asked, self._records = file, _records()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._records:
            raise InputError(f"{self._asked}: asks for {f'{module}.{name}'!r}, which no checkpoint needs; {ATTACK}")
        return self._records[module, name]

    def _load_items(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        if not all(isinstance(key, str | _Record) for key in items[::2]):
            raise TypeError("a key that is neither a text nor a record")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))  # type: ignore[attr-defined]

    dispatch[pickle.SETITEMS[0]] = _load_items
