"""Remembers what was read of image files, so that a later start opens none that has not changed. Imports no torch.

See DECISIONS 203.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote_from_bytes

import PIL
from pydantic import TypeAdapter, ValidationError

from trainer.config.sections import DataConfig
from trainer.data.images.colour import Profile
from trainer.data.images.image_io import ImageFile, read_header
from trainer.data.images.image_members import file_of, opened_image
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.files import Stamp

FORMAT = 1
"""Version of the stored records: raise it when `read_header` finds something else in the same file."""
FOLDER = "images"
"""In the cache that runs share."""
MOST_BYTES = 1 << 30


class Header(NamedTuple):
    """The fields of `ImageFile`."""

    width: int
    height: int
    profile: Profile
    has_frames: bool
    is_turned: bool


@dataclass(frozen=True, slots=True)
class Known:
    """The record of a file that was read.

    Attributes:
        stamp: Of the file, before it was read.
        read_at: Time of the first reading, nanoseconds.
        header: Its header, if that was read.
        digest: SHA-256 of its bytes, if those were read.
    """

    stamp: Stamp
    read_at: int
    header: Header | None = None
    digest: str | None = None

    @property
    def is_safe(self) -> bool:
        """Whether the file cannot have changed after the reading without another stamp."""
        return self.stamp.is_safe(self.read_at)


def memory_of(cfg: DataConfig, cache: Path) -> Path:
    """Return the file that remembers what was read of a dataset's images. cache: the folder that runs share."""
    folders = (cfg.path, *(folder.path for folder in cfg.folders), cfg.validation, cfg.regularization)
    what = (FORMAT, PIL.__version__, *folders, *cfg.companions.values(), cfg.questions)
    name = hashlib.sha256("\x1f".join(map(str, what)).encode()).hexdigest()[:32]
    return cache / FOLDER / f"{name}.json"


_ENTRY = TypeAdapter(tuple[Stamp, int, Header | None, str | None])


class KnownFiles:
    """Image files by path. Whatever is wrong with the memory, only time is lost.

    Args:
        memory: Where it is kept; None: it is not.
    """

    def __init__(self, memory: Path | None = None) -> None:
        self._memory = memory
        self._saved = {} if memory is None else _read(memory)
        self._found: dict[str, Known] = {}
        self._headers: dict[Header, Header] = {}
        self._is_changed = False

    @classmethod
    def of(cls, cfg: DataConfig, cache: Path) -> KnownFiles:
        """The images of a dataset. cache: the folder that runs share."""
        return cls(memory_of(cfg, cache))

    def header(self, path: Path) -> ImageFile:
        """The header, read only if it is not known. Raises InputError as `read_header`."""
        known = self._current(path)
        if known is None or known.header is None:
            file = read_header(path)
            header = Header(file.width, file.height, file.profile, file.has_frames, file.is_turned)
            if known is not None:
                self.add(path, replace(known, header=header))
            return file
        width, height, profile, has_frames, is_turned = known.header
        return ImageFile(str(path), width, height, profile=profile, has_frames=has_frames, is_turned=is_turned)

    def with_digest(self, path: Path) -> Known:
        """The record with its digest, which is read only if it is missing. Raises InputError if it cannot be read."""
        known = self._current(path)
        try:
            known = known or Known(Stamp.of(file_of(path)), 0)
            if known.digest is None:
                with opened_image(path) as stream:
                    known = replace(known, digest=hashlib.file_digest(stream, "sha256").hexdigest())
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); restore or remove it") from error
        self.add(path, known)
        return known

    def digest(self, path: Path) -> str | None:
        """The SHA-256 of its bytes, or None if that is not known; nothing is read."""
        known = self._current(path)
        return None if known is None else known.digest

    def require_unchanged(self, path: Path, digest: str) -> None:
        """Raise InputError if the bytes of a file are no longer those of this digest.

        They are read only if its stamp has changed since they were, or was not seen here: on another machine.
        """
        if self.digest(path) == digest:
            return
        try:
            with opened_image(path) as stream:
                is_changed = hashlib.file_digest(stream, "sha256").hexdigest() != digest
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); restore or remove it") from error
        if is_changed:
            raise InputError(f"{path}: has changed while images were encoded; start again when it no longer changes")

    def add(self, path: str | Path, known: Known) -> None:
        """Remember what was read, here or on another rank; but not of a copy of the file on another machine."""
        location = str(path)
        former = self._found.get(location)
        if former is not None and former.stamp != known.stamp:
            return
        self._is_changed |= former != known
        self._found[location] = known

    def save(self) -> None:
        """Keep what was asked for since this object was made, if anything was read."""
        if self._memory is None or not self._is_changed:
            return
        entries = (
            (key_of(path), (known.stamp, known.read_at, known.header, known.digest))
            for path, known in self._found.items()
            if known.is_safe
        )
        with contextlib.suppress(OSError):  # a full or read-only disk: the files are read again
            files.make_private_if_new(self._memory.parent)
            files.replace(self._memory, _written(entries))
            self._is_changed = False

    def _current(self, path: Path) -> Known | None:
        """The record of the file in its present state, with empty fields where nothing was read; None if missing."""
        try:
            stamp = Stamp.of(file_of(path))
        except OSError:
            return None
        location = str(path)
        known = self._found.get(location) or self._recalled(self._saved.pop(key_of(location), b""))
        if known is None or known.stamp != stamp:
            known = Known(stamp, time.time_ns())
        self._found[location] = known
        return known

    def _recalled(self, entry: bytes) -> Known | None:
        """An entry of the memory; None for what is none, or may have changed after the reading."""
        try:
            stamp, read_at, header, digest = _ENTRY.validate_json(entry)
        except ValidationError:
            return None
        header = header and self._headers.setdefault(header, header)  # equal ones once, as most of a folder are
        known = Known(stamp, read_at, header, digest)
        return known if known.is_safe else None


def key_of(path: str | Path) -> str:
    """Return a path as a name in JSON, which has no place for names that are not UTF-8."""
    return quote_from_bytes(os.fsencode(path))


def _written(entries: Iterable[tuple[str, object]]) -> str:
    """A memory of (`key_of` the path, what is known): one JSON object with a line for each."""
    return "{\n" + ",\n".join(f"{json.dumps(path)}: {json.dumps(entry)}" for path, entry in entries) + "\n}\n"


def _read(memory: Path) -> dict[str, bytes]:
    """The entries of a memory, {`key_of` the path: JSON}. 100,000 of them take 26 MB; parsed all at once, 140.

    Lines that are no entry are found out when they are asked for.
    """
    try:
        content = files.read(memory, at_most=MOST_BYTES)
    except (OSError, InputError):
        return {}
    lines = (line.strip(b",\n").partition(b'": ') for line in io.BytesIO(content))
    return {path[1:].decode("ascii", "replace"): entry for path, _, entry in lines}
