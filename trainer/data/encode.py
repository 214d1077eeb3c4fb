"""Encodes images and captions into cached examples. Encoders are loaded and freed here."""

from __future__ import annotations

import gc
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from trainer.config.errors import InputError
from trainer.config.files import make_private_if_new
from trainer.config.schema import RunConfig
from trainer.data import image_warnings
from trainer.data.buckets import bucket_sizes, choose_bucket
from trainer.data.cache import Crew, ExampleCache, content_keys, encode_missing, key_of, missing
from trainer.data.captions import measure
from trainer.data.image_files import CaptionedImage, scan
from trainer.data.image_io import ImageFile, is_invisible, load_mask, load_resized, load_rgb
from trainer.data.image_source import EncodedData, EncodedImage, EncodedPrompt, with_trigger
from trainer.data.known_files import KnownFiles
from trainer.data.prompts import CACHE_VERSION, origin_of, text_keys
from trainer.distributed.context import RankContext
from trainer.distributed.world import World
from trainer.models.base import ImageFamily, LoadModule
from trainer.models.objectives import Example
from trainer.run.events import Emit, StatusEvent, WarningEvent

T = TypeVar("T")

PROGRESS_S = 0.25
"""Shortest time between two events about the number of encoded items; the last one is always written."""


class StopRequested(Exception):
    """Raised on all ranks when a stop is requested while encoding. Encoded examples stay in the cache."""


def encode_data(
    family: ImageFamily, load: LoadModule, context: RankContext, others: Sequence[ImageFile] = ()
) -> EncodedData:
    """Encode everything a run needs that is not cached yet: each image and each caption once, by one of the ranks.

    Collective.

    Args:
        family: Encodes images and captions.
        load: Loads an encoder of the family.
        context: This rank's part of the run.
        others: Images without captions that are encoded too.

    Raises:
        StopRequested: A stop was requested; raised on every rank.
        InputError: An image cannot be decoded and `data.bad_image` is not warn, or there are reference images but the
            family reads none.
    """
    cfg = context.cfg
    for field, given in (("data.references", cfg.data.references), ("sample.references", cfg.sample.references)):
        if given and not family.reads_references:
            raise InputError(f"{field}: models of family {cfg.model.family} read no reference images; remove the field")
    return _DataEncoder(family, load, context, ExampleCache(context.cache / "examples")).encode(others)


@dataclass(frozen=True)
class _DataEncoder:
    family: ImageFamily
    load: LoadModule
    context: RankContext
    cache: ExampleCache

    @cached_property
    def _crew(self) -> Crew:
        return _crew(self.context.world, self.context.cache)

    @cached_property
    def _known(self) -> KnownFiles:
        return KnownFiles.of(self.context.cfg.data, self.context.cache)

    def encode(self, others: Sequence[ImageFile]) -> EncodedData:
        dataset = scan(self.context.cfg.data, known=self._known)
        in_buckets = [image for image in dataset.images if self._own_size(image) is None]
        for warning in (*dataset.warnings, *image_warnings.of_buckets(in_buckets, self._sizes)):
            self.context.emit(WarningEvent(message=warning))
        images = (*dataset.train, *dataset.validation)
        samples = [self._known.header(Path(file)) for file in self.context.cfg.sample.references]
        texts = self._encode_texts(images)
        alike = [*images, *(r for image in images for r in image.references), *samples, *others]
        pairs = [(image.rejected, self._size(image)) for image in images if image.rejected]
        keys = self._encode_images([*((image, self._size(image)) for image in alike), *pairs])
        latents = _usable(alike, keys[: len(alike)])
        rejected = _usable([image for image, _ in pairs], keys[len(alike) :])
        masks = self._encode_masks([image for image in images if image.path in latents], latents)
        return EncodedData(
            self.cache,
            _encoded_images(dataset.train, latents, texts, masks, rejected),
            _encoded_images(dataset.validation, latents, texts, masks, rejected),
            self._encoded_prompts(texts, samples, latents),
            texts[self.context.cfg.sample.negative],
            texts[""],
            self.family.dropped_text,
            self._origin,
            self.family.reads_original_size,
            {image.path: latents[image.path] for image in others if image.path in latents},
        )

    @cached_property
    def _origin(self) -> str:
        return origin_of(self.context.cfg, self.family)

    @property
    def _prompts(self) -> list[str]:
        return with_trigger(self.context.cfg.sample.prompts, self.context.cfg.data)

    def _encoded_prompts(
        self, texts: Mapping[str, str], samples: Sequence[ImageFile], latents: Mapping[Path, str]
    ) -> tuple[EncodedPrompt, ...]:
        lost = [sample.path for sample in samples if sample.path not in latents]
        if lost:
            raise InputError(f"sample.references: {lost[0]} cannot be read; replace it")
        if not samples:
            return tuple(EncodedPrompt(prompt, texts[prompt], None) for prompt in self._prompts)
        return tuple(
            EncodedPrompt(prompt, texts[prompt], latents[sample.path], sample)
            for prompt, sample in zip(self._prompts, samples, strict=True)
        )

    def _encode_texts(self, images: Sequence[CaptionedImage]) -> dict[str, str]:
        """Encode all captions, the empty caption, the prompts and the negative prompt. Returns {caption: key}."""
        # Every rank has all captions. The cache does not hold their lengths, but tokenizing again is cheap.
        if self.context.world.rank == 0:
            for warning in measure(self.family, self.context.cfg, images).warnings:
                self.context.emit(WarningEvent(message=warning))
        captions = ["", self.context.cfg.sample.negative, *self._prompts, *(image.caption for image in images)]
        keys = text_keys(self.context.cfg, self._origin, captions)
        captions_by_key = {key: caption for caption, key in keys.items()}
        work = {key: captions_by_key[key] for key in missing(captions_by_key, self.cache, self._crew)}
        if work:
            self._announce("captions")
            self._encode_with(partial(self.family.encode_text, self.family.text_encoder(self.load)), "captions", work)
            self._release()
        return keys

    @cached_property
    def _sizes(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of all buckets."""
        data, family = self.context.cfg.data, self.family
        return bucket_sizes(data.resolution, family.size_multiple, data.max_aspect, family.longest_side)

    def _own_size(self, image: ImageFile) -> tuple[int, int] | None:
        return self.family.drawn_size(image.width, image.height, self.context.cfg.data.resolution)

    def _size(self, image: ImageFile) -> tuple[int, int]:
        return self._own_size(image) or choose_bucket(image.width, image.height, self._sizes)

    def _scaling(self, image: ImageFile) -> tuple[str, ...]:
        """The part of a key for images in their own sizes, which are not cropped."""
        return () if self._own_size(image) is None else ("whole",)

    def _encode_images(self, sized: Sequence[tuple[ImageFile, tuple[int, int]]]) -> list[str | None]:
        """Encode images in (width, height). Returns the key of each, None where it cannot be used."""
        digests = content_keys([image.path for image, _ in sized], self._crew, self._known)
        keys = [
            key_of(self._origin, "image", digest, size, *_conversion(image), *self._scaling(image))
            for digest, (image, size) in zip(digests, sized, strict=True)
        ]
        sized_by_key = dict(zip(keys, sized, strict=True))
        work = {key: sized_by_key[key] for key in missing(keys, self.cache, self._crew)}
        failures: dict[str, str] = {}
        if work:
            self._announce("images")
            invisible: list[Path] = []
            failures = self._encode_with(
                partial(self._load_and_encode, self.family.image_encoder(self.load), invisible), "images", work
            )
            self._release()
            _report_failures(failures, self.context.cfg, self.context.emit)
            self._warn_of_invisible(invisible)
        return [None if key in failures else key for key in keys]

    def _load_and_encode(self, encoder: Any, invisible: list[Path], item: tuple[ImageFile, tuple[int, int]]) -> Example:
        """Encode an image of (image file, bucket size). Images without a visible pixel are added to `invisible`."""
        image, size = item
        pixels = load_rgb(image, size) if self._own_size(image) is None else load_resized(image, size)
        if is_invisible(image, pixels):
            invisible.append(image.path)
        return self.family.encode_image(encoder, pixels)

    def _warn_of_invisible(self, files: Sequence[Path]) -> None:
        """Warn of fully transparent images. files: the ones that this rank encoded. Collective."""
        invisible = sorted({file for part in self.context.world.gather(files) for file in part})
        if invisible:
            count = image_warnings.counted(len(invisible), "image is", "images are")
            message = f"{count} fully transparent and trained as white: first {invisible[0]}; remove it"
            self.context.emit(WarningEvent(message=message))

    def _encode_masks(self, images: Sequence[CaptionedImage], latents: Mapping[Path, str]) -> dict[CaptionedImage, str]:
        """Encode masks where the data have them; an image without a mask is learned whole.

        Returns {image: key} of the usable ones.
        """
        if self.context.cfg.data.masks is None:
            return {}
        files = [image.mask.path for image in images if image.mask]
        digests = dict(zip(files, content_keys(files, self._crew, self._known), strict=True))
        keys, work = {}, {}
        for image in images:
            height, width = self.cache.shapes(latents[image.path])["latents"].shape[-2:]
            content = (digests[image.mask.path], self.context.cfg.data.mask_background) if image.mask else ("whole",)
            keys[image] = key_of(CACHE_VERSION, "mask", width, height, *content)
            work[keys[image]] = (image.mask, (width, height))
        failures = self._encode_with(partial(_encode_mask, self.context.cfg.data.mask_background), "masks", work)
        _report_failures(failures, self.context.cfg, self.context.emit)
        return {image: key for image, key in keys.items() if key not in failures}

    def _announce(self, what: str) -> None:
        self.context.emit(StatusEvent(state="encoding", message=f"loading the encoder of {what}"))

    @torch.no_grad()
    def _encode_with(self, encode: Callable[[T], Example], what: str, work: Mapping[str, T]) -> dict[str, str]:
        """Encode the missing keys of `work`. Returns {key: why it cannot be used}.

        This call holds the last reference to the encoder.
        """

        shown_at = -math.inf

        def progress(done: int, total: int) -> None:
            nonlocal shown_at
            if done == total or time.monotonic() - shown_at >= PROGRESS_S:
                shown_at = time.monotonic()
                self.context.emit(StatusEvent(state="encoding", message=what, done=done, total=total))
            if any(self.context.world.gather(self.context.is_stopping())):
                raise StopRequested

        return encode_missing(work, self.cache, encode, self._crew, progress)

    def _release(self) -> None:
        """Return the memory of a freed encoder to the device."""
        gc.collect()
        if self.context.world.device.type == "cuda":
            torch.cuda.empty_cache()


def _usable(images: Sequence[ImageFile], keys: Sequence[str | None]) -> dict[Path, str]:
    return {image.path: key for image, key in zip(images, keys, strict=True) if key is not None}


def _encoded_images(
    images: Iterable[CaptionedImage],
    latents: Mapping[Path, str],
    texts: Mapping[str, str],
    masks: Mapping[CaptionedImage, str],
    rejected: Mapping[Path, str],
) -> tuple[EncodedImage, ...]:
    """The images of which file, mask, references and rejected image can all be used."""
    return tuple(
        EncodedImage(
            image,
            latents[image.path],
            texts[image.caption],
            masks.get(image),
            tuple(latents[reference.path] for reference in image.references),
            rejected[image.rejected.path] if image.rejected else None,
        )
        for image in images
        if all(file.path in latents for file in (image, *image.references))
        if image.rejected is None or image.rejected.path in rejected
        if image.mask is None or image in masks
    )


def _encode_mask(background: float, item: tuple[ImageFile | None, tuple[int, int]]) -> Example:
    """Weights of the loss per latent pixel, from a mask and (width, height). background: weight where it is black."""
    mask, (width, height) = item
    if mask is None:
        return {"mask": torch.ones(height, width)}
    levels = torch.from_numpy(np.array(load_mask(mask, (width, height)))) / 255
    return {"mask": levels + (1 - levels) * background}


def _conversion(image: ImageFile) -> tuple[str, ...]:
    """The part of a key for images that older versions converted wrongly or not at all; empty for other images."""
    is_tiff = image.path.suffix.lower() in (".tif", ".tiff")
    return (*(["srgb"] if image.profile == "used" else []), *(["upright"] if is_tiff and image.is_turned else []))


def _report_failures(failures: Mapping[str, str], cfg: RunConfig, emit: Emit) -> None:
    if failures and cfg.data.bad_image == "stop":
        raise InputError("\n".join(f"{message}, or set data.bad_image: warn" for message in failures.values()))
    for message in failures.values():
        emit(WarningEvent(message=f"left out: {message}"))


def _crew(world: World, folder: Path) -> Crew:
    """The ranks that share the cache folder: all if every rank sees a file that rank 0 writes, else this node's."""
    token: str = world.gather(secrets.token_hex(8))[0]
    mark = folder / f".shared-{token}"
    if world.rank == 0:
        make_private_if_new(folder)
        mark.touch()
    world.barrier()
    shared = all(world.gather(mark.exists()))
    if world.rank == 0:
        mark.unlink()
    if shared:
        return Crew(world.rank, world.size, world.gather)
    return Crew(world.local_rank, world.local_size, world.gather)
