"""Images with captions in parquet, csv and tar files, a row or sample each. Imports neither torch nor numpy.

Nothing is unpacked: an image is read from its place in the file when it is needed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from trainer.config.sections import DataConfig, half_character
from trainer.data.images.image_members import SUFFIX, TAR, member, require_size, tar_member
from trainer.data.row_files import MOST_RATIO, open_parquet, remedy_of_separator, require_plain, rows_at_once
from trainer.system.errors import InputError
from trainer.system.files import opened
from trainer.system.terminal import shortened

CSV = ".csv"
TABLES = (SUFFIX, CSV, TAR)
"""Suffixes of files that hold several images, or name them."""
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
COMPRESSED_MARKS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""First bytes of gzip, bzip2, xz and zstd."""
IS_COMPRESSED = "is compressed, and images are read from their place in it; unpack it to a .tar"
IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "file_name", "image_path", "path", "file", "img")
TAR_IMAGES = (*IMAGE_COLUMNS, "bmp", "tif", "tiff", "jfif", "jpe", "pjpeg", "pjp")
"""Suffixes of images in a tar file, in the order in which one is chosen."""
CAPTION_COLUMNS = ("text", "caption", "captions", "prompt", "txt", "description")
FORMS: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD")
"""How systems write accents."""
ROWS_AT_ONCE, LISTS_AT_ONCE = 1024, 16
"""Rows that are read at a time: of texts, and of lists, which may hold whole images."""
MOST_TEXT = 2**20
"""Bytes of a text, or of a name, in a tar file that are read."""
MOST_NAME, MOST_PATH = 255, 4095
"""Bytes of the name of a file, and of its path, on Linux."""
ABOUT = frozenset(
    (
        *("readme", "license", "licence", "copying", "notice", "citation", "changelog"),
        *("dataset_info", "dataset_infos", "metadata", "info", "stats"),
    )
)
"""Names, in lower case and without suffix, of files in a tar file that are about a dataset, where no image has them."""
_DOTS = "the name of a sample ends at the first dot"


@dataclass(frozen=True)
class TableRow:
    """An image of a table.

    Attributes:
        place: File and row, for messages.
        image: Its file, or its path inside the table.
        name: Its name, by which masks and references in folders are found: the file's or the sample's without suffix,
            and in a parquet file the number of its row from 0.
        captions: Its captions.
        references: Its reference images, as `image`.
        unused: Names of its further images, which are not trained.
    """

    place: str
    image: Path
    name: str
    captions: tuple[str, ...]
    references: tuple[Path, ...] = ()
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Columns:
    """The columns, or in a tar file the suffixes, that are read. An empty name stands for the usual ones.

    has_lines: Whether each line of a .txt in a tar file is a caption by itself.
    """

    image: str = ""
    caption: str = ""
    references: tuple[str, ...] = ()
    has_lines: bool = False

    @classmethod
    def of(cls, data: DataConfig) -> Columns:
        return cls(data.image_column, data.caption_column, data.reference_columns, data.caption_lines)


class NoImage(InputError):
    """A sample has a caption and no image."""


@dataclass(frozen=True)
class Unread:
    """A file in a tar file that belongs to no image. name: its name there."""

    name: str


def read_table(file: Path, columns: Columns) -> Iterator[TableRow | InputError | Unread]:
    """Yield the rows of a table; for a wrong one, what is wrong with it; and files in it that belong to no row.

    Raises:
        OSError: The file cannot be read.
        InputError: The whole file is wrong: damaged, cut off, or without a column.
    """
    read = {SUFFIX: _parquet_rows, CSV: _csv_rows, TAR: _tar_rows}[file.suffix.lower()]
    return read(file, columns)


def csv_rows(file: Path, needed: Sequence[Sequence[str]] = ()) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line from 1, {column: value}) of every row of a csv file with a header.

    Args:
        file: The file.
        needed: Columns that it must have, one of each.

    Raises:
        OSError: The file cannot be read.
        InputError: It is not a csv file in UTF-8, or lacks a column.
    """
    with opened(file) as stream:
        reader = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", newline=""), strict=True)
        try:
            columns = reader.fieldnames or ()
            _require_different(file, columns)
            if absent := next((names for names in needed if not set(names) & set(columns)), None):
                raise InputError(
                    f"{file}: none of its columns {shortened(', '.join(columns))} is called {' or '.join(absent)}; "
                    f"rename it{remedy_of_separator(columns)}"
                )
            for row in reader:
                if None in row:
                    raise InputError(f"{file}:{reader.line_num}: has more fields than the header; put texts in quotes")
                yield reader.line_num, {name: value or "" for name, value in row.items()}
        except csv.Error as error:
            raise InputError(f"{file}:{reader.line_num}: not a row of a csv file ({error}); write it again") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{file}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


def _chosen(file: Path, known: Sequence[str], columns: Columns) -> Columns:
    """The columns of a file that are read. Raises InputError for one that is missing."""
    given = (
        ("data.image_column", columns.image),
        ("data.caption_column", columns.caption),
        *(("data.reference_columns", name) for name in columns.references),
    )
    for field, name in given:
        if name and name not in known:
            raise InputError(f"{field}: {file} has no column '{name}'; it has {', '.join(known) or 'none'}")
    image = columns.image or next((name for name in IMAGE_COLUMNS if name in known), "")
    if not image:
        raise InputError(
            f"{file}: none of its columns {', '.join(known)} is called {', '.join(IMAGE_COLUMNS[:4])} or "
            f"{IMAGE_COLUMNS[5]}; name the one with the images in data.image_column{remedy_of_separator(known)}"
        )
    caption = columns.caption or next((name for name in CAPTION_COLUMNS if name in known), "")
    _require_different(file, [name for name in known if name in (image, caption, *columns.references)])
    return Columns(image, caption, columns.references)


def _require_different(file: Path, names: Sequence[str]) -> None:
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise InputError(f"{file}: has several columns '{twice}'; rename all but one of them")


def _captions(value: Any) -> tuple[str, ...]:
    """The captions of a cell: a text, or a list of them. Raises InputError for something else."""
    texts = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"its caption {shortened(str(value))} is not a text or a list of texts; correct it")
    if half := half_character("".join(texts)):
        raise InputError(f"its caption {half}")
    return tuple(unix_lines(text).strip() for text in texts)


def unix_lines(text: str) -> str:
    """Return a text with the line ends of Linux: the same caption saved on Windows has the same tokens."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _named(folder: Path, column: str, path: Any) -> Path:
    """The file that a cell names, relative to the table's folder. Raises InputError for what names none."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise InputError("names no image file; correct or remove the row")
    if "://" in path:
        raise InputError(f"{shortened(path)} is an address; download the image and name its file")
    parts = map(os.fsencode, path.split("/"))
    if max(map(len, parts)) > MOST_NAME or len(os.fsencode(folder / path)) > MOST_PATH:
        raise InputError(
            f"its column {column} holds {shortened(path)}, which is too long for the name of a file; correct the row, "
            "or name the columns of images in data.image_column and data.reference_columns"
        )
    return named_file(folder, path)


def named_file(folder: Path, name: str) -> Path:
    """Return the file of a name below a folder, also if its accents are written in another way (`same_name`)."""
    file, *others = (
        Path(os.path.normpath(folder / form)) for form in (name, *(unicodedata.normalize(form, name) for form in FORMS))
    )
    # Unlike Path.exists, os.path.exists knows no file of a name that is too long, in place of raising an error.
    return file if name.isascii() else next((one for one in (file, *others) if os.path.exists(one)), file)


def _row(
    place: str, image: Path, name: str, caption: Any, references: tuple[Path, ...], unused: tuple[str, ...] = ()
) -> TableRow | InputError:
    try:
        return TableRow(place, image, name, _captions(caption), references, unused)
    except InputError as error:
        return InputError(f"{place}: {error}")


# --- csv --------------------------------------------------------------------------------------------------------------


def _csv_rows(file: Path, columns: Columns) -> Iterator[TableRow | InputError]:
    chosen = None
    for line, row in csv_rows(file):
        chosen = chosen or _chosen(file, list(row), columns)
        place = f"{file}:{line}"
        try:
            image = _named(file.parent, chosen.image, row[chosen.image])
            references = tuple(_reference(file.parent, row, name) for name in chosen.references)
        except InputError as error:
            yield InputError(f"{place}: {error}")
            continue
        name = os.path.splitext(row[chosen.image])[0]
        yield _row(place, image, name, row[chosen.caption] if chosen.caption else None, references)


def _reference(folder: Path, row: Mapping[str, str], column: str) -> Path:
    if not row[column]:
        raise InputError(f"its column {column} names no image, and data.reference_columns names it; fill or remove it")
    return _named(folder, column, row[column])


# --- parquet ----------------------------------------------------------------------------------------------------------


def _parquet_rows(file: Path, columns: Columns) -> Iterator[TableRow | InputError]:
    with open_parquet(file) as table:
        schema = table.schema_arrow
        chosen = _chosen(file, schema.names, columns)
        if odd := [name for name in (chosen.image, *chosen.references) if "/" in name]:
            raise InputError(f"{file}: images in a column with / in its name, {odd[0]}, are not found; rename it")
        # Encoded images stay where they are: only texts, names of files and lists, for their lengths, are read here.
        read = {name for name in (chosen.image, *chosen.references) if _is_read(schema.field(name).type)}
        names = sorted({part_read(table, name) for name in read} | ({chosen.caption} - {""}))
        require_plain(file, table.metadata, [chosen.image, *chosen.references])
        require_plain(file, table.metadata, [chosen.caption], MOST_RATIO, "texts")
        number = 0
        has_lists = any(hasattr(schema.field(name).type, "value_field") for name in read)
        most = LISTS_AT_ONCE if has_lists else ROWS_AT_ONCE
        at_once = rows_at_once(table.metadata, [*read, chosen.caption], most)
        for count, values in batches(table, names, at_once):
            for place in range(count):
                row = {name: cells[place] for name, cells in values.items()}
                yield _parquet_row(file, number, row, chosen)
                number += 1


def batches(table: Any, names: list[str], at_once: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (number of rows, {column: its cells}) of a table, some rows at a time."""
    if not names:
        yield table.metadata.num_rows, {}
        return
    for batch in table.iter_batches(at_once, columns=names):
        yield batch.num_rows, {name: batch.column(name) for name in batch.schema.names}


def _is_read(kind: Any) -> bool:
    """Whether a column must be read to find its images: names of files, and lists."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_read(kind.value_type)
    names = (types.is_string, types.is_large_string, types.is_string_view)
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(test(kind) for test in (*names, *lists))


def part_read(table: Any, name: str) -> str:
    """The part of a column that tells how long its lists are: of {bytes, path}, as the hub has them, only the path."""
    parts = [table.schema.column(number).path for number in range(len(table.schema))]
    return next((part for part in parts if part.startswith(f"{name}.") and part.endswith(".path")), name)


def _parquet_row(file: Path, number: int, row: Mapping[str, Any], columns: Columns) -> TableRow | InputError:
    place = f"{file}: row {number + 1}"
    try:
        images = _images(file, number, columns.image, row)
        if len(images) != 1:
            raise InputError(f"its column {columns.image} holds {len(images) or 'no'} images; give one")
        references = [one for name in columns.references for one in _references(file, number, name, row)]
        caption = row[columns.caption].as_py() if columns.caption else None
    except InputError as error:
        return InputError(f"{place}: {error}")
    except UnicodeDecodeError as error:
        return InputError(f"{place}: a text cannot be read ({error}); correct it")
    return _row(place, images[0], str(number), caption, tuple(references))


def _references(file: Path, number: int, column: str, row: Mapping[str, Any]) -> list[Path]:
    found = _images(file, number, column, row)
    if not found:
        raise InputError(f"its column {column} holds no image, and data.reference_columns names it; remove the row")
    return found


def _images(file: Path, number: int, column: str, row: Mapping[str, Any]) -> list[Path]:
    """The images of a cell: files that it names, or places in the parquet file."""
    if column not in row:
        return [member(file, number, column)]
    cell = row[column]
    if not cell.is_valid:
        return []
    if not hasattr(cell, "values"):
        return [_named(file.parent, column, cell.as_py())]
    return [
        _named(file.parent, column, one.as_py())
        if isinstance(one.as_py(), str)
        else member(file, number, column, place)
        for place, one in enumerate(cell.values)
    ]


# --- tar --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    """A file in a tar file. suffix: what follows the first dot of its name's last part, in lower case."""

    name: str
    suffix: str
    offset: int
    size: int


def _tar_rows(file: Path, columns: Columns) -> Iterator[TableRow | InputError | Unread]:
    with opened(file) as stream:
        # By name, not by neighbours: tar itself packs a folder in the order of its disk.
        samples: dict[str, dict[str, _Member]] = {}
        for sample, one in _tar_members(file, stream):
            samples.setdefault(sample, {})[one.suffix] = one
        _require_images(file, {one.suffix: one for group in samples.values() for one in group.values()}, columns)
        for sample, group in samples.items():
            if _is_sample(sample, group, columns):
                yield _sample(file, stream, sample, group, columns)
            else:
                yield from (Unread(one.name) for one in group.values())


def _require_images(file: Path, known: Mapping[str, _Member], columns: Columns) -> None:
    """Raise InputError where no sample of a tar file can have an image. known: {suffix: a file with it}."""
    if columns.image:
        _chosen(file, list(known), columns)
    elif not any(suffix in TAR_IMAGES for suffix in known):
        if dotted := next((suffix for suffix in known if _is_dotted(suffix)), ""):
            raise InputError(
                f"{file}: holds no images: {_DOTS}, so that {known[dotted].name} has the suffix {dotted}; rename the "
                "files without further dots, or name a suffix that all have in data.image_column"
            )
        raise InputError(
            f"{file}: holds no images; a sample is an image and a text of one name, as in 000.jpg and 000.txt"
        )


def _is_dotted(suffix: str) -> bool:
    """Whether a file is an image, but for its name with several dots."""
    return suffix not in TAR_IMAGES and suffix.rpartition(".")[2] in TAR_IMAGES


def _is_sample(name: str, members: Iterable[str], columns: Columns) -> bool:
    """Whether files of one name are an image with its caption, or a part of these. members: their suffixes."""
    suffixes = [suffix for suffix in members if suffix]  # a column of Columns without a name is ""
    images = (*TAR_IMAGES, columns.image, *columns.references)
    if any(suffix in images or _is_dotted(suffix) for suffix in suffixes):
        return True
    captions = (columns.caption, *CAPTION_COLUMNS, "json")
    return os.path.basename(name).lower() not in ABOUT and any(suffix in captions for suffix in suffixes)


class _Headers:
    """A tar file of which `tarfile` reads headers only. It would read a name of any length that a header claims."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        if size > MOST_TEXT:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._stream.read(size)


def _tar_members(file: Path, stream: io.BufferedReader) -> Iterator[tuple[str, _Member]]:
    """Yield (sample, file) of the regular files of a tar file. Only their headers are read.

    A sample is the name up to the first dot of its last part.
    """
    # A compressed tar file may have the name of another one.
    head = stream.read(6)
    stream.seek(0)
    if any(head.startswith(mark) for mark in COMPRESSED_MARKS):
        raise InputError(f"{file}: {IS_COMPRESSED}")
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", _Headers(stream)), mode="r:") as tar:
            while (one := tar.next()) is not None:
                cast("Any", tar).members.clear()  # which would hold a kilobyte of each file
                folder, _, base = one.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                if one.isreg() and not one.issparse() and stem:
                    sample = os.path.normpath(f"{folder}/{stem}").lstrip("/")  # tar writes ./ before all names
                    yield sample, _Member(one.name, suffix.lower(), one.offset_data, one.size)
            stream.seek(tar.offset)
            is_whole = len(stream.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE
    except tarfile.TarError as error:
        raise InputError(f"{file}: not a tar file, or cut off ({error}); copy it again") from error
    if not is_whole:
        raise InputError(f"{file}: cut off: it has no end mark; copy it again")


def _sample(
    file: Path, stream: io.BufferedReader, name: str, members: Mapping[str, _Member], columns: Columns
) -> TableRow | InputError:
    place = f"{file}: {name}"
    suffixes = (columns.image,) if columns.image else TAR_IMAGES
    own = [members[suffix] for suffix in suffixes if suffix in members and suffix not in columns.references]
    if not own:
        why = f", since {_DOTS}" if any(map(_is_dotted, members)) else ""
        found = shortened(", ".join(members))
        return NoImage(f"{place}: has no image, only {found}{why}; add it or remove the sample")
    image, *others = own
    absent = [suffix for suffix in columns.references if suffix not in members]
    if absent:
        return InputError(f"{place}: has no {absent[0]}, which data.reference_columns names; add it")
    images = [image, *(members[suffix] for suffix in columns.references)]
    paths = [tar_member(file, one.offset, one.size, one.name) for one in images]
    try:
        for one in images:
            require_size(f".{one.suffix}", one.size)
        caption = _tar_caption(stream, members, columns)
    except InputError as error:
        return InputError(f"{place}: {error}")
    return _row(place, paths[0], name, caption, tuple(paths[1:]), tuple(one.name for one in others))


def _tar_caption(stream: io.BufferedReader, members: Mapping[str, _Member], columns: Columns) -> Any:
    """The caption of a sample: the text of its .txt, else a value of its .json. Raises InputError."""
    names = (columns.caption,) if columns.caption else CAPTION_COLUMNS
    suffixes = (*names, "json") if columns.caption else ("txt", *names, "json")
    found = next((members[one] for one in suffixes if one in members), None)
    if found is None:
        return None
    if found.size > MOST_TEXT:
        raise InputError(f"its .{found.suffix} has {found.size} bytes, the limit is {MOST_TEXT}; shorten it")
    stream.seek(found.offset)
    try:
        text = stream.read(found.size).decode("utf-8-sig")
        if not found.suffix.endswith("json"):
            is_list = columns.has_lines and found.suffix == "txt"
            return [line for line in text.splitlines() if line.strip()] if is_list else text
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"its .{found.suffix} cannot be read ({error}); correct it") from error
    if isinstance(value, dict):
        return next((value[name] for name in names if name in value), None)
    return value
