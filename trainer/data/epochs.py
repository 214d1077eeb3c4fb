"""The length of an epoch: how many samples some passes over the data are. Imports neither torch nor numpy.

See DECISIONS 164, 205.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def occurrences(weight: float, index: int, epochs: int) -> int:
    """Return how often an image occurs in the first `epochs` epochs: epochs x weight, rounded up or down.

    Args:
        weight: Occurrences per epoch, > 0; the half in 1.5 is an occurrence in every second epoch.
        index: Index of the image in the dataset.
        epochs: Number of epochs.
    """
    whole, part = divmod(weight, 1)
    # Multiples of the golden ratio are evenly spread, so each epoch gets its share of any run of equal weights.
    return int(whole) * epochs + math.floor(epochs * part + index * GOLDEN_RATIO % 1)


def num_images(weights: Sequence[float], epochs: float) -> int:
    """Return how many images the first `epochs` epochs train: of a part of an epoch, as large a part of its images.

    Args:
        weights: Occurrences of each image per epoch.
        epochs: Passes over the data, > 0.
    """
    whole = math.floor(epochs)
    before, after = (sum(occurrences(weight, i, n) for i, weight in enumerate(weights)) for n in (whole, whole + 1))
    return max(1, before + rounded_up((epochs - whole) * (after - before)))


def rounded_up(samples: float) -> int:
    """Return a part of an epoch in whole samples. 1.1 x 10 is 11, though a little more in binary."""
    return math.ceil(round(samples, 6))


def num_mixed(images: int, question_share: float) -> int:
    """Return the fewest samples among which there are `images` images; the others are questions.

    Args:
        images: Number of images, at least 1.
        question_share: Share of questions in the first n samples, which hold floor(n x share) of them.
    """
    samples = math.floor(images / (1 - question_share))
    while samples - math.floor(samples * question_share) >= images:
        samples -= 1
    while samples - math.floor(samples * question_share) < images:
        samples += 1
    return samples
