"""Uploads into the draft's folder of images, and its deleted images; the screen Data shows them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from app.data import dataset, masks, trash
from app.data.data_folders import free_name
from app.data.upload import upload_kinds, upload_names
from app.data.upload.uploads import MOST_CHUNK, Chosen, require_usable
from app.form import draft as form
from app.studio import Studio
from app.web.answers import Calls
from app.web.pages.data import folders_key, require_shown
from app.web.pages.new_run import left_with_images
from trainer.system.errors import InputError

MOST_NAMED = 3
"""Images of a deletion that are named."""


def facts() -> dict[str, Any]:
    """Return what the script knows from the start."""
    return {"chunk": MOST_CHUNK, "head": upload_kinds.HEAD, "accept": ",".join(upload_names.accepted())}


def calls(studio: Studio) -> Calls:
    """Return the functions of the screen's script."""
    functions = (state, begin, finish, cancel, masked, make, delete, restore, empty)
    return {f"upload_{function.__name__}": partial(function, studio) for function in functions}


def state(studio: Studio) -> dict[str, Any]:
    """Return where images go, why none are taken, and what can be restored.

    `roots` is {folder that a new one can be made in: a name that is free there}.
    """
    config = form.check(studio.draft()).config
    roots = [] if studio.half_typed.holds(studio.draft().values) else dataset.folders(config.data)
    folder = str(roots[0]) if roots else ""
    return {
        "closed": studio.uploads.closed or studio.unwritable,
        "folder": folder,
        "problem": _problem(studio, folder),
        "roots": {str(root): free_name(root) for root in studio.uploads.folders.roots},
        "key": folders_key(config),
        "deleted": [_deletion(root, found) for root in roots for found in trash.deletions(root)],
    }


def begin(studio: Studio, file: Chosen) -> dict[str, Any]:
    """Begin an upload or go on with it."""
    return asdict(studio.uploads.begin(file))


def finish(studio: Studio, file: Chosen) -> dict[str, Any]:
    """Check a complete file and put it into its folder."""
    return asdict(studio.uploads.finish(file))


def cancel(studio: Studio, id: str) -> None:
    """Forget an unfinished upload."""
    studio.uploads.cancel(id)


def masked(studio: Studio, folder: str, names: list[str]) -> dict[str, str]:
    """Return {name: mask} of new images of a folder that have a mask already. A deleted image leaves its own behind."""
    data = form.check(studio.draft()).config.data
    return {name: str(mask) for name, mask in masks.waiting(data, Path(folder), names).items()}


def make(studio: Studio, above: str, name: str) -> dict[str, Any]:
    """Make a folder, which becomes that of the draft's images. Returns it, and what was left with the former one."""
    if studio.uploads.closed:
        raise InputError(studio.uploads.closed)
    made = str(studio.uploads.folders.make(above, name))
    studio.half_typed.leave(["data.path"])
    gone = studio.change_images(lambda draft: draft.typed("data.path", made))
    return {"folder": made, "left": left_with_images(gone)}


def delete(studio: Studio, key: str, images: list[str]) -> dict[str, Any]:
    """Move images that the window shows into the trash of their folder. Returns what `restore` needs."""
    config = form.check(studio.draft()).config
    require_shown(config, key)
    found = studio.scans.of(config)
    if not found.is_complete:
        raise InputError("The images are still being read; try again when that is done")
    roots, by_root = dataset.folders(config.data), defaultdict[Path, list[Path]](list)
    for image in map(dataset.image_at, images):
        if image not in found.images:
            raise InputError(f"{image}: not one of the images that are shown; read them again")
        if dataset.is_in_table(image, found):
            raise InputError(f"{image}: stands in a table; remove it there")
        by_root[next(root for root in roots if image.is_relative_to(root))].append(image)
    if len(by_root) != 1:
        raise InputError("images of one folder can be deleted at once; delete those of each folder by themselves")
    [(root, chosen)] = by_root.items()
    studio.uploads.folders.require_changeable(root.resolve())
    trash.require_no_rows(root, chosen)
    deletion = _deletion(root, trash.delete(root, chosen))
    studio.scans.of(config, is_fresh=True)
    return deletion


def restore(studio: Studio, key: str, folder: str, name: str) -> int:
    """Undo a deletion. Returns the number of files."""
    config = form.check(studio.draft()).config
    count = len(trash.restore(_shown_folder(studio, key, folder), name))
    studio.scans.of(config, is_fresh=True)
    return count


def empty(studio: Studio, key: str, deletions: list[str]) -> int:
    """Remove deletions in the folders that the window shows for good. Returns their number.

    Args:
        deletions: Names of those that the window shows. What another window deleted meanwhile stays.
    """
    config = form.check(studio.draft()).config
    require_shown(config, key)
    roots = [root for root in dataset.folders(config.data) if trash.deletions(root)]
    return sum(trash.empty(_shown_folder(studio, key, str(root)), deletions) for root in roots)


def _shown_folder(studio: Studio, key: str, folder: str) -> Path:
    """The folder of the draft with this path. Raises InputError for another one."""
    config = form.check(studio.draft()).config
    require_shown(config, key)
    root = next((root for root in dataset.folders(config.data) if str(root) == folder), None)
    if root is None:
        raise InputError(f"{folder[:200]!r}: not a folder of the images that are shown; reload the page")
    studio.uploads.folders.require_changeable(root.resolve())
    return root


def _problem(studio: Studio, folder: str) -> str:
    """Why nothing can be put into the draft's folder; "" where it can."""
    if not folder:
        return "No folder is chosen."
    try:
        real = studio.uploads.folders.checked(folder)
        with studio.uploads.folders.opened(real) as descriptor:
            require_usable(descriptor, real)
    except (InputError, OSError) as error:
        return str(error)
    return ""


def _deletion(root: Path, deletion: trash.Deletion) -> dict[str, Any]:
    images = [file for file in deletion.files if upload_names.is_image(file)]
    return {
        "folder": str(root),
        "name": deletion.name,
        "at": deletion.deleted_at,
        "images": images[:MOST_NAMED],
        "num_images": len(images),
        "num_files": len(deletion.files),
    }
