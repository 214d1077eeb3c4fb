"""Warnings about images that can be trained on, one sentence per kind. Imports neither torch nor numpy."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from trainer.config.size import Size
from trainer.data.images.buckets import kept_part
from trainer.data.images.image_io import ImageFile
from trainer.data.images.image_members import is_member
from trainer.system.errors import InputError
from trainer.system.files import opened

MOST_ENLARGED = 1.5
"""Enlargement above which an image is blurred at the size it is trained at."""
LEAST_KEPT = 2 / 3
"""Share of an image's pixels that the crop to its bucket should keep."""
TAIL_BYTES = 4096
MAX_SHOWN_PROBLEMS = 20
MOST_ALIKE = 3
"""Messages with one remedy that are shown whole."""
_LEFT_OUT = "left out: "


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
    Images inside other files are not compared.

    Args:
        digest: The digest of a file's bytes where it is known, None elsewhere. Files that are all known are not read.
    """
    groups: list[list[Path]] = []
    for alike in _parted((file for file in files if not is_member(file)), _length):
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


def of_unchanged(edits: Mapping[Path, Sequence[Path]]) -> Iterator[str]:
    """Warn of images that are, byte for byte, one of their references: they teach the model to change nothing.

    Args:
        edits: {image: its references, at least one}. Images inside other files are not compared.
    """
    same: dict[Path, Path] = {}
    for image, references in edits.items():
        for reference in references:
            pair = [file for file in (image, reference) if not is_member(file)]
            if any(_parted(group, _content) for group in _parted(pair, _length)):
                same[image] = reference
    if not same:
        return
    image, reference = next(iter(same.items()))
    count = "every image is" if len(same) == len(edits) else counted(len(same), "image is", "images are")
    yield (
        f"data.references: {count} the same file as a reference, which teaches to change nothing: first {image} and "
        f"{reference}; name the folder of the images before the edit, or replace those"
    )


def of_buckets(images: Iterable[tuple[ImageFile, Size]], is_padded: bool = False) -> Iterator[str]:
    """Warn of images that are enlarged or cropped much.

    Args:
        images: (image, size that it is trained at).
        is_padded: Whether images are whole, with borders.
    """
    enlarged: dict[Path, float] = {}
    cropped: dict[Path, float] = {}
    for image, size in images:
        scale, kept = fit(image, size, is_padded)
        if scale > MOST_ENLARGED:
            enlarged[image.path] = max(scale, enlarged.get(image.path, 0))
        if kept < LEAST_KEPT:
            cropped[image.path] = min(kept, cropped.get(image.path, 1))
    if enlarged:
        first, scale = next(iter(enlarged.items()))
        count = counted(len(enlarged), "image is", "images are")
        yield (
            f"{count} enlarged more than {MOST_ENLARGED} times to fill a bucket, and trained blurred: "
            f"first {first} {scale:.1f} times; use larger files, or lower data.resolution"
        )
    if cropped:
        first, kept = next(iter(cropped.items()))
        count = counted(len(cropped), "image loses", "images lose")
        yield (
            f"{count} more than a third to the crop to a bucket: first {first} of which {kept:.0%} is kept; "
            "crop by hand, raise data.max_aspect, or set data.fit: pad"
        )


def of_left_out(files: Sequence[str | Path], most_cropped: float) -> Iterator[str]:
    """Warn of images that `data.fit: drop` leaves out. most_cropped: `data.most_cropped`."""
    if files:
        count = counted(len(files), "image", "images")
        yield (
            f"data.fit: drop leaves out {count} of which the crop to a bucket would cut off more than "
            f"{most_cropped:.0%}: first {files[0]}; crop by hand, raise data.most_cropped, or set data.fit: pad"
        )


def fit(image: ImageFile, size: Size, is_padded: bool = False) -> tuple[float, float]:
    """Return (scale, share of its pixels that is kept) of an image in a bucket of this size."""
    if is_padded:
        return min(size.width / image.width, size.height / image.height), 1.0
    kept_x, kept_y = kept_part(image.size, size)
    return max(size.width / image.width, size.height / image.height), kept_x * kept_y


def left_out(message: str) -> str:
    """Return the warning about a file that is left out. message: what is wrong with it."""
    return f"{_LEFT_OUT}{message}"


def folded(messages: Iterable[str]) -> list[str]:
    """Fold messages about files, as `FILE: what is wrong; remedy`.

    Of those with one remedy the first MOST_ALIKE stay as they are, followed by one line about all others.
    """
    alike: dict[str, list[str]] = {}
    lines = []
    for message in messages:
        same = alike.setdefault(message.rpartition("; ")[2], [])
        same.append(message.removeprefix(_LEFT_OUT).partition(": ")[0])
        if len(same) <= MOST_ALIKE:
            lines.append((message, same if len(same) == MOST_ALIKE else []))
    return [line for message, same in lines for line in (message, *_rest(same[MOST_ALIKE:]))]


def _rest(places: Sequence[str]) -> Iterator[str]:
    """A line about messages that are not shown. places: the files that they are about."""
    if places:
        yield f"and {len(places)} more like these: {' to '.join(dict.fromkeys((places[0], places[-1])))}"


def listing(problems: Iterable[str]) -> str:
    """Return the text of an error with all problems, one a line, the first MAX_SHOWN_PROBLEMS of them in words."""
    lines = folded(problems)
    hidden = len(lines) - MAX_SHOWN_PROBLEMS
    return "\n".join(lines[:MAX_SHOWN_PROBLEMS] + ([f"and {hidden} more"] if hidden > 0 else []))


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
