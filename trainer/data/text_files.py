"""Finds the text files of a dataset. Imports neither torch nor numpy: it is checked before they are loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.config.errors import InputError
from trainer.config.files import NOT_REGULAR, opened
from trainer.config.sections import DataConfig
from trainer.config.terminal import shortened

SUFFIXES = frozenset({".txt", ".jsonl", ".parquet", ".npy"})
GIVE = "a .txt, .jsonl, .parquet or .npy file"
Kind = Literal["text", "pair", "chat", "preference"]
TEXT: Kind = "text"
PAIR: Kind = "pair"
CHAT: Kind = "chat"
PREFERENCE: Kind = "preference"
COLUMNS = ("text", "prompt", "completion", "messages", "tools", "chosen", "rejected")
"""The keys of rows that are read."""
MOST_DEEP = 100
"""Limit for nested folders: each level lengthens every path, so the search takes time in the square of the depth."""
MOST_FIRST = 2**24
"""Limit for the row of a file that tells what it holds, bytes."""
MOST_COUNTED = 2**30
"""Limit for a .jsonl whose lines are counted, bytes: a second or two."""
MOST_ROW = 2**20
"""Limit for a row about one image, bytes: room for a caption of 64 KiB with any escaping."""


@dataclass(frozen=True)
class TextFolder:
    """Files whose documents occur equally often.

    Attributes:
        files: The files, at least one.
        weight: How often each of their documents occurs per epoch, > 0.
    """

    files: tuple[Path, ...]
    weight: float = 1.0


def of_config(cfg: DataConfig) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The files to train on, and the held-out files. Raises InputError naming the field if a path has none."""
    if isinstance(cfg.validation, int) and cfg.validation:
        raise InputError(
            f"data.validation: {cfg.validation} is for images; name a file or folder of text that is not trained on"
        )
    trained = tuple(dict.fromkeys(file for folder in folders_of(cfg) for file in folder.files))
    return trained, _of_field("validation", cfg.validation)


def folders_of(cfg: DataConfig) -> tuple[TextFolder, ...]:
    """The files to train on, folder by folder, `data.path` first. Raises InputError naming the field as `of_config`."""
    own = _of_field("path", cfg.path)
    others = (
        TextFolder(_of_field(f"folders[{number}].path", folder.path), folder.weight)
        for number, folder in enumerate(cfg.folders)
    )
    return (*((TextFolder(own),) if own else ()), *others)


def count_documents(file: Path) -> int | None:
    """Number of documents in a file; None where counting takes long, and for token ids, whose end is not known here.

    Raises:
        InputError: It cannot be read.
    """
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        with open_parquet(file) as table:
            return int(table.metadata.num_rows)
    if suffix != ".jsonl":
        return 1 if suffix == ".txt" else None
    with reading(file), opened(file) as stream:
        if file.stat().st_size > MOST_COUNTED:
            return None
        return sum(1 for line in stream if line.strip())


def kinds(files: Sequence[Path]) -> frozenset[Kind]:
    """The kinds of documents in the files, by the first row of each. Rows that cannot be read count as text."""
    found = set()
    for file in files:
        with reading(file):
            found.add(_kind_in(file))
    return frozenset(found)


def check_preferences(files: Sequence[Path], compares: bool) -> None:
    """Raise InputError for files of preferences that a run does not compare, and for others that it cannot.

    Args:
        files: The files of a run.
        compares: Whether `objective.dpo_beta` is set.
    """
    for file in files:
        with reading(file):
            row = first_row(file) or {}
        is_preference = kind_of(row) == PREFERENCE
        if compares and not is_preference:
            raise InputError(
                f"{file}: holds no pairs, which objective.dpo_beta compares; give .jsonl or .parquet files whose rows "
                'have "prompt", "chosen" and "rejected", or leave objective.dpo_beta out'
            )
        if is_preference and not compares and not holds_more(row):
            raise InputError(
                f'{file}: its rows have "chosen" and "rejected", which only preference training reads; set '
                "objective.dpo_beta, for example to 0.1"
            )


def kind_of(keys: Mapping[str, Any] | Sequence[str]) -> Kind:
    """The kind of document in a row with these keys."""
    if "chosen" in keys and "rejected" in keys:
        return PREFERENCE
    if "messages" in keys:
        return CHAT
    return PAIR if "prompt" in keys and "completion" in keys and "text" not in keys else TEXT


def holds_more(keys: Mapping[str, Any] | Sequence[str]) -> bool:
    """Whether a row with two answers also holds a text, a conversation or a completion, as some published datasets."""
    return "messages" in keys or "text" in keys or ("prompt" in keys and "completion" in keys)


def first_row(file: Path) -> Mapping[str, Any] | None:
    """The first row of a .jsonl or .parquet file; None for other files, and for a row that is not an object.

    Raises:
        OSError: The file cannot be read.
        InputError: It is not a regular file, or not a parquet file.
    """
    if file.suffix.lower() == ".parquet":
        with open_parquet(file) as table:
            for batch in table.iter_batches(1, columns=columns_of(table)):
                return present(python_rows(batch, file, 1)[0])
        return None
    if file.suffix.lower() != ".jsonl":
        return None
    with opened(file) as stream:
        while line := stream.readline(MOST_FIRST):
            if line.strip():
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError):  # of a row that is longer, or is named when it is trained
                    return None
                return present(values) if isinstance(values, dict) else None
    return None


def present(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without keys whose value is null: it may have the columns of other rows."""
    return {key: value for key, value in row.items() if value is not None}


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


def _kind_in(file: Path) -> Kind:
    row = first_row(file)
    return TEXT if row is None else kind_of(row)


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


def columns_of(table: Any) -> list[str]:
    """The columns of a parquet file that are read."""
    return [name for name in table.schema_arrow.names if name in COLUMNS]


def _of_field(name: str, path: str | int | None) -> tuple[Path, ...]:
    if not isinstance(path, str):
        return ()
    try:
        return find_files(Path(path))
    except InputError as error:
        raise InputError(f"data.{name}: {error}") from error


def find_files(path: Path) -> tuple[Path, ...]:
    """Find the text files below a folder, by relative path; or return `path` itself if it is a text file.

    A .txt is one document. A .jsonl has one document per line: an object with `text`, with `prompt` and `completion`,
    of which the completion is learned, or with `messages`, of which the assistant's are learned; blank lines are
    skipped. A .parquet has the same columns. A .npy holds token ids, each document ended by end-of-text. Other files
    and hidden files are left out.

    Raises:
        InputError: There is nothing to read.
    """
    _require_regular(path)
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{path}: not a supported kind of text; give {GIVE}")
        return (path,)
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder; give {GIVE}, or a folder of them")
    files = [file for file in _files_below(path) if file.suffix.lower() in SUFFIXES]
    if not files:
        raise InputError(f"{path}: no text in this folder; put .txt, .jsonl, .parquet or .npy files into it")
    for file in files:
        _require_regular(file)
    return tuple(sorted(files, key=lambda file: file.relative_to(path).as_posix()))


def sizes(files: Sequence[Path]) -> dict[Path, int]:
    """{file: size in bytes}. Raises InputError naming a file that is gone."""
    result = {}
    for file in files:
        with reading(file):
            result[file] = file.stat().st_size
    return result


def digest(files: Sequence[Path]) -> str:
    """Digest of names below the common folder, sizes and modification times of the files, without reading them.

    Raises:
        InputError: A file is gone; the message names it.
    """
    absolute = [Path(os.path.abspath(file)) for file in files]
    root = os.path.commonpath([file.parent for file in absolute])
    facts = []
    for file in absolute:
        with reading(file):
            status = file.stat()
        facts.append([file.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def rows(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset in bytes, content) of every line that is not blank, of a file with rows about images.

    Raises:
        OSError: The file cannot be read.
        InputError: It is not a regular file, or a line has more than MOST_ROW bytes.
    """
    with opened(file) as stream:
        number, offset = 1, 0
        while line := stream.readline(MOST_ROW + 1):
            if len(line) > MOST_ROW:
                raise InputError(f"{file}:{number}: the line is longer than 1 MiB; shorten or remove it")
            if line.strip():
                yield number, offset, line.strip()
            number, offset = number + 1, offset + len(line)


def too_deep(folder: Path) -> InputError:
    """The error about a folder with more than MOST_DEEP nested folders."""
    return InputError(f"{folder}: its folders are nested more than {MOST_DEEP} deep; move the files up")


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


def _files_below(folder: Path) -> Iterator[Path]:
    """The files below a folder, hidden ones left out. Links to folders are followed, but none is entered twice."""
    entered: set[Path] = set()
    with reading(folder):
        for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
            resolved = Path(root).resolve()
            if resolved in entered:
                folders.clear()
                continue
            entered.add(resolved)
            if len(Path(root).parts) - len(folder.parts) > MOST_DEEP:
                raise too_deep(folder)
            # Sorted, so that every machine takes the same one of two paths to a folder.
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (Path(root, name) for name in names if not name.startswith("."))


def _require_regular(path: Path) -> None:
    """Raise InputError for a path that exists but is neither a file nor a folder: reading a pipe has no end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{path}: {NOT_REGULAR}")


def _raise(error: OSError) -> None:
    raise error
