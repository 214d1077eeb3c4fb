"""Encoded images with captions: the training examples, and the prompts that images are generated from.

See DECISIONS 192.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.config.sections import DataConfig, fill_trigger
from trainer.config.size import Size
from trainer.data.cache import ExampleCache, key_of_all
from trainer.data.epochs import num_images
from trainer.data.images.image_files import CaptionedImage
from trainer.data.images.image_io import ImageFile, png
from trainer.data.images.scan_memory import without_collection
from trainer.data.loader import BatchSizes, Choices, ImageBatchSampler, ImageItem
from trainer.data.prompts import Prompt, PromptEncoder, Seen
from trainer.data.source import DataSource, Generate, Sampler
from trainer.distributed.context import RankContext
from trainer.models.base import ImageFamily, LoadModule
from trainer.models.objectives.base import Example
from trainer.rng import SampleRng
from trainer.run.manifest import Progress
from trainer.run.samples import IMAGE, Sample, SampleKind, kind_of_size


@dataclass(frozen=True, slots=True)
class Pixels:
    """The cache keys of all that is made of pixels: the latents of an image, its mask, the latents of its references
    and of its rejected image."""

    latents: str
    mask: str | None
    references: tuple[str, ...]
    rejected: str | None = None

    @property
    def content(self) -> tuple[object, ...]:
        """Its part of `EncodedData.digest`."""
        return (self.mask, self.references, self.rejected)


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image in one of its sizes.

    Attributes:
        image: The image.
        size: The size.
        pixels: What is made of it as it is.
        texts: Cache keys of its captions' embeddings.
        mirrored: What is made of it with left and right exchanged; None where it never is.
        reference_sizes: Size of each reference.
        empty: Cache key of the empty caption with its references; None where the text encoder sees none, or no caption
            is dropped.
        texts_alone: `texts` without the references, for occurrences that are trained without them; empty where the
            text encoder sees none.
    """

    image: CaptionedImage
    size: Size
    pixels: Pixels
    texts: tuple[str, ...]
    mirrored: Pixels | None = None
    reference_sizes: tuple[Size, ...] = ()
    empty: str | None = None
    texts_alone: tuple[str, ...] = ()

    @property
    def content(self) -> tuple[object, ...]:
        """Its part of `EncodedData.digest`."""
        mirrored = (self.mirrored.latents, *self.mirrored.content) if self.mirrored else None
        return (self.pixels.latents, *self.pixels.content, mirrored, self.texts, self.image.weight)


@dataclass(frozen=True)
class EncodedPrompt:
    """A sample prompt.

    Attributes:
        text: With its trigger filled in.
        key: Cache key of its embeddings.
        negative: Cache key of those of the negative prompt.
        references: Cache keys of its references' latents.
        files: Its references.
        seen: Its references as the text encoder sees them, if it does.
    """

    text: str
    key: str
    negative: str
    references: tuple[str, ...] = ()
    files: tuple[ImageFile, ...] = ()
    seen: tuple[Seen, ...] = ()


@dataclass(frozen=True)
class EncodedData:
    """Everything a run feeds to the model, by cache key.

    In addition to what the family encodes, an example holds "mask" (h, w), weights of the loss per latent pixel, where
    the data have masks, "reference_0", "reference_1" and so on (..., h, w), the latents of its reference images, and
    "rejected" in the shape of the latents, those of the image that this one is preferred to.

    Attributes:
        empty: Key of the empty caption.
        dropped_text: `ImageFamily.dropped_text`.
        origin: The part of every key that the encoders are in (`prompts.origin_of`).
        with_size: Whether an example also holds "original_size" (2,), height and width of the image's file.
        others: {file: key of its latents} of images that do not belong to captions or prompts.
    """

    cache: ExampleCache
    train: tuple[EncodedImage, ...]
    validation: tuple[EncodedImage, ...]
    prompts: tuple[EncodedPrompt, ...]
    empty: str
    dropped_text: Callable[[Example, Example], Example]
    origin: str
    with_size: bool = False
    others: Mapping[Path, str] = field(default_factory=dict)

    def example(self, item: ImageItem) -> Example:
        """One training example: latents with the embeddings of the caption, or of the empty one if it is dropped."""
        return self._joined(self.train[item.index], item, self.cache.read)

    def shapes(self, item: ImageItem) -> Example:
        """The example on the meta device: only its shapes, read from the headers of the files."""
        return self._joined(self.train[item.index], item, self.cache.shapes)

    def held_out(self, index: int) -> Example:
        """One validation example."""
        return self._joined(self.validation[index], ImageItem(index, dropped=False), self.cache.read)

    def prompt(self, index: int) -> Example:
        """The inputs of a sample: the embeddings of its prompt, and the latents of its references."""
        prompt = self.prompts[index]
        return self.cache.read(prompt.key) | _reference_latents(prompt.references, self.cache.read)

    @property
    def digest(self) -> str:
        """Digest of the training examples and their order; it changes with the images, captions and weights."""
        return key_of_all(one.content for one in self.train)

    def loss_weight(self, item: ImageItem) -> float:
        """The weight of an item's loss."""
        return self.train[item.index].image.loss_weight

    def _joined(self, encoded: EncodedImage, item: ImageItem, read: Callable[[str], Example]) -> Example:
        is_alone = item.without_references
        caption = ((is_alone and encoded.texts_alone) or encoded.texts)[item.caption]
        empty = self.empty if is_alone or encoded.empty is None else encoded.empty
        text = self.dropped_text(read(empty), self.cache.shapes(caption)) if item.dropped else read(caption)
        pixels = encoded.mirrored if item.is_mirrored else encoded.pixels
        assert pixels is not None, "only images that may be flipped are mirrored"
        example = read(pixels.latents) | text
        if pixels.mask is not None:
            example |= read(pixels.mask)
        if pixels.rejected is not None:
            example["rejected"] = read(pixels.rejected)["latents"]
        if self.with_size:
            example["original_size"] = torch.tensor([encoded.image.height, encoded.image.width])
        return example | _reference_latents(() if is_alone else pixels.references, read)


def _reference_latents(keys: Sequence[str], read: Callable[[str], Example]) -> Example:
    return {f"reference_{number}": read(key)["latents"] for number, key in enumerate(keys)}


class ImageSource(DataSource):
    """Encoded images and captions.

    Args:
        cfg: The config of the run.
        family: The model.
        data: The encoded data, as the cache holds them.
    """

    unit = "images"
    changed_message = (
        "images, captions or how they are encoded have changed since the checkpoint: from here on the order differs"
    )

    def __init__(self, cfg: RunConfig, family: ImageFamily, data: EncodedData) -> None:
        self.data = data
        with without_collection():
            self.digest = data.digest
        self.num_held_out = len(data.validation)
        self._cfg = cfg
        self._batch_key = batch_keys(family, self.data)

    def batch_sampler(self, sizes: BatchSizes, saved: Progress | None) -> ImageBatchSampler:
        made: dict[Choices, Choices] = {}  # one for all images alike: there may be a million
        choices = [made.setdefault(one, one) for one in (self._choices(each.image) for each in self.data.train)]
        return ImageBatchSampler(self._batch_key, self._weights, sizes, self._cfg.train.seed, choices)

    def _choices(self, image: CaptionedImage) -> Choices:
        """The random choices of an image.

        Guidance pushes samples away from what a dropped caption gives, which therefore must be the subject that is
        trained, not a regularization image.
        """
        reference_dropout = self._cfg.data.reference_dropout if image.references else 0.0
        dropout = image.caption_dropout if image.is_own else 0.0
        return Choices(dropout, len(image.captions), image.may_flip, reference_dropout)

    def num_samples(self, epochs: float, context: RankContext) -> int:
        return num_images(self._weights, epochs)

    @property
    def samples_of_an_epoch(self) -> float:
        return math.fsum(self._weights)

    @property
    def _weights(self) -> list[float]:
        return [encoded.image.weight for encoded in self.data.train]

    def example(self, item: ImageItem) -> Example:
        return self.data.example(item)

    def loss_weight(self, item: ImageItem) -> float:
        return self.data.loss_weight(item)

    def micro_batch(self, item: ImageItem) -> int | None:
        return self.data.train[item.index].image.micro_batch

    def batch_key(self, item: ImageItem) -> Hashable:
        return self._batch_key(item)

    def held_out(self, index: int) -> Example:
        return self.data.held_out(index)


class ImageSampler(Sampler):
    """Generates images for the encoded prompts; the family's autoencoder decodes them.

    Args:
        load: Loads the autoencoder.
        encoder: Encodes prompts that `data` does not hold.
    """

    def __init__(
        self, cfg: RunConfig, family: ImageFamily, load: LoadModule, data: EncodedData, encoder: PromptEncoder
    ) -> None:
        self.prompts = tuple(prompt.text for prompt in data.prompts)
        self._sample, self._family, self._load, self._data = cfg.sample, family, load, data
        self._config, self._encoder = cfg.data, encoder

    def change_prompts(self, prompts: Sequence[str]) -> None:
        texts = with_trigger(prompts, self._config)
        former = self._data.prompts if self._sample.references else [None] * len(texts)
        named = [(Prompt(text, old.seen if old else ()), old) for text, old in zip(texts, former, strict=True)]
        negative = [Prompt(self._sample.negative, prompt.seen) for prompt, _ in named]
        keys = self._encoder.encode([*(prompt for prompt, _ in named), *negative])
        encoded = []
        for (prompt, old), other in zip(named, negative, strict=True):
            shown = (old.references, old.files) if old else ((), ())
            encoded.append(EncodedPrompt(prompt.text, keys[prompt], keys[other], *shown, prompt.seen))
        self._data = replace(self._data, prompts=tuple(encoded))
        self.prompts = tuple(texts)

    @property
    def data(self) -> EncodedData:
        """The encoded prompts, with what is trained on."""
        return self._data

    def load_autoencoder(self) -> Any:
        """The result of `ImageFamily.image_encoder`. Collective."""
        return self._family.image_encoder(self._load)

    def references(self, index: int) -> tuple[Path, ...]:
        return tuple(file.path for file in self._data.prompts[index].files)

    def kind(self, index: int) -> SampleKind:
        return kind_of_size(self._sample.full_size)

    def prepare(self) -> Generate:
        autoencoder = self.load_autoencoder()
        is_guided = self._family.complete_sample(self._sample).guidance > 1
        guides = self._family.guides(self._load) if is_guided else {}

        def generate(model: nn.ModuleDict, index: int, rng: SampleRng) -> Sample:
            components = nn.ModuleDict({**model, **guides}) if guides else model
            prompt = self._data.prompts[index]
            text, negative = self._data.prompt(index) | self._inputs(prompt), self._data.cache.read(prompt.negative)
            image = self._family.sample(components, autoencoder, text, negative, self._sample, rng)
            return Sample(IMAGE, png(image))

        return generate

    def _inputs(self, prompt: EncodedPrompt) -> Example:
        """More inputs of a sample than `EncodedData.prompt` has."""
        return {}


def with_trigger(prompts: Sequence[str], data: DataConfig) -> list[str]:
    """Return prompts with `data.trigger` in place of [trigger]."""
    return [fill_trigger(prompt, data.trigger) for prompt in prompts]


def batch_keys(family: ImageFamily, data: EncodedData) -> Callable[[ImageItem], Hashable]:
    """Return a function that computes the family's batch key of an item from the shapes in the cache."""
    keys: dict[ImageItem, Hashable] = {}

    def batch_key(item: ImageItem) -> Hashable:
        if item not in keys:
            keys[item] = family.batch_key(data.shapes(item))
        return keys[item]

    return batch_key
