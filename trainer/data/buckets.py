"""The image sizes that a run trains at: one area, several aspect ratios."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from trainer.config.errors import InputError
from trainer.data.image_io import ImageFile


def bucket_sizes(
    resolution: int, multiple: int, max_aspect: float, longest: int | None = None
) -> tuple[tuple[int, int], ...]:
    """Choose the (width, height) of all buckets, from tall to wide.

    Sides are multiples of `multiple` pixels, areas are at most resolution^2 and longest : shortest side is at most
    `max_aspect`. Widths grow by about resolution / 16: finer steps would crop a few percent less, but leave small
    datasets with a bucket per image, so that a batch would hold the same image several times.

    Args:
        resolution: Side of the square bucket, pixels.
        multiple: The model's size multiple, pixels.
        max_aspect: Limit of longest : shortest side.
        longest: Limit of the longest side, pixels; None for no limit. Longer buckets shrink in their aspect ratio.

    Raises:
        InputError: The resolution is smaller than one multiple.
    """
    square = resolution // multiple * multiple
    if square == 0:
        raise InputError(f"data.resolution: {resolution} is below the {multiple} pixels this model works in; raise it")
    step = max(1, resolution // 16 // multiple) * multiple
    wide: list[tuple[int, int]] = []
    width, height = square, square
    while width <= max_aspect * height:
        wide.append((width, height))
        width += step
        height = resolution**2 // width // multiple * multiple
    if longest is not None:
        wide = list(dict.fromkeys(_within(size, longest // multiple * multiple, multiple) for size in wide))
    tall = [(height, width) for width, height in wide[:0:-1]]
    return (*tall, *wide)


def _within(size: tuple[int, int], longest: int, multiple: int) -> tuple[int, int]:
    """Shrink a wide (width, height) so that its width is at most `longest`."""
    width, height = size
    if width <= longest:
        return size
    return longest, max(1, round(height * longest / width / multiple)) * multiple


def choose_bucket(width: int, height: int, sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The size whose aspect ratio is nearest to width : height, in the logarithm, so that tall and wide are alike."""
    aspect = math.log(width / height)
    return min(sizes, key=lambda size: (abs(math.log(size[0] / size[1]) - aspect), size))


def kept_part(width: int, height: int, size: tuple[int, int]) -> tuple[float, float]:
    """The shares of an image's width and height that the crop to a bucket keeps, around its center; one of them is 1.

    Args:
        width: Pixels of the image.
        height: Pixels of the image.
        size: (width, height) of the bucket.
    """
    scale_x, scale_y = size[0] / width, size[1] / height
    scale = max(scale_x, scale_y)
    return scale_x / scale, scale_y / scale


def images_per_bucket(images: Iterable[ImageFile], sizes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Count the images per bucket: {size: images} in the order of `sizes`, without empty buckets."""
    counts = Counter(choose_bucket(image.width, image.height, sizes) for image in images)
    return {size: counts[size] for size in sizes if counts[size]}
