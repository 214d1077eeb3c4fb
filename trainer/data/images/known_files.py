"""Remembers what was read of image files, so that a later start opens none that has not changed. Imports no torch.

See DECISIONS 203.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import PIL
from pydantic import TypeAdapter, ValidationError

from trainer.data.images.colour import Profile
from trainer.data.images.image_io import ImageFile, read_header
from trainer.data.images.image_members import file_of, opened_image
from trainer.system.errors import InputError
from trainer.system.files import Stamp
from trainer.system.index import Index

FORMAT = 1
"""Version of the stored headers: raise it when `read_header` finds something else in the same file."""
HEADERS, DIGESTS = f"header {FORMAT} {PIL.__version__}", "digest"
"""Kinds of records in the index, by path."""
T = TypeVar("T")


class Known(NamedTuple, Generic[T]):
    """What was read of a file.

    Attributes:
        stamp: Of the file, before it was read.
        value: What was read.
        is_safe: Whether the file cannot have changed after the reading without another stamp.
    """

    stamp: Stamp
    value: T
    is_safe: bool


class FileMemory(Generic[T]):
    """One thing that is read of files, by path. A file is read again only when it has changed.

    Args:
        index: Where it is kept; None: it is not.
        kind: What is read, with the version of its reader.
        values: Its type.
        read: Reads it. May raise OSError and InputError.
    """

    def __init__(self, index: Index | None, kind: str, values: type[T], read: Callable[[Path], T]) -> None:
        self._index, self._kind, self._read = index, kind, read
        self._rows: TypeAdapter[tuple[Stamp, T]] = TypeAdapter(tuple[Stamp, values])  # type: ignore[valid-type]
        self._new: dict[str, Known[T]] = {}
        self._unsaved: dict[str, Known[T]] = {}  # in the order of the readings, which is that of the next start

    def known(self, path: Path, stamp: Stamp | None = None) -> Known[T] | None:
        """What was read of a file in its present state; None where nothing was. Raises OSError for a missing file."""
        stamp = stamp or Stamp.of(file_of(path))
        known = self._new.get(str(path))
        if known is None and self._index is not None and (row := self._index.get(self._kind, str(path))):
            with suppress(ValidationError):  # damaged, or from a stranger
                known = Known(*self._rows.validate_json(row), is_safe=True)
        return known if known is not None and known.stamp == stamp else None

    def read(self, path: Path) -> Known[T]:
        """The same, read now where it is not known. Raises OSError for a missing file, and what its reader raises."""
        stamp, now = Stamp.of(file_of(path)), time.time_ns()
        if known := self.known(path, stamp):
            return known
        self.add(path, Known(stamp, self._read(path), stamp.is_safe(now)))
        return self._new[str(path)]

    def add(self, path: Path, known: Known[T]) -> None:
        """Remember what was read, here or on another rank, of the file in its present state."""
        self._new[str(path)] = known
        if known.is_safe:
            self._unsaved[str(path)] = known

    def save(self) -> None:
        """Keep what was read since the last call."""
        if self._index is not None and self._unsaved:
            rows = {path: self._rows.dump_json(known[:2]) for path, known in self._unsaved.items()}
            self._index.put(self._kind, rows)
        self._unsaved.clear()


class Header(NamedTuple):
    """The fields of `ImageFile`."""

    width: int
    height: int
    profile: Profile
    has_frames: bool
    is_turned: bool


class KnownFiles:
    """Headers and digests of image files. Whatever is wrong with the index, only time is lost."""

    def __init__(self, index: Index | None = None) -> None:
        self._headers = FileMemory(index, HEADERS, Header, _header)
        self._digests = FileMemory(index, DIGESTS, str, _digest)

    def header(self, path: Path) -> ImageFile:
        """The header, read only if it is not known. Raises InputError as `read_header`."""
        try:
            width, height, profile, has_frames, is_turned = self._headers.read(path).value
        except OSError:
            return read_header(path)  # says what is wrong
        return ImageFile(str(path), width, height, profile=profile, has_frames=has_frames, is_turned=is_turned)

    def with_digest(self, path: Path) -> Known[str]:
        """The SHA-256 of its bytes, read only if it is not known. Raises InputError if it cannot be read."""
        try:
            return self._digests.read(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); restore or remove it") from error

    def digest(self, path: Path) -> str | None:
        """The SHA-256 of its bytes, or None if that is not known; nothing is read."""
        with suppress(OSError):
            known = self._digests.known(path)
            return known and known.value
        return None

    def require_unchanged(self, path: Path, digest: str) -> None:
        """Raise InputError if the bytes of a file are no longer those of this digest.

        They are read only if its stamp has changed since they were, or was not seen here: on another machine.
        """
        if self.with_digest(path).value != digest:
            raise InputError(f"{path}: has changed while images were encoded; start again when it no longer changes")

    def add(self, path: Path, known: Known[str]) -> None:
        """Remember the digest that another rank read; but not of a copy of the file on another machine."""
        with suppress(OSError):
            stamp = Stamp.of(file_of(path))
            if known.stamp == stamp and self._digests.known(path, stamp) is None:
                self._digests.add(path, known)

    def save(self) -> None:
        """Keep what was read."""
        self._headers.save()
        self._digests.save()


def _header(path: Path) -> Header:
    file = read_header(path)
    return Header(file.width, file.height, file.profile, file.has_frames, file.is_turned)


def _digest(path: Path) -> str:
    with opened_image(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
