"""Photos and captions to cached examples. The encoders live and die here."""

from __future__ import annotations

import gc
import hashlib
import secrets
from collections.abc import Callable, Hashable, Mapping
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


def encode_data(
    cfg: RunConfig, family: ModelFamily, load: LoadModule, cache_folder: Path, world: World, say: Say
) -> EncodedData:
    """Encode what is not cached yet: each photo and each caption once, by one of the ranks. Collective.

    Raises InputError on every rank for a photo that cannot be decoded, unless `data.bad_image` is warn.
    """
    dataset = scan(cfg.data)
    for warning in dataset.warnings:
        say(WarningEvent(message=warning))
    cache = ExampleCache(cache_folder / "examples")
    crew = _crew(world, cache_folder)
    prompts = [prompt.replace(TRIGGER_PLACE, cfg.data.trigger) for prompt in cfg.sample.prompts]
    photos = (*dataset.train, *dataset.validation)
    captions = dict.fromkeys(["", cfg.sample.negative, *prompts, *(photo.caption for photo in photos)])
    origin = f"{CACHE_VERSION} {cfg.model.family} {family.fingerprint()}"
    text_keys = {caption: _key(origin, "text", cfg.train.precision, caption) for caption in captions}
    texts = {key: caption for caption, key in text_keys.items()}
    _encode(
        "captions", texts, cache, crew, world, say,
        lambda: family.text_encoder(load), family.encode_text,
    )  # fmt: skip
    sizes = bucket_sizes(cfg.data.resolution, family.size_multiple, cfg.data.max_aspect)
    sized = [(photo, choose_bucket(photo.width, photo.height, sizes)) for photo in photos]
    keys = [
        _key(origin, "image", digest, size)
        for digest, (_, size) in zip(content_keys([photo.path for photo in photos], crew), sized, strict=True)
    ]
    failures = _encode(
        "images", dict(zip(keys, sized, strict=True)), cache, crew, world, say,
        lambda: family.image_encoder(load), lambda encoder, work: family.encode_image(encoder, load_photo(*work)),
    )  # fmt: skip
    _report_failures(failures, cfg, say)
    encoded = [EncodedPhoto(photo, key, text_keys[photo.caption]) for photo, key in zip(photos, keys, strict=True)]
    split = len(dataset.train)
    return EncodedData(
        cache,
        tuple(e for e in encoded[:split] if e.latents not in failures),
        tuple(e for e in encoded[split:] if e.latents not in failures),
        tuple(EncodedPrompt(prompt, text_keys[prompt]) for prompt in prompts),
        text_keys[cfg.sample.negative],
        text_keys[""],
    )


def _encode(
    what: str,
    work: Mapping[str, T],
    cache: ExampleCache,
    crew: Crew,
    world: World,
    say: Say,
    make_encoder: Callable[[], Any],
    encode: Callable[[Any, T], Example],
) -> dict[str, str]:
    """Encode the missing part of `work`; the encoder is made only if some rank misses something. {key: failure}."""
    if not missing(work, cache, crew):
        return {}
    say(StatusEvent(state="encoding", message=f"loading the encoder of {what}"))
    failures = _encode_with(make_encoder(), what, work, cache, crew, say, encode)
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return failures


@torch.no_grad()
def _encode_with(
    encoder: Any,
    what: str,
    work: Mapping[str, T],
    cache: ExampleCache,
    crew: Crew,
    say: Say,
    encode: Callable[[Any, T], Example],
) -> dict[str, str]:
    """The encoder dies with this call."""
    return encode_missing(
        work,
        cache,
        lambda item: encode(encoder, item),
        crew,
        lambda done, total: say(StatusEvent(state="encoding", message=what, done=done, total=total)),
    )


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
