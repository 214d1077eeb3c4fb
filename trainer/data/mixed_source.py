"""Data of a run that trains on images to draw and questions to answer: two streams in one order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import nn

from trainer.config.schema import RunConfig
from trainer.data import question_files
from trainer.data.epochs import num_images, num_mixed
from trainer.data.image_io import ImageFile, load_rgb, read_header
from trainer.data.image_source import EncodedData, ImageDrawer, ImageSource
from trainer.data.loader import BatchSampler, BatchSizes, ImageBatchSampler, ImageItem
from trainer.data.question_files import Question
from trainer.data.source import DataSource, Draw, SampleDrawer
from trainer.distributed.context import RankContext
from trainer.models.base import MultimodalFamily
from trainer.models.objectives import Example
from trainer.rng import SampleRng
from trainer.run.events import Emit, WarningEvent
from trainer.run.manifest import Progress


@dataclass(frozen=True)
class QuestionItem:
    """An item of a batch that is a question.

    Attributes:
        number: Index of the question among those that are trained.
    """

    number: int


class MixedSource(DataSource):
    """Encoded images with captions, and questions, whose images are read as they are needed.

    Raises:
        InputError: Questions that cannot be used.
    """

    unit = "images"
    changed_message = (
        "images, captions, questions or how they are encoded have changed since the checkpoint: from here on the order "
        "differs"
    )

    def __init__(self, cfg: RunConfig, family: MultimodalFamily, data: EncodedData, emit: Emit) -> None:
        self._cfg, self._family = cfg, family
        self._images = ImageSource(cfg, family, data)
        self._questions = question_files.of_config(cfg.data)
        for warning in self._questions.warnings:
            emit(WarningEvent(message=warning))
        self.digest = _digest(self._images.digest, self._questions.train, cfg.data.question_share)
        self.num_held_out = len(data.validation) + len(self._questions.validation)

    def follow_recipe(self, recipe: int) -> None:
        self._images.follow_recipe(recipe)

    def batch_sampler(self, sizes: BatchSizes, saved: Progress | None) -> BatchSampler[ImageItem | QuestionItem]:
        cfg, train, single = self._cfg, self._questions.train, BatchSizes(1)
        questions = ImageBatchSampler(lambda item: None, [1.0] * len(train), single, cfg.train.seed) if train else None
        images = self._images.batch_sampler(single, saved) if self._images.data.train or not train else None
        return MixedBatchSampler(images, questions, cfg.data.question_share, sizes)

    def num_samples(self, epochs: float, context: RankContext) -> int:
        """An epoch is one pass over the images, with as many questions as `data.question_share` asks for between them;
        without images, one pass over the questions."""
        if not self._images.data.train:
            return num_images([1.0] * len(self._questions.train), epochs)
        images = self._images.num_samples(epochs, context)
        return num_mixed(images, self._share)

    @property
    def samples_of_an_epoch(self) -> float:
        if not self._images.data.train:
            return float(len(self._questions.train))
        return self._images.samples_of_an_epoch / (1 - self._share)

    @property
    def _share(self) -> float:
        """Share of questions among the samples of a run with images."""
        return self._cfg.data.question_share if self._questions.train else 0.0

    def example(self, item: ImageItem | QuestionItem) -> Example:
        if isinstance(item, QuestionItem):
            return self._question_example(self._questions.train[item.number])
        return self._images.example(item)

    def loss_weight(self, item: ImageItem | QuestionItem) -> float:
        return 1.0 if isinstance(item, QuestionItem) else self._images.loss_weight(item)

    def held_out(self, index: int) -> Example:
        if index < self._images.num_held_out:
            return self._images.held_out(index)
        return self._question_example(self._questions.validation[index - self._images.num_held_out])

    def _question_example(self, question: Question) -> Example:
        image = _load_seen(question.image, self._family, self._cfg)
        return self._family.encode_question(image, question.question, question.answer)


class MixedDrawer(SampleDrawer):
    """Draws images for `sample.prompts`, then answers to `sample.questions`. images: draws the images.

    Raises:
        InputError: An image of `sample.images` cannot be read.
    """

    def __init__(self, cfg: RunConfig, family: MultimodalFamily, images: ImageDrawer) -> None:
        self._cfg, self._family, self._images = cfg, family, images
        self._question_images = tuple(read_header(Path(file)) for file in cfg.sample.images)
        self.prompts = (*images.prompts, *cfg.sample.questions)

    def change_prompts(self, prompts: Sequence[str]) -> None:
        self._images.change_prompts(prompts)
        self.prompts = (*self._images.prompts, *self._cfg.sample.questions)

    @property
    def _num_images(self) -> int:
        return len(self._images.prompts)

    def follow_recipe(self, recipe: int) -> None:
        self._images.follow_recipe(recipe)

    @property
    def groups(self) -> tuple[range, ...]:
        groups = (range(self._num_images), range(self._num_images, len(self.prompts)))
        return tuple(group for group in groups if group)

    def suffix(self, index: int) -> str:
        return ".png" if index < self._num_images else ".txt"

    def prepare(self) -> Draw:
        draw_image = self._images.prepare() if self._num_images else None

        def draw(model: nn.ModuleDict, index: int, rng: SampleRng) -> bytes:
            if index < self._num_images:
                assert draw_image is not None
                return draw_image(model, index, rng)
            image = _load_seen(self._question_images[index - self._num_images], self._family, self._cfg)
            return self._family.answer(model, image, self.prompts[index], self._cfg.sample, rng).encode()

        return draw


class MixedBatchSampler:
    """Batches of two streams. The n-th question of the run is the same whatever the batch sizes.

    Args:
        images: One image per step; None where there are none.
        questions: One question per step; None where there are none.
        question_share: Share of questions among the items of the whole run, evenly spread.
        sizes: The batch sizes.
    """

    def __init__(
        self,
        images: BatchSampler[ImageItem] | None,
        questions: BatchSampler[ImageItem] | None,
        question_share: float,
        sizes: BatchSizes,
    ) -> None:
        self.sizes = sizes
        self._images, self._questions, self._share = images, questions, question_share
        self._step, self._batch = -1, ()  # type: tuple[int, tuple[ImageItem | QuestionItem, ...]]

    def batch(self, step: int) -> tuple[ImageItem | QuestionItem, ...]:
        """The items of an optimizer step, counted from 0. Fast for the same and the next step, else it counts up."""
        if step != self._step:
            indices = range(self.sizes.before(step), self.sizes.before(step + 1))
            self._step, self._batch = step, tuple(map(self._item, indices))
        return self._batch

    def _item(self, index: int) -> ImageItem | QuestionItem:
        """The item with this global index in the run."""
        if self._questions is None:
            assert self._images is not None
            return self._images.batch(index)[0]
        num_questions = index if self._images is None else math.floor(index * self._share)
        if self._images is None or math.floor((index + 1) * self._share) > num_questions:
            return QuestionItem(self._questions.batch(num_questions)[0].index)
        return self._images.batch(index - num_questions)[0]


def _load_seen(image: ImageFile, family: MultimodalFamily, cfg: RunConfig) -> Image.Image:
    """Load the image of a question in the size that the model sees it in."""
    return load_rgb(image, family.seen_size(image.width, image.height, cfg.data.resolution))


def _digest(images: str, questions: tuple[Question, ...], question_share: float) -> str:
    rows = [(str(one.image.path), one.question, one.answer) for one in questions]
    return hashlib.sha256(f"{images} {question_share} {rows}".encode()).hexdigest()
