"""The images of a run as they are trained: cropped, with what a mask takes out of the loss, and with their captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageChops

from trainer.config import families
from trainer.config.schema import RunConfig
from trainer.config.sections import DataConfig
from trainer.config.size import Size
from trainer.data.images import image_warnings
from trainer.data.images.buckets import Buckets
from trainer.data.images.image_files import CaptionedImage, scan
from trainer.data.images.image_io import Framing, load_bordered_mask, load_mask, load_rgb
from trainer.system.errors import InputError

MOST_OUTSIDE = 0.75
"""Of the colour that is drawn over what is not in the loss at all."""
OUTSIDE = "#6f6a8f"


@dataclass(frozen=True)
class Trained:
    """An image with what is trained of it.

    Attributes:
        image: The image, its captions as they are trained, and its mask.
        size: (width, height) that it is trained at, the largest of several; None where it is left out.
        share: The share of its pixels that the crop keeps.
        is_held_out: Whether it is not trained on.
    """

    image: CaptionedImage
    size: Size | None
    share: float
    is_held_out: bool

    @property
    def path(self) -> Path:
        return self.image.path


def compared(one: RunConfig, other: RunConfig) -> list[tuple[Trained, Trained]]:
    """Return the images of a run, those that are trained on first, each as the run and as another one trains them.

    Raises InputError as a scan does.
    """
    found = scan(one.data)
    images = (*found.train, *found.validation)
    held_out = [number >= len(found.train) for number in range(len(images))]
    return list(zip(_trained(one, images, held_out), _trained(other, images, held_out), strict=True))


def _trained(cfg: RunConfig, images: Sequence[CaptionedImage], held_out: Sequence[bool]) -> Iterator[Trained]:
    known = families.of(cfg.model.family)
    buckets = Buckets.of(cfg.data, known.size_multiple, known.longest_side) if known and known.in_buckets else None
    for image, is_held_out in zip(images, held_out, strict=True):
        sides = [side for side in image.sides if buckets and side in buckets.by_side] or cfg.data.sides
        sizes = [size for _, size in buckets.of_image(image, sides)] if buckets else [image.size]
        share = image_warnings.fit(image, sizes[-1], cfg.data.fit == "pad")[1] if sizes else 0.0
        yield Trained(image, sizes[-1] if sizes else None, share, is_held_out)


def drawn(one: Trained, data: DataConfig, side: int) -> Image.Image:
    """Return an image as it is trained, its longer side at most `side` pixels. What is not in the loss is painted over.

    Raises:
        InputError: It is left out, or cannot be read any more.
    """
    if one.size is None:
        raise InputError(f"{one.path}: left out, since too much of it would be cut off")
    scale = min(1.0, side / max(one.size.frame))
    size = max(1, round(one.size.width * scale)), max(1, round(one.size.height * scale))
    framing = Framing(one.image.focus, data.fit == "pad", background=data.background)
    picture = load_rgb(one.image, size, framing)
    if data.fit == "pad":
        weights = load_bordered_mask(one.image, one.image.mask, size, data.mask_background, framing)
        levels = weights.point(lambda weight: weight * 255)
    elif one.image.mask is not None:
        shown = 1 - data.mask_background
        levels = load_mask(one.image.mask, size, framing).point(lambda level: level * shown + 255 * (1 - shown))
    else:
        return picture
    cover = ImageChops.invert(levels.convert("L")).point(lambda level: round(level * MOST_OUTSIDE))
    return Image.composite(Image.new("RGB", size, OUTSIDE), picture, cover)
