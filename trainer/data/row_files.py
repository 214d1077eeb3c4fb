"""Rows of .jsonl, .json, .csv and .parquet files, one by one and in bounded memory. Imports neither torch nor numpy.

The first three may be packed by gzip. See DECISIONS 160.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, Self

from trainer.data.row_forms import COLUMNS, KEYS, completed, is_known, present, unread, unread_except
from trainer.system.errors import InputError
from trainer.system.files import MIB, opened
from trainer.system.terminal import shortened

PACKED = ".gz"
LINE_CHUNK = 2**20
PARQUET_ROWS = 64
"""Rows of a parquet file that are converted at once, at most."""
ROWS_LOOKED_AT = 100
"""First rows of a file that are looked through for texts that are not read."""
MOST_LINE = 64 * MIB
"""Limit for a row that is a line, an object or the cells of a table, bytes or letters: some 16 million tokens."""
MOST_UNPACKED, MOST_RATIO = 1024 * MIB, 200
"""A file is no bomb if it unpacks to so many bytes at most, or to so many times its size."""
LEAST_SUSPICIOUS, MOST_PACKED = 64 * MIB, 50
"""A column of images is refused where more bytes than this become more than 50 times as many: images are compressed."""
BYTES_AT_ONCE = 128 * MIB
"""Limit for the rows of a parquet file that are converted at once."""
ROW_KEYS = f"each row is an object with {KEYS}"
LONG = f"longer than {MOST_LINE // MIB} MiB; shorten or remove it"
BYTE_ORDER_MARK = "\ufeff"
BLANK = re.compile(r"[ \t\r\n\ufeff]*")


@dataclass(frozen=True, eq=False)
class FoundRow:
    """A row of a file.

    Attributes:
        values: Returns {key: value}, without those that are null. Raises InputError naming the file and the row.
        where: Returns the file with the line or row, for messages.
        after: The offset after it, as `rows_of` counts.
        share: Share of the file that lies before that offset, the same wherever reading began.
    """

    values: Callable[[], dict[str, Any]]
    where: Callable[[], str]
    after: int
    share: float


def suffix_of(file: Path) -> str:
    """The suffix of a file, lower case; of .jsonl.gz, .json.gz and .csv.gz that of the file that is packed."""
    suffix = file.suffix.lower()
    inner = Path(file.stem).suffix.lower()
    return inner if suffix == PACKED and inner in (".jsonl", ".json", ".csv") else suffix


def has_rows(file: Path) -> bool:
    """Whether a file is one of rows."""
    return suffix_of(file) in READERS


def rows_of(file: Path, offset: int = 0) -> Iterator[FoundRow]:
    """The rows of a file, from an offset on.

    Args:
        file: The file.
        offset: Where a row begins: in (unpacked) bytes of a .jsonl, in rows of other files. In packed files, .json and
            .csv the rows before it are read, too.

    Raises:
        InputError: The file cannot be read.
    """
    return READERS[suffix_of(file)](file, offset)


def first_row(file: Path) -> Mapping[str, Any] | None:
    """The first row of a file; None for files without rows, and for a row that cannot be read.

    Raises:
        OSError: The file cannot be read.
        InputError: It is not a regular file, or damaged.
    """
    if not has_rows(file):
        return None
    for row in rows_of(file):
        try:
            return row.values()
        except InputError:  # it is named when it is trained
            return None
    return None


def unread_keys(file: Path, read: Collection[str] | None = None) -> list[str]:
    """The keys that hold texts in the first rows of a file and are not read.

    Args:
        file: The file.
        read: The columns of a parquet file that are read, where they are not those of `row_forms`.

    Raises:
        InputError: As `first_row`.
    """
    first = islice(_with_all_columns(file), ROWS_LOOKED_AT)
    keys = (unread(row) if read is None else unread_except(row, read) for row in first)
    return [*dict.fromkeys(key for found in keys for key in found)]


def unread_warning(place: str, keys: Iterable[str]) -> str:
    """The warning about such keys. place: the file, or the first of several."""
    return f"{place}: rows hold texts that are not read, under {shortened(', '.join(keys), 200)}; move what matters"


def _with_all_columns(file: Path) -> Iterator[Mapping[str, Any]]:
    """Rows with what is not read of them, up to the first that cannot be read: it is named when it is trained."""
    with suppress(InputError):
        if suffix_of(file) == ".parquet":
            yield from _rows_of_texts(file)
        elif has_rows(file):
            yield from (row.values() for row in rows_of(file))


def _rows_of_texts(file: Path) -> Iterator[Mapping[str, Any]]:
    """Rows of a parquet file with what is read and all other texts."""
    with open_parquet(file) as table:
        texts = [field.name for field in table.schema_arrow if str(field.type) in ("string", "large_string")]
        names = [*dict.fromkeys([*columns_of(table), *texts])]
        require_plain(file, table.metadata, names, MOST_RATIO, "texts")
        for number, batch in enumerate(table.iter_batches(1, columns=names), 1):
            yield present(python_rows(batch, file, number)[0])


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError inside into an InputError that names the file."""
    try:
        yield
    except OSError as error:
        name = shortened(str(error.filename or path), 500)
        raise InputError(
            f"{name}: cannot be read ({error.strerror}); put it back, or change its permissions"
        ) from error


@contextmanager
def unpacked(path: Path) -> Iterator[BufferedReader | gzip.GzipFile]:
    """Open a file that gzip may have packed. Raises InputError if it cannot be read or unpacked."""
    with reading(path), opened(path) as raw:
        if path.suffix.lower() != PACKED:
            yield raw
            return
        try:
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{path}: not a file of gzip, or cut short ({error}); write it again") from error


def _unpacked_size(path: Path) -> int:
    """Bytes of a file when it is unpacked, which takes a second for 300 MB: gzip stores them modulo 4 GiB only."""
    with reading(path):
        status = path.stat()
    return _read_size(path, status.st_size, status.st_mtime_ns) if path.suffix.lower() == PACKED else status.st_size


@lru_cache(maxsize=1024)
def _read_size(path: Path, size: int, changed_ns: int) -> int:
    """size, changed_ns: tell whether it is still the file that is remembered."""
    unpacked_size = 0
    with unpacked(path) as file:
        while chunk := file.read(LINE_CHUNK):
            unpacked_size += len(chunk)
            if unpacked_size > max(MOST_UNPACKED, MOST_RATIO * size):
                wrong = f"{path}: unpacks to more than {MOST_RATIO} times its size"
                raise InputError(f"{wrong}, as no text does; unpack it and look into it")
    return unpacked_size


def line_number(path: Path, offset: int) -> int:
    """Number of the line that holds the byte at `offset`, from 1."""
    number = 1
    with unpacked(path) as file:
        while offset > 0 and (chunk := file.read(min(offset, LINE_CHUNK))):
            number += chunk.count(b"\n")
            offset -= len(chunk)
    return number


def utf8(data: bytes, path: Path, offset: int) -> str:
    """Decode the text that begins at `offset` bytes, without the byte order mark that Windows editors write."""
    try:
        return data.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        byte = offset + error.start
        raise InputError(
            f"{path}:{line_number(path, byte)}: byte {byte} of the file (0x{data[error.start]:02x}) is not UTF-8; "
            "save the file as UTF-8"
        ) from error


def is_blank(line: bytes) -> bool:
    """Whether a line holds nothing, or only the byte order mark of a file that was joined to others."""
    return not line.strip().removeprefix(BYTE_ORDER_MARK.encode()).strip()


def _lines(path: Path, offset: int) -> Iterator[FoundRow]:
    """Rows of a .jsonl, parsed when they are needed."""
    size = _unpacked_size(path)
    with unpacked(path) as file:
        start = file.seek(offset)  # a packed file is unpacked up to there
        while line := file.readline(MOST_LINE + 1):
            begin, start = start, start + len(line)
            if len(line) > MOST_LINE:
                raise InputError(f"{path}:{line_number(path, begin)}: the line is {LONG}")
            if is_blank(line):
                continue
            where = partial(_line_of, path, begin)
            values = partial(_line_values, path, begin, line.rstrip())
            yield FoundRow(values, where, start, start / size)


def _line_of(path: Path, offset: int) -> str:
    return f"{path}:{line_number(path, offset)}"


def _line_values(path: Path, offset: int, line: bytes) -> dict[str, Any]:
    text = utf8(line, path, offset)
    try:
        return _checked(json.loads(text))
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
        raise InputError(f"{_line_of(path, offset)}: not a JSON object ({reason}); {ROW_KEYS}") from error
    except RecursionError as error:
        raise InputError(f"{_line_of(path, offset)}: not a JSON object (nested too deep); {ROW_KEYS}") from error
    except ValueError as error:  # of ours, and a number of thousands of digits
        reason = str(error) if isinstance(error, InputError) else f"not a JSON object ({error})"
        raise InputError(f"{_line_of(path, offset)}: {reason}; {ROW_KEYS}") from error


def _checked(values: Any) -> dict[str, Any]:
    """The row of a line. The caller names the line in what is raised here, as in the errors of the parser."""
    if not isinstance(values, dict):
        raise InputError("not a JSON object")
    found: dict[str, Any] = present(values)
    return found


def _objects(path: Path, offset: int) -> Iterator[FoundRow]:
    """Rows of a .json: a list of objects, or objects one after the other."""
    with _Text(path) as text:
        for number, (line, values, share) in enumerate(_parsed_objects(path, text), 1):
            if number > offset:
                yield FoundRow(partial(present, values), partial("{}:{}".format, path, line), number, share)


def _parsed_objects(path: Path, text: _Text) -> Iterator[tuple[int, dict[str, Any], float]]:
    """Each object, with its line and the share of the file up to its end. They are parsed one by one, in a window."""
    decode, window, at, line, is_list, is_first = json.JSONDecoder().raw_decode, "", 0, 1, False, True
    begin = end_of_window = 0.0
    while True:
        at, line = _past_blanks(window, at, line)
        if at == len(window):
            begin, window, at = end_of_window, text.read(LINE_CHUNK), 0
            end_of_window = text.share
            if not window:
                break
        elif is_first and window[at] == "[":
            is_list, is_first, at = True, False, at + 1
        elif is_list and window[at] in ",]":
            at, is_list = at + 1, window[at] == ","
        elif window[at] != "{":
            raise InputError(f"{path}:{line}: not a JSON object, nor a list of them; {ROW_KEYS}")
        else:
            try:
                values, end = decode(window, at)
            except json.JSONDecodeError as error:  # or the window ends within the object
                wrong = f"{path}:{line + window.count(chr(10), at, error.pos)}: not JSON ({error.msg})"
                more = text.read(max(LINE_CHUNK, len(window) - at))
                begin += (end_of_window - begin) * at / len(window)
                window, at, end_of_window = window[at:] + more, 0, text.share
                if not more:
                    raise InputError(f"{wrong}; write the file again") from error
                if len(window) > MOST_LINE:
                    raise InputError(f"{path}:{line}: not JSON, or an object {LONG}") from error
                continue
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}:{line}: not a JSON object ({error}); {ROW_KEYS}") from error
            yield line, values, begin + (end_of_window - begin) * end / len(window)
            line, at, is_first = line + window.count("\n", at, end), end, False
    if is_list:
        raise InputError(f"{path}:{line}: the list has no end, so that the file was cut short; write it again")


def _past_blanks(window: str, at: int, line: int) -> tuple[int, int]:
    """(place of the next letter that is not blank, its line): `raw_decode` takes no blanks before a value."""
    found = BLANK.match(window, at)
    end = found.end() if found else at
    return end, line + window.count("\n", at, end)


class _Text:
    """Text of a file, without the byte order mark at its beginning. Line ends stay as they are."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, max(1, _unpacked_size(path))
        self._opened = ExitStack()
        self.num_bytes = 0  # of the lines that were read
        self.num_letters = 0  # of the row that is read

    def __enter__(self) -> Self:
        self._file = self._opened.enter_context(unpacked(self._path))
        self._stream = self._opened.enter_context(io.TextIOWrapper(self._file, "utf-8-sig", newline=""))
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._opened.__exit__(*error)

    @property
    def share(self) -> float:
        """Share of the file that was read in blocks."""
        return min(1.0, self._file.tell() / self._size)

    @property
    def share_of_lines(self) -> float:
        """Share of the file that was read in lines."""
        return min(1.0, self.num_bytes / self._size)

    def read(self, size: int) -> str:
        """Read at most some letters. Raises InputError for a text that is not UTF-8."""
        try:
            return self._stream.read(size)
        except UnicodeDecodeError as error:
            raise self._not_utf8(error) from error

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next line. Raises InputError for a row that is too long."""
        try:
            line = self._stream.readline(MOST_LINE + 1)
        except UnicodeDecodeError as error:
            raise self._not_utf8(error) from error
        self.num_bytes += len(line.encode())
        self.num_letters += len(line)
        if self.num_letters > MOST_LINE:
            raise InputError(f"{self._path}: a row is {LONG}")
        if not line:
            raise StopIteration
        return line

    def _not_utf8(self, error: UnicodeDecodeError) -> InputError:
        byte = error.object[error.start]
        return InputError(f"{self._path}: not UTF-8 (byte 0x{byte:02x}); save the file as UTF-8")


def _cells(path: Path, offset: int) -> Iterator[FoundRow]:
    """Rows of a .csv, whose first row has the names of the columns."""
    csv.field_size_limit(MOST_LINE)  # of Python, for all files: 128 KiB
    with _Text(path) as text:
        reader = csv.reader(text, strict=True)
        names: list[str] | None = None
        number = 0
        while (found := _next_cells(path, text, reader)) is not None:
            line, cells = found
            if not any(cells):
                continue
            if names is None:
                if len({*cells}) < len(cells):
                    raise InputError(f"{path}: two columns have one name; rename one of {', '.join(cells)}")
                names = cells
                continue
            if len(cells) > len(names):
                raise InputError(f"{path}:{line}: {len(cells)} cells for {len(names)} columns; quote cells with commas")
            number += 1
            if number > offset:
                values = partial(_named_cells, names, cells)
                yield FoundRow(values, partial("{}:{}".format, path, line), number, text.share_of_lines)


def csv_columns(path: Path) -> list[str]:
    """The names of the columns of a .csv; none if it is empty."""
    with _Text(path) as text:
        reader = csv.reader(text, strict=True)
        while (found := _next_cells(path, text, reader)) is not None:
            if any(found[1]):
                return found[1]
    return []


def remedy_of_separator(columns: Iterable[str]) -> str:
    """The end of a remedy for a csv file whose fields other signs divide, as Excel writes them in Europe."""
    is_divided = any(mark in name for name in columns for mark in ";\t|")
    return ", or save the file with commas between its fields" if is_divided else ""


def _next_cells(path: Path, text: _Text, reader: Any) -> tuple[int, list[str]] | None:
    line, text.num_letters = reader.line_num + 1, 0
    try:
        cells = next(reader, None)
    except csv.Error as error:
        raise InputError(f"{path}:{line}: not a row of a csv file ({error}); write it again") from error
    return None if cells is None else (line, cells)


def _named_cells(names: list[str], cells: list[str]) -> dict[str, Any]:
    """A row without its empty cells, but for those without which it would not be a document."""
    values = dict(zip(names, cells, strict=False))
    filled = {name: cell for name, cell in values.items() if cell}
    return filled if is_known(filled) else completed(filled, values)


@contextmanager
def open_parquet(file: Path) -> Iterator[Any]:
    """Open a parquet file, a `pyarrow.parquet.ParquetFile`, whose rows are read as they are needed.

    Raises:
        InputError: It is not a parquet file.
    """
    # Imported here: it takes a third of a second, and few runs need it.
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    with reading(file), opened(file) as stream:
        try:
            with ParquetFile(stream) as table:
                yield table
        except (ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # of the disk; damaged pages have no number
                raise
            reason = shortened(str(error).partition("\n")[0], 200)
            raise InputError(f"{file}: not a parquet file, or damaged ({reason}); write it again") from error


def require_plain(
    file: Path, metadata: Any, columns: Iterable[str], ratio: int = MOST_PACKED, what: str = "encoded images"
) -> None:
    """Raise InputError for a parquet file whose values take little room on the disk and would fill the memory.

    Args:
        file: The file.
        metadata: Its `pyarrow.parquet.FileMetaData`.
        columns: Its columns that are read.
        ratio: How many times smaller they may be on the disk.
        what: The values, for the message.
    """
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for chunk in map(row_group.column, range(row_group.num_columns)):
            name = chunk.path_in_schema.partition(".")[0]
            size, packed = chunk.total_uncompressed_size, chunk.total_compressed_size
            if name in columns and size > max(LEAST_SUSPICIOUS, ratio * packed):
                raise InputError(
                    f"{file}: row group {group + 1} of the column {name} has {packed / MIB:.1f} MiB that become "
                    f"{size / MIB:.0f}; {what} do not shrink so much, write the file again"
                )


def rows_at_once(metadata: Any, columns: Sequence[str], at_most: int) -> int:
    """Return how many rows can be converted at a time, even where each has the largest values of its row group.

    A file stores equal values once, and each takes its full size when it is converted.
    """
    largest = 1
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = map(group.column, range(group.num_columns))
        sizes = (one.total_uncompressed_size for one in chunks if one.path_in_schema.partition(".")[0] in columns)
        largest = max(largest, sum(sizes))
    return max(1, min(at_most, BYTES_AT_ONCE // largest))


def columns_of(table: Any) -> list[str]:
    """The columns of a parquet file that are read."""
    return [name for name in table.schema_arrow.names if name in COLUMNS]


def python_rows(batch: Any, file: Path, first: int) -> list[dict[str, Any]]:
    """Convert rows of a parquet file.

    Args:
        batch: A `pyarrow.RecordBatch`.
        file: The file, for errors.
        first: Number of its first row, from 1, for errors.

    Raises:
        InputError: A value cannot be converted, as text that is not UTF-8.
    """
    try:
        found: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        for index in range(batch.num_rows if batch.num_rows > 1 else 0):
            python_rows(batch.slice(index, 1), file, first + index)
        raise InputError(f"{file}: row {first}: a value cannot be read ({error}); correct it") from error
    return found


def _parquet(path: Path, offset: int) -> Iterator[FoundRow]:
    """Rows are read one row group at a time, and only the columns that are used."""
    with open_parquet(path) as file:
        columns, total, row = columns_of(file), file.metadata.num_rows, 0
        if not is_known(columns):
            names = shortened(", ".join(file.schema_arrow.names), 200)
            raise InputError(f"{path}: has the columns {names}; a row has {KEYS}")
        require_plain(path, file.metadata, columns, MOST_RATIO, "texts")
        at_once = rows_at_once(file.metadata, columns, PARQUET_ROWS)
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if row + count <= offset:
                row += count
                continue
            for batch in file.iter_batches(at_once, row_groups=[group], columns=columns, use_threads=False):
                if batch.num_rows == 1 and batch.nbytes > MOST_LINE:
                    raise InputError(f"{path}: row {row + 1}: the row is {LONG}")
                for values in python_rows(batch, path, row + 1):
                    row += 1
                    if row > offset:
                        where = partial("{}: row {}".format, path, row)
                        yield FoundRow(partial(present, values), where, row, row / total)


READERS: Mapping[str, Callable[[Path, int], Iterator[FoundRow]]] = {
    ".jsonl": _lines,
    ".json": _objects,
    ".csv": _cells,
    ".parquet": _parquet,
}
