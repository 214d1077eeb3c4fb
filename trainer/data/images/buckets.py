"""The image sizes that a run trains at: one area, several aspect ratios. See DECISIONS 73."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainer.config.sections import DataConfig
from trainer.config.size import Size
from trainer.data.images.image_io import ImageFile
from trainer.system.errors import InputError


@dataclass(frozen=True)
class Buckets:
    """The sizes that the images of a run are trained at.

    Attributes:
        by_side: {resolution: its buckets}, from small to large resolutions.
        at: `data.at_resolutions`.
        least_kept: The least share of an image that a crop must keep, else the image is left out.
    """

    by_side: Mapping[int, tuple[Size, ...]]
    at: Literal["each", "largest"] = "each"
    least_kept: float = 0.0

    @classmethod
    def of(cls, data: DataConfig, multiple: int, longest: int | None) -> Buckets:
        """Choose the buckets of a config. multiple, longest: as `bucket_sizes`, which may raise InputError."""
        by_side = {side: bucket_sizes(side, multiple, data.max_aspect, longest) for side in data.all_sides}
        return cls(by_side, data.at_resolutions, 1 - data.most_cropped if data.fit == "drop" else 0.0)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """All sizes, those of small resolutions first."""
        return tuple(dict.fromkeys(size for sizes in self.by_side.values() for size in sizes))

    def nearest(self, image: ImageFile, side: int) -> Size:
        """The size in which an image is trained at a resolution."""
        return choose_bucket(image.size, self.by_side[side])

    def of_image(self, image: ImageFile, sides: Sequence[int]) -> tuple[tuple[int, Size], ...]:
        """(resolution, size) of each time that an image occurs; none where it would lose too much.

        Args:
            image: The image.
            sides: The resolutions of its folder, from small to large.
        """
        nearest = {side: self.nearest(image, side) for side in sides or tuple(self.by_side)[:1]}
        chosen = chosen_sides(image, nearest) if self.at == "largest" else tuple(nearest)
        kept = {
            nearest[side]: side
            for side in reversed(chosen)
            if math.prod(kept_part(image.size, nearest[side])) >= self.least_kept
        }
        return tuple((side, size) for size, side in reversed(kept.items()))


def bucket_sizes(resolution: int, multiple: int, max_aspect: float, longest: int | None = None) -> tuple[Size, ...]:
    """Choose the sizes of all buckets, from tall to wide.

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
    wide: list[Size] = []
    width, height = square, square
    while width <= max_aspect * height:
        wide.append(Size(width, height))
        width += step
        height = resolution**2 // width // multiple * multiple
    if longest is not None:
        wide = list(dict.fromkeys(_within(size, longest // multiple * multiple, multiple) for size in wide))
    # The wide ones turned, without the square, which is there already.
    tall = [Size(size.height, size.width) for size in wide[:0:-1]]
    return (*tall, *wide)


def _within(size: Size, longest: int, multiple: int) -> Size:
    """Shrink a wide size so that its width is at most `longest`."""
    if size.width <= longest:
        return size
    return Size(longest, max(1, round(size.height * longest / size.width / multiple)) * multiple)


def choose_bucket(whole: Size, sizes: Iterable[Size]) -> Size:
    """The bucket whose aspect ratio is nearest, in the logarithm, so that tall and wide are alike; with all frames.

    Args:
        whole: Size of the image or clip.
        sizes: The buckets.
    """
    aspect = math.log(whole.width / whole.height)
    found = min(sizes, key=lambda size: (abs(math.log(size.width / size.height) - aspect), size))
    return found if found.frames == whole.frames else replace(found, frames=whole.frames)


def chosen_sides(image: ImageFile, nearest: Mapping[int, Size]) -> tuple[int, ...]:
    """The largest resolution whose size an image fills without being enlarged, else the smallest one.

    Args:
        image: The image.
        nearest: {resolution: its size there}, from small to large.
    """
    filled = [side for side, size in nearest.items() if size.width <= image.width and size.height <= image.height]
    return (filled[-1] if filled else next(iter(nearest)),)


def kept_part(whole: Size, size: Size) -> tuple[float, float]:
    """The shares of an image's width and height that the crop to a bucket keeps, around its center; one of them is 1.

    Args:
        whole: Size of the image.
        size: Size of the bucket.
    """
    scale_x, scale_y = size.width / whole.width, size.height / whole.height
    scale = max(scale_x, scale_y)
    return scale_x / scale, scale_y / scale


def images_per_bucket(chosen: Iterable[Size], sizes: Sequence[Size]) -> dict[Size, int]:
    """Count images by their sizes: {size: images} in the order of `sizes`, then of frames, without empty buckets."""
    counts, places = Counter(chosen), {size.frame: place for place, size in enumerate(sizes)}
    return {size: counts[size] for size in sorted(counts, key=lambda size: (places[size.frame], size.frames))}
