"""Deleted images of a folder of data: moved into a hidden folder of it, which no run reads, until they are restored.

A deletion is a folder `.trash-shardstudio/<time>-<number>/` in which the files lie as they lay in the folder of data.
Nothing else is written down, so a folder of data that comes from a stranger cannot say where its files go.
"""

from __future__ import annotations

import calendar
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.data.data_folders import Missing, is_taken, opened
from app.data.upload.upload_names import CAPTION, is_image
from trainer.data.images import image_files
from trainer.data.images.image_files import METADATA
from trainer.run.folder import TRASH
from trainer.system import files
from trainer.system.errors import InputError

FOLDER = TRASH
MOST_SHOWN = 100
"""Deletions that are listed, the newest ones."""
MOST_FILES = 10_000
MOST_DELETED = 1000
NAME = re.compile(r"\d{8}T\d{6}Z-\d{1,6}")
_TIME = "%Y%m%dT%H%M%SZ"
CHANGES = threading.Lock()
"""Held while files are moved: two windows of a page restore one after the other."""


@dataclass(frozen=True)
class Deletion:
    """Files that were deleted together.

    Attributes:
        name: Names it within the folder.
        deleted_at: Seconds since 1970.
        files: Paths below the folder of data, of images and their captions.
    """

    name: str
    deleted_at: float
    files: tuple[str, ...]


def delete(root: Path, images: Sequence[Path]) -> Deletion:
    """Move images of a folder with their captions into its trash. Masks stay; of a link, the link is moved.

    A caption stays where another image of the same name uses it.

    Args:
        root: The folder of data.
        images: Files below it.

    Raises:
        InputError: One is not below it or cannot be moved. Those before it stay deleted, and can be restored.
    """
    if not 1 <= len(images) <= MOST_DELETED:
        raise InputError(f"{len(images)} images; delete 1 to {MOST_DELETED} at once")
    relative = [_below(root, image) for image in images]
    real = root.resolve()
    name = begin(real)
    try:
        with CHANGES:
            for path in relative:
                _delete(real, name, path)
    except (InputError, OSError) as error:
        moved = list(_files(real, name))
        if not moved:
            forget(real, name)
        why = f"{error.filename or root}: {error.strerror}" if isinstance(error, OSError) else str(error)
        more = f"; {len(moved)} files were deleted before" if moved else ""
        raise InputError(f"not deleted: {why}{more}") from error
    return _deletion(real, name)


def require_no_rows(root: Path, images: list[Path]) -> None:
    """Raise InputError for an image that a row of a metadata.jsonl or .csv leads to."""
    folders = {folder for image in images for folder in image.parents if folder.is_relative_to(root)}
    for file in (folder / name for folder in sorted(folders) for name in METADATA):
        if file.is_file():
            named = image_files.named_images(file)
            if image := next((image for image in images if image in named), None):
                raise InputError(
                    f"{image}: a row of {file} leads to it, and no run starts while its image is missing; remove the "
                    "row first, or, where it only has a focus point, set that to the middle in Crop"
                )


def deletions(root: Path) -> list[Deletion]:
    """Return what can be restored, newest first."""
    real = root.resolve()
    return [_deletion(real, name) for name in names(real)[:MOST_SHOWN]]


def names(real: Path) -> list[str]:
    """Return the names of all deletions of a folder, newest first."""
    try:
        with opened(real, (FOLDER,)) as trash:
            return sorted((name for name in os.listdir(trash) if NAME.fullmatch(name)), reverse=True)
    except (InputError, OSError):  # nothing was deleted here
        return []


def deleted_at(name: str) -> float:
    """Return when a deletion was made, in seconds since 1970; 0 for a name that this program did not give."""
    try:
        return float(calendar.timegm(time.strptime(name.partition("-")[0], _TIME)))
    except ValueError:
        return 0.0


def restore(root: Path, name: str) -> tuple[str, ...]:
    """Move the files of a deletion back to where they were, and return their paths below the folder.

    Raises:
        InputError: Something has one of their names now, and nothing was restored; or another window restores them.
    """
    with CHANGES:
        return _restore(root, root.resolve(), name)


def _restore(root: Path, real: Path, name: str) -> tuple[str, ...]:
    found = list(_files(real, name))
    if not found:
        raise InputError("nothing to restore: it was restored or removed meanwhile")
    for path in found:
        with opened(real, path.parent.parts, makes=True) as folder:
            if is_taken(folder, path.name):
                raise InputError(f"{root / path}: is there again; rename it first. Nothing was restored")
    try:
        for path in found:
            with (
                opened(real, (FOLDER, name, *path.parent.parts)) as source,
                opened(real, path.parent.parts) as folder,
            ):
                files.move_at(source, path.name, folder, path.name)
    except (FileExistsError, FileNotFoundError, Missing) as error:  # of another process
        raise InputError("another page restores or removes these files; look again in a moment") from error
    forget(real, name)
    return tuple(path.as_posix() for path in found)


def empty(root: Path, chosen: Collection[str] | None = None) -> int:
    """Remove deleted files for good. Returns the number of deletions.

    Args:
        chosen: Names of deletions; None for all.
    """
    real = root.resolve()
    if not os.path.lexists(real / FOLDER):
        return 0
    with CHANGES, opened(real, (FOLDER,)) as trash:
        found = [name for name in os.listdir(trash) if NAME.fullmatch(name) and (chosen is None or name in chosen)]
        for name in found:
            # What a stranger put in its place is not opened as a folder: a pipe would never end.
            if stat.S_ISDIR(os.stat(name, dir_fd=trash, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=trash)
            else:
                os.unlink(name, dir_fd=trash)
    return len(found)


def _below(root: Path, image: Path) -> Path:
    """Return the path of an image below its folder. Raises InputError for what no scan of the folder finds."""
    try:
        path = Path(os.path.normpath(image)).relative_to(os.path.normpath(root))
    except ValueError as error:
        raise InputError(f"{image}: not in {root}") from error
    if any(part.startswith(".") for part in path.parts) or not is_image(path.name):
        raise InputError(f"{image}: not an image of {root}")
    return path


def begin(real: Path) -> str:
    """Make an empty folder for a deletion and return its name."""
    seconds, micros = divmod(time.time_ns() // 1000, 10**6)
    name = f"{time.strftime(_TIME, time.gmtime(seconds))}-{micros:06}"
    with opened(real, (FOLDER,), makes=True, mode=0o700) as trash:
        os.mkdir(name, 0o700, dir_fd=trash)
    return name


def _delete(real: Path, deletion: str, path: Path) -> None:
    folders = path.parent.parts
    with (
        opened(real, folders) as folder,
        opened(real, (FOLDER, deletion, *folders), makes=True, mode=0o700) as target,
    ):
        files.move_at(folder, path.name, target, path.name)
        caption = f"{path.stem}{CAPTION}"
        others = (name for name in os.listdir(folder) if os.path.splitext(name)[0] == path.stem and is_image(name))
        if is_taken(folder, caption) and not any(others):
            files.move_at(folder, caption, target, caption)


def _files(real: Path, name: str) -> Iterator[Path]:
    """Yield the images and captions of a deletion by their paths below the folder of data."""
    if not NAME.fullmatch(name):
        raise InputError("not a deletion; reload the page")
    try:
        with opened(real, (FOLDER, name)) as deletion:
            count = 0
            for above, folders, names, descriptor in os.fwalk(".", dir_fd=deletion):
                folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
                for file in sorted(names):
                    try:
                        mode = os.stat(file, dir_fd=descriptor, follow_symlinks=False).st_mode
                    except FileNotFoundError:  # it is being restored
                        continue
                    is_file = stat.S_ISREG(mode) or stat.S_ISLNK(mode)
                    if is_file and not file.startswith(".") and (is_image(file) or file.endswith(CAPTION)):
                        count += 1
                        yield Path(above, file)
                    if count >= MOST_FILES:
                        return
    except InputError:  # restored or removed meanwhile
        return


def _deletion(real: Path, name: str) -> Deletion:
    return Deletion(name, deleted_at(name), tuple(path.as_posix() for path in _files(real, name)))


def forget(real: Path, name: str) -> None:
    """Remove the empty folders of a deletion; what else is in them stays."""
    with suppress(FileNotFoundError), opened(real, (FOLDER,)) as trash:  # by another process that empties it
        for _, folders, _, above in os.fwalk(name, topdown=False, dir_fd=trash):
            for inner in folders:
                with suppress(OSError):  # not empty, or a link to a folder
                    os.rmdir(inner, dir_fd=above)
        with suppress(OSError):
            os.rmdir(name, dir_fd=trash)
