"""Finds the text files of a dataset. No torch and no numpy: a dataset is checked before they load."""

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
"""Folders within each other at most: each level makes a path longer, and finding them all takes its square."""
MOST_ROW = 2**20
"""Bytes of a row about one image at most: captions of 64 KiB, however they are escaped."""


def of_config(cfg: DataConfig) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The files to train on, and those held out. Raises InputError naming the field where there are none."""
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
    """The text files of a folder and of those in it, by relative path; or `path` itself where it is a text file.

    A .txt is one document. A .jsonl has one per line: an object with `text`, or with `prompt` and `completion`, of
    which the completion is learned; blank lines are skipped. A .npy holds token ids, each document ended by
    end-of-text. Other files and what is hidden are left out. Raises InputError when there is nothing to read.
    """
    _require_regular(path)
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{path}: not a kind of text that is read; give a .txt, .jsonl or .npy file")
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
    """{file: its bytes}. Raises InputError naming a file that is gone."""
    found = {}
    for file in files:
        with reading(file):
            found[file] = file.stat().st_size
    return found


def digest(files: Sequence[Path]) -> str:
    """Changes with the name of a file below their common folder, its size or its modification time; reads none.

    Raises InputError naming the file when it is gone.
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
    """(number, offset in bytes, content) of the lines of a file about images that hold anything; numbers from 1.

    Raises OSError, and InputError for what is no regular file and for a line of more than MOST_ROW bytes, without its
    end.
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
    """The error about a folder with more than MOST_DEEP folders within each other."""
    return InputError(f"{folder}: its folders lie within each other more than {MOST_DEEP} deep; move the files up")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises InputError naming the file that cannot be read inside."""
    try:
        yield
    except OSError as error:
        name = shortened(str(error.filename or path), 500)
        raise InputError(
            f"{name}: cannot be read ({error.strerror}); put it back, or change its permissions"
        ) from error


def _files_below(folder: Path) -> Iterator[Path]:
    """Links to folders are followed, but none is entered twice. What is hidden is left out."""
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
            # Sorted, so that of two ways to a folder the same one is taken everywhere.
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (Path(root, name) for name in names if not name.startswith("."))


def _require_regular(path: Path) -> None:
    """Raises InputError for what is there and neither a file nor a folder: reading a pipe has no end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{path}: {NOT_REGULAR}")


def _raise(error: OSError) -> None:
    raise error
