"""Which sample is trained when, on how many ranks and after which restart."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
import torch

from trainer.data.epochs import num_images, occurrences
from trainer.data.loader import BatchSizes, Choices, ImageBatchSampler, ImageItem, Loader, MicroBatch, passes_of
from trainer.models.objectives.base import Example
from trainer.run.manifest import Progress
from trainer.system.errors import InputError

BUCKETS = [0] * 7 + [1] * 4 + [2]
WEIGHTS = [1.0, 1.5, 0.25, 2.0] * 3


def sampler_of(
    buckets: list[int], batch_size: int, weights: list[float] | None = None, dropout: float = 0.0
) -> ImageBatchSampler:
    sizes = BatchSizes(batch_size)
    choices = [Choices(dropout)] * len(buckets)
    return ImageBatchSampler(lambda item: buckets[item.index], weights or [1.0] * len(buckets), sizes, 3, choices)


def photos_of(sampler: ImageBatchSampler, num_steps: int) -> list[int]:
    return [item.index for step in range(num_steps) for item in sampler.batch(step)]


def example_of(item: ImageItem) -> Example:
    return {"photo": torch.tensor(item.index), "dropped": torch.tensor(item.dropped)}


def read(
    sampler: ImageBatchSampler, world_size: int, micro_batch: int, num_steps: int, buckets: list[int] | None = None
) -> list[list[MicroBatch]]:
    """For each step the passes of all ranks, in the order in which they run."""
    ranks: list[list[list[MicroBatch]]] = []
    for rank in range(world_size):
        with Loader(sampler, example_of, rank, world_size, micro_batch, batch_key=key_in(buckets)) as loader:
            ranks.append([loader.micro_batches(step) for step in range(num_steps)])
    return [[one for together in zip(*parts, strict=True) for one in together] for parts in zip(*ranks, strict=True)]


def key_in(buckets: list[int] | None) -> Callable[[ImageItem], Hashable]:
    return lambda item: None if buckets is None else buckets[item.index]


def weighted(passes: list[MicroBatch]) -> list[tuple[int, int]]:
    """(sample index, photo) of everything that carries weight, in order."""
    return [
        (index, int(example["photo"]))
        for batch in passes
        for index, example, weight in zip(batch.indices, batch.examples, batch.weights, strict=True)
        if weight
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 16])
def test_the_samples_of_an_epoch_follow_those_of_the_epoch_before(batch_size: int) -> None:
    photos = photos_of(sampler_of(BUCKETS, batch_size), 60)
    assert len(photos) == 60 * batch_size
    epochs = [sorted(photos[start : start + 12]) for start in range(0, len(photos) - 11, 12)]
    assert epochs == [list(range(12))] * len(epochs)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 16])
def test_a_batch_is_of_one_bucket_unless_it_holds_what_an_epoch_left(batch_size: int) -> None:
    items = epochs_of(sampler_of(BUCKETS, 1), [1.0] * 12, 20)
    sampler = sampler_of(BUCKETS, batch_size)
    expected = list(by_hand(items, (batch_size for _ in range(240))))
    assert [sampler.batch(step) for step in range(len(expected))] == expected
    assert len(expected) == 240 // batch_size
    mixed = [batch for batch in expected if len({BUCKETS[item.index] for item in batch}) > 1]
    # The last one of an epoch holds some of the next, and a batch of more photos than there are all of them.
    assert len(mixed) <= {1: 0, 2: 2 * 20, 3: 2 * 20, 5: 2 * 20, 16: 15}[batch_size]


def test_without_buckets_every_epoch_holds_each_photo_once_in_another_order() -> None:
    photos = photos_of(sampler_of([0] * 10, 5), 8)
    epochs = [photos[start : start + 10] for start in range(0, 40, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_weights_are_kept_exactly_over_the_epochs_and_taken_in_turns() -> None:
    weights = [2.0, 1.5, 1.5, 1.5, 1.5, 0.25, 0.25, 0.25, 0.25]
    photos = photos_of(sampler_of([0] * 9, 1, weights), 4 * 9)
    assert Counter(photos) == {0: 8, 1: 6, 2: 6, 3: 6, 4: 6, 5: 1, 6: 1, 7: 1, 8: 1}
    extras = [sum(photo in (1, 2, 3, 4) for photo in photos[start : start + 9]) for start in range(0, 36, 9)]
    assert all(5 <= count <= 7 for count in extras)


@pytest.mark.parametrize("start", [0, 1, 7, 23])
def test_a_restart_at_any_step_goes_on_as_the_uninterrupted_run(start: int) -> None:
    straight = [sampler.batch(step) for sampler in [sampler_of(BUCKETS, 3, dropout=0.3)] for step in range(30)]
    resumed = sampler_of(BUCKETS, 3, dropout=0.3)
    assert [resumed.batch(step) for step in range(start, 30)] == straight[start:]
    assert resumed.batch(start) == straight[start]


def test_the_order_of_a_seed_is_this_one() -> None:
    assert photos_of(sampler_of(BUCKETS, 3), 4) == [0, 2, 1, 10, 8, 9, 3, 6, 4, 5, 7, 11]


@pytest.mark.parametrize(
    ("batch_size", "digest"), [(1, "92ebe86fa545efc1"), (3, "cdfa2fba2c9a5c19"), (8, "e58faa5e88f28732")]
)
def test_the_items_of_200_steps_are_these(batch_size: int, digest: str) -> None:
    sampler = ImageBatchSampler(
        lambda item: (BUCKETS[item.index], item.dropped), WEIGHTS, BatchSizes(batch_size), 3, [Choices(0.3)] * 12
    )
    items = [(item.index, item.dropped) for step in range(200) for item in sampler.batch(step)]
    assert hashlib.sha256(repr(items).encode()).hexdigest()[:16] == digest


PARTS = ((4, 10), (8, 7), (2, 9), (5, 3))
"""(batch size, steps) of the parts of a run."""


def continued(*parts: tuple[int, int]) -> ImageBatchSampler:
    """The sampler of the last part of a run with buckets, weights and dropped captions."""
    sizes = BatchSizes(parts[-1][0], parts[:-1])
    return ImageBatchSampler(lambda item: BUCKETS[item.index], WEIGHTS, sizes, 3, [Choices(0.3)] * 12)


def epochs_of(single: ImageBatchSampler, weights: list[float], number: int) -> list[list[ImageItem]]:
    """The items of each epoch in their order. single: a sampler of batches of one."""
    ends = [num_images(weights, epoch) if epoch else 0 for epoch in range(number + 1)]
    return [[single.batch(step)[0] for step in range(*bounds)] for bounds in pairwise(ends)]


def by_hand(epochs: list[list[ImageItem]], sizes: Iterator[int]) -> Iterator[tuple[ImageItem, ...]]:
    """A batch per size: what an epoch left, filled with what comes next, or the first bucket that has so many."""
    size, rest = next(sizes, 0), list[ImageItem]()
    for epoch in epochs:
        todo, buckets = list(epoch), defaultdict[int, list[ImageItem]](list)
        while size:
            if rest:
                while todo and len(rest) < size:
                    rest.append(todo.pop(0))
                queue = rest
            else:
                queue = next((bucket for bucket in buckets.values() if len(bucket) >= size), [])
                while todo and len(queue) < size:
                    queue = buckets[BUCKETS[todo[0].index]]
                    queue.append(todo.pop(0))
                if len(queue) < size:
                    rest = [item for bucket in buckets.values() for item in bucket]
                    buckets.clear()
                    queue = rest
            if len(queue) < size:
                break
            yield tuple(queue[:size])
            del queue[:size]
            size = next(sizes, 0)


def test_a_run_that_goes_on_with_another_batch_size_trains_every_item_once_and_in_order() -> None:
    epochs = epochs_of(continued((1, 0)), WEIGHTS, 10)
    found: list[tuple[ImageItem, ...]] = []
    for number, (_, steps) in enumerate(PARTS, 1):
        sampler = continued(*PARTS[:number])
        found += [sampler.batch(step) for step in range(len(found), len(found) + steps)]
    assert found == list(by_hand(epochs, (size for size, steps in PARTS for _ in range(steps))))
    trained, whole = [item for batch in found for item in batch], num_images(WEIGHTS, 9)
    assert (len(trained), whole) == (129, 128)
    assert Counter(trained[:whole]) == Counter(item for epoch in epochs[:9] for item in epoch)


def test_samples_are_numbered_on_with_another_batch_size() -> None:
    indices: list[int] = []
    for number, (_, steps) in enumerate(PARTS, 1):
        begin = sum(steps for _, steps in PARTS[: number - 1])
        with Loader(continued(*PARTS[:number]), example_of, 0, 1, 3) as loader:
            for step in range(begin, begin + steps):
                indices += [
                    index
                    for batch in loader.micro_batches(step)
                    for index, weight in zip(batch.indices, batch.weights, strict=True)
                    if weight
                ]
    assert indices == list(range(129))


def test_a_checkpoint_says_which_batch_sizes_there_were() -> None:
    sizes = BatchSizes.after(Progress(17, batch_sizes=PARTS[:2]), 2)
    assert sizes.until(26) == PARTS[:3]
    assert sizes.until(12) == ((4, 10), (8, 2))
    assert BatchSizes.after(Progress(17, batch_sizes=PARTS[:2]), 8).until(20) == ((4, 10), (8, 10))
    assert BatchSizes.after(None, 8).until(2) == ((8, 2),)
    assert BatchSizes.after(None, 8).until(0) == ()


def test_captions_of_photos_that_keep_them_are_not_dropped_and_the_others_as_without_them() -> None:
    plain, keeping = (
        ImageBatchSampler(lambda item: None, [1.0] * 12, BatchSizes(4), 3, [Choices(0.5)] * 8 + [Choices(others)] * 4)
        for others in (0.5, 0.0)
    )
    found, expected = ([item for step in range(60) for item in sampler.batch(step)] for sampler in (keeping, plain))
    assert found == [ImageItem(item.index, item.dropped and item.index < 8) for item in expected]
    assert any(item.dropped for item in expected if item.index >= 8)


def test_another_seed_gives_another_order() -> None:
    samplers = [
        ImageBatchSampler(lambda item: 0, [1.0] * 20, BatchSizes(20), seed, [Choices(0.5)] * 20) for seed in (0, 1)
    ]
    assert samplers[0].batch(0) != samplers[1].batch(0)


@pytest.mark.parametrize(("share", "fewest", "most"), [(0.0, 0, 0), (0.25, 220, 280), (1.0, 1000, 1000)])
def test_captions_are_dropped_at_the_given_share(share: float, fewest: int, most: int) -> None:
    sampler = sampler_of([0] * 10, 10, dropout=share)
    dropped = [item.dropped for step in range(100) for item in sampler.batch(step)]
    assert fewest <= sum(dropped) <= most


def test_copies_of_a_photo_within_an_epoch_are_dropped_independently() -> None:
    sampler = sampler_of([0] * 4, 8, weights=[2.0] * 4, dropout=0.5)
    per_epoch = [Counter(item.index for item in sampler.batch(epoch) if item.dropped) for epoch in range(50)]
    for photo in range(4):
        num_dropped = Counter(epoch[photo] for epoch in per_epoch)
        assert num_dropped.keys() == {0, 1, 2}


def test_a_dropped_caption_may_belong_to_another_batch_key() -> None:
    sampler = ImageBatchSampler(lambda item: item.dropped, [1.0] * 10, BatchSizes(4), 0, [Choices(0.3)] * 10)
    with Loader(sampler, example_of, 0, 1, 4, batch_key=lambda item: item.dropped) as loader:
        passes = [one for step in range(50) for one in loader.micro_batches(step)]
    assert all(len({bool(example["dropped"]) for example in one.examples}) == 1 for one in passes)
    assert len(passes) > 50, "some steps have both"


def test_a_plan_without_photos_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        ImageBatchSampler(lambda item: 0, [], BatchSizes(1), 0)
    assert str(caught.value) == "data.path: no image is left to train on; see the warnings above"


COUNTS = ((10, 4, 3, 2, 1), (12, 6, 5, 4, 2, 1), (15, 5, 4, 3, 2, 1), (1, 1, 1, 1), (2,))
"""Photos of each bucket."""


@pytest.mark.parametrize("num_epochs", [1, 1.5, 3])
@pytest.mark.parametrize("batch_size", [4, 8, 16])
@pytest.mark.parametrize("counts", COUNTS)
def test_each_photo_is_trained_as_often_as_the_epochs_say_on_any_ranks_and_over_any_restart(
    counts: tuple[int, ...], batch_size: int, num_epochs: float
) -> None:
    buckets = [bucket for bucket, count in enumerate(counts) for _ in range(count)]
    weights = [1.0 + 0.5 * (number % 3 == 2) for number in range(len(buckets))]  # some occur every second time again
    end = num_images(weights, num_epochs)
    whole = BatchSizes(batch_size, end=end)

    def sampler_with(sizes: BatchSizes) -> ImageBatchSampler:
        return ImageBatchSampler(lambda item: buckets[item.index], weights, sizes, 3, [Choices(0.3)] * len(buckets))

    for ranks in (1, 2, 4):
        steps = read(sampler_with(whole), ranks, 3, whole.num_steps, buckets)
        samples = sorted(sample for passes in steps for sample in weighted(passes))
        assert [index for index, _ in samples] == list(range(end))
        trained = Counter(photo for _, photo in samples)
        least, most = (
            [occurrences(w, i, n) for i, w in enumerate(weights)] for n in (int(num_epochs), ceil(num_epochs))
        )
        assert all(low <= trained[photo] <= high for photo, (low, high) in enumerate(zip(least, most, strict=True)))
        for passes in steps:
            assert {len({buckets[int(one["photo"])] for one in batch.examples}) for batch in passes} == {1}
            assert len(passes) % ranks == 0
    straight = [sampler_with(whole).batch(step) for step in range(whole.num_steps)]
    for step in range(1, whole.num_steps):
        rest = sampler_with(BatchSizes(batch_size, ((batch_size, step),), end))
        assert [rest.batch(number) for number in range(step, whole.num_steps)] == straight[step:]
        smaller = BatchSizes(3, ((batch_size, step),), end)
        other = sampler_with(smaller)
        left = [item.index for number in range(step, smaller.num_steps) for item in other.batch(number)]
        if isinstance(num_epochs, int):
            assert Counter(left) == Counter(item.index for batch in straight[step:] for item in batch)


def test_a_run_that_ended_with_a_short_step_goes_on_with_the_next_epoch() -> None:
    first = BatchSizes(8, end=12)
    ended = Progress(2, batch_sizes=first.until(2))
    assert ended.batch_sizes == ((8, 1), (4, 1))
    more = replace(BatchSizes.after(ended, 8), end=36)
    sampler = ImageBatchSampler(lambda item: BUCKETS[item.index], [1.0] * 12, more, 3)
    photos = photos_of(sampler, more.num_steps)
    assert [sorted(photos[start : start + 12]) for start in (0, 12, 24)] == [list(range(12))] * 3
    fresh = ImageBatchSampler(lambda item: BUCKETS[item.index], [1.0] * 12, first, 3)
    assert photos[:12] == photos_of(fresh, 2)


@pytest.mark.parametrize(
    ("groups", "limits", "world_size", "sizes"),
    [
        ([3, 2, 1, 1, 1], [8] * 5, 1, [3, 2, 1, 1, 1]),
        ([3, 2, 1, 1, 1], [8] * 5, 4, [1] * 8),
        ([6, 2], [4, 4], 2, [2, 2, 2, 2]),
        ([2, 1], [4, 4], 4, [1, 1, 1, 1]),  # the last rank repeats an item that does not count
        ([6, 2], [4, 1], 2, [3, 3, 1, 1]),  # a folder's own micro_batch
        ([1, 1], [4, 4], 4, [1, 1, 1, 1]),
    ],
)
def test_a_batch_of_several_buckets_takes_as_few_passes_as_all_ranks_can_share(
    groups: list[int], limits: list[int], world_size: int, sizes: list[int]
) -> None:
    positions = iter(range(sum(groups)))
    passes = passes_of([[next(positions) for _ in range(count)] for count in groups], limits, world_size)
    assert [len(one) for one, _ in passes] == sizes
    present = [position for one, count in passes for position in one[:count]]
    assert present == list(range(sum(groups)))


@pytest.mark.parametrize("batch_size", [1, 4, 5, 7])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 100])
def test_1_2_3_and_4_ranks_train_the_same_samples(batch_size: int, micro_batch: int) -> None:
    sampler = sampler_of(BUCKETS, batch_size, dropout=0.3)
    for ranks in (1, 2, 3, 4):
        for step, passes in enumerate(read(sampler, ranks, micro_batch, 12, BUCKETS)):
            photos = [item.index for item in sampler.batch(step)]
            assert sorted(weighted(passes)) == [
                (step * batch_size + place, photo) for place, photo in enumerate(photos)
            ]
            assert all(len({BUCKETS[int(one["photo"])] for one in batch.examples}) == 1 for batch in passes)
            assert all(len(batch.examples) <= micro_batch for batch in passes)


@pytest.mark.parametrize(
    ("batch_size", "world_size", "micro_batch", "num_passes", "pass_size"),
    [
        (8, 2, 2, 2, 2),
        (8, 2, 3, 2, 2),
        (7, 2, 2, 2, 2),
        (7, 3, 2, 2, 2),
        (1, 4, 1, 1, 1),
        (5, 1, 4, 2, 3),
        (6, 4, 8, 1, 2),
    ],
)
def test_all_ranks_make_equally_many_passes_of_one_size_and_pad_with_weight_0(
    batch_size: int, world_size: int, micro_batch: int, num_passes: int, pass_size: int
) -> None:
    (passes,) = read(sampler_of([0] * 9, batch_size), world_size, micro_batch, 1)
    assert len(passes) == world_size * num_passes
    assert {(len(batch.examples), len(batch.indices), len(batch.weights)) for batch in passes} == {(pass_size,) * 3}
    weights = [weight for batch in passes for weight in batch.weights]
    assert weights == [1.0] * batch_size + [0.0] * (len(weights) - batch_size)


def test_padding_repeats_the_last_sample() -> None:
    sampler = sampler_of([0] * 9, 5)
    with Loader(sampler, example_of, data_rank=1, data_size=2, micro_batch=3) as loader:
        (batch,) = loader.micro_batches(2)
    last = sampler.batch(2)[4].index
    assert batch.indices == (13, 14, 14)
    assert batch.weights == (1.0, 1.0, 0.0)
    assert [int(example["photo"]) for example in batch.examples[1:]] == [last, last]


def test_items_weigh_what_their_photo_weighs_and_padding_nothing() -> None:
    sampler, weights = sampler_of([0] * 3, 5), (1.0, 0.5, 2.0)
    with Loader(sampler, example_of, 0, 2, 3, lambda item: weights[item.index]) as first:
        (batch,) = first.micro_batches(0)
    assert batch.weights == tuple(weights[item.index] for item in sampler.batch(0)[:3])
    with Loader(sampler, example_of, 1, 2, 3, lambda item: weights[item.index]) as second:
        (batch,) = second.micro_batches(0)
    assert batch.weights == (*(weights[item.index] for item in sampler.batch(0)[3:]), 0.0)


def test_the_next_step_is_read_while_this_one_is_trained() -> None:
    sampler = sampler_of([0] * 9, 1)
    threads: dict[int, str] = {}
    is_ahead = threading.Event()

    def fetch(item: ImageItem) -> Example:
        threads[len(threads)] = threading.current_thread().name
        if len(threads) == 2:
            is_ahead.set()
        return example_of(item)

    with Loader(sampler, fetch, 0, 1, 1) as loader:
        loader.micro_batches(0)
        assert is_ahead.wait(timeout=10)
    assert threads == {0: "loader_0", 1: "loader_0"}


def test_steps_may_be_asked_for_in_any_order() -> None:
    sampler = sampler_of(BUCKETS, 3)
    straight = [weighted(passes) for passes in read(sampler, 1, 2, 9)]
    with Loader(sampler_of(BUCKETS, 3), example_of, 0, 1, 2) as loader:
        for step in (5, 6, 2, 2, 8, 0):
            assert weighted(loader.micro_batches(step)) == straight[step]


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    with Loader(sampler_of([0] * 9, 1), example_of, 0, 1, 1) as loader:
        loader.micro_batches(0)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_an_example_that_cannot_be_read_ends_its_own_step_and_no_other() -> None:
    sampler = sampler_of([0] * 3, 1)
    lost = sampler.batch(1)[0].index

    def fetch(item: ImageItem) -> Example:
        if item.index == lost:
            raise InputError("the file is gone")
        return example_of(item)

    with Loader(sampler, fetch, 0, 1, 1) as loader:
        assert len(loader.micro_batches(0)) == 1
        with pytest.raises(InputError, match="the file is gone"):
            loader.micro_batches(1)
        assert len(loader.micro_batches(2)) == 1
