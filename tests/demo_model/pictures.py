"""Pictures of the demo model: the glyphs of a colour emoji font with their Unicode names.

Needs Debian's `fonts-noto-color-emoji`, or another font with embedded colour bitmaps of 109 pixels. Numbers and colours
are taught by pictures made of several glyphs and by glyphs in another hue; some of those are kept out of the training
set, so that it can be seen whether the words were understood.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trainer.system.errors import InputError

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
FONT_SIZE = 109
RANGES = ((0x203C, 0x3300), (0x1F000, 0x1FB00))
SIZE = 64
MARGIN = 2

COUNTS = {2: "two", 3: "three", 4: "four"}
PLACES = {
    2: ((0, 16), (32, 16)),
    3: ((16, 0), (0, 32), (32, 32)),
    4: ((0, 0), (32, 0), (0, 32), (32, 32)),
}
"""Left upper corners of several glyphs of half size."""
HUES = {"red": 0, "orange": 30, "yellow": 55, "green": 120, "blue": 220, "purple": 285}
"""Degrees on the colour circle."""
OBJECTS = {
    "red apple": ("apple", "apples"),
    "banana": ("banana", "bananas"),
    "bicycle": ("bicycle", "bicycles"),
    "bird": ("bird", "birds"),
    "butterfly": ("butterfly", "butterflies"),
    "cactus": ("cactus", "cactuses"),
    "candle": ("candle", "candles"),
    "automobile": ("car", "cars"),
    "cherries": ("cherry", "cherries"),
    "crown": ("crown", "crowns"),
    "dog": ("dog", "dogs"),
    "tropical fish": ("fish", "fishes"),
    "hibiscus": ("flower", "flowers"),
    "guitar": ("guitar", "guitars"),
    "top hat": ("hat", "hats"),
    "house building": ("house", "houses"),
    "key": ("key", "keys"),
    "lemon": ("lemon", "lemons"),
    "crescent moon": ("moon", "moons"),
    "mushroom": ("mushroom", "mushrooms"),
    "octopus": ("octopus", "octopuses"),
    "pear": ("pear", "pears"),
    "pencil": ("pencil", "pencils"),
    "rocket": ("rocket", "rockets"),
    "rose": ("rose", "roses"),
    "shark": ("shark", "sharks"),
    "snail": ("snail", "snails"),
    "white medium star": ("star", "stars"),
    "strawberry": ("strawberry", "strawberries"),
    "evergreen tree": ("tree", "trees"),
    "tulip": ("tulip", "tulips"),
    "turtle": ("turtle", "turtles"),
    "umbrella": ("umbrella", "umbrellas"),
    "spouting whale": ("whale", "whales"),
}
"""Glyphs that are also drawn several times and in other hues: {name: (one, many)}."""
HELD_OUT_EVERY = 6


@dataclass(frozen=True)
class Picture:
    """pixels: RGBA, SIZE x SIZE.  held_out: no training picture."""

    caption: str
    pixels: Image.Image
    held_out: bool = False

    def on(self, colour: str = "white") -> Image.Image:
        """The picture on a plain ground."""
        ground = Image.new("RGBA", self.pixels.size, colour)
        return Image.alpha_composite(ground, self.pixels).convert("RGB")


def glyphs(font: Path = FONT) -> list[Picture]:
    """One picture per character of the font that has a name; equal ones once.

    Raises InputError where the font is not there or has no bitmaps of FONT_SIZE.
    """
    try:
        face = ImageFont.truetype(str(font), FONT_SIZE)
    except OSError as error:
        raise InputError(f"{font}: {error}; install fonts-noto-color-emoji, or name its file with --font") from error
    pictures: dict[bytes, Picture] = {}
    for code in (code for first, end in RANGES for code in range(first, end)):
        name = unicodedata.name(chr(code), "").lower().replace("-", " ")
        canvas = Image.new("RGBA", (160, 160))
        ImageDraw.Draw(canvas).text((12, 12), chr(code), font=face, embedded_color=True)
        box = canvas.getbbox()
        if not name or box is None or not _coloured(canvas):
            continue
        pixels = _fitted(canvas.crop(box), SIZE)
        pictures.setdefault(pixels.tobytes(), Picture(name, pixels))
    return list(pictures.values())


def numbers_and_colours(pictures: Iterable[Picture]) -> Iterator[Picture]:
    """OBJECTS several times and in other hues; a caption that a glyph has already is left out."""
    by_name = {picture.caption: picture for picture in pictures}
    made = []
    for name, (one, many) in OBJECTS.items():
        pixels = by_name[name].pixels
        made += [(f"{spelled} {many}", _several(pixels, count)) for count, spelled in COUNTS.items()]
        made += [(f"{colour} {one}", _hued(pixels, degrees)) for colour, degrees in HUES.items()]
    for index, (caption, drawn) in enumerate(made):
        if caption not in by_name:
            yield Picture(caption, drawn, index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1)


def write_folder(folder: Path, pictures: Iterable[tuple[str, Image.Image]], suffix: str = "") -> None:
    """A data folder of named pictures. Captions are the names and the suffix. The folder must be new or empty."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, (name, image) in enumerate(pictures):
        stem = f"{index:04d}-{'-'.join(re.findall('[a-z0-9]+', name))}"
        image.save(folder / f"{stem}.png", optimize=True)
        (folder / f"{stem}.txt").write_text(f"{name}{suffix}\n", encoding="utf-8")


def _coloured(canvas: Image.Image) -> bool:
    """Whether a glyph has colours of its own: outlines for what the font lacks are black."""
    pixels = np.asarray(canvas)
    return bool(pixels[..., :3][pixels[..., 3] > 0].max() > 0)


def _fitted(glyph: Image.Image, size: int) -> Image.Image:
    """A glyph in the middle of an empty square, its longer side all but the margin."""
    scale = (size - 2 * MARGIN) / max(glyph.size)
    small = glyph.resize(
        (max(1, round(glyph.width * scale)), max(1, round(glyph.height * scale))), Image.Resampling.LANCZOS
    )
    square = Image.new("RGBA", (size, size))
    square.alpha_composite(small, ((size - small.width) // 2, (size - small.height) // 2))
    return square


def _several(pixels: Image.Image, count: int) -> Image.Image:
    half = pixels.resize((SIZE // 2, SIZE // 2), Image.Resampling.LANCZOS)
    square = Image.new("RGBA", (SIZE, SIZE))
    for place in PLACES[count]:
        square.alpha_composite(half, place)
    return square


def _hued(pixels: Image.Image, degrees: int) -> Image.Image:
    """The picture with one hue, as saturated as a coloured picture is."""
    hue, saturation, value = (np.asarray(band) for band in pixels.convert("RGB").convert("HSV").split())
    hsv = np.stack(
        [np.full_like(hue, round(degrees / 360 * 255)), np.maximum(saturation, 150), np.maximum(value, 60)], axis=-1
    )
    coloured = Image.fromarray(hsv, "HSV").convert("RGBA")
    coloured.putalpha(pixels.getchannel("A"))
    return coloured
