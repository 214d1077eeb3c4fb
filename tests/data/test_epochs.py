"""How many samples an epoch has: as the batches count them."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from trainer.data.epochs import num_images, num_mixed, occurrences, rounded_up
from trainer.data.loader import BatchSizes, ImageBatchSampler
from trainer.data.mixed.mixed_source import MixedBatchSampler, QuestionItem

WEIGHTS = [1.0, 1.5, 0.25, 2.0, 1 / 3] * 3


def items(weights: list[float], number: int) -> list[int]:
    sampler = ImageBatchSampler(lambda item: None, weights, BatchSizes(1), seed=3)
    return [sampler.batch(step)[0].index for step in range(number)]


@pytest.mark.parametrize("epochs", [1, 2, 3, 7])
def test_the_first_epochs_hold_each_image_as_often_as_it_is_drawn_in_them(epochs: int) -> None:
    drawn = Counter(items(WEIGHTS, num_images(WEIGHTS, epochs)))
    expected = {index: occurrences(weight, index, epochs) for index, weight in enumerate(WEIGHTS)}
    assert drawn == Counter({index: count for index, count in expected.items() if count})
    assert all(abs(expected[index] - epochs * weight) < 1 for index, weight in enumerate(WEIGHTS))


@pytest.mark.parametrize(
    ("weights", "epochs", "samples"),
    [
        ([1.0] * 10, 1, 10),
        ([1.0] * 10, 0.25, 3),  # of a quarter of an epoch, 2.5 images, rounded up
        ([1.0] * 10, 2.5, 25),
        ([1.0] * 10, 1.1, 11),  # 1.1 - 1 is a little more than 0.1 in binary
        ([1.0] * 1000, 8.2, 8200),
        ([3.0] * 4, 2, 24),  # data.repeats: 3
        ([1.0] * 6 + [2.0] * 3, 3, 36),  # 3 regularization images that occur as often as 6 images
        ([0.5] * 4, 1, 2),
        ([0.001], 0.001, 1),  # at least one
    ],
)
def test_samples_of_some_epochs(weights: list[float], epochs: float, samples: int) -> None:
    assert num_images(weights, epochs) == samples


def test_rows_of_a_part_of_an_epoch_are_rounded_up_but_not_by_the_error_of_binary_numbers() -> None:
    assert [rounded_up(epochs * 10) for epochs in (1.1, 2.2, 0.25, 1.0)] == [11, 22, 3, 10]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("images", [1, 2, 7, 40])
def test_a_mixed_epoch_ends_with_its_last_image(images: int, share: float) -> None:
    samples = num_mixed(images, share)
    drawn, asked = (ImageBatchSampler(lambda item: None, [1.0] * count, BatchSizes(1), seed=1) for count in (images, 5))
    mixed = MixedBatchSampler(drawn, asked, share, BatchSizes(1))
    kinds = [isinstance(mixed.batch(step)[0], QuestionItem) for step in range(samples)]
    assert kinds.count(False) == images
    assert kinds[-1] is False
    assert kinds.count(True) == math.floor(samples * share)


def test_the_last_step_is_as_short_as_the_samples_that_are_left_after_any_batch_sizes() -> None:
    assert BatchSizes(4, end=16).num_steps == 4
    longer = BatchSizes(4, end=17)
    assert (longer.num_steps, longer.of(3), longer.of(4), longer.of(5)) == (5, 4, 1, 0)
    assert (longer.before(5), longer.before(9)) == (17, 17)
    assert longer.until(5) == ((4, 4), (1, 1))
    after_eight = [BatchSizes(2, ((8, 1),), end) for end in (16, 9, 8)]  # one step of 8, then 2 at a time
    assert [sizes.num_steps for sizes in after_eight] == [5, 2, 1]
    assert [sizes.until(5) for sizes in after_eight] == [((8, 1), (2, 4)), ((8, 1), (1, 1)), ((8, 1),)]
    assert BatchSizes(2, ((8, 1),), 3).num_steps == 1, "a run that has trained more is at its end"
