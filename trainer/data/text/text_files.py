"""Finds the text files of a dataset. Imports neither torch nor numpy: it is checked before they are loaded."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from trainer.config.sections import DataConfig
from trainer.data.row_files import (
    LINE_CHUNK,
    MOST_LINE,
    MOST_RATIO,
    READERS,
    columns_of,
    csv_columns,
    first_row,
    has_rows,
    is_blank,
    open_parquet,
    reading,
    require_plain,
    rows_at_once,
    rows_of,
    suffix_of,
    unpacked,
    unread_keys,
    unread_warning,
)
from trainer.data.row_forms import (
    CHAT,
    COLUMNS,
    PREFERENCE,
    TEXT,
    Kind,
    is_known,
    kind_of,
    kinds_of,
    possible_kinds,
    present,
    without_answers,
)
from trainer.run.folder import is_run
from trainer.system.errors import InputError
from trainer.system.files import NOT_REGULAR, opened
from trainer.system.terminal import shortened

SUFFIXES = (".txt", *READERS, ".npy")
KINDS = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
GIVE = f"a {KINDS} file"
READ = f"give {GIVE}; .jsonl, .json and .csv may be packed as .gz"
ABOUT = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
"""Files that describe a dataset, as the library datasets writes them."""
NOT_DATA = frozenset({"readme", "license", "licence", "notice", "citation"})
"""Names without suffix of files about a dataset, which hold none of its documents."""
MOST_NAMED = 5
"""Most files that a message names."""
OTHER_KEYS = re.compile(rb'"(?:messages|conversations?|instruction|question|completion|chosen)"')
"""Keys of rows that are not texts."""
CHAT_KEYS = re.compile(rb'"(?:messages|conversations?|instruction|question|(?:prompt|completion|chosen)"\s*:\s*[\[{])')
"""Keys of rows that may be conversations."""
MOST_DEEP = 100
"""Limit for nested folders: each level lengthens every path, so the search takes time in the square of the depth."""
TABLE_ROWS = 1024
"""Rows of a parquet file whose nulls are looked at at once, at most."""
MOST_COUNTED = 2**30
"""Limit for a .jsonl whose lines are counted, bytes: a second or two."""
MOST_PARSED = 2**26
"""Limit for a .json, .csv or packed file whose rows are counted, bytes."""
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
    suffix = suffix_of(file)
    if suffix == ".parquet":
        with open_parquet(file) as table:
            return int(table.metadata.num_rows)
    if not has_rows(file):
        return 1 if suffix == ".txt" else None
    with reading(file):
        if file.stat().st_size > (MOST_COUNTED if suffix == ".jsonl" else MOST_PARSED):
            return None
    return sum(1 for _ in rows_of(file))


def kinds(files: Sequence[Path]) -> frozenset[Kind]:
    """The kinds of documents in the files. Rows that cannot be read count as text.

    All rows count, but a file's are looked at up to its first conversation: from there on, no answer depends on others.
    """
    found = set[Kind]()
    for file in files:
        with reading(file):
            status = file.stat()
        found |= _kinds_in(file, status.st_size, status.st_mtime_ns)
    return frozenset(found)


def has_plain_text(files: Sequence[Path]) -> bool:
    """Whether a file begins with plain text, which is cut to `data.length` and never left out."""
    for file in files:
        with reading(file):
            if not has_rows(file) or kind_of(first_row(file) or {}) == TEXT:
                return True
    return False


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
        if is_preference and not compares and not is_known(without_answers(row)):
            raise InputError(
                f'{file}: its rows have "chosen" and "rejected", which only preference training reads; set '
                "objective.dpo_beta, for example to 0.1"
            )


@lru_cache(maxsize=1024)
def _kinds_in(file: Path, size: int, changed_ns: int) -> frozenset[Kind]:
    """The kinds in a file. size, changed_ns: tell whether it is still the file that is remembered."""
    row = first_row(file)
    found = kinds_of(row) if row is not None else frozenset({TEXT})
    if not has_rows(file) or CHAT in found:
        return found
    if suffix_of(file) == ".jsonl":
        return _kinds_in_lines(file, found)
    if suffix_of(file) == ".parquet":
        return _kinds_in_parquet(file, found)
    columns = csv_columns(file) if suffix_of(file) == ".csv" else COLUMNS
    if not possible_kinds(columns) <= found:
        for one in rows_of(file):
            found |= kinds_of(one.values())
            if CHAT in found:
                break
    return found


def _kinds_in_lines(file: Path, found: frozenset[Kind]) -> frozenset[Kind]:
    """The kinds in a .jsonl with those in `found`. Only lines with a key of another kind are parsed: 2 GB/s."""
    rest, is_end = b"", False
    with unpacked(file) as stream:
        while not is_end and len(rest) <= MOST_LINE:  # a longer line is named when it is trained
            chunk = stream.read(LINE_CHUNK)
            is_end = not chunk
            window = rest + (chunk or b"\n")
            at, stop = 0, window.rfind(b"\n") + 1
            while match := (OTHER_KEYS if found <= {TEXT} else CHAT_KEYS).search(window, at, stop):
                at = window.index(b"\n", match.start()) + 1
                try:
                    row = json.loads(window[window.rfind(b"\n", 0, match.start()) + 1 : at])
                except (ValueError, RecursionError):  # it is named when it is trained
                    continue
                found |= kinds_of(present(row)) if isinstance(row, dict) else frozenset()
                if CHAT in found:
                    return found
            rest = window[stop:]
    return found


def _kinds_in_parquet(file: Path, found: frozenset[Kind]) -> frozenset[Kind]:
    """The kinds in a table with those in `found`, by which of its cells are null."""
    with open_parquet(file) as table:
        names = columns_of(table)
        if possible_kinds(names) <= found:
            return found
        require_plain(file, table.metadata, names, MOST_RATIO, "texts")
        is_nested = {name: bool(table.schema_arrow.field(name).type.num_fields) for name in names}
        for batch in table.iter_batches(rows_at_once(table.metadata, names, TABLE_ROWS), columns=names):
            for valid in set(zip(*(column.is_valid().to_pylist() for column in batch.columns), strict=True)):
                row = {name: [] if is_nested[name] else "" for name, has in zip(names, valid, strict=True) if has}
                found |= kinds_of(row)
            if CHAT in found:
                break
    return found


def _of_field(name: str, path: str | int | None) -> tuple[Path, ...]:
    if not isinstance(path, str):
        return ()
    try:
        return find_files(Path(path))
    except InputError as error:
        raise InputError(f"data.{name}: {error}") from error


def find_files(path: Path) -> tuple[Path, ...]:
    """Find the text files below a folder, by relative path; or return `path` itself if it is a text file.

    A .txt is one document; .jsonl, .json, .csv and .parquet have one in each row, in any of the forms of `row_forms`;
    a .npy holds token ids, each document ended by end-of-text. Other files and hidden files are left out.

    Raises:
        InputError: There is nothing to read.
    """
    _require_regular(path)
    if path.is_file():
        if suffix_of(path) not in SUFFIXES:
            raise InputError(f"{path}: not a supported kind of text; {READ}")
        return (path,)
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder; give {GIVE}, or a folder of them")
    files = [file for file in files_below(path) if _is_read(file)]
    if not files:
        raise InputError(f"{path}: no text in this folder; put {KINDS} files into it")
    for file in files:
        _require_regular(file)
    return tuple(sorted(files, key=lambda file: file.relative_to(path).as_posix()))


def _is_read(file: Path) -> bool:
    """Whether a file of a folder is read: not a packed one whose unpacked copy lies next to it."""
    if suffix_of(file) not in SUFFIXES or file.name in ABOUT:
        return False
    return suffix_of(file) == file.suffix.lower() or not file.with_suffix("").is_file()


def warnings_of(cfg: DataConfig) -> Iterator[str]:
    """Messages about files of the config that are not read, and about texts in rows that are not.

    Raises:
        InputError: A file cannot be read.
    """
    held_out = cfg.validation if isinstance(cfg.validation, str) else None
    given = (cfg.path, *(folder.path for folder in cfg.folders), held_out)
    for path in dict.fromkeys(Path(name) for name in given if name):
        if message := _not_read(path):
            yield message
        files = find_files(path)
        found = {file: keys for file in files if (keys := unread_keys(file))}
        if found:
            file, keys = next(iter(found.items()))
            more = f" and {len(found) - 1} other files" if len(found) > 1 else ""
            yield unread_warning(f"{file}{more}", keys)


def _not_read(path: Path) -> str | None:
    """A warning that counts and names the files of a folder that are not read; None if there are none.

    Raises:
        InputError: The folder cannot be searched.
    """
    if not path.is_dir():
        return None
    others = [file for file in files_below(path) if not _is_read(file) and file.name not in ABOUT]
    names = sorted(
        file.relative_to(path).as_posix() for file in others if file.name.partition(".")[0].lower() not in NOT_DATA
    )
    if not names:
        return None
    are = "is" if len(names) == 1 else "are"
    unpacked_too = any(suffix_of(Path(name)) in SUFFIXES for name in names)
    why = " (of a packed file that also lies there unpacked, only the unpacked one is read)" if unpacked_too else ""
    return f"{path}: {named([Path(name) for name in names])} {are} not read{why}; convert what is to be trained: {READ}"


def named(files: Sequence[Path]) -> str:
    """The number of some files, and the names of the first."""
    names = ", ".join(shortened(file.name, 100) for file in files[:MOST_NAMED])
    more = f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
    return f"{len(files)} {'file' if len(files) == 1 else 'files'}: {names}{more}"


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
            if not is_blank(line):
                yield number, offset, line.strip()
            number, offset = number + 1, offset + len(line)


def too_deep(folder: Path) -> InputError:
    """The error about a folder with more than MOST_DEEP nested folders."""
    return InputError(f"{folder}: its folders are nested more than {MOST_DEEP} deep; move the files up")


def files_below(folder: Path) -> Iterator[Path]:
    """The files below a folder, but hidden ones and those of runs. Links to folders are followed, none twice."""
    entered: set[Path] = set()
    with reading(folder):
        for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
            resolved = Path(root).resolve()
            if resolved in entered or is_run(resolved):
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
