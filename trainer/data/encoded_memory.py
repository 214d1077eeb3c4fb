"""Remembers which files of the cache hold a run's examples, so that a later start on the same data only looks whether
they are there."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter, ValidationError

from trainer.config.size import Size
from trainer.data.cache import ExampleCache, key_of_all
from trainer.data.images.image_files import Dataset
from trainer.data.images.image_io import NativeText
from trainer.data.images.image_source import EncodedImage, Pixels
from trainer.data.images.scan_memory import MOST_KEPT, without_collection
from trainer.system.index import Index

FORMAT = 2
"""Version of the stored records: raise it when equal images and settings make other examples or messages."""
KIND = f"encoded {FORMAT}"


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


_HEAD = TypeAdapter(tuple[int, str, tuple[NativeText, ...]])
"""The first line of a record: how many examples are trained on, `EncodedMemory._state`, and the warnings."""
_Key = Annotated[str, AfterValidator(sys.intern)]
_ROW: TypeAdapter[Any] = TypeAdapter(
    tuple[int, Size, Pixels, tuple[_Key, ...], Pixels | None, tuple[Size, ...], _Key | None, tuple[_Key, ...]]
)
"""Each other line: the fields of an EncodedImage, with the number of its image in the dataset."""


class EncodedMemory:
    """The examples of one scan, encoded in one way.

    Args:
        cache: The examples.
        index: Where it is remembered which they are.
        scan: Digest of the scan's files and settings; None where a later change could not be seen.
        way: All else that decides which examples there are, and under which keys.
    """

    def __init__(self, cache: ExampleCache, index: Index, scan: str | None, way: Iterable[object]) -> None:
        self._cache, self._index = cache, index
        text = "\x1f".join(map(str, (scan, *way)))
        self._key = hashlib.sha256(text.encode()).hexdigest() if scan else ""

    def recalled(self, dataset: Dataset) -> Encoded | None:
        """The examples, if all of their files are as they were. None where they are not known."""
        content = self._index.get(KIND, self._key) if self._key else None
        if content is None:
            return None
        # A record may be a stranger's; a file may be gone.
        with suppress(ValidationError, OSError, IndexError), without_collection():
            head, *lines = content.split(b"\n")
            num_train, state, warnings = _HEAD.validate_json(head)
            images = (*dataset.train, *dataset.validation)
            found = tuple(EncodedImage(images[number], *rest) for number, *rest in map(_ROW.validate_json, lines))
            if self._state(found) == state:
                self._index.touch(KIND, self._key)
                return Encoded(found[:num_train], found[num_train:], warnings)
        return None

    def keep(self, dataset: Dataset, encoded: Encoded) -> None:
        """Keep examples that are all in the cache."""
        if not self._key:
            return
        places = {image: number for number, image in enumerate((*dataset.train, *dataset.validation))}
        examples = (*encoded.train, *encoded.validation)
        lines = (
            _ROW.dump_json((places[one.image], *(getattr(one, field.name) for field in fields(one)[1:])))
            for one in examples
        )
        with suppress(OSError):  # an example that is gone: the next start asks for each file
            head = _HEAD.dump_json((len(encoded.train), self._state(examples), encoded.warnings))
            self._index.put(KIND, {self._key: b"\n".join((head, *lines))}, MOST_KEPT)

    def _state(self, examples: Iterable[EncodedImage]) -> str:
        """Digest of the examples' files and their lengths: one that a power cut tore has another. Raises OSError if one
        is missing. Examples of other runs are not looked at."""
        folder = str(self._cache.folder)
        keys = dict.fromkeys(key for example in examples for key in _keys(example))
        return key_of_all(f"{key} {os.stat(f'{folder}/{key[:2]}/{key}.safetensors').st_size}" for key in keys)


def _keys(example: EncodedImage) -> Iterable[str]:
    yield from (*example.texts, *example.texts_alone, *filter(None, (example.empty,)))
    for pixels in filter(None, (example.pixels, example.mirrored)):
        yield from filter(None, (pixels.latents, pixels.mask, *pixels.references, pixels.rejected))
