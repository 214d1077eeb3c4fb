"""Folders of images for the form: what is in one, which were used lately, and choosing one below the allowed roots."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from trainer.data.images.image_io import IMAGE_SUFFIXES, same_name
from trainer.system import files
from trainer.system.errors import InputError

MOST_ENTRIES = 5000
"""Entries of one folder that are looked at; a larger folder is counted up to there."""
MOST_RECENT = 6
TYPING_S = 6.0
"""A window that types a path and was not heard for this long is gone: it asks every 2 s."""
_RECENT = TypeAdapter(tuple[str, ...])


@dataclass(frozen=True)
class Listing:
    """One folder, without what is in its subfolders.

    Attributes:
        above: The folder above; "" where it is outside the allowed roots.
        folders: Names of its subfolders.
        num_captions: Text files that have an image's name.
        is_cut: Whether it holds more than MOST_ENTRIES entries.
    """

    path: str
    above: str
    folders: tuple[str, ...]
    num_images: int
    num_captions: int
    is_cut: bool


def typed_folder(path: str) -> Path:
    """Return the folder that a person names, with `~` for a home. Raises InputError for what no path can be."""
    if "\0" in path:
        raise InputError("a path cannot hold the character NUL; remove it")
    return Path(os.path.expanduser(files.pasted(path)))  # one of an unknown user stays as it is, as in a config


def listed(folder: Path, above: str = "") -> Listing:
    """Return what is directly in a folder. Raises InputError where it cannot be read."""
    folders, images, texts, count = [], set(), set(), 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                count += 1
                if count > MOST_ENTRIES:
                    break
                stem, suffix = os.path.splitext(same_name(entry.name))
                if entry.is_dir() and not entry.name.startswith("."):
                    folders.append(entry.name)
                elif suffix.lower() in IMAGE_SUFFIXES:
                    images.add(stem)
                elif suffix.lower() == ".txt":
                    texts.add(stem)
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from error
    names = tuple(sorted(folders, key=str.lower))
    return Listing(str(folder), above, names, len(images), len(images & texts), count > MOST_ENTRIES)


class Picker:
    """Lists folders below some roots, and none outside them, also not by links or `..`."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(dict.fromkeys(root.resolve() for root in roots if root.is_dir()))

    def listing(self, path: str) -> Listing:
        """Return a folder's content; an empty path stands for the first root. Raises InputError outside the roots."""
        folder = typed_folder(path) if path else self.roots[0]
        real = folder.resolve()
        root = self.root_of(real)
        if root is None:
            raise InputError(f"{folder}: outside {' and '.join(map(str, self.roots))}; type its path into the field")
        if not os.path.isdir(real):
            raise InputError(f"{folder}: not a folder")
        return listed(real, "" if real == root else str(real.parent))

    def root_of(self, real: Path) -> Path | None:
        """Return the root that a resolved path is below, or is itself; None where it is outside all of them."""
        return next((root for root in self.roots if real.is_relative_to(root)), None)


class HalfTyped:
    """The path that a window is typing right now: no window reads its folder before it is typed to its end."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._heard_at = -math.inf

    def typing(self, edits: Mapping[str, str]) -> None:
        """A window types these paths, or asks while it does. edits: {field: what is there so far}."""
        self._values = {**self._values, **edits}
        self._heard_at = time.monotonic()

    def leave(self, fields: Iterable[str]) -> None:
        """These fields were left, or changed as a whole."""
        self._values = {name: value for name, value in self._values.items() if name not in set(fields)}

    def holds(self, values: Mapping[str, object]) -> bool:
        """Whether one of these values of a draft is still being typed. A window that is gone types nothing."""
        is_heard = time.monotonic() - self._heard_at < TYPING_S
        return is_heard and any(values.get(name) == value for name, value in self._values.items())


class Recent:
    """The folders that runs were started with last, newest first. Kept in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def all(self) -> tuple[str, ...]:
        """Return those that exist."""
        try:
            kept = files.read_json(self._file, _RECENT)
        except (InputError, OSError):  # none yet, or damaged: it is only a convenience
            return ()
        return tuple(folder for folder in kept if os.path.isdir(folder))

    def add(self, folder: str) -> None:
        """Put a folder first. Raises OSError where it cannot be saved."""
        known = dict.fromkeys((os.path.abspath(folder), *self.all()))
        files.make_private(self._file.parent)
        files.replace(self._file, _RECENT.dump_json(tuple(known)[:MOST_RECENT]))
