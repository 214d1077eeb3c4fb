"""Files that the page may serve: re-encoded copies of images, and exported files that a user chose."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from pathlib import Path

from trainer.data.images.image_io import load_preview, read_header
from trainer.data.images.image_members import file_of
from trainer.system import files
from trainer.system.errors import InputError

FULL = 2048
SMALL = 256
_VERSION = 2
"""Increased when copies are made differently, so that older copies are not shown."""
DOWNLOADED = frozenset({".safetensors", ".json", ".txt"})


class Thumbnails:
    """WebP copies of images as they are trained: upright, in sRGB, transparency on white."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._alone = threading.Lock()

    def of(self, image: Path, side: int = SMALL) -> Path:
        """Return a copy whose longer side is at most `side` pixels. Raises InputError for other files than images."""
        try:
            identity = f"{_VERSION} {os.path.realpath(image)} {stamp(image)}"
            key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:24]
            copy = self.folder / f"{key}-{side}.webp"
            if not copy.exists():
                self._write(image, copy, side)
        except OSError as error:
            raise InputError(f"{image}: cannot be shown ({error})") from error
        return copy

    def _write(self, image: Path, copy: Path, side: int) -> None:
        files.make_private(self.folder)
        with self._alone:  # one at a time: the page holds one large image in memory, not one per visitor
            small = load_preview(read_header(image), side)
        partial = copy.with_suffix(f".{threading.get_ident()}.part")
        small.save(partial, "WEBP", quality=90)
        files.rename(partial, copy)


def stamp(image: Path) -> str:
    """Return what tells an image from a later one of its name. Raises OSError where it is missing."""
    status = file_of(image).stat()
    return f"{status.st_mtime_ns} {status.st_size}"


class Downloads:
    """Hard links to exported files in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def offer(self, file: Path) -> Path:
        """Return a path that may be served. Raises InputError for a type that a browser might execute."""
        if file.suffix not in DOWNLOADED:
            raise InputError(
                f"{file.name}: only {', '.join(sorted(DOWNLOADED))} can be downloaded; the file is in {file.parent}"
            )
        link = self.folder / hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16] / file.name
        files.make_private(self.folder)
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        try:
            link.hardlink_to(file)
        except OSError:  # another file system
            shutil.copyfile(file, link)
        return link


def address(file: Path) -> str:
    """Return the address at which the page serves a thumbnail or an offered file."""
    return f"/gradio_api/file={file}"
