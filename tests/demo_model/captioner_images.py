"""Training images of the demo's captioner: glyphs moved, turned, in other colours and on other grounds.

None of the looks of `style.py`, the quickstart's among them, is drawn: on those the captioner is measured. Grey images
come near to its `grey`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tests.demo_model.pictures import OBJECTS, Picture
from tests.demo_model.style import HELD_OUT, TAUGHT

SIDE = 60
"""Pixels of an image's side."""
RANGES = (
    *((0x2600, 0x2604), (0x26C4, 0x26C5), (0x1F308, 0x1F309), (0x1F32D, 0x1F3B0), (0x1F3B7, 0x1F3BC)),
    *((0x1F400, 0x1F43F), (0x1F680, 0x1F6A3), (0x1F6F0, 0x1F700), (0x1F950, 0x1F970), (0x1F980, 0x1F9B0)),
    *((0x1F9C0, 0x1F9CC), (0x1FAB0, 0x1FAC0), (0x1FAD0, 0x1FAE0)),
)
"""Characters that are animals, plants, food, weather, vehicles, musical instruments and celebrations."""
MOST_WORDS = 2
SMALLER = 42
"""Longer side of a glyph, pixels, from which small ones are drawn: reduced by a good filter, once."""
SIZES = {False: (41, 60), True: (28, 47)}
"""{whether it is drawn from the smaller glyph: its longer side on the image, pixels}."""
TURN = 12.0
"""Largest turn in degrees."""
INKS = 5
ONE_WAY = ("musical keyboard",)
"""Names of what is never mirrored."""


@dataclass(frozen=True)
class Glyphs:
    """Glyphs as tensors.

    Attributes:
        names: Their names.
        levels: (N, 4, H, W) each: colours multiplied by alpha, and alpha, 0 to 1; whole and reduced to SMALLER.
        may_flip: (N,) whether a mirrored one has the same name.
    """

    names: tuple[str, ...]
    levels: tuple[Tensor, Tensor]
    may_flip: Tensor

    @classmethod
    def of(cls, pictures: Sequence[Picture]) -> Glyphs:
        names = tuple(picture.caption for picture in pictures)
        may_flip = torch.tensor([name not in ONE_WAY for name in names])
        return cls(names, (_pixels(pictures, SIDE), _pixels(pictures, SMALLER)), may_flip)


def named(pictures: Sequence[Picture]) -> list[Picture]:
    """Return what the captioner learns: things of RANGES with short names, and what the demo model is shown with."""
    things = {unicodedata.name(chr(code), "").lower().replace("-", " ") for one in RANGES for code in range(*one)}
    shown = {*TAUGHT, *HELD_OUT, *OBJECTS}
    short = {name for name in things if len(name.split()) <= MOST_WORDS}
    return [picture for picture in pictures if picture.caption in short | shown]


def images_of(glyphs: Glyphs, chosen: Tensor, strength: float) -> Tensor:
    """RGB images (B, 3, SIDE, SIDE), 0 to 1, of the chosen glyphs. strength: how different they are, 0 to 1."""
    placed = _placed(glyphs, chosen, strength)
    colours, alpha = placed[:, :3], placed[:, 3:]
    count = len(chosen)
    is_white = torch.rand(count, 1, 1, 1) < 0.5
    ground = torch.where(is_white, torch.ones(count, 3, 1, 1), torch.rand(count, 3, 1, 1))
    images = colours + ground * (1 - alpha)
    _recolour(images, strength)
    contrast, brightness = 0.65 + 0.35 * torch.rand(count, 1, 1, 1), torch.rand(count, 1, 1, 1)
    images = images * contrast + (1 - contrast) * brightness
    blurred = torch.rand(count) < 0.25
    images[blurred] = nn.functional.avg_pool2d(
        nn.functional.pad(images[blurred], (1, 1, 1, 1), mode="replicate"), 3, stride=1
    )
    noise = 0.02 * torch.randn(count, 1, 1, 1) * torch.randn_like(images)
    return (images + noise).clamp(0, 1)


def _pixels(pictures: Sequence[Picture], longer: int) -> Tensor:
    """(N, 4, H, W): glyphs whose longer side has so many pixels, with two empty ones around."""
    side = round(longer * pictures[0].pixels.width / SIDE)
    small = [picture.pixels.resize((side, side), Image.Resampling.LANCZOS) for picture in pictures]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in small])).permute(0, 3, 1, 2).float() / 255
    pixels[:, :3] *= pixels[:, 3:]
    return pixels.contiguous()


def _placed(glyphs: Glyphs, chosen: Tensor, strength: float) -> Tensor:
    """(B, 4, SIDE, SIDE): glyphs of random size, turned, moved, some mirrored and a little wider or narrower."""
    is_small = bool(torch.rand(()) < 0.4)
    source = glyphs.levels[is_small][chosen]
    count, longer = len(chosen), SMALLER if is_small else SIDE
    least, most = SIZES[is_small]
    size = least + (most - least) * torch.rand(count)
    zoom = size / longer * source.shape[-1] / SIDE
    angle = (torch.rand(count) * 2 - 1) * math.radians(TURN) * strength
    mirrored = torch.where((torch.rand(count) < 0.3) & glyphs.may_flip[chosen], -1.0, 1.0)
    room = ((SIDE - size) / SIDE + 0.06) * strength
    moved = (torch.rand(count, 2) * 2 - 1) * room[:, None]
    wider = (1 + 0.08 * torch.randn(count)) * mirrored
    cosine, sine = torch.cos(angle) / zoom, torch.sin(angle) / zoom
    turn = torch.stack([torch.stack([cosine * wider, sine * wider], -1), torch.stack([-sine, cosine], -1)], 1)
    affine = torch.cat([turn, -turn @ moved[:, :, None]], -1)
    grid = nn.functional.affine_grid(affine, [count, 4, SIDE, SIDE], align_corners=False)
    return nn.functional.grid_sample(source, grid, align_corners=False)


def _recolour(images: Tensor, strength: float) -> None:
    """Give a share of the images other colours, in place: inks by brightness, other hues, greys, outlines."""
    kind = torch.where(torch.rand(len(images)) < strength, torch.rand(len(images)), 0.5)
    brightness = _brightness(images)
    inked, hued, grey, lined = kind < 0.42, (kind > 0.65) & (kind < 0.9), (kind > 0.9) & (kind < 0.97), kind > 0.97
    images[inked] = _in_random_inks(brightness[inked])
    matrices = torch.eye(3) + 0.25 * torch.randn(int(hued.sum()), 3, 3)
    images[hued] = torch.einsum("bij,bjhw->bihw", matrices, images[hued]).clamp(0, 1)
    greys = brightness[grey][:, None]
    is_negative = torch.rand(len(greys), 1, 1, 1) < 0.15
    images[grey] = torch.where(is_negative, 1 - greys, greys).expand(-1, 3, -1, -1)
    edges = _edges(images[lined])
    first, second = torch.rand(2, len(edges), 3, 1, 1)
    images[lined] = first * edges + second * (1 - edges)


def _brightness(colours: Tensor) -> Tensor:
    """(B, 3, ...) to (B, ...)."""
    return 0.299 * colours[:, 0] + 0.587 * colours[:, 1] + 0.114 * colours[:, 2]


def _in_random_inks(brightness: Tensor) -> Tensor:
    """(B, 3, H, W) of (B, H, W): INKS colours at random stops; most often from dark to bright, some the other way."""
    count = len(brightness)
    stops = torch.rand(count, INKS).sort(1).values
    stops[:, 0], stops[:, -1] = 0, 1
    inks = torch.rand(count, INKS, 3)
    key, how = _brightness(inks.transpose(1, 2)), torch.rand(count, 1)
    key = torch.where(how < 0.12, -key, key)
    key = torch.where(how > 0.96, torch.rand(count, INKS), key)
    inks = inks.gather(1, key.argsort(1)[:, :, None].expand(-1, -1, 3))
    mean = inks.mean(1, keepdim=True)
    inks = (mean + (inks - mean) * (1 + 0.8 * torch.rand(count, 1, 1))).clamp(0, 1)
    mixed = inks[:, 0, :, None, None]
    for k in range(INKS - 1):
        begin, end = stops[:, k, None, None], stops[:, k + 1, None, None]
        share = ((brightness - begin) / (end - begin + 1e-3)).clamp(0, 1)[:, None]
        mixed = mixed + (inks[:, k + 1] - inks[:, k])[:, :, None, None] * share
    return mixed


def _edges(images: Tensor) -> Tensor:
    """Where the images change, 0 to 1: (B, 1, H, W)."""
    across = nn.functional.pad(images.diff(dim=3).abs().amax(1), (0, 1))
    down = nn.functional.pad(images.diff(dim=2).abs().amax(1), (0, 0, 0, 1))
    return ((across + down) * 3).clamp(0, 1)[:, None]
