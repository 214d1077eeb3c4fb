"""Says what lies in a folder of images and is not read. Imports neither torch nor numpy."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from trainer.data.images.image_io import (
    IMAGE_SUFFIXES,
    OTHER_IMAGE_SUFFIXES,
    folders_with_images,
    is_passed_over,
    same_name,
)
from trainer.data.images.image_tables import COMPRESSED, CSV, TABLES
from trainer.data.images.image_warnings import counted

CAPTION = ".txt"
OTHER_CAPTIONS = frozenset({".caption", ".captions", ".cap", ".tags", ".json", ".jsonl", CSV, ".tsv"})
"""Suffixes under which other programs keep captions."""
LISTS = frozenset({".json", ".jsonl", CSV, ".tsv", ".parquet"})
"""Those of files with captions of several images."""
UNNAMED = frozenset({"thumbs.db", "desktop.ini", "readme", "license", "readme.txt", "license.txt"})
"""Names, in lower case, of files that accompany data and hold none, as do those that end in .md."""
MOST_SUFFIXES = 5
"""Suffixes that one sentence names."""


def stem_of(path: Path | str) -> str:
    """A file's path without its suffix, as it is compared."""
    return same_name(os.path.splitext(path)[0])


def nearest(files: Iterable[Path], images: Sequence[Path]) -> dict[Path, Path]:
    """{image without a caption: a file that probably is its caption, under another name}.

    As `im.caption`, `im.png.txt` or, where the image is `im.png`, `IM.txt`.
    """
    near: dict[str, Path] = {}
    for file in files:
        stem = os.path.splitext(file)[0]
        if os.path.splitext(stem)[1].lower() in IMAGE_SUFFIXES:
            stem = os.path.splitext(stem)[0]
        if file.suffix.lower() in OTHER_CAPTIONS | {CAPTION}:
            near.setdefault(same_name(stem).casefold(), file)
    found = ((image, near.get(stem_of(image).casefold())) for image in images)
    return {image: file for image, file in found if file is not None}


def of_captioned(field: str, files: Sequence[Path], named: Collection[Path]) -> Iterator[str]:
    """Warn of files next to captioned images that are neither images that are read nor their captions.

    Args:
        field: The field of the config that names the folder.
        files: Those files.
        named: Some of them, which another sentence names.
    """
    captions = {stem_of(file): file for file in files if file.suffix.lower() == CAPTION and not _is_unnamed(file)}
    pictures = [file for file in _of_other_kinds(files) if stem_of(file) in captions]
    if pictures:
        count = counted(
            len(pictures), "file has a caption, but is not an image", "files have a caption, but are not images"
        )
        yield (
            f"{field}: {count} of a kind that is read: first {pictures[0]}{_suffixes(pictures)}; convert to png or "
            "jpg, or remove with the caption"
        )
    taken = {stem_of(file) for file in files if file.suffix.lower() not in OTHER_CAPTIONS | {CAPTION}}
    alone = [file for stem, file in captions.items() if stem not in taken and file not in named]
    if alone:
        count = counted(len(alone), "caption belongs", "captions belong")
        yield f"{field}: {count} to no image that is read: first {alone[0]}; give a caption the name of its image"
    others = [file for file in files if file.suffix.lower() in OTHER_CAPTIONS and file not in named]
    if others:
        count = counted(len(others), "file that may hold captions is", "files that may hold captions are")
        yield (
            f"{field}: {count} not read: first {others[0]}; write captions into .txt files named as their images, or "
            "into a metadata.jsonl or metadata.csv with file_name and text"
        )
    pictured = set(pictures)
    yield from of_others(field, [file for file in files if file not in pictured])


def of_others(field: str, files: Iterable[Path]) -> Iterator[str]:
    """Warn of files that are neither images, nor captions, nor tables."""
    if others := _of_other_kinds(files):
        count = counted(len(others), "file of another kind is", "files of other kinds are")
        yield f"{field}: {count} not read: first {others[0]}{_suffixes(others)}"


def of_tables(field: str, files: Iterable[Path]) -> Iterator[str]:
    """Warn of files next to tables that hold the images. files: all but the tables."""
    others = [file for file in files if not file.name.lower().endswith(COMPRESSED) and not _is_unnamed(file)]
    if others:
        count = counted(len(others), "file next to tables of images is", "files next to tables of images are")
        yield f"{field}: {count} not read: first {others[0]}{_suffixes(others)}"


def of_samples(field: str, unused: Sequence[str]) -> Iterator[str]:
    """Warn of samples of tar files with several images. unused: of each, an image that is not trained."""
    if unused:
        count = counted(len(unused), "sample has further images", "samples have further images")
        yield (
            f"{field}: {count}, which are not trained: first {unused[0]}; give each image a sample of its own, or name "
            "the suffix that is trained in data.image_column"
        )


def of_members(field: str, unread: Sequence[Path]) -> Iterator[str]:
    """Warn of files in tar files that belong to no image. unread: each as `TAR/NAME`."""
    if unread:
        count = counted(len(unread), "file in tar files belongs", "files in tar files belong")
        is_are = "is" if len(unread) == 1 else "are"
        yield f"{field}: {count} to no image and {is_are} not read: first {unread[0]}{_suffixes(unread)}"


def of_folders(field: str, passed: Iterable[str]) -> Iterator[str]:
    """Warn of folders with images that are passed over."""
    folders = folders_with_images(passed)
    hidden = [folder for folder in folders if is_passed_over(os.path.basename(folder))]
    if hidden:
        count = counted(len(hidden), "folder with images is", "folders with images are")
        yield (
            f"{field}: {count} not read, hidden or named as a cache: first {hidden[0]}; rename it to train on its "
            "images"
        )
    runs = [folder for folder in folders if folder not in hidden]
    if runs:
        count = counted(len(runs), "folder is that of a run", "folders are those of runs")
        yield f"{field}: {count}, whose images are not trained on: first {runs[0]}"


def _of_other_kinds(files: Iterable[Path]) -> list[Path]:
    """The files that are not captions, tables or known images, of which other sentences speak."""
    known = (*OTHER_CAPTIONS, CAPTION, *TABLES, *COMPRESSED, *OTHER_IMAGE_SUFFIXES)
    return [file for file in files if not file.name.lower().endswith(known) and not _is_unnamed(file)]


def _is_unnamed(file: Path) -> bool:
    return file.name.lower() in UNNAMED or file.suffix.lower() == ".md"


def _suffixes(files: Iterable[Path]) -> str:
    """The suffixes of several kinds of files, in brackets."""
    kinds = list(dict.fromkeys(file.suffix or "without a suffix" for file in files))
    return f" ({', '.join(kinds[:MOST_SUFFIXES])}{' ...' * (len(kinds) > MOST_SUFFIXES)})" if len(kinds) > 1 else ""
