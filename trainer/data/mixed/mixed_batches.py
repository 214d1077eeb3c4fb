"""Batches of images to draw and of rows with text and images: two streams in one order, perhaps packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from trainer.data.loader import BatchSampler, BatchSizes, ImageItem

WAITING = 64
"""Sequences among which the next of a pack is looked for."""


@dataclass(frozen=True)
class DrawnItem:
    """An item of a batch that is a captioned image.

    Attributes:
        image: The image.
        index: Global index of the sample in the run.
    """

    image: ImageItem
    index: int


@dataclass(frozen=True)
class QuestionItem:
    """An item of a batch that is a row.

    Attributes:
        number: Index of the row among those that are trained.
        index: Global index of the sample in the run.
    """

    number: int
    index: int


@dataclass(frozen=True)
class Pack:
    """An item of a batch that is several samples."""

    items: tuple[DrawnItem | QuestionItem, ...]


MixedItem = DrawnItem | QuestionItem


class MixedBatchSampler:
    """Batches of two streams. The n-th row of the run is the same whatever the batch sizes.

    Args:
        images: One image per step; None where there are none.
        questions: One row per step; None where there are none.
        question_share: Share of rows among the items of the whole run, evenly spread.
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
        self._step, self._batch = -1, ()  # type: tuple[int, tuple[MixedItem, ...]]

    def batch(self, step: int) -> tuple[MixedItem, ...]:
        """The items of an optimizer step, counted from 0. Fast for the same and the next step, else it counts up."""
        if step != self._step:
            indices = range(self.sizes.before(step), self.sizes.before(step + 1))
            self._step, self._batch = step, tuple(map(self.item, indices))
        return self._batch

    def item(self, index: int) -> MixedItem:
        """The item with this global index in the run."""
        if self._questions is None:
            assert self._images is not None
            return DrawnItem(self._images.batch(index)[0], index)
        num_questions = index if self._images is None else math.floor(index * self._share)
        if self._images is None or math.floor((index + 1) * self._share) > num_questions:
            return QuestionItem(self._questions.batch(num_questions)[0].index, index)
        return DrawnItem(self._images.batch(index - num_questions)[0], index)


class PackedBatchSampler:
    """Batches of packs of whole samples with at most `budget` tokens each; a longer sample is a pack by itself.

    A pack begins with the sample that waits longest and takes, in order, each of the next ones that fits. The packs
    depend neither on the ranks nor on the batch size.

    Args:
        item: item(index) returns the item with this global index in the run.
        tokens: tokens(item) returns the tokens of an item.
        budget: Most tokens of a pack.
        sizes: The batch sizes, in packs.
    """

    def __init__(
        self, item: Callable[[int], MixedItem], tokens: Callable[[MixedItem], int], budget: int, sizes: BatchSizes
    ) -> None:
        self.sizes = sizes
        self._item, self._tokens, self._budget = item, tokens, budget
        self._packs = self._all_packs()
        self._step, self._batch = -1, ()  # type: tuple[int, tuple[Pack, ...]]

    def batch(self, step: int) -> tuple[Pack, ...]:
        """The packs of an optimizer step, counted from 0. Fast for the same and the next step, else it counts up."""
        if step < self._step:
            self._packs, self._step = self._all_packs(), -1
        while self._step < step:
            self._step += 1
            self._batch = tuple(next(self._packs) for _ in range(self.sizes.of(self._step)))
        return self._batch

    def num_packs(self, num_items: int) -> int:
        """Number of packs that hold the first `num_items` items of the run."""
        left = num_items
        for number, pack in enumerate(self._all_packs(), 1):
            left -= sum(item.index < num_items for item in pack.items)
            if not left:
                return number
        raise AssertionError("the items have no end")

    def _all_packs(self) -> Iterator[Pack]:
        waiting: list[tuple[MixedItem, int]] = []
        items = map(self._item, count())
        while True:
            while len(waiting) < WAITING:
                item = next(items)
                waiting.append((item, self._tokens(item)))
            taken, room, left = [waiting[0][0]], self._budget - waiting[0][1], []
            for item, tokens in waiting[1:]:
                if tokens <= room:
                    taken.append(item)
                    room -= tokens
                else:
                    left.append((item, tokens))
            waiting = left
            yield Pack(tuple(taken))
