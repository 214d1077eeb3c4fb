"""Warnings about images that can be trained on, one sentence per kind. Imports neither torch nor numpy."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path

from trainer.config.errors import InputError
from trainer.config.files import opened
from trainer.data.buckets import choose_bucket, kept_part
from trainer.data.image_io import ImageFile

MOST_ENLARGED = 1.5
"""Enlargement above which an image is blurred at the size it is trained at."""
LEAST_KEPT = 2 / 3
"""Share of an image's pixels that the crop to its bucket should keep."""
TAIL_BYTES = 4096


def of_files(images: Sequence[ImageFile]) -> Iterator[str]:
    """Warn of files with parts that are not used."""
    if paged := [image.path for image in images if image.has_frames]:
        count = counted(len(paged), "image has", "images have")
        yield f"{count} several frames or pages, of which only the first one is used: first {paged[0]}"
    if broken := [image.path for image in images if image.profile == "broken"]:
        count = counted(len(broken), "image has", "images have")
        yield f"{count} a colour profile that cannot be used and is ignored: first {broken[0]}; save it again as sRGB"


def of_copies(files: Iterable[Path], digest: Callable[[Path], str | None] = lambda file: None) -> Iterator[str]:
    """Warn of files with the same bytes. Only files of equal length are read, and fully only those with equal ends.

    Args:
        digest: The digest of a file's bytes where it is known, None elsewhere. Files that are all known are not read.
    """
    groups: list[list[Path]] = []
    for alike in _parted(files, _length):
        digests = {file: digest(file) for file in alike}
        if None not in digests.values():
            groups += _parted(alike, digests.__getitem__)
            continue
        groups += [part for group in _parted(alike, _tail) for part in _parted(group, _content)]
    if groups:
        count = counted(sum(len(group) - 1 for group in groups), "image has", "images have")
        first, copy = groups[0][:2]
        yield (
            f"{count} the same bytes as another one: first {copy} as {first}; remove copies, or give their folder a "
            "weight in data.folders"
        )


def of_buckets(images: Sequence[ImageFile], sizes: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Warn of images that are enlarged or cropped much. sizes: (width, height) of all buckets."""
    enlarged, cropped = [], []
    for image in images:
        scale, kept = fit(image, choose_bucket(image.width, image.height, sizes))
        if scale > MOST_ENLARGED:
            enlarged.append(f"{image.path} {scale:.1f} times")
        if kept < LEAST_KEPT:
            cropped.append(f"{image.path} of which {kept:.0%} is kept")
    if enlarged:
        count = counted(len(enlarged), "image is", "images are")
        yield (
            f"{count} enlarged more than {MOST_ENLARGED} times to fill a bucket, and learned blurred: "
            f"first {enlarged[0]}; use larger files, or lower data.resolution"
        )
    if cropped:
        count = counted(len(cropped), "image loses", "images lose")
        yield (
            f"{count} more than a third to the crop to a bucket: first {cropped[0]}; "
            "crop by hand, or raise data.max_aspect"
        )


def fit(image: ImageFile, size: tuple[int, int]) -> tuple[float, float]:
    """Return (scale, share of its pixels that is kept) of an image that fills a bucket of this (width, height)."""
    kept_x, kept_y = kept_part(image.width, image.height, size)
    return max(size[0] / image.width, size[1] / image.height), kept_x * kept_y


def counted(number: int, one: str, more: str) -> str:
    return f"1 {one}" if number == 1 else f"{number} {more}"


def _parted(files: Iterable[Path], same: Callable[[Path], Hashable]) -> list[list[Path]]:
    """Groups of at least two files with equal `same(file)`, in the order of their first files."""
    groups: defaultdict[Hashable, list[Path]] = defaultdict(list)
    for file in files:
        try:
            groups[same(file)].append(file)
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror}); restore or remove it") from error
    return [group for group in groups.values() if len(group) > 1]


def _length(file: Path) -> int:
    return file.stat().st_size


def _tail(file: Path) -> bytes:
    with opened(file) as stream:
        stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
        return stream.read()


def _content(file: Path) -> bytes:
    with opened(file) as stream:
        return hashlib.file_digest(stream, "sha256").digest()
