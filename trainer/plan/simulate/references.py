"""Counts the reference images of an example by the names of files, without opening any. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from itertools import count, takewhile

from trainer.config.families import of as families_of
from trainer.config.schema import RunConfig
from trainer.config.sections import NUMBERED_FOLDER


def references_of(cfg: RunConfig) -> int:
    """Return the most reference images of one training image: at most as many as models of the family read.

    Names are compared as `trainer/data/images/masks_references.py` does, in the folders themselves, not in those below
    them. Where they say nothing, as for files that are not there yet, an image has one.
    """
    data = cfg.data
    if not data.has_references:
        return 0
    found = len(data.reference_columns)
    if data.references:
        images = {path for path in (data.path, *(folder.path for folder in data.folders)) if path}
        stamps = tuple(map(_stamp, (data.references, *sorted(images))))
        found = max(found, _counted(data.references, tuple(sorted(images)), stamps))
    known = families_of(cfg.model.family)
    most = max((kind.references for kind in known.edits), default=found) if known else found
    return max(1, min(found, most))


def _stamp(path: str) -> int:
    """Return when entries of a folder changed last; 0 where it cannot be read."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@lru_cache(16)
def _counted(references: str, images: tuple[str, ...], stamps: tuple[int, ...]) -> int:
    """Count by names. stamps: when the folders changed last; they are listed again after a change."""
    folders, names = _entries([references])
    image_folders, image_names = _entries(images)
    found = 0
    for name in image_names - names:
        found = max(found, sum(1 for _ in takewhile(names.__contains__, (f"{name}_{number}" for number in count()))))
    # A folder with a number that the images have too holds references by the same paths.
    numbered = [folder for folder in folders - image_folders if NUMBERED_FOLDER.fullmatch(folder)]
    return found if found or image_names & names else len(numbered)


def _entries(folders: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the names of the folders in folders, and those of the files without suffix."""
    inner, names = set[str](), set[str]()
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir():
                        inner.add(entry.name)
                    else:
                        names.add(os.path.splitext(entry.name)[0])
        except OSError:  # not there yet, or a file of rows
            continue
    return inner, names
