"""Data of a run that trains on pictures to draw and questions to answer: two streams in one order."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import nn

from trainer.config.schema import RunConfig
from trainer.data import question_files
from trainer.data.image_io import Picture, load_rgb, open_picture
from trainer.data.image_source import EncodedData, ImageDrawer, ImageSource
from trainer.data.loader import BatchSampler, BatchSizes, ImageBatchSampler, ImageItem
from trainer.data.question_files import Question
from trainer.data.source import DataSource, Draw, SampleDrawer
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
        self._pictures = ImageSource(cfg, family, data)
        self._questions = question_files.of_config(cfg.data)
        for warning in self._questions.warnings:
            emit(WarningEvent(message=warning))
        self.digest = _digest(self._pictures.digest, self._questions.train, cfg.data.question_share)
        self.num_held_out = len(data.validation) + len(self._questions.validation)

    def follow_recipe(self, recipe: int) -> None:
        self._pictures.follow_recipe(recipe)

    def batch_sampler(self, sizes: BatchSizes, saved: Progress | None) -> BatchSampler[ImageItem | QuestionItem]:
        cfg, train, single = self._cfg, self._questions.train, BatchSizes(1)
        questions = ImageBatchSampler(lambda item: None, [1.0] * len(train), single, cfg.train.seed) if train else None
        pictures = self._pictures.batch_sampler(single, saved) if self._pictures.data.train or not train else None
        return MixedBatchSampler(pictures, questions, cfg.data.question_share, sizes)

    def example(self, item: ImageItem | QuestionItem) -> Example:
        if isinstance(item, QuestionItem):
            return self._question_example(self._questions.train[item.number])
        return self._pictures.example(item)

    def loss_weight(self, item: ImageItem | QuestionItem) -> float:
        return 1.0 if isinstance(item, QuestionItem) else self._pictures.loss_weight(item)

    def held_out(self, index: int) -> Example:
        if index < self._pictures.num_held_out:
            return self._pictures.held_out(index)
        return self._question_example(self._questions.validation[index - self._pictures.num_held_out])

    def _question_example(self, question: Question) -> Example:
        image = _load_seen(question.picture, self._family, self._cfg)
        return self._family.encode_question(image, question.question, question.answer)


class MixedDrawer(SampleDrawer):
    """Draws pictures for `sample.prompts`, then answers to `sample.questions`. pictures: draws the pictures.

    Raises:
        InputError: An image of `sample.images` cannot be read.
    """

    def __init__(self, cfg: RunConfig, family: MultimodalFamily, pictures: ImageDrawer) -> None:
        self._cfg, self._family, self._pictures = cfg, family, pictures
        self._num_pictures = len(pictures.prompts)
        self._question_images = tuple(open_picture(Path(file)) for file in cfg.sample.images)
        self.prompts = (*pictures.prompts, *cfg.sample.questions)

    def follow_recipe(self, recipe: int) -> None:
        self._pictures.follow_recipe(recipe)

    @property
    def groups(self) -> tuple[range, ...]:
        groups = (range(self._num_pictures), range(self._num_pictures, len(self.prompts)))
        return tuple(group for group in groups if group)

    def suffix(self, index: int) -> str:
        return ".png" if index < self._num_pictures else ".txt"

    def prepare(self) -> Draw:
        draw_picture = self._pictures.prepare() if self._num_pictures else None

        def draw(model: nn.ModuleDict, index: int, rng: SampleRng) -> bytes:
            if index < self._num_pictures:
                assert draw_picture is not None
                return draw_picture(model, index, rng)
            image = _load_seen(self._question_images[index - self._num_pictures], self._family, self._cfg)
            return self._family.answer(model, image, self.prompts[index], self._cfg.sample, rng).encode()

        return draw


class MixedBatchSampler:
    """Batches of two streams. The n-th question of the run is the same whatever the batch sizes.

    Args:
        pictures: One picture per step; None where there are none.
        questions: One question per step; None where there are none.
        question_share: Share of questions among the items of the whole run, evenly spread.
        sizes: The batch sizes.
    """

    def __init__(
        self,
        pictures: BatchSampler[ImageItem] | None,
        questions: BatchSampler[ImageItem] | None,
        question_share: float,
        sizes: BatchSizes,
    ) -> None:
        self.sizes = sizes
        self._pictures, self._questions, self._share = pictures, questions, question_share
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
            assert self._pictures is not None
            return self._pictures.batch(index)[0]
        num_questions = index if self._pictures is None else math.floor(index * self._share)
        if self._pictures is None or math.floor((index + 1) * self._share) > num_questions:
            return QuestionItem(self._questions.batch(num_questions)[0].photo)
        return self._pictures.batch(index - num_questions)[0]


def _load_seen(picture: Picture, family: MultimodalFamily, cfg: RunConfig) -> Image.Image:
    """Load the image of a question in the size that the model sees it in."""
    return load_rgb(picture, family.seen_size(picture.width, picture.height, cfg.data.resolution))


def _digest(pictures: str, questions: tuple[Question, ...], question_share: float) -> str:
    rows = [(str(one.picture.path), one.question, one.answer) for one in questions]
    return hashlib.sha256(f"{pictures} {question_share} {rows}".encode()).hexdigest()
