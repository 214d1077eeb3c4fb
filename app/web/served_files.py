"""Files that the page serves: exported files that a user chose, and the addresses of copies of images."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from trainer.system import files
from trainer.system.errors import InputError

DOWNLOADED = frozenset({".safetensors", ".json", ".txt"})


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
