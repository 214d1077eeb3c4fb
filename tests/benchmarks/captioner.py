"""Which names the demo's captioner gives to drawings in looks that it never saw.

    python -m tests.benchmarks.captioner [MODEL] [--names N]      some minutes; exit code 1 below LIMIT

Each drawing is one of the font's glyphs in another size, place and turn, as a JPEG, in a look of `style.py`. The font's
own colours, on white or on any colour, are measured too and not counted: those are trained. The command `--caption`
gives the names, which count letter for letter but for capitals. Needs the font of tests.demo_model.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from tests.commands import launch_py
from tests.demo_model.captioner_images import named
from tests.demo_model.pictures import FONT, Picture, glyphs
from tests.demo_model.style import LOOKS, in_inks, in_style
from trainer.system.errors import InputError
from trainer.system.terminal import complain, say

LIMIT = 0.8
"""Share of the names in all looks together that were not trained."""
TRAINED = ("font", "on any colour")
SIDES, SIZES = (64, 80, 96, 128, 160), (0.62, 0.97)
"""Pixels of an image's side, and shares of it that the glyph's longer side takes."""
TURN = 8.0
QUALITIES = (75, 85, 92)
SHOWN = 5

Look = Callable[[Image.Image], Image.Image]
"""From a glyph with alpha to an RGB image of the same size."""


def looks(rng: random.Random) -> dict[str, Look]:
    """Return {name: look}."""
    others: dict[str, Look] = {name: _inked(len(inks), name) for name, inks in LOOKS.items()}

    def on_any_colour(glyph: Image.Image) -> Image.Image:
        return _on(glyph, (rng.randrange(256), rng.randrange(256), rng.randrange(256)))

    return {"font": _on, "on any colour": on_any_colour, "quickstart": lambda glyph: in_style(_on(glyph)), **others}


def drawing(glyph: Image.Image, rng: random.Random) -> Image.Image:
    """Draw a glyph somewhere on an empty image, in some size, a little turned."""
    side = rng.choice(SIDES)
    scale = side * rng.uniform(*SIZES) / max(glyph.size)
    size = max(1, round(glyph.width * scale)), max(1, round(glyph.height * scale))
    turned = glyph.resize(size, Image.Resampling.LANCZOS).rotate(
        rng.uniform(-TURN, TURN), Image.Resampling.BICUBIC, expand=True
    )
    drawn = Image.new("RGBA", (side, side))
    drawn.paste(turned, tuple(round(rng.uniform(0, max(0, side - length))) for length in turned.size))
    return drawn


def right_names(model: str, pictures: Sequence[Picture], look: Look, rng: random.Random) -> tuple[int, list[str]]:
    """How many drawings in a look got their names, and the wrong ones, as `ant -> bee`.

    Args:
        model: As `--model`; a relative folder is one of this process's working folder.
        pictures: Glyphs and their names.
        look: What becomes of them.
        rng: Draws sizes, places, turns and qualities.
    """
    given = os.path.abspath(model) if model != "demo" and os.path.exists(model) else model
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "drawings"
        folder.mkdir()
        for picture in pictures:
            image = look(drawing(picture.pixels, rng))
            image.save(folder / f"{picture.caption}.jpg", quality=rng.choice(QUALITIES))
        done = launch_py(Path(temporary), "--caption", folder, "--model", given, "--device", "cpu")
        if done.returncode:
            raise InputError(done.stderr.strip())
        answers = {text.stem: text.read_text(encoding="utf-8").strip().lower() for text in folder.glob("*.txt")}
    wrong = [f"{name} -> {answer}" for name, answer in answers.items() if answer != name]
    return len(answers) - len(wrong), sorted(wrong)


def _inked(count: int, name: str) -> Look:
    stops = [number / (count - 1) for number in range(count)]
    return lambda glyph: in_inks(_on(glyph), LOOKS[name], stops)


def _on(glyph: Image.Image, colour: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    ground = Image.new("RGBA", glyph.size, colour)
    ground.alpha_composite(glyph)
    return ground.convert("RGB")


def main() -> int:
    """Print the share of right names by look. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.captioner", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo", help="as --model; default: demo")
    parser.add_argument("--names", type=int, default=0, help="names drawn at random for each look; default: all")
    parser.add_argument("--font", type=Path, default=FONT)
    arguments = parser.parse_args()
    try:
        pictures = named(glyphs(arguments.font))
        share = measure(arguments.model, pictures, arguments.names)
    except InputError as error:
        complain(error)
        return 2
    return int(share < LIMIT)


def measure(model: str, pictures: Sequence[Picture], names: int) -> float:
    """Print the share of right names by look, and return that of all looks that were not trained.

    Args:
        model: As `--model`.
        pictures: Glyphs and their names.
        names: How many of them are drawn in each look, chosen at random; 0: all.
    """
    rng, found, asked = random.Random(0), 0, 0
    for name, look in looks(rng).items():
        chosen = rng.sample(pictures, names) if names else pictures
        right, wrong = right_names(model, chosen, look, rng)
        if name not in TRAINED:
            found, asked = found + right, asked + len(chosen)
        say(f"{name:14} {right / len(chosen):6.1%} of {len(chosen)}   {'; '.join(wrong[:SHOWN])}")
    say(f"{'not trained':14} {found / asked:6.1%} of {asked}; limit {LIMIT:.0%}")
    return found / asked


if __name__ == "__main__":
    sys.exit(main())
