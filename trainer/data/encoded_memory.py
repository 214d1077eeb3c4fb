"""Remembers which files of the cache hold a run's examples, so that a later start on the same data only looks whether
they are there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.size import Size
from trainer.data.cache import ExampleCache
from trainer.data.images.image_files import CaptionedImage, Dataset
from trainer.data.images.image_source import EncodedImage, Pixels
from trainer.data.images.known_files import MOST_BYTES
from trainer.data.images.scan_memory import keep_last, without_collection
from trainer.system import files
from trainer.system.errors import InputError

FORMAT = 1
"""Version of the stored records: raise it when equal images and settings make other examples or messages."""
FOLDER = ".known"
"""In the folder of the examples."""


@dataclass(frozen=True)
class Encoded:
    """The examples of a dataset.

    Attributes:
        train: Those that are trained.
        validation: Those that are held out.
        warnings: What was said of them while they were made.
    """

    train: tuple[EncodedImage, ...]
    validation: tuple[EncodedImage, ...]
    warnings: tuple[str, ...]


class EncodedMemory:
    """The examples of one scan, encoded in one way.

    Args:
        cache: The examples.
        scan: Digest of the scan's files and settings; None where a later change could not be seen.
        way: All else that decides which examples there are, and under which keys.
    """

    def __init__(self, cache: ExampleCache, scan: str | None, way: Iterable[object]) -> None:
        self._cache, self._file = cache, None
        if scan is not None:
            text = "\x1f".join(map(str, (FORMAT, scan, *way)))
            self._file = cache.folder / FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def recalled(self, dataset: Dataset) -> Encoded | None:
        """The examples, if all of their files are as they were. None where they are not known."""
        if self._file is None:
            return None
        try:
            with without_collection():
                content = json.loads(files.read(self._file, at_most=MOST_BYTES))
                if not self._are_whole(content["sizes"]):
                    return None
                found = _encoded(content, dataset)
            os.utime(self._file)
        except (OSError, InputError, ValueError, TypeError, KeyError, IndexError):  # none, or damaged: made again
            return None
        return found

    def keep(self, dataset: Dataset, encoded: Encoded) -> None:
        """Keep examples that are all in the cache."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # a full or read-only disk: the next start asks for each file again
            content = _content(dataset, encoded)
            content["sizes"] = self._sizes(content["sizes"])
            keep_last(self._file, json.dumps(content))

    def _are_whole(self, expected: Mapping[str, int]) -> bool:
        """Whether all files are there with their lengths: one that a power cut tore has another."""
        return self._sizes(expected) == expected

    def _sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """{key: bytes of its file}. Raises OSError if one is missing. Examples of other runs are not looked at."""
        folder = str(self._cache.folder)
        return {key: os.stat(f"{folder}/{key[:2]}/{key}.safetensors").st_size for key in keys}


def _content(dataset: Dataset, encoded: Encoded) -> dict[str, Any]:
    """Examples as JSON can hold them. Each key stands once in "sizes", by whose order others name it."""
    keys: dict[str, int] = {}

    def numbers_of(pixels: Pixels | None) -> list[Any] | None:
        if pixels is None:
            return None
        mask, rejected = (None if key is None else number_of(key) for key in (pixels.mask, pixels.rejected))
        return [number_of(pixels.latents), mask, [number_of(key) for key in pixels.references], rejected]

    def number_of(key: str) -> int:
        return keys.setdefault(key, len(keys))

    rows = {}
    for name in ("train", "validation"):
        places = {image: number for number, image in enumerate(getattr(dataset, name))}
        rows[name] = [
            [
                places[one.image],
                one.size.values,
                numbers_of(one.pixels),
                numbers_of(one.mirrored),
                [number_of(key) for key in one.texts],
                [size.values for size in one.reference_sizes],
            ]
            for one in getattr(encoded, name)
        ]
    return {"sizes": keys, **rows, "warnings": encoded.warnings}


def _encoded(content: Mapping[str, Any], dataset: Dataset) -> Encoded:
    keys = list(content["sizes"])

    def pixels_of(row: Sequence[Any]) -> Pixels:
        latents, mask, references, rejected = row
        return Pixels(
            keys[latents],
            None if mask is None else keys[mask],
            tuple(keys[number] for number in references),
            None if rejected is None else keys[rejected],
        )

    def image_of(images: Sequence[CaptionedImage], row: Sequence[Any]) -> EncodedImage:
        number, size, pixels, mirrored, texts, reference_sizes = row
        return EncodedImage(
            images[number],
            Size(*size),
            pixels_of(pixels),
            tuple(keys[text] for text in texts),
            None if mirrored is None else pixels_of(mirrored),
            tuple(Size(*one) for one in reference_sizes),
        )

    train = tuple(image_of(dataset.train, row) for row in content["train"])
    validation = tuple(image_of(dataset.validation, row) for row in content["validation"])
    return Encoded(train, validation, tuple(content["warnings"]))
