"""Training images of the demo's captioner: glyphs moved, turned, in other colours and on other grounds.

None of the looks of `style.py` is among them: those and the quickstart's are what the captioner is measured on.
"""

from __future__ import annotations

import math
import re
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
MOST_WORDS = 2
WITH_FACES = frozenset(
    "bear cat clown cow dog dragon fox frog giraffe hamster horse lion monkey mouse panda pig rabbit robot tiger "
    "unicorn wolf zebra".split()
)
LEFT_OUT_WORDS = frozenset(
    "adult boy cross customs eye eyes fist girl hand hands fingers keycap man mark no older person pregnant raised "
    "sign speaker squared symbol woman".split()
)
LEFT_OUT = frozenset(
    "information source;yin yang;aries;taurus;gemini;cancer;leo;virgo;libra;scorpius;sagittarius;capricorn;aquarius;"
    "pisces;hot springs;ophiuchus;sparkle;curly loop;wavy dash;face massage;love letter;incoming envelope;"
    "vibration mode;radio button;trident emblem;face palm;restroom;water closet;passport control;baggage claim;"
    "left luggage".split(";")
)
ONE_OF_MANY_COLOURS = re.compile(r"(black|blue|brown|green|orange|purple|white|yellow) (heart|book)")
"""Alike in inks."""
SMALLER = 42
"""Longer side of a glyph, pixels, from which small ones are drawn: reduced by a good filter, once."""
SIZES = {False: (41, 60), True: (28, 47)}
"""{whether it is drawn from the smaller glyph: its longer side on the image, pixels}."""
TURN = 12.0
"""Largest turn in degrees."""
INKS = 5
FULL_FROM = 0.15
"""Share of the training from which on images are as different as they get."""
ONE_WAY = re.compile(r"\b(left|right|keyboard)\b")
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
        may_flip = torch.tensor([not ONE_WAY.search(name) for name in names])
        return cls(names, (_pixels(pictures, SIDE), _pixels(pictures, SMALLER)), may_flip)


def named(pictures: Sequence[Picture]) -> list[Picture]:
    """Return what the captioner learns: things whose name is short, and what the demo model is shown with.

    Signs, letters, hands and faces of people are left out.
    """
    shown = {*TAUGHT, *HELD_OUT, *OBJECTS}
    return [picture for picture in pictures if picture.caption in shown or _is_thing(picture.caption)]


def _is_thing(name: str) -> bool:
    words = name.split()
    if len(words) > MOST_WORDS or name in LEFT_OUT or LEFT_OUT_WORDS & {*words} or ONE_OF_MANY_COLOURS.fullmatch(name):
        return False
    return words[-1] != "face" or words[0] in WITH_FACES


def images_of(glyphs: Glyphs, chosen: Tensor, progress: float) -> Tensor:
    """RGB images (B, 3, SIDE, SIDE), 0 to 1, of the chosen glyphs. progress: share of the training that is over."""
    strength = min(1.0, 0.3 + 0.7 * progress / FULL_FROM)
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
    inked, hued, grey, lined = kind < 0.45, (kind > 0.6) & (kind < 0.86), (kind > 0.86) & (kind < 0.92), kind > 0.92
    images[inked] = _in_random_inks(brightness[inked])
    matrices = torch.eye(3) + 0.25 * torch.randn(int(hued.sum()), 3, 3)
    images[hued] = torch.einsum("bij,bjhw->bihw", matrices, images[hued]).clamp(0, 1)
    greys = brightness[grey][:, None]
    is_negative = torch.rand(len(greys), 1, 1, 1) < 0.3
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
    key = torch.where(how < 0.2, -key, key)
    key = torch.where(how > 0.85, torch.rand(count, INKS), key)
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
