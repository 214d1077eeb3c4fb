"""Data of a run that trains on images to draw and on rows of text and images."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from PIL import Image
from torch import nn

from trainer.config.schema import RunConfig
from trainer.config.size import Size
from trainer.data.epochs import num_images, num_mixed
from trainer.data.images.image_io import ImageFile, load_resized, read_header
from trainer.data.images.image_source import EncodedData, EncodedImage, EncodedPrompt, ImageSampler, ImageSource
from trainer.data.loader import BatchSampler, BatchSizes, ImageBatchSampler
from trainer.data.mixed.mixed_batches import (
    DrawnItem,
    MixedBatchSampler,
    MixedItem,
    Pack,
    PackedBatchSampler,
    QuestionItem,
)
from trainer.data.mixed.question_files import Questions
from trainer.data.mixed.sequence_rows import AnyRow, EditChain, ImagePart, ImageProblem, Part, TextPart
from trainer.data.prompts import PromptEncoder
from trainer.data.source import DataSource, Generate, Sampler
from trainer.distributed.context import RankContext
from trainer.models.base import LoadModule, MultimodalFamily, PartKind, SequencePart, references_of
from trainer.models.objectives.base import Example
from trainer.rng import SampleRng, derived_seed
from trainer.run.events import Emit, WarningEvent
from trainer.run.manifest import Progress
from trainer.run.samples import TEXT, Sample, SampleKind
from trainer.system.errors import InputError
from trainer.system.terminal import shortened

log = logging.getLogger(__name__)

Dropped = Callable[[str, int], bool]
"""dropped(kind, number) returns whether the condition with this number is left out of a sample."""


class MixedSource(DataSource):
    """Encoded images with captions, and rows, whose conditioning images are read as they are needed."""

    unit = "images"
    changed_message = (
        "images, captions, questions or how they are encoded have changed since the checkpoint: from here on the order "
        "differs"
    )

    def __init__(
        self, cfg: RunConfig, family: MultimodalFamily, data: EncodedData, questions: Questions, emit: Emit
    ) -> None:
        self._cfg, self._family, self._data, self._emit = cfg, family, data, emit
        self._images = ImageSource(cfg, family, data)
        self._train, self._validation = (self._usable(rows) for rows in (questions.train, questions.validation))
        for warning in questions.warnings:
            emit(WarningEvent(message=warning))
        texts = [repr(row) for row in self._train]
        budget = "" if cfg.data.pack_tokens is None else f" {cfg.data.pack_tokens}"
        self.digest = hashlib.sha256(
            f"{self._images.digest} {cfg.data.question_share} {texts}{budget}".encode()
        ).hexdigest()
        self.num_held_out = len(data.validation) + len(self._validation)
        self._samples_of_an_epoch = math.nan

    def _usable(self, rows: Sequence[AnyRow]) -> tuple[AnyRow, ...]:
        """Without the rows that have an image which could not be encoded, and was left out with a warning."""
        return tuple(row for row in rows if all(image.path in self._data.others for image in row.encoded))

    def batch_sampler(self, sizes: BatchSizes, saved: Progress | None) -> BatchSampler[MixedItem | Pack]:
        mixed, budget = self._mixed(sizes, saved), self._cfg.data.pack_tokens
        if budget is None:
            return mixed
        longer = set[tuple[bool, int]]()

        def count_tokens(item: MixedItem) -> int:
            tokens = self.count_tokens(item)
            if tokens > budget:
                self._warn_of_longer(item, tokens, longer)
            return tokens

        return PackedBatchSampler(mixed.item, count_tokens, budget, sizes)

    def _warn_of_longer(self, item: MixedItem, tokens: int, longer: set[tuple[bool, int]]) -> None:
        """Warn of the first sequence that is longer than a pack, and of how many there are. longer: those before it."""
        key = (isinstance(item, QuestionItem), item.number if isinstance(item, QuestionItem) else item.image.index)
        if key in longer:
            return
        longer.add(key)
        budget = self._cfg.data.pack_tokens
        if len(longer) == 1:
            what = f"{self._named(item)}: a sequence of {tokens} tokens is longer than data.pack_tokens {budget}"
            remedy = "it is trained by itself and takes more memory than planned: raise data.pack_tokens, or cut it"
            self._emit(WarningEvent(message=f"{what}; {remedy}"))
        elif str(len(longer)).strip("0") == "1":
            message = f"{len(longer)} sequences so far are longer than data.pack_tokens {budget}"
            self._emit(WarningEvent(message=message))

    def _named(self, item: MixedItem) -> str:
        """The name of an item for people: its image, or its first text or image."""
        if isinstance(item, DrawnItem):
            return self._images.data.train[item.image.index].image.path.name
        row = self._train[item.number]
        if isinstance(row, EditChain):
            return row.images[0].path.name
        first = row.parts[0]
        return first.image.path.name if isinstance(first, ImagePart) else shortened(first.texts[0], 60)

    def _mixed(self, sizes: BatchSizes, saved: Progress | None) -> MixedBatchSampler:
        """The samples in their order, not packed."""
        cfg, train, single = self._cfg, self._train, BatchSizes(1)
        rows = ImageBatchSampler(lambda item: None, [1.0] * len(train), single, cfg.train.seed) if train else None
        images = self._images.batch_sampler(single, saved) if self._images.data.train or not train else None
        return MixedBatchSampler(images, rows, cfg.data.question_share, sizes)

    def num_samples(self, epochs: float, context: RankContext) -> int:
        """An epoch is one pass over the images, with as many rows as `data.question_share` asks for between them;
        without images, one pass over the rows."""
        if self._images.data.train:
            share = self._cfg.data.question_share if self._train else 0.0
            samples = num_mixed(self._images.num_samples(epochs, context), share)
        else:
            samples = num_images([1.0] * len(self._train), epochs)
        if (budget := self._cfg.data.pack_tokens) is not None:
            single = BatchSizes(1)
            packs = PackedBatchSampler(self._mixed(single, None).item, self.count_tokens, budget, single)
            samples = packs.num_packs(samples)
        self._samples_of_an_epoch = samples / epochs
        return samples

    @property
    def samples_of_an_epoch(self) -> float:
        return self._samples_of_an_epoch

    def example(self, item: MixedItem | Pack) -> Example:
        if isinstance(item, Pack):
            return self._family.pack_examples({one.index: self.example(one) for one in item.items})
        if isinstance(item, QuestionItem):
            seed = derived_seed(self._cfg.train.seed, "row", item.index)
            return self._readable(self._train, item.number, seed, self._dropped(item))
        example = self._images.example(item.image)
        return self._with_references(example, self._images.data.train[item.image.index], self._dropped(item))

    def loss_weight(self, item: MixedItem | Pack) -> float:
        return self._images.loss_weight(item.image) if isinstance(item, DrawnItem) else 1.0

    def micro_batch(self, item: MixedItem | Pack) -> int | None:
        return self._images.micro_batch(item.image) if isinstance(item, DrawnItem) else None

    def held_out(self, index: int) -> Example:
        if index < self._images.num_held_out:
            example = self._images.held_out(index)
            return self._with_references(example, self._data.validation[index], _nothing)
        seed = derived_seed(self._cfg.train.seed, "held out", index)
        return self._readable(self._validation, index - self._images.num_held_out, seed, _nothing)

    def count_tokens(self, item: MixedItem) -> int:
        """Tokens of an item. Only headers of images are read."""
        if isinstance(item, QuestionItem):
            row, seed = self._train[item.number], derived_seed(self._cfg.train.seed, "row", item.index)
            row_parts = self._row_parts(row, seed, self._dropped(item))
            return self._family.count_tokens([self._measured(*part) for part in row_parts])
        encoded, dropped = self._images.data.train[item.image.index], self._dropped(item)
        image = encoded.image
        parts = [SequencePart("drawn", encoded.size)]
        caption = image.captions[item.image.caption]
        if caption and not item.image.dropped:
            parts.append(SequencePart("text", caption))
        for number, reference in enumerate(image.references):
            size = encoded.reference_sizes[number]
            parts += [] if dropped("latents", number) else [SequencePart("clean", size)]
            parts += (
                [] if dropped("vision", number) else [SequencePart("conditioning", self._conditioning_size(reference))]
            )
        return self._family.count_tokens(parts)

    def _dropped(self, item: MixedItem) -> Dropped:
        data, seed = self._cfg.data, self._cfg.train.seed
        shares = {"text": data.caption_dropout, "latents": data.latents_dropout, "vision": data.vision_dropout}

        def dropped(kind: str, number: int) -> bool:
            return derived_seed(seed, "condition", item.index, kind, number) < int(shares[kind] * 2**63)

        return dropped

    def _with_references(self, example: Example, encoded: EncodedImage, dropped: Dropped) -> Example:
        """An edit as a sequence: of each reference its clean latents and the view of it, the caption, the image."""
        references = references_of(example)
        if not references:
            return example
        parts: list[SequencePart] = []
        for number, latents in enumerate(references):
            file = encoded.image.references[number]
            without = SequencePart("gap")
            parts.append(without if dropped("latents", number) else SequencePart("clean", latents))
            parts.append(without if dropped("vision", number) else SequencePart("conditioning", self._load(file)))
        if len(example["caption"]):
            parts.append(SequencePart("text", example["caption"]))
        parts.append(SequencePart("drawn", example["latents"]))
        mask = {"mask": example["mask"]} if "mask" in example else {}
        return self._family.encode_sequence(parts) | mask

    def _readable(self, rows: Sequence[AnyRow], number: int, seed: int, dropped: Dropped) -> Example:
        """The example of a row; with `data.bad_image: warn`, of the next row whose images can be decoded.

        Only the header of a conditioning image was read before. Which row takes the place depends on the files alone,
        so that it is the same on every rank.
        """
        for ahead in range(len(rows)):
            try:
                return self._row_example(rows[(number + ahead) % len(rows)], seed, dropped)
            except ImageProblem as error:
                if self._cfg.data.bad_image != "warn" or ahead == len(rows) - 1:
                    raise
                log.warning("%s; the next row is trained in its place", error)
        raise AssertionError(rows)

    def _row_example(self, row: AnyRow, seed: int, dropped: Dropped) -> Example:
        def content(kind: PartKind, content: str | ImageFile | None, num_conditioning: int) -> SequencePart:
            if not isinstance(content, ImageFile):
                return SequencePart(kind, content)
            if kind == "conditioning":
                return SequencePart(kind, self._load(content, num_conditioning))
            return SequencePart(kind, self._data.cache.read(self._data.others[content.path])["latents"])

        return self._family.encode_sequence([content(*part) for part in self._row_parts(row, seed, dropped)])

    def _measured(self, kind: PartKind, content: str | ImageFile | None, num_conditioning: int) -> SequencePart:
        """A part of a row to count its tokens."""
        if not isinstance(content, ImageFile):
            return SequencePart(kind, content)
        size = (
            self._conditioning_size(content, num_conditioning)
            if kind == "conditioning"
            else self._family.drawn_size(content.size, self._cfg.data.resolution)
        )
        return SequencePart(kind, size)

    def _row_parts(
        self, row: AnyRow, seed: int, dropped: Dropped
    ) -> list[tuple[PartKind, str | ImageFile | None, int]]:
        """(kind, text or image, number of conditioning images of the sequence) of each part of a sample.

        Only what an image is drawn from is left out: answers keep all that they are about.
        """
        draws = count()
        sequence = row.sequence(lambda choices: derived_seed(seed, next(draws)) % choices)
        draws_images = any(isinstance(part, ImagePart) and part.way == "drawn" for part in sequence)
        num_conditioning = 1 if draws_images else sum(isinstance(part, ImagePart) for part in sequence)
        drop = dropped if draws_images else _nothing
        kinds = (found for number, part in enumerate(sequence) for found in _kinds(part, number, drop))
        return [(kind, content, num_conditioning) for kind, content in kinds]

    def _load(self, image: ImageFile, num_conditioning: int = 1) -> Image.Image:
        try:
            return load_conditioning(image, self._family, self._cfg, num_conditioning)
        except InputError as error:
            raise ImageProblem(f"{error}, or set data.bad_image: warn") from error

    def _conditioning_size(self, image: ImageFile, num_conditioning: int = 1) -> Size:
        return self._family.conditioning_size(image.size, self._cfg.data, num_conditioning)


def _nothing(kind: str, number: int) -> bool:
    """Leave nothing out."""
    return False


def _kinds(part: Part, number: int, dropped: Dropped) -> Iterator[tuple[PartKind, str | ImageFile | None]]:
    """The parts that the model reads for a part of a row. number: index of the part."""
    if isinstance(part, TextPart):
        if part.in_loss or part.kept or not dropped("text", number):
            yield ("target" if part.in_loss else "text"), part.texts[0]
        return
    if part.way == "drawn":
        yield "drawn", part.image
    if part.way in ("clean", "both"):
        yield ("gap", None) if not part.kept and dropped("latents", number) else ("clean", part.image)
    if part.way in ("seen", "both"):
        yield ("gap", None) if not part.kept and dropped("vision", number) else ("conditioning", part.image)


class EditSampler(ImageSampler):
    """Generates images for prompts, and edits of their references, which also condition the model."""

    def __init__(
        self, cfg: RunConfig, family: MultimodalFamily, load: LoadModule, data: EncodedData, encoder: PromptEncoder
    ) -> None:
        super().__init__(cfg, family, load, data, encoder)
        self._run, self._multimodal = cfg, family

    def _inputs(self, prompt: EncodedPrompt) -> Example:
        return {
            f"conditioning_{number}": self._multimodal.encode_conditioning(
                load_conditioning(file, self._multimodal, self._run)
            )
            for number, file in enumerate(prompt.files)
        }


class MixedSampler(Sampler):
    """Generates images for `sample.prompts`, then answers to `sample.questions`. images: makes the images.

    Raises:
        InputError: An image of `sample.images` cannot be read.
    """

    def __init__(self, cfg: RunConfig, family: MultimodalFamily, images: ImageSampler) -> None:
        self._cfg, self._family, self._images = cfg, family, images
        self._question_images = tuple(read_header(Path(file)) for file in cfg.sample.images)
        self.prompts = (*images.prompts, *cfg.sample.questions)

    def change_prompts(self, prompts: Sequence[str]) -> None:
        self._images.change_prompts(prompts)
        self.prompts = (*self._images.prompts, *self._cfg.sample.questions)

    @property
    def _num_images(self) -> int:
        return len(self._images.prompts)

    @property
    def groups(self) -> tuple[range, ...]:
        groups = (range(self._num_images), range(self._num_images, len(self.prompts)))
        return tuple(group for group in groups if group)

    def references(self, index: int) -> tuple[Path, ...]:
        return self._images.references(index) if index < self._num_images else ()

    def kind(self, index: int) -> SampleKind:
        return self._images.kind(index) if index < self._num_images else TEXT

    def prepare(self) -> Generate:
        generate_image = self._images.prepare() if self._num_images else None

        def generate(model: nn.ModuleDict, index: int, rng: SampleRng) -> Sample:
            if index < self._num_images:
                assert generate_image is not None
                return generate_image(model, index, rng)
            image = load_conditioning(self._question_images[index - self._num_images], self._family, self._cfg)
            answer = self._family.answer(model, image, self.prompts[index], self._cfg.sample, rng)
            return Sample(TEXT, answer.encode())

        return generate


def load_conditioning(
    image: ImageFile, family: MultimodalFamily, cfg: RunConfig, num_conditioning: int = 1
) -> Image.Image:
    """Load an image in the size of a conditioning image. num_conditioning: as `MultimodalFamily.conditioning_size`."""
    size = family.conditioning_size(image.size, cfg.data, num_conditioning).frame
    return load_resized(image, size, cfg.data.background)
