"""Reference images that a person gives to the page for a drawing: decoded, written anew and kept for a week."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from pathlib import Path

from app.data.thumbnails import FULL, preview
from trainer.data.images.image_io import png
from trainer.system import files
from trainer.system.errors import InputError

MOST_SENT = 2_900_000
"""Bytes of one image; in base64 it is below the longest body that the page takes."""
MOST_KEPT = 100
KEPT_S = 7 * 86_400.0
ID = re.compile(r"[0-9a-f]{32}")


class GivenReferences:
    """The images in a private folder, by id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def add(self, content: bytes) -> str:
        """Keep an image and return its id. Raises InputError if it is too large or cannot be decoded."""
        if len(content) > MOST_SENT:
            raise InputError(f"reference: {len(content):,} bytes are more than {MOST_SENT:,}; make the image smaller")
        id = hashlib.sha256(content).hexdigest()[:32]
        with self._lock:  # one large image at a time is in memory
            kept = sorted(files.make_private(self._folder).iterdir(), key=lambda file: -file.stat().st_mtime)
            for number, file in enumerate(kept, 1):
                if number >= MOST_KEPT or file.stat().st_mtime < time.time() - KEPT_S:
                    file.unlink(missing_ok=True)
            sent = self._folder / f"{id}.sent"
            try:
                files.replace(sent, content)
                files.replace(self._folder / f"{id}.png", png(preview(sent, FULL)))
            except InputError as error:
                raise InputError(f"reference: {str(error).removeprefix(f'{sent}: ')}") from error
            finally:
                sent.unlink(missing_ok=True)
        return id

    def file(self, id: str) -> Path:
        """Return the image of an id. Raises InputError where there is none."""
        file = self._folder / f"{id}.png"
        if not ID.fullmatch(id) or not file.is_file():
            raise InputError("reference: this image is no longer kept; choose its file again")
        return file
