"""Encodes photos and captions into cached examples. Encoders are loaded and freed here."""

from __future__ import annotations

import gc
import secrets
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
from trainer.data.image_files import TRIGGER_PLACE, Photo, scan
from trainer.data.image_io import Picture, is_invisible, load_mask, load_rgb, open_picture
from trainer.data.image_source import EncodedData, EncodedPhoto, EncodedPrompt
from trainer.distributed.context import RankContext
from trainer.distributed.world import World
from trainer.models.base import ImageFamily, LoadModule
from trainer.models.objectives import Example
from trainer.run.events import Emit, StatusEvent, WarningEvent
from trainer.weights.quantization import VERSION

CACHE_VERSION = 1
"""Part of every key: raise it when equal photos or captions are encoded differently than before."""

T = TypeVar("T")


class StopRequested(Exception):
    """Raised on all ranks when a stop is requested while encoding. Encoded examples stay in the cache."""


def encode_data(family: ImageFamily, load: LoadModule, context: RankContext) -> EncodedData:
    """Encode everything a run needs that is not cached yet: each image and each caption once, by one of the ranks.

    Collective.

    Args:
        family: Encodes images and captions.
        load: Loads an encoder of the family.
        context: This rank's part of the run.

    Raises:
        StopRequested: A stop was requested; raised on every rank.
        InputError: An image cannot be decoded and `data.bad_image` is not warn, or there are reference images but the
            family reads none.
    """
    cfg = context.cfg
    for field, given in (("data.references", cfg.data.references), ("sample.references", cfg.sample.references)):
        if given and not family.reads_references:
            raise InputError(f"{field}: models of family {cfg.model.family} read no reference images; remove the field")
    return _DataEncoder(family, load, context, ExampleCache(context.cache / "examples")).encode()


@dataclass(frozen=True)
class _DataEncoder:
    family: ImageFamily
    load: LoadModule
    context: RankContext
    cache: ExampleCache

    @cached_property
    def _crew(self) -> Crew:
        return _crew(self.context.world, self.context.cache)

    def encode(self) -> EncodedData:
        dataset = scan(self.context.cfg.data)
        for warning in (*dataset.warnings, *image_warnings.of_buckets(dataset.pictures, self._sizes)):
            self.context.emit(WarningEvent(message=warning))
        photos = (*dataset.train, *dataset.validation)
        samples = [open_picture(Path(file)) for file in self.context.cfg.sample.references]
        texts = self._encode_texts(photos)
        latents = self._encode_pictures([*photos, *(r for photo in photos for r in photo.references), *samples])
        masks = self._encode_masks([photo for photo in photos if photo.path in latents], latents)
        return EncodedData(
            self.cache,
            _encoded_photos(dataset.train, latents, texts, masks),
            _encoded_photos(dataset.validation, latents, texts, masks),
            self._encoded_prompts(texts, samples, latents),
            texts[self.context.cfg.sample.negative],
            texts[""],
            self.family.dropped_text,
            self.family.reads_original_size,
        )

    @cached_property
    def _origin(self) -> str:
        """The part of a key that all encodings of the family depend on."""
        return f"{CACHE_VERSION} {self.context.cfg.model.family} {self.family.fingerprint()}"

    @property
    def _encoder_types(self) -> tuple[object, ...]:
        """The part of a caption's key for the encoders' precision: quantized encoders give other embeddings."""
        quantize, precision = self.context.cfg.quantize, self.context.cfg.train.precision
        return (precision, quantize.format, VERSION) if quantize.encoders else (precision,)

    @property
    def _prompts(self) -> list[str]:
        return [
            prompt.replace(TRIGGER_PLACE, self.context.cfg.data.trigger) for prompt in self.context.cfg.sample.prompts
        ]

    def _encoded_prompts(
        self, texts: Mapping[str, str], samples: Sequence[Picture], latents: Mapping[Path, str]
    ) -> tuple[EncodedPrompt, ...]:
        lost = [sample.path for sample in samples if sample.path not in latents]
        if lost:
            raise InputError(f"sample.references: {lost[0]} cannot be read; replace it")
        references: list[str | None] = [latents[sample.path] for sample in samples]
        references = references or [None] * len(self._prompts)
        return tuple(
            EncodedPrompt(prompt, texts[prompt], reference)
            for prompt, reference in zip(self._prompts, references, strict=True)
        )

    def _encode_texts(self, photos: Sequence[Photo]) -> dict[str, str]:
        """Encode all captions, the empty caption, the prompts and the negative prompt. Returns {caption: key}."""
        # Every rank has all captions. The cache does not hold their lengths, but tokenizing again is cheap.
        if self.context.world.rank == 0:
            for warning in measure(self.family, self.context.cfg, photos).warnings:
                self.context.emit(WarningEvent(message=warning))
        captions = dict.fromkeys(
            ["", self.context.cfg.sample.negative, *self._prompts, *(photo.caption for photo in photos)]
        )
        keys = {caption: key_of(self._origin, "text", *self._encoder_types, caption) for caption in captions}
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

    def _encode_pictures(self, pictures: Sequence[Picture]) -> dict[Path, str]:
        """Encode pictures, each in the bucket of its own shape. Returns {file: key} of the usable ones."""
        sized = [(picture, choose_bucket(picture.width, picture.height, self._sizes)) for picture in pictures]
        digests = content_keys([picture.path for picture in pictures], self._crew)
        keys = [
            key_of(self._origin, "image", digest, size, *_conversion(picture))
            for digest, (picture, size) in zip(digests, sized, strict=True)
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
        return {picture.path: key for picture, key in zip(pictures, keys, strict=True) if key not in failures}

    def _load_and_encode(self, encoder: Any, invisible: list[Path], item: tuple[Picture, tuple[int, int]]) -> Example:
        """Encode an image of (picture, bucket size). Images without a visible pixel are added to `invisible`."""
        picture, size = item
        image = load_rgb(picture, size)
        if is_invisible(picture, image):
            invisible.append(picture.path)
        return self.family.encode_image(encoder, image)

    def _warn_of_invisible(self, files: Sequence[Path]) -> None:
        """Warn of fully transparent images. files: the ones that this rank encoded. Collective."""
        invisible = sorted({file for part in self.context.world.gather(files) for file in part})
        if invisible:
            count = image_warnings.counted(len(invisible), "image is", "images are")
            message = f"{count} fully transparent and trained as white: first {invisible[0]}; remove it"
            self.context.emit(WarningEvent(message=message))

    def _encode_masks(self, photos: Sequence[Photo], latents: Mapping[Path, str]) -> dict[Photo, str]:
        """Encode masks where the data have them; a photo without a mask is learned whole.

        Returns {photo: key} of the usable ones.
        """
        if self.context.cfg.data.masks is None:
            return {}
        files = [photo.mask.path for photo in photos if photo.mask]
        digests = dict(zip(files, content_keys(files, self._crew), strict=True))
        keys, work = {}, {}
        for photo in photos:
            height, width = self.cache.shapes(latents[photo.path])["latents"].shape[-2:]
            content = (digests[photo.mask.path], self.context.cfg.data.mask_background) if photo.mask else ("whole",)
            keys[photo] = key_of(CACHE_VERSION, "mask", width, height, *content)
            work[keys[photo]] = (photo.mask, (width, height))
        failures = self._encode_with(partial(_encode_mask, self.context.cfg.data.mask_background), "masks", work)
        _report_failures(failures, self.context.cfg, self.context.emit)
        return {photo: key for photo, key in keys.items() if key not in failures}

    def _announce(self, what: str) -> None:
        self.context.emit(StatusEvent(state="encoding", message=f"loading the encoder of {what}"))

    @torch.no_grad()
    def _encode_with(self, encode: Callable[[T], Example], what: str, work: Mapping[str, T]) -> dict[str, str]:
        """Encode the missing keys of `work`. Returns {key: why it cannot be used}.

        This call holds the last reference to the encoder.
        """

        def progress(done: int, total: int) -> None:
            self.context.emit(StatusEvent(state="encoding", message=what, done=done, total=total))
            if any(self.context.world.gather(self.context.is_stopping())):
                raise StopRequested

        return encode_missing(work, self.cache, encode, self._crew, progress)

    def _release(self) -> None:
        """Return the memory of a freed encoder to the device."""
        gc.collect()
        if self.context.world.device.type == "cuda":
            torch.cuda.empty_cache()


def _encoded_photos(
    photos: Iterable[Photo], latents: Mapping[Path, str], texts: Mapping[str, str], masks: Mapping[Photo, str]
) -> tuple[EncodedPhoto, ...]:
    """The photos whose image, mask and references can all be used."""
    return tuple(
        EncodedPhoto(
            photo,
            latents[photo.path],
            texts[photo.caption],
            masks.get(photo),
            tuple(latents[reference.path] for reference in photo.references),
        )
        for photo in photos
        if all(picture.path in latents for picture in (photo, *photo.references))
        if photo.mask is None or photo in masks
    )


def _encode_mask(background: float, item: tuple[Picture | None, tuple[int, int]]) -> Example:
    """Weights of the loss per latent pixel, from a mask and (width, height). background: weight where it is black."""
    mask, (width, height) = item
    if mask is None:
        return {"mask": torch.ones(height, width)}
    levels = torch.from_numpy(np.array(load_mask(mask, (width, height)))) / 255
    return {"mask": levels + (1 - levels) * background}


def _conversion(picture: Picture) -> tuple[str, ...]:
    """The part of a key for images that older versions converted wrongly or not at all; empty for other images."""
    is_tiff = picture.path.suffix.lower() in (".tif", ".tiff")
    return (*(["srgb"] if picture.profile == "used" else []), *(["upright"] if is_tiff and picture.is_turned else []))


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
