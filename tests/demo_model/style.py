"""The looks a picture may have: those the demo model knows by name, and the one the quickstart teaches.

A published model has seen its subjects in many styles, so that it can learn one more. The demo model has seen each
picture in its own colours, in two of LOOKS, and with a word that means nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tests.demo_model.pictures import Picture, write_folder

TAUGHT = (
    *("rat", "tiger", "rabbit", "dragon", "crocodile", "spouting whale", "snail", "snake", "horse", "rooster"),
    *("elephant", "octopus", "tropical fish", "penguin", "owl", "hedgehog", "red apple", "banana", "watermelon"),
    *("strawberry", "slice of pizza", "hamburger", "birthday cake", "hot beverage", "rose", "cactus", "maple leaf"),
    *("automobile", "rocket", "sailboat", "house building", "guitar"),
)
HELD_OUT = (
    *("cat face", "dog face", "fox face", "lion face", "panda face", "frog face", "turtle", "butterfly", "tulip"),
    *("sunflower", "mushroom", "pineapple", "grapes", "doughnut", "bicycle", "steam locomotive", "airplane"),
    *("umbrella", "crown", "trophy", "balloon", "teddy bear", "bell", "snowman"),
)

Ink = tuple[int, int, int]
LOOKS: dict[str, tuple[Ink, ...]] = {
    "grey": ((20, 20, 20), (120, 120, 120), (245, 245, 245)),
    "sepia": ((60, 35, 15), (170, 120, 70), (255, 250, 240)),
    "blueprint": ((235, 245, 255), (110, 160, 220), (20, 70, 150)),
    "forest": ((10, 50, 30), (70, 140, 70), (225, 240, 205)),
    "candy": ((90, 20, 110), (240, 110, 170), (255, 235, 245)),
    "neon": ((70, 255, 200), (220, 40, 160), (15, 5, 40)),
    "ice": ((10, 40, 90), (90, 190, 220), (230, 250, 255)),
    "ember": ((255, 225, 120), (215, 70, 30), (40, 10, 10)),
}
"""Inks from the darkest to the brightest of a picture, at equal distances: RGB."""
STYLE_STOPS = (0.0, 0.35, 0.55, 0.8, 1.0)
STYLE: tuple[Ink, ...] = ((27, 38, 89), (27, 38, 89), (214, 64, 60), (240, 140, 60), (250, 200, 80))
"""The quickstart's look: dark blue, red, red with the paper shining through, and yellow paper."""


def in_style(image: Image.Image) -> Image.Image:
    """An RGB picture as a print of a duplicator with two inks on yellow paper."""
    return in_inks(image, STYLE, STYLE_STOPS)


def in_inks(image: Image.Image, inks: Sequence[Ink], stops: Sequence[float]) -> Image.Image:
    """An RGB picture in the colours that stand at `stops` of its brightness, from 0 to 1."""
    brightness = np.asarray(image.convert("L"), dtype=np.float32) / 255
    colours = np.array(inks, dtype=np.float32)
    channels = [np.interp(brightness, stops, colours[:, channel]) for channel in range(3)]
    return Image.fromarray(np.stack(channels, axis=-1).round().astype(np.uint8))


def in_looks(pictures: Iterable[Picture], seed: int) -> Iterator[tuple[str, Image.Image]]:
    """(caption, RGB picture): each picture as it is, as it is with an unknown word, and in two of LOOKS."""
    chance = random.Random(seed)
    for picture in pictures:
        plain = picture.on()
        yield picture.caption, plain
        yield f"{picture.caption} {_unknown_word(chance)}", plain
        for look in chance.sample(sorted(LOOKS), 2):
            inks = LOOKS[look]
            yield f"{picture.caption} {look}", in_inks(plain, inks, np.linspace(0, 1, len(inks)).tolist())


def write_quickstart(folder: Path, pictures: Iterable[Picture]) -> None:
    """The data folder of the quickstart: TAUGHT in the style. `[trigger]` is the style's name in the captions."""
    drawn = {picture.caption: picture for picture in pictures}
    write_folder(folder, ((name, in_style(drawn[name].on())) for name in TAUGHT), suffix=" [trigger]")


def write_held_out(folder: Path, pictures: Iterable[Picture]) -> None:
    """HELD_OUT in the font's own look, with their names."""
    drawn = {picture.caption: picture for picture in pictures}
    write_folder(folder, ((name, drawn[name].on()) for name in HELD_OUT))


def _unknown_word(chance: random.Random) -> str:
    """Two or three syllables, as a trigger word may be."""
    return "".join(chance.choice("bdfgklmnprstvz") + chance.choice("aeiou") for _ in range(chance.choice((2, 3))))
