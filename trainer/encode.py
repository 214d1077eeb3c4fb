"""Photos and captions to cached examples. The encoders live and die here."""

from __future__ import annotations

import gc
import hashlib
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer.config import InputError, RunConfig
from trainer.data.buckets import bucket_sizes, choose_bucket
from trainer.data.cache import Crew, ExampleCache, content_keys, encode_missing, missing
from trainer.data.images import TRIGGER_PLACE, Photo, load_photo, scan
from trainer.data.loader import Item
from trainer.events import StatusEvent, WarningEvent
from trainer.families.base import LoadModule, ModelFamily
from trainer.objectives import Example
from trainer.world import World

CACHE_VERSION = 1
"""Part of every key: raise it when equal photos or captions are to be encoded in another way."""

Say = Callable[[Any], None]
T = TypeVar("T")


@dataclass(frozen=True)
class EncodedPhoto:
    """Where a photo's latents and its caption's embeddings lie in the cache."""

    photo: Photo
    latents: str
    text: str


@dataclass(frozen=True)
class EncodedPrompt:
    """A sample prompt with its trigger filled in, and where its embeddings lie in the cache."""

    text: str
    key: str


@dataclass(frozen=True)
class EncodedData:
    """Everything a run feeds to the model, by cache key. negative, empty: the negative and the empty caption."""

    cache: ExampleCache
    train: tuple[EncodedPhoto, ...]
    validation: tuple[EncodedPhoto, ...]
    prompts: tuple[EncodedPrompt, ...]
    negative: str
    empty: str

    def example(self, item: Item) -> Example:
        """One training example: latents with the caption's embeddings, or the empty caption's where it is dropped."""
        encoded = self.train[item.photo]
        return self.cache.read(encoded.latents) | self.cache.read(self.empty if item.dropped else encoded.text)

    def held_out(self, index: int) -> Example:
        """One validation example."""
        encoded = self.validation[index]
        return self.cache.read(encoded.latents) | self.cache.read(encoded.text)

    def shapes(self, item: Item) -> Example:
        """`example` on the meta device: shapes and types, read from the files' headers only."""
        encoded = self.train[item.photo]
        return self.cache.shapes(encoded.latents) | self.cache.shapes(self.empty if item.dropped else encoded.text)


class StopRequested(Exception):
    """Raised on all ranks when a stop is requested while encoding. What is encoded stays in the cache."""


def encode_data(
    cfg: RunConfig,
    family: ModelFamily,
    load: LoadModule,
    cache_folder: Path,
    world: World,
    say: Say,
    stopping: Callable[[], bool] = lambda: False,
) -> EncodedData:
    """Encode what a run needs and is not cached yet: each photo and each caption once, by one of the ranks. Collective.

    cache_folder: shared by runs.  stopping: whether a stop is requested, asked on rank 0 only.
    Raises StopRequested on every rank, or InputError for a photo that cannot be decoded, unless `data.bad_image` is
    warn.
    """
    return _DataEncoder(cfg, family, load, cache_folder, world, say, stopping).encode()


@dataclass(frozen=True)
class _DataEncoder:
    cfg: RunConfig
    family: ModelFamily
    load: LoadModule
    cache_folder: Path
    world: World
    say: Say
    stopping: Callable[[], bool]

    def encode(self) -> EncodedData:
        dataset = scan(self.cfg.data)
        for warning in dataset.warnings:
            self.say(WarningEvent(message=warning))
        photos = (*dataset.train, *dataset.validation)
        cache = ExampleCache(self.cache_folder / "examples")
        crew = _crew(self.world, self.cache_folder)
        origin = f"{CACHE_VERSION} {self.cfg.model.family} {self.family.fingerprint()}"
        texts = self._encode_texts(photos, cache, crew, origin)
        latents, failures = self._encode_photos(photos, cache, crew, origin)
        encoded = [EncodedPhoto(photo, key, texts[photo.caption]) for photo, key in zip(photos, latents, strict=True)]
        split = len(dataset.train)
        return EncodedData(
            cache,
            tuple(e for e in encoded[:split] if e.latents not in failures),
            tuple(e for e in encoded[split:] if e.latents not in failures),
            tuple(EncodedPrompt(prompt, texts[prompt]) for prompt in self._prompts),
            texts[self.cfg.sample.negative],
            texts[""],
        )

    @property
    def _prompts(self) -> list[str]:
        return [prompt.replace(TRIGGER_PLACE, self.cfg.data.trigger) for prompt in self.cfg.sample.prompts]

    def _encode_texts(self, photos: Sequence[Photo], cache: ExampleCache, crew: Crew, origin: str) -> dict[str, str]:
        """{caption: key}, with the empty caption, the prompts and the negative prompt."""
        captions = dict.fromkeys(["", self.cfg.sample.negative, *self._prompts, *(photo.caption for photo in photos)])
        keys = {caption: _key(origin, "text", self.cfg.train.precision, caption) for caption in captions}
        captions_by_key = {key: caption for caption, key in keys.items()}
        work = {key: captions_by_key[key] for key in missing(captions_by_key, cache, crew)}
        if work:
            self._announce("captions")
            self._encode_with(
                self.family.text_encoder(self.load), self.family.encode_text, "captions", work, cache, crew
            )
            self._release()
        return keys

    def _encode_photos(
        self, photos: Sequence[Photo], cache: ExampleCache, crew: Crew, origin: str
    ) -> tuple[list[str], dict[str, str]]:
        """Keys of the photos, in order, and {key: why it cannot be used}."""
        sizes = bucket_sizes(self.cfg.data.resolution, self.family.size_multiple, self.cfg.data.max_aspect)
        sized = [(photo, choose_bucket(photo.width, photo.height, sizes)) for photo in photos]
        digests = content_keys([photo.path for photo in photos], crew)
        keys = [_key(origin, "image", digest, size) for digest, (_, size) in zip(digests, sized, strict=True)]
        sized_by_key = dict(zip(keys, sized, strict=True))
        work = {key: sized_by_key[key] for key in missing(keys, cache, crew)}
        if not work:
            return keys, {}

        def encode(encoder: Any, item: tuple[Photo, tuple[int, int]]) -> Example:
            return self.family.encode_image(encoder, load_photo(*item))

        self._announce("images")
        failures = self._encode_with(self.family.image_encoder(self.load), encode, "images", work, cache, crew)
        self._release()
        _report_failures(failures, self.cfg, self.say)
        return keys, failures

    def _announce(self, what: str) -> None:
        self.say(StatusEvent(state="encoding", message=f"loading the encoder of {what}"))

    @torch.no_grad()
    def _encode_with(
        self,
        encoder: Any,
        encode: Callable[[Any, T], Example],
        what: str,
        work: Mapping[str, T],
        cache: ExampleCache,
        crew: Crew,
    ) -> dict[str, str]:
        """Encode what of `work` is missing; the encoder dies with this call. {key: why it cannot be used}."""

        def progress(done: int, total: int) -> None:
            self.say(StatusEvent(state="encoding", message=what, done=done, total=total))
            if any(self.world.gather(self.world.rank == 0 and self.stopping())):
                raise StopRequested

        return encode_missing(work, cache, lambda item: encode(encoder, item), crew, progress)

    def _release(self) -> None:
        """Give the memory of an encoder that is gone back to the device."""
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()


def _report_failures(failures: Mapping[str, str], cfg: RunConfig, say: Say) -> None:
    if failures and cfg.data.bad_image == "stop":
        raise InputError("\n".join(f"{message}, or set data.bad_image: warn" for message in failures.values()))
    for message in failures.values():
        say(WarningEvent(message=f"left out: {message}"))


def _key(*parts: object) -> str:
    text = "\x1f".join(str(part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()


def _crew(world: World, folder: Path) -> Crew:
    """The ranks that share the cache folder: all, if every rank sees a file rank 0 writes; else those of this node."""
    token: str = world.gather(secrets.token_hex(8))[0]
    mark = folder / f".shared-{token}"
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    world.barrier()
    shared = all(world.gather(mark.exists()))
    if world.rank == 0:
        mark.unlink()
    if shared:
        return Crew(world.rank, world.size, world.gather)
    return Crew(world.local_rank, world.local_size, world.gather)


def batch_keys(family: ModelFamily, data: EncodedData) -> Callable[[Item], Hashable]:
    """The family's batch key of an item, from the shapes of what is cached."""
    keys: dict[Item, Hashable] = {}

    def batch_key(item: Item) -> Hashable:
        if item not in keys:
            keys[item] = family.batch_key(data.shapes(item))
        return keys[item]

    return batch_key
