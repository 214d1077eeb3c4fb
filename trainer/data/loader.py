"""Batch samplers, which choose the items of each step, and the loader, which reads their examples ahead.

The position follows from the optimizer step and the batch sizes so far: a run continues at any step on any number of
ranks with the examples that the uninterrupted run would have read, and with another batch size at the next sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import torch

from trainer.data import epochs
from trainer.distributed.threads import worker_threads
from trainer.models.objectives.base import Batch, Example
from trainer.rng import SampleRng, derived_seed, generator
from trainer.run.manifest import Progress
from trainer.system.errors import InputError

CPU = torch.device("cpu")
ItemT = TypeVar("ItemT")
ItemT_co = TypeVar("ItemT_co", covariant=True)


@dataclass(frozen=True)
class ImageItem:
    """One occurrence of an image.

    Attributes:
        index: Index of the image in the dataset.
        dropped: Whether it is trained with the empty caption.
        caption: Number of the caption that it is trained with, of those that the image has.
        is_mirrored: Whether left and right are exchanged.
        without_references: Whether it is trained without its reference images.
    """

    index: int
    dropped: bool
    caption: int = 0
    is_mirrored: bool = False
    without_references: bool = False


@dataclass(frozen=True)
class Choices:
    """The random choices of each occurrence of an image.

    Attributes:
        caption_dropout: Share of the occurrences that are trained with the empty caption.
        num_captions: Number of captions, of which one is drawn.
        may_flip: Whether half of the occurrences are mirrored.
        reference_dropout: Share of the occurrences that are trained without reference images.
    """

    caption_dropout: float = 0.0
    num_captions: int = 1
    may_flip: bool = False
    reference_dropout: float = 0.0


@dataclass(frozen=True)
class BatchSizes:
    """The number of samples of each optimizer step of a run, all ranks together.

    Attributes:
        now: The batch size of every step after those of `former`.
        former: (batch size, optimizer steps) of the parts of the run that had other sizes, in order.
        end: Number of samples of the run: the step that reaches it is as short as need be, and the last one. None for
            a run that is given in steps.
    """

    now: int
    former: tuple[tuple[int, int], ...] = ()
    end: int | None = None

    @classmethod
    def after(cls, saved: Progress | None, now: int) -> BatchSizes:
        """The batch sizes of a run that continues from `saved` (None: from its start) with size `now`."""
        return cls(now, saved.batch_sizes if saved else ())

    def of(self, step: int) -> int:
        """Number of samples of a step, counted from 0; 0 after the last one."""
        return self.before(step + 1) - self.before(step)

    def before(self, step: int) -> int:
        """Number of samples of all steps before this one: the global index of its first sample."""
        return sum(size * steps for size, steps in self.until(step))

    @property
    def num_steps(self) -> int:
        """Number of steps of a run with an `end`: at least those of `former`."""
        assert self.end is not None, "a run in steps knows its steps"
        left = self.end - sum(size * steps for size, steps in self.former)
        return sum(steps for _, steps in self.former) + max(0, math.ceil(left / self.now))

    def until(self, step: int) -> tuple[tuple[int, int], ...]:
        """(batch size, optimizer steps) of the parts of the first `step` steps, for `Progress.batch_sizes`."""
        rest = [(self.now, step)]
        if self.end is not None:
            left = self.end - sum(size * steps for size, steps in self.former)
            full, last = divmod(max(0, left), self.now)
            rest = [(self.now, full), (last, int(last > 0))]
        parts: list[tuple[int, int]] = []
        for size, steps in (*self.former, *rest):
            if parts and parts[-1][0] == size:
                steps += parts.pop()[1]
            taken = min(steps, step - sum(steps for _, steps in parts))
            parts += [(size, taken)] if taken else []
        return tuple(parts)


class BatchSampler(Protocol[ItemT_co]):
    """An endless sequence of batches."""

    sizes: BatchSizes

    def batch(self, step: int) -> tuple[ItemT_co, ...]:
        """The items of an optimizer step, counted from 0."""
        ...


class ImageBatchSampler:
    """An endless sequence of batches: a function of the arguments and the step.

    Each epoch is shuffled, and its samples follow those of the epoch before: an image is trained in each epoch as often
    as its weight says, also where no other has its shape. Within an epoch, items wait until their key fills a
    batch. Items left at the end of the epoch make batches of several keys; the first items of the next epoch fill the
    last of these.

    Args:
        batch_key: batch_key(item) returns a key; items with equal keys may share a pass.
        weights: Occurrences of each image per epoch, > 0; the half in 1.5 is an occurrence in every second epoch,
            alternating with other images.
        sizes: The batch sizes.
        seed: Seed of order and dropout.
        choices: What is drawn for the occurrences of each image; None for nothing.

    Raises:
        InputError: There are no images.
    """

    def __init__(
        self,
        batch_key: Callable[[ImageItem], Hashable],
        weights: Sequence[float],
        sizes: BatchSizes,
        seed: int,
        choices: Sequence[Choices] | None = None,
    ) -> None:
        if not weights:
            raise InputError("data.path: no image is left to train on; see the warnings above")
        self.sizes = sizes
        self._batch_key = batch_key
        self._weights = weights
        self._seed = seed
        self._choices = choices or [Choices()] * len(weights)
        self._batches = self._all_batches()
        self._batch: tuple[ImageItem, ...] = ()
        self._step = -1

    def batch(self, step: int) -> tuple[ImageItem, ...]:
        """The items of an optimizer step, counted from 0. Fast for the same and the next step, else it counts up."""
        if step < self._step:
            self._batches = self._all_batches()
            self._step = -1
        while self._step < step:
            self._batch = next(self._batches)
            self._step += 1
        return self._batch

    def _all_batches(self) -> Iterator[tuple[ImageItem, ...]]:
        waiting: dict[Hashable, list[ImageItem]] = {}
        left: list[ImageItem] = []  # of the epoch before; while there are some, no other item waits
        items = self._all_items()
        for step in count():
            size = self.sizes.of(step)
            # After a larger size, waiting items may fill a batch.
            queue = next((queue for queue in waiting.values() if len(queue) >= size), left)
            while len(queue) < size:
                item = next(items)
                if item is None:
                    left += [one for key in waiting for one in waiting[key]]
                    waiting.clear()
                    queue = left
                else:
                    queue = left or waiting.setdefault(self._batch_key(item), [])
                    queue.append(item)
            batch = tuple(queue[:size])
            del queue[:size]  # before the yield: the consumer may stop after this batch
            yield batch

    def _all_items(self) -> Iterator[ImageItem | None]:
        """The items of all epochs in order, with None after each epoch."""
        for epoch in count():
            occurrences = [
                (index, copy) for index in range(len(self._weights)) for copy in range(self._num_copies(index, epoch))
            ]
            order = torch.randperm(len(occurrences), generator=generator(self._seed, "order", epoch))
            for position in order.tolist():
                index, copy = occurrences[position]
                yield self._drawn(self._choices[index], index, epoch, copy)
            yield None

    def _num_copies(self, index: int, epoch: int) -> int:
        """Occurrences in this epoch. Over the epochs they add up to epochs x weight, rounded up or down."""
        until, before = (epochs.occurrences(self._weights[index], index, number) for number in (epoch + 1, epoch))
        return until - before

    def _drawn(self, choices: Choices, index: int, epoch: int, copy: int) -> ImageItem:
        def draw(what: str) -> int:
            # The seed is itself uniform over 63 bits; seeding a generator with it to draw one number takes 4x as long.
            return derived_seed(self._seed, what, epoch, index, copy)

        def happens(what: str, share: float) -> bool:
            return share > 0 and draw(what) < int(share * 2**63)

        caption = draw("caption") % choices.num_captions if choices.num_captions > 1 else 0
        return ImageItem(
            index,
            happens("caption_dropout", choices.caption_dropout),
            caption,
            happens("flip", 0.5 * choices.may_flip),
            happens("reference_dropout", choices.reference_dropout),
        )


@dataclass(frozen=True)
class Prepared:
    """A pass as the model takes it.

    Attributes:
        batch: On the CPU, in memory that the device reads by itself.
        rng: The random numbers of its items.
    """

    batch: Batch
    rng: SampleRng


Prepare = Callable[[Sequence[Example], Sequence[float], Sequence[int]], Prepared]
"""Prepares examples with their weights and global sample indices."""


@dataclass(frozen=True)
class MicroBatch:
    """The part of a step that one rank trains in one pass; all examples share a batch key.

    Attributes:
        examples: The examples.
        indices: Global sample index of each example: the number of samples of all earlier steps + its position.
        weights: Weight of each example's loss, 0 for padding.
        prepared: The pass as the model takes it; None without `prepare`.
    """

    examples: tuple[Example, ...]
    indices: tuple[int, ...]
    weights: tuple[float, ...]
    prepared: Prepared | None = None


class Loader(Generic[ItemT]):
    """The examples of each step for one rank. A thread reads the next step while the current one is trained.

    A pass holds items of one batch key. `passes_of` divides the batch into equally many passes for every rank, since
    all know the whole batch; the rest of a pass repeats an item with weight 0. Use as a context manager, or call
    `close`.

    Args:
        batch_sampler: The items of each step.
        fetch: fetch(item) returns the item's example; called on the thread.
        data_rank: The share of the samples that this rank reads.
        data_size: Number of shares.
        micro_batch: Most examples per pass.
        own_micro_batch: own_micro_batch(item) returns the most examples of a pass with this item; None for
            `micro_batch`.
        loss_weight: loss_weight(item) returns the weight of the item's loss, > 0.
        device: Of this rank.
        prepare: Called on the thread.
        batch_key: batch_key(item) returns a key; items with equal keys may share a pass.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler[ItemT],
        fetch: Callable[[ItemT], Example],
        data_rank: int,
        data_size: int,
        micro_batch: int,
        loss_weight: Callable[[ItemT], float] = lambda item: 1.0,
        device: torch.device = CPU,
        prepare: Prepare | None = None,
        own_micro_batch: Callable[[ItemT], int | None] = lambda item: None,
        batch_key: Callable[[ItemT], Hashable] = lambda item: None,
    ) -> None:
        self._batch_sampler = batch_sampler
        self._fetch = fetch
        self._loss_weight = loss_weight
        self._prepare = prepare
        self._batch_key = batch_key
        self._data_rank, self._data_size = data_rank, data_size
        self._micro_batch, self._own_micro_batch = micro_batch, own_micro_batch
        self._thread = worker_threads(1, "loader", device)
        self._ahead: dict[int, Future[list[MicroBatch]]] = {}

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This rank's passes of an optimizer step, counted from 0. Raises the errors of `fetch`."""
        current = self._ahead.get(step) or self._thread.submit(self._load, step)
        is_last = self._batch_sampler.sizes.of(step + 1) == 0
        self._ahead = {} if is_last else {step + 1: self._thread.submit(self._load, step + 1)}
        return current.result()

    def close(self) -> None:
        """Wait for the current read and end the thread."""
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Loader[ItemT]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, step: int) -> list[MicroBatch]:
        batch = self._batch_sampler.batch(step)
        groups: dict[Hashable, list[int]] = {}
        for position, item in enumerate(batch):
            groups.setdefault(self._batch_key(item), []).append(position)
        limits = [min(self._own_micro_batch(batch[p]) or self._micro_batch for p in group) for group in groups.values()]
        passes = passes_of(list(groups.values()), limits, self._data_size)
        return [self._load_pass(step, batch, *one) for one in passes[self._data_rank :: self._data_size]]

    def _load_pass(self, step: int, batch: tuple[ItemT, ...], positions: Sequence[int], num_present: int) -> MicroBatch:
        first_index = self._batch_sampler.sizes.before(step)
        examples = tuple(self._fetch(batch[position]) for position in positions)
        indices = tuple(first_index + position for position in positions)
        weights = tuple(
            self._loss_weight(batch[position]) if number < num_present else 0.0
            for number, position in enumerate(positions)
        )
        prepared = self._prepare(examples, weights, indices) if self._prepare else None
        return MicroBatch(examples, indices, weights, prepared)


def passes_of(
    groups: Sequence[Sequence[int]], limits: Sequence[int], data_size: int
) -> list[tuple[tuple[int, ...], int]]:
    """Divide a batch into as few passes as all shares can have equally many of, each of items that fit together.

    Share r takes every `data_size`-th pass from r on, so that passes of one shape run at the same time.

    Args:
        groups: Positions in the batch of the items with each batch key.
        limits: Most items per pass of each group.
        data_size: Number of shares.

    Returns:
        (positions, number of them that count) of each pass. Passes of a group have one size: the last positions repeat
        an item that does not count.
    """

    def number(most: int) -> int:
        return sum(math.ceil(len(group) / min(most, limit)) for group, limit in zip(groups, limits, strict=True))

    total = math.ceil(number(max(limits)) / data_size) * data_size
    most = next(most for most in count(1) if number(most) <= total)  # small passes, where that takes no more of them
    passes: list[tuple[tuple[int, ...], int]] = []
    for group, limit in zip(groups, limits, strict=True):
        size = math.ceil(len(group) / math.ceil(len(group) / min(most, limit)))
        for begin in range(0, len(group), size):
            part = group[begin : begin + size]
            passes.append(((*part, *[part[-1]] * (size - len(part))), len(part)))
    positions, _ = passes[-1]
    return passes + [((positions[-1],) * len(positions), 0)] * (total - len(passes))
