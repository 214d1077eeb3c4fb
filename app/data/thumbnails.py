"""Copies of images for the page and the notebooks: upright, in sRGB, transparency on white. See DECISIONS 134."""

from __future__ import annotations

import hashlib
import os
import threading
from io import BytesIO
from pathlib import Path

from PIL import Image

from trainer.data.images.image_io import load_preview, read_header
from trainer.data.images.image_members import file_of
from trainer.system import files
from trainer.system.errors import InputError

FULL = 2048
SMALL = 256
_FORMAT = 1
"""Increased when copies are made differently, so that older copies are not shown."""


def preview(image: Path, side: int) -> Image.Image:
    """Return a copy of an image whose longer side is at most `side` pixels. Raises InputError if it cannot be shown."""
    return load_preview(read_header(image), side)


def webp(image: Path, side: int, quality: int) -> bytes:
    """Return a copy of an image as a WebP file whose longer side is at most `side` pixels."""
    copy = BytesIO()
    preview(image, side).save(copy, "WEBP", quality=quality)
    return copy.getvalue()


class Thumbnails:
    """WebP copies of images in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._alone = threading.Lock()

    def of(self, image: Path, side: int = SMALL) -> Path:
        """Return a copy whose longer side is at most `side` pixels. Raises InputError for other files than images."""
        try:
            identity = f"{_FORMAT} {os.path.realpath(image)} {stamp(image)}"
            key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:24]
            copy = self.folder / f"{key}-{side}.webp"
            if not copy.exists():
                files.make_private(self.folder)
                with self._alone:  # one at a time: the page holds one large image in memory, not one per visitor
                    small = preview(image, side)
                self._save(small, copy)
        except OSError as error:
            raise InputError(f"{image}: cannot be shown ({error})") from error
        return copy

    def drawn(self, image: Image.Image) -> Path:
        """Return a copy of an image that was drawn here, pixel by pixel. Raises InputError if it cannot be written."""
        key = hashlib.sha256(f"{_FORMAT} {image.size}".encode() + image.tobytes()).hexdigest()[:24]
        copy = self.folder / f"{key}-drawn.webp"
        try:
            if not copy.exists():
                files.make_private(self.folder)
                self._save(image, copy, lossless=max(image.size) < SMALL)
        except OSError as error:
            raise InputError(f"{copy}: cannot be written ({error})") from error
        return copy

    def _save(self, image: Image.Image, copy: Path, lossless: bool = False) -> None:
        partial = copy.with_suffix(f".{threading.get_ident()}.part")
        image.save(partial, "WEBP", quality=90, lossless=lossless)
        files.rename(partial, copy)


def stamp(image: Path) -> str:
    """Return what tells an image from a later one of its name. Raises OSError where it is missing."""
    status = file_of(image).stat()
    return f"{status.st_mtime_ns} {status.st_size}"
