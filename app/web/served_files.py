"""What the page may serve: pictures that were decoded and written anew, and exported files that were asked for."""

from __future__ import annotations

import hashlib
import shutil
import threading
from pathlib import Path

from trainer.config import files
from trainer.config.errors import InputError
from trainer.data.image_io import load_preview, open_picture

FULL = 2048
SMALL = 256
_VERSION = 2
"""Raised when copies are made in another way: those from before are not shown again."""
DOWNLOADED = frozenset({".safetensors", ".json", ".txt"})


class Thumbnails:
    """WebP copies of pictures as they are trained: upright, in sRGB, transparency on white."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._alone = threading.Lock()

    def of(self, picture: Path, side: int = SMALL) -> Path:
        """A copy whose longer side is at most `side`. Raises InputError for what is no picture."""
        try:
            stat = picture.stat()
            facts = f"{_VERSION} {picture.resolve()} {stat.st_mtime_ns} {stat.st_size}"
            key = hashlib.sha256(facts.encode()).hexdigest()[:24]
            copy = self.folder / f"{key}-{side}.webp"
            if not copy.exists():
                self._write(picture, copy, side)
        except OSError as error:
            raise InputError(f"{picture}: cannot be shown ({error})") from error
        return copy

    def _write(self, picture: Path, copy: Path, side: int) -> None:
        files.make_private(self.folder)
        with self._alone:  # one at a time: the memory of the page holds one large picture, not one per visitor
            small = load_preview(open_picture(picture), side)
        draft = copy.with_suffix(f".{threading.get_ident()}.part")
        small.save(draft, "WEBP", quality=90)
        files.rename(draft, copy)


class Downloads:
    """Exported files under a folder of their own, by hard links: nothing is copied."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def offer(self, file: Path) -> Path:
        """The file where it may be served. Raises InputError for a kind that a browser might execute."""
        if file.suffix not in DOWNLOADED:
            raise InputError(f"{file.name}: only {', '.join(sorted(DOWNLOADED))} are served; it lies in {file.parent}")
        place = self.folder / hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16] / file.name
        files.make_private(self.folder)
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        try:
            place.hardlink_to(file)
        except OSError:  # another file system
            shutil.copyfile(file, place)
        return place
