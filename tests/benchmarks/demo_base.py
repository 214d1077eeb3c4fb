"""What the demo model draws: 24 names of training pictures drawn at random, and words put together in new ways.

    python -m tests.benchmarks.demo_base [MODEL]      prints the figures and writes the contact sheet of tests/README.md

A drawing is recognised when its own picture is among the five nearest of all pictures, by the root mean square of the
difference of pixels. diffusers' own pipeline draws, so the folder is what other programs see. Needs the font of
tests.demo_model.
"""

from __future__ import annotations

import argparse
import random
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import Flux2KleinPipeline
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tests.demo_model.pictures import Picture, glyphs, numbers_and_colours
from trainer.config.sections import DEMO

ROOT = Path(__file__).parents[2]
SHEET = ROOT / "tests" / "pictures" / "demo-base.png"
COUNT = 24
NEAREST = 5
LAYERS = (1, 2, 3)
"""Hidden states of the text encoder that are stacked: evenly spaced, as the trainer finds them."""
COLUMNS, CELL, LINES = 8, 96, 3


def load(folder: Path = DEMO / "flux2") -> Any:
    pipeline: Any = Flux2KleinPipeline.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: Any, captions: Sequence[str]) -> list[Image.Image]:
    """A picture of 64 x 64 pixels for each caption, each from noise of its own number."""
    images: list[Image.Image] = pipeline(
        prompt=list(captions),
        height=64,
        width=64,
        num_inference_steps=24,
        guidance_scale=3.0,
        generator=[torch.Generator().manual_seed(number) for number in range(len(captions))],
        max_sequence_length=pipeline.tokenizer.model_max_length,
        text_encoder_out_layers=LAYERS,
    ).images
    return images


def place(drawn: Image.Image, own: int, pictures: NDArray[np.float32]) -> int:
    """How many of the pictures (N, H, W, 3) are at least as near to the drawn one as its own, itself among them."""
    distances = np.square(pictures - np.asarray(drawn, dtype=np.float32)).mean((1, 2, 3))
    return int((distances <= distances[own]).sum())


def places(pipeline: Any, chosen: Sequence[Picture], among: Sequence[Picture]) -> tuple[list[Image.Image], list[int]]:
    """What is drawn for the chosen pictures' captions, and the place of each one's own picture."""
    drawn = draw(pipeline, [picture.caption for picture in chosen])
    pixels = np.stack([np.asarray(picture.on(), dtype=np.float32) for picture in among])
    return drawn, [place(image, among.index(picture), pixels) for image, picture in zip(drawn, chosen, strict=True)]


def write_sheet(file: Path, chosen: Sequence[Picture], drawn: Sequence[Image.Image]) -> None:
    """Pairs of the drawn and the training picture with their caption."""
    width, height = CELL + 12, 2 * CELL + 12 * LINES + 8
    sheet = Image.new("RGB", (COLUMNS * width, -(-len(chosen) // COLUMNS) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (picture, image) in enumerate(zip(chosen, drawn, strict=True)):
        left, top = index % COLUMNS * width + 6, index // COLUMNS * height
        for row, shown in enumerate((image, picture.on())):
            sheet.paste(shown.resize((CELL, CELL), Image.Resampling.LANCZOS), (left, top + row * CELL))
        lines = textwrap.wrap(picture.caption, 18, max_lines=LINES)
        pen.multiline_text((left, top + 2 * CELL + 2), "\n".join(lines), fill="black", spacing=1)
    sheet.save(file, optimize=True)


def main() -> int:
    """0 when enough training names are recognised."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.demo_base", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=DEMO / "flux2", help="of a model for diffusers")
    pipeline = load(parser.parse_args().folder)
    pictures = glyphs()
    pictures += numbers_and_colours(pictures)
    taught = [picture for picture in pictures if not picture.held_out]
    chosen = random.Random(0).sample(taught, COUNT)
    drawn, found = places(pipeline, chosen, taught)
    recognised = sum(number <= NEAREST for number in found)
    print(f"{recognised} of {COUNT} names among the nearest {NEAREST} of {len(taught)} pictures; places {found}")
    held_out = [picture for picture in pictures if picture.held_out]
    _, found = places(pipeline, held_out, pictures)
    composed = sum(number <= NEAREST for number in found)
    print(f"{composed} of {len(held_out)} numbers and colours that were not trained, of {len(pictures)} pictures")
    write_sheet(SHEET, chosen, drawn)
    return 0 if recognised >= 20 else 1


if __name__ == "__main__":
    sys.exit(main())
