"""Finds the text files of a dataset. Imports neither torch nor numpy: it is checked before they are loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainer.config.errors import InputError
from trainer.config.files import NOT_REGULAR, opened
from trainer.config.sections import DataConfig
from trainer.config.terminal import shortened

SUFFIXES = frozenset({".txt", ".jsonl", ".npy"})
MOST_DEEP = 100
"""Limit for nested folders: each level lengthens every path, so the search takes time in the square of the depth."""
MOST_ROW = 2**20
"""Limit for a row about one image, bytes: room for a caption of 64 KiB with any escaping."""


def of_config(cfg: DataConfig) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The files to train on, and the held-out files. Raises InputError naming the field if a path has none."""
    if isinstance(cfg.validation, int) and cfg.validation:
        raise InputError(
            f"data.validation: {cfg.validation} is for images; name a file or folder of text that is not trained on"
        )
    trained, held_out = (_of_field(name, path) for name, path in (("path", cfg.path), ("validation", cfg.validation)))
    return trained, held_out


def _of_field(name: str, path: str | int | None) -> tuple[Path, ...]:
    if not isinstance(path, str):
        return ()
    try:
        return find_files(Path(path))
    except InputError as error:
        raise InputError(f"data.{name}: {error}") from error


def find_files(path: Path) -> tuple[Path, ...]:
    """Find the text files below a folder, by relative path; or return `path` itself if it is a text file.

    A .txt is one document. A .jsonl has one document per line: an object with `text`, or with `prompt` and
    `completion`, of which the completion is learned; blank lines are skipped. A .npy holds token ids, each document
    ended by end-of-text. Other files and hidden files are left out.

    Raises:
        InputError: There is nothing to read.
    """
    _require_regular(path)
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{path}: not a supported kind of text; give a .txt, .jsonl or .npy file")
        return (path,)
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder; give a .txt, .jsonl or .npy file, or a folder of them")
    files = [file for file in _files_below(path) if file.suffix.lower() in SUFFIXES]
    if not files:
        raise InputError(f"{path}: no text in this folder; put .txt, .jsonl or .npy files into it")
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
