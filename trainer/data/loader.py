"""Batch samplers, which choose the items of each step, and the loader, which reads their examples ahead.

The position follows from the optimizer step and the batch sizes so far: a run continues at any step on any number of
ranks with the examples that the uninterrupted run would have read, and with another batch size at the next sample.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count, islice
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import torch

from trainer.config.errors import InputError
from trainer.data import epochs
from trainer.distributed.threads import worker_threads
from trainer.models.objectives import Batch, Example
from trainer.rng import SampleRng, derived_seed, generator
from trainer.run.manifest import Progress

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
    """

    index: int
    dropped: bool
    caption: int = 0
    is_mirrored: bool = False


@dataclass(frozen=True)
class Choices:
    """What is drawn anew for each occurrence of an image.

    Attributes:
        caption_dropout: Share of the occurrences that are trained with the empty caption.
        num_captions: Number of captions, of which one is drawn.
        may_flip: Whether half of the occurrences are mirrored.
    """

    caption_dropout: float = 0.0
    num_captions: int = 1
    may_flip: bool = False


@dataclass(frozen=True)
class BatchSizes:
    """The number of samples of each optimizer step of a run, all ranks together.

    Attributes:
        now: The batch size of every step after those of `former`.
        former: (batch size, optimizer steps) of the parts of the run that had other sizes, in order.
    """

    now: int
    former: tuple[tuple[int, int], ...] = ()

    @classmethod
    def after(cls, saved: Progress | None, now: int) -> BatchSizes:
        """The batch sizes of a run that continues from `saved` (None: from its start) with size `now`.

        A checkpoint without batch sizes has the one of its config.
        """
        if saved is None:
            return cls(now)
        size = saved.config["train"]["batch_size"] if saved.config else now
        return cls(now, saved.batch_sizes or ((size, saved.step),))

    def of(self, step: int) -> int:
        """Number of samples of a step, counted from 0."""
        return self.before(step + 1) - self.before(step)

    def before(self, step: int) -> int:
        """Number of samples of all steps before this one: the global index of its first sample."""
        return sum(size * steps for size, steps in self.until(step))

    def steps_for(self, samples: int) -> int:
        """Number of steps that train the first `samples` samples: at least those of `former`."""
        former = sum(steps for _, steps in self.former)
        return former + max(0, math.ceil((samples - self.before(former)) / self.now))

    def until(self, step: int) -> tuple[tuple[int, int], ...]:
        """(batch size, optimizer steps) of the parts of the first `step` steps, for `Progress.batch_sizes`."""
        parts: list[tuple[int, int]] = []
        for size, steps in (*self.former, (self.now, step)):
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
    """An endless sequence of full batches whose items share a batch key: a function of the arguments and the step.

    Each epoch is shuffled. An item waits until a batch of its key is full, past the end of an epoch or a change of the
    batch size if need be: nothing is left out, and odd bucket sizes make no short batch.

    Args:
        batch_key: batch_key(item) returns a key; items with equal keys may share a batch.
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
        waiting: defaultdict[Hashable, list[ImageItem]] = defaultdict(list)
        items = self._all_items()
        for size, steps in self.sizes.former:
            yield from islice(self._filled(size, waiting, items), steps)
        yield from self._filled(self.sizes.now, waiting, items)

    def _filled(
        self, size: int, waiting: defaultdict[Hashable, list[ImageItem]], items: Iterator[ImageItem]
    ) -> Iterator[tuple[ImageItem, ...]]:
        """Full batches of one size. After a larger size, waiting items may fill some batches: they come first."""
        for queue in waiting.values():
            while len(queue) >= size:
                batch = tuple(queue[:size])
                del queue[:size]  # before the yield: the consumer may stop after this batch
                yield batch
        for item in items:
            queue = waiting[self._batch_key(item)]
            queue.append(item)
            if len(queue) == size:
                batch = tuple(queue)
                queue.clear()
                yield batch

    def _all_items(self) -> Iterator[ImageItem]:
        for epoch in count():
            occurrences = [
                (index, copy) for index in range(len(self._weights)) for copy in range(self._num_copies(index, epoch))
            ]
            order = torch.randperm(len(occurrences), generator=generator(self._seed, "order", epoch))
            for position in order.tolist():
                index, copy = occurrences[position]
                yield self._drawn(self._choices[index], index, epoch, copy)

    def _num_copies(self, index: int, epoch: int) -> int:
        """Occurrences in this epoch. Over the epochs they add up to epochs x weight, rounded up or down."""
        until, before = (epochs.occurrences(self._weights[index], index, number) for number in (epoch + 1, epoch))
        return until - before

    def _drawn(self, choices: Choices, index: int, epoch: int, copy: int) -> ImageItem:
        def draw(what: str) -> int:
            # The seed is itself uniform over 63 bits; seeding a generator with it to draw one number takes 4x as long.
            return derived_seed(self._seed, what, epoch, index, copy)

        is_dropped = choices.caption_dropout > 0 and draw("caption_dropout") < int(choices.caption_dropout * 2**63)
        caption = draw("caption") % choices.num_captions if choices.num_captions > 1 else 0
        return ImageItem(index, is_dropped, caption, choices.may_flip and draw("flip") < 2**62)


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

    The batch is split contiguously over the ranks, and each part into equal passes, as few as `micro_batch` allows.
    Number and size of the passes are the same on every rank, since all know the whole batch; the last positions repeat
    the last item with weight 0 where the batch size does not divide. Use as a context manager, or call `close`.

    Args:
        batch_sampler: The items of each step.
        fetch: fetch(item) returns the item's example; called on the thread.
        rank: This rank.
        world_size: Number of ranks.
        micro_batch: Most examples per pass.
        own_micro_batch: own_micro_batch(item) returns the most examples of a pass with this item; None for
            `micro_batch`.
        loss_weight: loss_weight(item) returns the weight of the item's loss, > 0.
        device: Of this rank.
        prepare: Called on the thread.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler[ItemT],
        fetch: Callable[[ItemT], Example],
        rank: int,
        world_size: int,
        micro_batch: int,
        loss_weight: Callable[[ItemT], float] = lambda item: 1.0,
        device: torch.device = CPU,
        prepare: Prepare | None = None,
        own_micro_batch: Callable[[ItemT], int | None] = lambda item: None,
    ) -> None:
        self._batch_sampler = batch_sampler
        self._fetch = fetch
        self._loss_weight = loss_weight
        self._prepare = prepare
        self._rank = rank
        self._per_rank = math.ceil(batch_sampler.sizes.now / world_size)
        self._micro_batch, self._own_micro_batch = micro_batch, own_micro_batch
        self._thread = worker_threads(1, "loader", device)
        self._ahead: dict[int, Future[list[MicroBatch]]] = {}

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This rank's passes of an optimizer step, counted from 0. Raises the errors of `fetch`."""
        current = self._ahead.get(step) or self._thread.submit(self._load, step)
        self._ahead = {step + 1: self._thread.submit(self._load, step + 1)}
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
        most = min(self._own_micro_batch(item) or self._micro_batch for item in batch)
        num_passes = math.ceil(self._per_rank / most)
        size = math.ceil(self._per_rank / num_passes)
        starts = [(self._rank * num_passes + number) * size for number in range(num_passes)]
        return [self._load_pass(step, batch, range(start, start + size)) for start in starts]

    def _load_pass(self, step: int, batch: tuple[ItemT, ...], positions: range) -> MicroBatch:
        last, first_index = len(batch) - 1, self._batch_sampler.sizes.before(step)
        present = [min(position, last) for position in positions]
        examples = tuple(self._fetch(batch[position]) for position in present)
        indices = tuple(first_index + position for position in present)
        weights = tuple(self._loss_weight(batch[p]) if p <= last else 0.0 for p in positions)
        prepared = self._prepare(examples, weights, indices) if self._prepare else None
        return MicroBatch(examples, indices, weights, prepared)
