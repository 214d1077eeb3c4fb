"""Names under which uploaded files are kept: valid on Linux, macOS and Windows, and never the name of another file."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trainer.data.images.image_io import IMAGE_SUFFIXES, OTHER_IMAGE_SUFFIXES
from trainer.data.images.image_tables import CSV, TABLES
from trainer.system.errors import InputError

MOST_STEM = 180
"""Bytes of a name without its suffix: with ` (99999)` and a suffix it stays below 200."""
MOST_SUFFIX = 8
MOST_NUMBERS = 10_000
METADATA = "metadata.jsonl"
CAPTION = ".txt"
_WINDOWS = re.compile(r"(?i)(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])(\..*)?")
_UNSAFE = re.compile(r'[\\:*?"<>|]')
_ALL_IMAGES = IMAGE_SUFFIXES | OTHER_IMAGE_SUFFIXES


def safe(given: str) -> str:
    """Return the name to keep a file under.

    Unicode is composed (NFC). Control characters and what Windows cannot name become `_`, leading dots go, and long
    names are cut: a caption is cut as its image is, because both have the same stem.

    Raises:
        InputError: It names a folder or no file at all.
    """
    if "/" in given or "\0" in given or given.strip() in ("", ".", ".."):
        raise InputError(f"{given[:200]!r}: not the name of a file; rename it and choose it again")
    plain = unicodedata.normalize("NFC", given)
    plain = "".join(
        "_" if unicodedata.category(letter)[0] == "C" or letter in "\u2028\u2029" else letter for letter in plain
    )
    plain = _UNSAFE.sub("_", plain).lstrip(". ").rstrip(". ")
    stem, suffix = os.path.splitext(plain)
    if len(suffix.encode()) > MOST_SUFFIX:
        stem, suffix = plain, ""
    stem = stem.rstrip(". ") or "file"
    return f"{_cut(f'_{stem}' if _WINDOWS.fullmatch(stem) else stem)}{suffix}"


def folder(given: str) -> str:
    """Return the name of a new folder. Raises InputError for one that would have to be changed."""
    name = unicodedata.normalize("NFC", given.strip())
    is_cache = name == "cache" or name.endswith("_cache")  # which a run does not read
    try:
        is_plain = safe(name) == name and not is_cache
    except InputError:
        is_plain = False
    if not is_plain:
        raise InputError(
            f"{given[:200]!r}: not a name for a folder of images; use letters, digits, spaces, - and _, at most "
            f"{MOST_STEM} bytes, and no leading dot"
        )
    return name


def _cut(stem: str) -> str:
    """Cut a long stem. A digest of the whole one keeps two that begin alike apart."""
    encoded = stem.encode()
    if len(encoded) <= MOST_STEM:
        return stem
    digest = hashlib.sha256(encoded).hexdigest()[:8]
    return f"{encoded[: MOST_STEM - 9].decode(errors='ignore').rstrip('. ')}-{digest}"


def parts(name: str) -> tuple[str, str]:
    """Return stem and suffix as they are compared: composed, in lower case."""
    stem, suffix = os.path.splitext(unicodedata.normalize("NFC", name))
    return stem.casefold(), suffix.lower()


def accepted() -> list[str]:
    """Return the suffixes of files that are taken."""
    return [*sorted(IMAGE_SUFFIXES), CAPTION, ".jsonl"]


def is_image(name: str) -> bool:
    """Whether a run reads a file of this name as an image."""
    return parts(name)[1] in IMAGE_SUFFIXES


def is_table(name: str) -> bool:
    """Whether a run reads a file of this name as several images, where its folder has none of its own."""
    return parts(name)[1] in TABLES and parts(name)[1] != CSV


def numbered(stem: str) -> Iterator[str]:
    """Yield `stem`, `stem (2)`, `stem (3)`. Raises InputError after MOST_NUMBERS."""
    yield stem
    for number in range(2, MOST_NUMBERS):
        yield f"{stem} ({number})"
    raise InputError(f"{stem}: {MOST_NUMBERS} files have this name; rename it and choose it again")


def by_stem(names: Iterable[str]) -> dict[str, list[str]]:
    """Return {stem as it is compared: names} of a folder, in which thousands of photos may be called `image.jpg`."""
    found = defaultdict[str, list[str]](list)
    for name in names:
        found[parts(name)[0]].append(name)
    return dict(found)


def in_the_way(present: Mapping[str, Sequence[str]], stem: str, is_first: bool) -> list[str]:
    """Return the names of `by_stem` that keep an image from being called `stem`.

    These are images of that stem, whatever their suffix and case: they would share a caption. A caption alone is taken
    over by the image that was uploaded under its name, but not by one that was given a number.
    """
    suffixes = _ALL_IMAGES if is_first else _ALL_IMAGES | {CAPTION}
    return [name for name in present.get(stem.casefold(), ()) if parts(name)[1] in suffixes]
