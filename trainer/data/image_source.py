"""Training data of pictures and captions, as the cache holds them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.data.cache import ExampleCache, key_of
from trainer.data.image_files import Photo
from trainer.data.image_io import png
from trainer.data.loader import BatchPlan, BatchSizes, Item
from trainer.data.source import Draw, Source
from trainer.models.base import ImageFamily, LoadModule
from trainer.models.objectives import Example
from trainer.rng import SampleRng
from trainer.run.manifest import Progress


@dataclass(frozen=True)
class EncodedPhoto:
    """Where a photo's latents lie in the cache, its caption's embeddings, its mask and its references' latents."""

    photo: Photo
    latents: str
    text: str
    mask: str | None
    references: tuple[str, ...]


@dataclass(frozen=True)
class EncodedPrompt:
    """A sample prompt with its trigger filled in, and where its embeddings and its reference's latents lie."""

    text: str
    key: str
    reference: str | None


@dataclass(frozen=True)
class EncodedData:
    """Everything a run feeds to the model, by cache key. negative, empty: the negative and the empty caption.

    Besides what the family encodes, an example holds "mask" (h, w), weights of the loss per latent pixel, where the
    data have masks, and "reference_0", "reference_1" and so on (..., h, w), the latents of its reference images.
    dropped_text: the family's.  with_size: whether an example also holds "original_size" (2,), height and width of the
    photo's file.
    """

    cache: ExampleCache
    train: tuple[EncodedPhoto, ...]
    validation: tuple[EncodedPhoto, ...]
    prompts: tuple[EncodedPrompt, ...]
    negative: str
    empty: str
    dropped_text: Callable[[Example, Example], Example]
    with_size: bool = False

    def example(self, item: Item) -> Example:
        """One training example: latents with the caption's embeddings, or the empty caption's where it is dropped."""
        return self._joined(self.train[item.photo], item.dropped, self.cache.read)

    def shapes(self, item: Item) -> Example:
        """`example` on the meta device: its shapes, read from the files' headers only."""
        return self._joined(self.train[item.photo], item.dropped, self.cache.shapes)

    def held_out(self, index: int) -> Example:
        """One validation example."""
        return self._joined(self.validation[index], False, self.cache.read)

    def prompt(self, index: int) -> Example:
        """What a picture is drawn from: the prompt's embeddings, and the latents of its reference."""
        prompt = self.prompts[index]
        references = () if prompt.reference is None else (prompt.reference,)
        return self.cache.read(prompt.key) | _reference_latents(references, self.cache.read)

    @property
    def digest(self) -> str:
        """Of what is trained and in which order: another one means other images, captions or weights."""
        parts = [(one.latents, one.text, one.mask, one.references, one.photo.weight) for one in self.train]
        return key_of(*parts)

    def loss_weight(self, item: Item) -> float:
        """The weight of an item's loss."""
        return self.train[item.photo].photo.loss_weight

    def _joined(self, encoded: EncodedPhoto, dropped: bool, read: Callable[[str], Example]) -> Example:
        text = self.dropped_text(read(self.empty), self.cache.shapes(encoded.text)) if dropped else read(encoded.text)
        example = read(encoded.latents) | text
        if encoded.mask is not None:
            example |= read(encoded.mask)
        if self.with_size:
            example["original_size"] = torch.tensor([encoded.photo.height, encoded.photo.width])
        return example | _reference_latents(encoded.references, read)


def _reference_latents(keys: Sequence[str], read: Callable[[str], Example]) -> Example:
    return {f"reference_{number}": read(key)["latents"] for number, key in enumerate(keys)}


class ImageSource(Source):
    """Encoded images and captions, and the pictures that are drawn with the family's autoencoder. load: its loader."""

    unit = "images"
    is_changed = "images, captions or how they are encoded are not as before: from here on the order is another"

    def __init__(self, cfg: RunConfig, family: ImageFamily, load: LoadModule, data: EncodedData) -> None:
        self.data = data
        self.prompts = tuple(prompt.text for prompt in data.prompts)
        self.digest = data.digest
        self.num_held_out = len(data.validation)
        self._cfg, self._family, self._load = cfg, family, load
        self._keeps_captions = True  # of regularization images

    def follow_recipe(self, recipe: int) -> None:
        if recipe < 2:
            self._keeps_captions = False
            self.data = replace(self.data, with_size=False)
            sample = self._cfg.sample.model_copy(update={"scheduler": "euler"})
            self._cfg = self._cfg.model_copy(update={"sample": sample})

    def plan(self, sizes: BatchSizes, saved: Progress | None) -> BatchPlan:
        cfg, photos = self._cfg, [encoded.photo for encoded in self.data.train]
        # Guidance pushes samples away from what a dropped caption gives: that is to be what is learned.
        regularizing = [number for number, photo in enumerate(photos) if not photo.is_own]
        return BatchPlan(
            batch_keys(self._family, self.data),
            [photo.weight for photo in photos],
            sizes,
            cfg.train.seed,
            cfg.data.caption_dropout,
            regularizing if self._keeps_captions else (),
        )

    def example(self, item: Item) -> Example:
        return self.data.example(item)

    def loss_weight(self, item: Item) -> float:
        return self.data.loss_weight(item)

    def held_out(self, index: int) -> Example:
        return self.data.held_out(index)

    def suffix(self, index: int) -> str:
        return ".png"

    def drawing(self) -> Draw:
        encoder = self._family.image_encoder(self._load)
        negative = self.data.cache.read(self.data.negative)

        def draw(model: nn.ModuleDict, index: int, rng: SampleRng) -> bytes:
            text = self.data.prompt(index)
            return png(self._family.sample(model, encoder, text, negative, self._cfg.sample, rng))

        return draw


def batch_keys(family: ImageFamily, data: EncodedData) -> Callable[[Item], Hashable]:
    """The family's batch key of an item, from the shapes of what is cached."""
    keys: dict[Item, Hashable] = {}

    def batch_key(item: Item) -> Hashable:
        if item not in keys:
            keys[item] = family.batch_key(data.shapes(item))
        return keys[item]

    return batch_key
