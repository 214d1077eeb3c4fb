"""Reads `data.questions`: rows with text and images, and what is wrong with them. Imports neither torch nor numpy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.sections import DataConfig
from trainer.data.images import image_warnings
from trainer.data.images.image_files import METADATA, MOST_WRONG_ROWS
from trainer.data.images.image_io import ImageFile, read_header
from trainer.data.images.image_members import SUFFIX, TAR, member
from trainer.data.images.image_tables import COMPRESSED, CSV, LISTS_AT_ONCE, batches, named_file, part_read
from trainer.data.mixed.sequence_rows import FORMS, AnyRow, ImageProblem, Row, is_of_a_form, parquet_row, parsed
from trainer.data.row_files import (
    MOST_RATIO,
    PACKED,
    open_parquet,
    require_plain,
    rows_at_once,
    unread_keys,
    unread_warning,
)
from trainer.data.text.text_files import ABOUT, files_below, named, rows
from trainer.system.errors import InputError
from trainer.system.terminal import shortened

PARQUET = {"image_list": "instruction_list", "image": "captions"}
"""{column of images: column of their texts}, in both published kinds of parquet files."""
READ = (".jsonl", SUFFIX)
"""Suffixes of the files of a folder that are read."""
OTHERS = (".json", CSV, ".tsv", TAR, *COMPRESSED, ".arrow", PACKED)
"""Suffixes of other files with rows."""
PARQUET_INFO = "parquet_info"
"""Folder of the index that comes with published parquet files. It holds no rows."""


@dataclass(frozen=True)
class Questions:
    """The rows of a config.

    Attributes:
        train: The rows to train on.
        validation: The last rows of the file, set aside.
        warnings: Messages about rows that were left out.
    """

    train: tuple[AnyRow, ...]
    validation: tuple[AnyRow, ...]
    warnings: tuple[str, ...]


def of_config(cfg: DataConfig) -> Questions:
    """Read the rows of `data.questions`; none if the field is empty. Only headers of images are read.

    Raises:
        InputError: Lists all problems, the first 20 of them in words.
    """
    if cfg.questions is None:
        return Questions((), (), ())
    source = Path(cfg.questions).expanduser()
    found = _Found(leaves_out=cfg.bad_image == "warn")
    for file in _files(source, found):
        (_read_parquet if file.suffix.lower() == SUFFIX else _read_lines)(file, found)
    if found.problems:
        raise InputError(image_warnings.listing(found.problems))
    questions = found.rows
    count = cfg.validation if isinstance(cfg.validation, int) else 0
    if not questions:
        first = f" ({found.warnings[0]})" if found.warnings else ""
        raise InputError(f"data.questions: {source}: has no row to train on{first}; write some into it")
    if count >= len(questions):
        raise InputError(
            f"data.validation: {count} of the {len(questions)} questions of {source} leaves none to train on; "
            f"use at most {len(questions) - 1}"
        )
    border = len(questions) - count
    return Questions(tuple(questions[:border]), tuple(questions[border:]), tuple(image_warnings.folded(found.warnings)))


@dataclass
class _Found:
    """State of the reading so far.

    Attributes:
        leaves_out: Whether an unreadable image is a warning, not a problem.
        unread: {key with texts that are not read: rows} of the file that is read.
        first_unread: The file and line of the first of these rows.
    """

    leaves_out: bool
    rows: list[AnyRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    headers: dict[Path, ImageFile] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)
    first_unread: str = ""

    def header(self, path: Path) -> ImageFile:
        """The header of an image. Raises ImageProblem."""
        if path not in self.headers:
            try:
                self.headers[path] = read_header(path)
            except InputError as error:
                raise ImageProblem(str(error)) from error
        return self.headers[path]

    def add(self, place: str, read: Callable[[], AnyRow]) -> None:
        """Add a row, or what is wrong with it. place: its file and line."""
        try:
            row = read()
            self.rows.append(row)
            if isinstance(row, Row) and row.unread:
                self.first_unread = self.first_unread or place
                self.unread.update(row.unread)
        except ImageProblem as error:
            message = f"{place}: {error}"
            if self.leaves_out:
                self.warnings.append(image_warnings.left_out(message))
            else:
                self.problems.append(f"{message}, or set data.bad_image: warn")
        except InputError as error:
            self.problems.append(f"{place}: {error}")

    def warn_of_unread(self) -> None:
        """Name the texts that are not read, at the end of a file."""
        if self.unread:
            counts = (f"{key} ({image_warnings.counted(n, 'row', 'rows')})" for key, n in self.unread.items())
            self.warnings.append(
                f"{self.first_unread}: the first row with texts that are not read, under "
                f"{shortened(', '.join(counts), 200)}; move what matters into what is read"
            )
        self.unread, self.first_unread = Counter(), ""

    def has_enough(self, file: Path) -> bool:
        """Whether so many rows are wrong that the rest need not be read."""
        if len(self.problems) < MOST_WRONG_ROWS:
            return False
        self.problems.append(f"{file}: {MOST_WRONG_ROWS} rows are wrong; the rest of them was not read")
        return True


def _files(source: Path, found: _Found) -> list[Path]:
    """The file, or the files of the folder that are read. Others with rows are named."""
    if not source.is_dir():
        return [source]
    below = sorted(file for file in files_below(source) if file.is_file())
    readable = [file for file in below if file.suffix.lower() in READ]
    # Captions of a folder of images, and files of other programs, may lie next to the questions. They are refused only
    # where nothing else is read: then they are what was meant.
    strange = {file for file in readable if file.name in METADATA or _has_other_rows(file)}
    files = [file for file in readable if file not in strange] or readable
    if not files:
        found.problems.append(
            f"data.questions: {source}: no .jsonl or .parquet files in this folder; write questions into such files"
        )
    if files != readable and (others := sorted(file for file in strange if file.name not in METADATA)):
        is_one = len(others) == 1
        found.warnings.append(
            f"data.questions: {source}: {named(others)} {'is' if is_one else 'are'} not read, since "
            f"{'its first row is' if is_one else 'their first rows are'} of another form; where "
            f"{'it is' if is_one else 'they are'} to be trained, write each row as a {FORMS}"
        )
    about = (*ABOUT, *METADATA)
    others = [file for file in below if file.name.lower().endswith(OTHERS) and file.name not in about]
    if others := [file for file in others if PARQUET_INFO not in file.relative_to(source).parts[:-1]]:
        found.warnings.append(
            f"data.questions: {source}: {named(others)} {'is' if len(others) == 1 else 'are'} not read; write their "
            "rows into .jsonl or .parquet files"
        )
    return files


def _has_other_rows(file: Path) -> bool:
    """Whether the first row of a .jsonl is one of another program. What cannot be read is refused where it is read."""
    if file.suffix.lower() == SUFFIX:
        return False
    try:
        line = next((line for _, _, line in rows(file)), None)
        return line is not None and not is_of_a_form(json.loads(line.decode("utf-8-sig")))
    except (OSError, InputError, ValueError, RecursionError):
        return False


def _read_lines(file: Path, found: _Found) -> None:
    try:
        for number, offset, line in rows(file):
            if found.has_enough(file):
                return
            try:
                text = line.decode().lstrip("\ufeff")
            except UnicodeDecodeError as error:
                found.problems.append(f"{file}: byte {offset + error.start} is not UTF-8; save the file as UTF-8")
                continue
            read_image = partial(_image_of_line, found, file.parent)
            found.add(f"{file}:{number}", partial(parsed, text, read_image))
        found.warn_of_unread()
    except InputError as error:
        found.problems.append(str(error))
    except OSError as error:
        found.problems.append(f"data.questions: {file}: cannot be read ({error.strerror}); name a .jsonl file")


def _image_of_line(found: _Found, folder: Path, path: str) -> ImageFile:
    return found.header(named_file(folder, path))


def _read_parquet(file: Path, found: _Found) -> None:
    row: dict[str, Any] = {}
    try:
        for number, row in _parquet_rows(file):
            if found.has_enough(file):
                return

            def image_of(column: str, index: int, number: int = number) -> ImageFile:
                return found.header(member(file, number - 1, column, index))

            found.add(f"{file}: row {number}", partial(parquet_row, row, image_of))
        if keys := unread_keys(file, row):
            found.warnings.append(unread_warning(str(file), keys))
    except InputError as error:
        found.problems.append(str(error))


def _parquet_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, {column: value}) of every row; of a column of images, the number of them."""
    with open_parquet(file) as parquet:
        names = set(parquet.schema_arrow.names)
        images = next((column for column, text in PARQUET.items() if {column, text} <= names), None)
        if images is None:
            known = " or ".join(f"{column} and {text}" for column, text in PARQUET.items())
            raise InputError(f"{file}: has the columns {', '.join(sorted(names))}; expected {known}")
        has_lists = images == "image_list"
        if has_lists and not hasattr(parquet.schema_arrow.field(images).type, "value_type"):
            raise InputError(f"{file}: its column image_list holds no lists of images; write one list for each row")
        require_plain(file, parquet.metadata, [images])
        require_plain(file, parquet.metadata, [PARQUET[images]], MOST_RATIO, "texts")
        # Of the images only the numbers are read here, of those that have a path only these.
        read = [part_read(parquet, images)] if has_lists else []
        number = 1
        columns = [PARQUET[images], *([images] if has_lists else [])]
        at_once = rows_at_once(parquet.metadata, columns, LISTS_AT_ONCE)
        for count, values in batches(parquet, [*read, PARQUET[images]], at_once):
            for place in range(count):
                lists = values[images][place] if has_lists else None
                try:
                    text = values[PARQUET[images]][place].as_py()
                except UnicodeDecodeError as error:
                    raise InputError(f"{file}: row {number}: a text cannot be read ({error}); correct it") from error
                yield number, {images: len(lists) if lists is not None and lists.is_valid else 1, PARQUET[images]: text}
                number += 1
