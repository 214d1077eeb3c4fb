"""Images inside parquet and tar files, which are read from their place in the file. Imports no torch.

A path of such an image has three parts behind the file: `shard.parquet/ROW/COLUMN/NUMBER`, both counted from 0, and
`shard.tar/OFFSET/SIZE/NAME`, both in bytes. See DECISIONS 193.
"""

from __future__ import annotations

import functools
import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.data.row_files import BYTES_AT_ONCE, open_parquet, require_plain, rows_at_once
from trainer.system.errors import InputError
from trainer.system.files import MIB, opened

SUFFIX = ".parquet"
TAR = ".tar"
BYTES_KEPT = 2 * BYTES_AT_ONCE
"""Cells of parquet columns that stay in memory. At most half of them are read at a time, and less where a file has more
than two columns of images."""
MOST_IMAGE = 1024 * MIB
"""Limit for the file of an image inside another file, bytes: 268 megapixels without any compression are less."""


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
    require_size(path, size)
    with opened(file_of(path)) as stream:
        stream.seek(offset)
        content = stream.read(size)
    if len(content) < size:
        raise InputError(f"{path}: the file ends before it; copy it again")
    return io.BytesIO(content)


def _in_parquet(path: Path) -> io.BytesIO:
    row, column, number = path.parts[-3:]
    value = _CELLS.value(file_of(path), int(row), column)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        value = value[int(number)]
    # The datasets of the hub hold {bytes, path}.
    content = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(value, dict) and content is None and value.get("path"):
        remedy = "write the images into the file, or their paths as plain texts"
        raise InputError(f"{path}: the column {column} has the path of an image without its bytes; {remedy}")
    if not isinstance(content, bytes):
        raise InputError(f"{path}: holds no image; the column {column} must have the bytes of an encoded image")
    require_size(path, len(content))
    return io.BytesIO(content)


def require_size(path: Path | str, size: int) -> None:
    """Raise InputError for an image file of more than MOST_IMAGE bytes inside another file."""
    if size > MOST_IMAGE:
        limit = f"{MOST_IMAGE // MIB} MiB"
        raise InputError(f"{path}: {size // MIB} MiB are too many for an image, the limit is {limit}; remove it")


class _Cells:
    """The cells of parquet columns that were read last: for each row group a part of it, from its first row on."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Path, int, int, str], tuple[int, list[Any], int]] = OrderedDict()
        self._columns: dict[Path, set[str]] = {}
        self._lock = threading.Lock()

    def value(self, file: Path, row: int, column: str) -> Any:
        changed = file.stat().st_mtime_ns
        starts = _starts(file, changed)
        group = max(number for number, start in enumerate(starts) if start <= row)
        key, place = (file, changed, group, column), row - starts[group]
        with self._lock:
            first, cells, _ = self._kept.get(key, (0, [], 0))
            if not first <= place < first + len(cells):
                self._kept.pop(key, None)
                # An image and its references are read in turn: a part of each column must fit next to the others.
                columns = self._columns.setdefault(file, set())
                columns.add(column)
                limit = BYTES_KEPT // max(2, len(columns))
                first, cells, size = place, *_read(file, group, column, place, limit)
                self._kept[key] = (first, cells, size)
                while sum(size for *_, size in self._kept.values()) > BYTES_KEPT and len(self._kept) > 1:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        return cells[place - first].as_py()


_CELLS = _Cells()


def _read(file: Path, group: int, column: str, first: int, limit: int) -> tuple[list[Any], int]:
    """The cells of a row group from a row on, as many as fit into `limit` bytes but at least one, and their bytes.

    A page of a parquet file is decoded as a whole, so that single rows are expensive, and so are open pages.
    """
    cells: list[Any] = []
    place = size = 0
    with open_parquet(file) as found:
        require_plain(file, found.metadata, [column])
        at_once = rows_at_once(found.metadata, [column], 1024)
        for batch in found.iter_batches(at_once, row_groups=[group], columns=[column]):
            if place + batch.num_rows > first:
                new = batch.column(column).slice(max(0, first - place))
                if cells and size + new.nbytes > limit:
                    break
                cells += list(new)
                size += new.nbytes
            place += batch.num_rows
    return cells, size


@functools.lru_cache(maxsize=256)
def _starts(file: Path, changed: int) -> tuple[int, ...]:
    """The first row of each row group. changed: the file's time, so that a replaced file is read again."""
    with open_parquet(file) as found:
        counts = [found.metadata.row_group(number).num_rows for number in range(found.num_row_groups)]
    return tuple(sum(counts[:number]) for number in range(len(counts)))
