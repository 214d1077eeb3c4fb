"""Images inside parquet and tar files, which are read from their place in the file. Imports no torch.

A path of such an image has three parts behind the file: `shard.parquet/ROW/COLUMN/NUMBER`, both counted from 0, and
`shard.tar/OFFSET/SIZE/NAME`, both in bytes.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config.errors import InputError
from trainer.config.files import opened
from trainer.data.row_files import open_parquet

SUFFIX = ".parquet"
TAR = ".tar"
GROUPS_KEPT = 4
"""Row groups of one column that stay in memory."""


def member(file: Path, row: int, column: str, number: int = 0) -> Path:
    """The path of an image in a parquet file."""
    return file / str(row) / column / str(number)


def tar_member(file: Path, offset: int, size: int, name: str) -> Path:
    """The path of an image in a tar file: its first byte, its number of bytes, and the last part of its name."""
    return file / str(offset) / str(size) / name.rpartition("/")[2]


def file_of(path: Path) -> Path:
    """The file on disk that an image is: its own, or the one that it is in."""
    return path.parents[2] if is_member(path) else path


def is_member(path: Path) -> bool:
    """Whether this is the path of an image inside another file."""
    parts = path.parts[-4:]
    is_named_so = len(parts) == 4 and parts[0].lower().endswith((SUFFIX, TAR)) and parts[1].isdigit()
    return is_named_so and not path.parents[2].is_dir()  # a folder may be called photos.tar


def opened_image(path: Path) -> io.BufferedReader | io.BytesIO:
    """Open a file, or an image inside another file.

    Raises:
        OSError: It does not exist or cannot be opened.
        InputError: It is not a regular file, or the file around it cannot be read.
    """
    if not is_member(path):
        return opened(path)
    return (_in_tar if file_of(path).suffix.lower() == TAR else _in_parquet)(path)


def _in_tar(path: Path) -> io.BytesIO:
    offset, size = map(int, path.parts[-3:-1])
    with opened(file_of(path)) as stream:
        stream.seek(offset)
        content = stream.read(size)
    if len(content) < size:
        raise InputError(f"{path}: the file ends before it; copy it again")
    return io.BytesIO(content)


def _in_parquet(path: Path) -> io.BytesIO:
    row, column, number = path.parts[-3:]
    value = _value(file_of(path), int(row), column)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        value = value[int(number)]
    # The datasets of the hub hold {bytes, path}.
    content = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(value, dict) and content is None and value.get("path"):
        remedy = "write the images into the file, or their paths as plain texts"
        raise InputError(f"{path}: the column {column} has the path of an image without its bytes; {remedy}")
    if not isinstance(content, bytes):
        raise InputError(f"{path}: holds no image; the column {column} must have the bytes of an encoded image")
    return io.BytesIO(content)


def _value(file: Path, row: int, column: str) -> Any:
    starts = _starts(file, file.stat().st_mtime_ns)
    group = max(number for number, start in enumerate(starts) if start <= row)
    return _column(file, file.stat().st_mtime_ns, group, column)[row - starts[group]].as_py()


@functools.lru_cache(maxsize=256)
def _starts(file: Path, changed: int) -> tuple[int, ...]:
    """The first row of each row group. changed: the file's time, so that a replaced file is read again."""
    with open_parquet(file) as found:
        counts = [found.metadata.row_group(number).num_rows for number in range(found.num_row_groups)]
    return tuple(sum(counts[:number]) for number in range(len(counts)))


@functools.lru_cache(maxsize=GROUPS_KEPT)
def _column(file: Path, changed: int, group: int, column: str) -> Any:
    with open_parquet(file) as found:
        return found.read_row_group(group, columns=[column]).column(column)
