"""Pairs of edit training: the folder with the images before an edit, found by its name, and the pairs held out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from app.data import dataset
from app.data.scans import ScanResult
from trainer.config.schema import RunConfig
from trainer.data.images.image_files import with_trigger
from trainer.data.images.image_io import IMAGE_SUFFIXES, files_below, same_name
from trainer.data.images.image_members import is_member
from trainer.data.images.masks_references import ReferenceNames
from trainer.launcher import preflight
from trainer.system.errors import InputError

NAMES = (
    *("control", "controls", "source", "sources", "before", "input", "inputs"),
    *("conditioning", "condition", "reference", "references", "original", "originals"),
)
"""Names of such folders, in lower case: alone, or after the name of the data's folder, as `cats_control`."""
LEAST_MATCHED = 0.5
"""Share of the images that must have one of their name."""
MOST_FILES = 20_000
"""Files of a folder whose names are read."""


@dataclass(frozen=True)
class Pairs:
    """A folder with images of the names of a draft's images.

    Attributes:
        folder: The folder.
        num_matched: Images of the draft that have one there.
        num_images: Images of the draft.
    """

    folder: Path
    num_matched: int
    num_images: int


@dataclass(frozen=True)
class HeldOut:
    """A pair that a run is not trained on.

    Attributes:
        caption: Its caption in one line, with the trigger as in training.
        references: Its images before the edit.
    """

    caption: str
    references: tuple[Path, ...]


def held_out(config: RunConfig, found: ScanResult, most: int) -> list[HeldOut]:
    """Return the first pairs that are held out, without those inside files.

    Args:
        config: A run's config.
        found: The complete scan of its images.
        most: The number of pairs.
    """
    framed = {image: found.framed[image].references for image in found.images if image in found.framed}
    images = [
        image
        for image, references in framed.items()
        if references and image in found.held_out and not any(map(is_member, references))
    ]
    return [
        HeldOut(" ".join(with_trigger(item.caption, config.data.trigger).split()), framed[item.image])
        for item in dataset.items(images[:most], found)
    ]


def suggested(config: RunConfig, found: ScanResult) -> Pairs | None:
    """Return the folder that a draft's images are probably made from; None where it has one, or none is found.

    Args:
        config: The draft's config.
        found: The complete scan of its images.
    """
    data = config.data
    if data.has_references or data.path is None or not preflight.reads_references(config.model):
        return None
    root = Path(os.path.abspath(Path(data.path).expanduser()))
    names = {_name(image, root) for image in found.images if image.is_relative_to(root)}
    matching = (_matched(folder, names) for folder in _siblings(root))
    return max(filter(None, matching), key=lambda pairs: pairs.num_matched, default=None)


def _siblings(root: Path) -> Iterator[Path]:
    wanted = {*NAMES, *(f"{root.name.lower()}{sign}{name}" for sign in "_-" for name in NAMES)}
    try:
        with os.scandir(root.parent) as entries:
            folders = sorted(entry.path for entry in entries if entry.name.lower() in wanted and entry.is_dir())
    except OSError:  # without a right to list it: nothing is suggested
        return
    yield from (Path(folder) for folder in folders if Path(folder) != root)


def _matched(folder: Path, names: set[str]) -> Pairs | None:
    """The folder, if enough of the names have references in it."""
    try:
        files = list(islice(files_below(folder, frozenset()), MOST_FILES))
    except (OSError, InputError):
        return None
    references = ReferenceNames({_name(file, folder) for file in files if file.suffix.lower() in IMAGE_SUFFIXES})
    count = sum(bool(references.of(name)) for name in names)
    return Pairs(folder, count, len(names)) if names and count >= LEAST_MATCHED * len(names) else None


def _name(image: Path, root: Path) -> str:
    return same_name(image.relative_to(root).with_suffix("").as_posix())
