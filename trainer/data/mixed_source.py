"""Pictures to draw and questions to answer as a run is trained on both: two streams in one order."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from trainer.config.schema import RunConfig
from trainer.data import question_files
from trainer.data.image_io import Picture, load_rgb, open_picture
from trainer.data.image_source import EncodedData, ImageSource
from trainer.data.loader import BatchPlan, BatchSizes, Item, Plan
from trainer.data.question_files import Question
from trainer.data.source import Draw, Source
from trainer.models.base import LoadModule, MultimodalFamily
from trainer.models.objectives import Example
from trainer.rng import SampleRng
from trainer.run.events import Emit, WarningEvent
from trainer.run.manifest import Progress


@dataclass(frozen=True)
class Asked:
    """An item of the plan that is a question. number: its place among those that are trained."""

    number: int


class MixedSource(Source):
    """Encoded images with captions, and questions, whose images are read as they are needed.

    Samples are pictures for `sample.prompts`, then answers to `sample.questions`. data: what is encoded.
    Raises InputError for questions that cannot be used.
    """

    unit = "images"
    is_changed = (
        "images, captions, questions or how they are encoded are not as before: from here on the order is another"
    )

    def __init__(
        self, cfg: RunConfig, family: MultimodalFamily, load: LoadModule, data: EncodedData, emit: Emit
    ) -> None:
        self._cfg, self._family = cfg, family
        self._pictures = ImageSource(cfg, family, load, data)
        self._questions = question_files.of_config(cfg.data)
        for warning in self._questions.warnings:
            emit(WarningEvent(message=warning))
        self._drawn = len(data.prompts)
        self._shown = tuple(open_picture(Path(file)) for file in cfg.sample.images)
        self.prompts = (*self._pictures.prompts, *cfg.sample.questions)
        self.digest = _digest(self._pictures.digest, self._questions.train, cfg.data.question_share)
        self.num_held_out = len(data.validation) + len(self._questions.validation)

    def follow_recipe(self, recipe: int) -> None:
        self._pictures.follow_recipe(recipe)

    def plan(self, sizes: BatchSizes, saved: Progress | None) -> Plan[Item | Asked]:
        cfg, train, single = self._cfg, self._questions.train, BatchSizes(1)
        asked = BatchPlan(lambda item: None, [1.0] * len(train), single, cfg.train.seed) if train else None
        drawn = self._pictures.plan(single, saved) if self._pictures.data.train or not train else None
        return MixedPlan(drawn, asked, cfg.data.question_share, sizes)

    def example(self, item: Item | Asked) -> Example:
        if isinstance(item, Asked):
            return self._asked(self._questions.train[item.number])
        return self._pictures.example(item)

    def loss_weight(self, item: Item | Asked) -> float:
        return 1.0 if isinstance(item, Asked) else self._pictures.loss_weight(item)

    def held_out(self, index: int) -> Example:
        asked = index - self._pictures.num_held_out
        return self._pictures.held_out(index) if asked < 0 else self._asked(self._questions.validation[asked])

    def suffix(self, index: int) -> str:
        return ".png" if index < self._drawn else ".txt"

    @property
    def alike(self) -> tuple[range, ...]:
        groups = (range(self._drawn), range(self._drawn, len(self.prompts)))
        return tuple(group for group in groups if group)

    def drawing(self) -> Draw:
        draw_picture = self._pictures.drawing() if self._drawn else None

        def draw(model: nn.ModuleDict, index: int, rng: SampleRng) -> bytes:
            if index < self._drawn:
                assert draw_picture is not None
                return draw_picture(model, index, rng)
            image = load_rgb(shown := self._shown[index - self._drawn], self._seen_size(shown))
            return self._family.answer(model, image, self.prompts[index], self._cfg.sample, rng).encode()

        return draw

    def _asked(self, question: Question) -> Example:
        image = load_rgb(question.picture, self._seen_size(question.picture))
        return self._family.encode_question(image, question.question, question.answer)

    def _seen_size(self, picture: Picture) -> tuple[int, int]:
        return self._family.seen_size(picture.width, picture.height, self._cfg.data.resolution)


class MixedPlan:
    """Batches of two streams. pictures, questions: plans of one item per step; None where there are none.

    question_share: of the items of the whole run that are questions, evenly spread. The n-th question of the run is
    the same whatever the size of the batches.
    """

    def __init__(
        self, pictures: Plan[Item] | None, questions: Plan[Item] | None, question_share: float, sizes: BatchSizes
    ) -> None:
        self.sizes = sizes
        self._pictures, self._questions, self._share = pictures, questions, question_share
        self._step, self._batch = -1, ()  # type: tuple[int, tuple[Item | Asked, ...]]

    def batch(self, step: int) -> tuple[Item | Asked, ...]:
        """The items of an optimizer step, counted from 0. Fast for the same and the next step, else it counts up."""
        if step != self._step:
            places = range(self.sizes.before(step), self.sizes.before(step + 1))
            self._step, self._batch = step, tuple(map(self._item, places))
        return self._batch

    def _item(self, place: int) -> Item | Asked:
        """place: in the run."""
        if self._questions is None:
            assert self._pictures is not None
            return self._pictures.batch(place)[0]
        asked = place if self._pictures is None else math.floor(place * self._share)
        if self._pictures is None or math.floor((place + 1) * self._share) > asked:
            return Asked(self._questions.batch(asked)[0].photo)
        return self._pictures.batch(place - asked)[0]


def _digest(pictures: str, asked: tuple[Question, ...], question_share: float) -> str:
    rows = [(str(one.picture.path), one.question, one.answer) for one in asked]
    return hashlib.sha256(f"{pictures} {question_share} {rows}".encode()).hexdigest()
