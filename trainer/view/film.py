"""Draws the film of a run: a frame for each sample, and a sheet with the samples of several steps. No torch.

Both are dark in every mode, since pictures look best on dark ground and a file cannot ask for the mode.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from PIL import Image, ImageDraw, ImageFont

from trainer.view.colors import TOKENS

FRAME_SIDE, SHEET_SIDE = 768, 384
"""Longer side of a picture in a frame and on a sheet, in pixels; smaller pictures are enlarged by a whole number."""
LEAST_WIDTH = 480
"""Of a frame or sheet, so that its words have room beside each other under narrow pictures."""
MOST_TITLE = 300
"""Characters of a prompt that are looked at; fewer have room."""
MOST_UNDRAWN = 0.2
"""Share of a prompt's characters that may be missing from the font before its number is shown instead."""
Picture = tuple[int, Image.Image]
"""(step, sample)"""


@dataclass(frozen=True)
class Credits:
    """The words of a film.

    Attributes:
        model: Name of the model.
        facts: Method, steps, minutes and what else is known, in one line.
        title: The prompt, or its number where the font cannot draw it.
        num_steps: Steps of the run, of which the bar shows the share that is done.
        is_over: Whether the run has ended, so that its last sample is called its result.
    """

    model: str
    facts: str
    title: str
    num_steps: int
    is_over: bool

    def label(self, step: int, is_last: bool = False) -> str:
        """Return what is written at a sample."""
        if not step:
            return "before training"
        steps = f"{step:,} step{'s' * (step != 1)}"
        return f"after {steps}" if is_last and self.is_over else f"step {step:,}"


def title_of(prompt: str, number: int) -> str:
    """Return a prompt as far as the font can draw it, else "prompt 1"."""
    line = " ".join(prompt[:MOST_TITLE].split())
    # The font has no accents: their letters stay without them.
    plain = "".join(mark for mark in unicodedata.normalize("NFKD", line) if not unicodedata.combining(mark))
    drawn = "".join(filter(_is_drawn, plain))
    return drawn if drawn.strip() and len(drawn) >= (1 - MOST_UNDRAWN) * len(plain) else f"prompt {number}"


def shown_size(size: tuple[int, int], most: int) -> tuple[int, int]:
    """Return how large a picture is shown: its longer side is at most `most`, and about 2/3 of that for a small one."""
    longer = max(size)
    scale = most / longer if longer >= most else max(1, round(most / 1.5 / longer))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def frame(picture: Picture, size: tuple[int, int], credits: Credits, is_last: bool) -> Image.Image:
    """Return a frame of the film.

    Args:
        picture: The sample.
        size: As `shown_size`, in pixels; a sample of another shape is shown within it.
        credits: The words.
        is_last: Whether it is the last sample.
    """
    width, height = max(size[0], LEAST_WIDTH), size[1]
    unit = width / 40  # all of the frame grows with the picture, and reads alike when it is scaled to one width
    margin, large, small = round(unit), _font(round(1.7 * unit)), _font(round(1.1 * unit))
    whole = width + 2 * margin, height + margin + round(5.9 * unit)
    even = whole[0] + whole[0] % 2, whole[1] + whole[1] % 2  # H.264 stores colours for two pixels together
    canvas = Image.new("RGB", even, _color("--panel"))
    draw = ImageDraw.Draw(canvas)
    _place(canvas, picture[1], (margin, margin, width, height))
    top = margin + height + round(0.6 * unit)
    _bar(draw, (margin, top, width, max(3, round(unit / 6))), picture[0] / max(1, credits.num_steps))
    first, second = top + round(2 * unit), top + round(3.9 * unit)
    label = credits.label(picture[0], is_last)
    draw.text((margin, first), label, _color("--ink"), large, "lm")
    rest = width - round(large.getlength(label)) - 2 * margin
    draw.text((margin + width, first), _fitted(credits.model, small, rest), _color("--ink"), small, "rm")
    facts = _fitted(credits.facts, small, round(0.7 * width))
    draw.text((margin + width, second), facts, _color("--ink3"), small, "rm")
    rest = width - round(small.getlength(facts)) - 2 * margin
    draw.text((margin, second), _fitted(credits.title, small, rest), _color("--ink2"), small, "lm")
    return canvas


def sheet(pictures: Sequence[Picture], credits: Credits) -> Image.Image:
    """Return a sheet: the samples of several steps side by side, with their steps and the prompt. At least one."""
    cell = shown_size(pictures[-1][1].size, SHEET_SIDE)
    gap, large, small = 24, _font(26), _font(22)
    column = max(cell[0], round(small.getlength("before training")))
    inner = max(len(pictures) * (column + gap) - gap, 2 * LEAST_WIDTH)
    column = (inner + gap) // len(pictures) - gap  # few narrow pictures are spread over the least width
    canvas = Image.new("RGB", (inner + 2 * gap, cell[1] + 178), _color("--panel"))
    draw = ImageDraw.Draw(canvas)
    for at, (step, image) in enumerate(pictures):
        left, bottom = gap + at * (column + gap), gap + cell[1]
        _place(canvas, image, (left, gap, column, cell[1]))
        _bar(draw, (left, bottom + 12, column, 4), step / max(1, credits.num_steps))
        is_last = at == len(pictures) - 1
        color = _color("--ink" if at in (0, len(pictures) - 1) else "--ink3")
        draw.text((left, bottom + 38), _fitted(credits.label(step, is_last), small, column), color, small, "lm")
    line = gap + cell[1] + 104
    corner = _fitted(f"{credits.model}, {credits.facts}", small, round(0.6 * inner))
    draw.line((gap, line - 34, gap + inner, line - 34), _color("--line"), 2)
    draw.text((gap + inner, line + 8), corner, _color("--ink2"), small, "rm")
    rest = inner - round(small.getlength(corner)) - 2 * gap
    draw.text((gap, line + 8), _fitted(credits.title, large, rest), _color("--ink"), large, "lm")
    return canvas


def _color(token: str) -> str:
    return TOKENS[token][1]


@lru_cache(maxsize=16)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


@lru_cache(maxsize=1024)
def _is_drawn(mark: str) -> bool:
    """Whether the font has a character: it draws all others as the same box."""
    if mark == " ":
        return True
    font = _font(20)
    return bytes(font.getmask(mark)) not in (bytes(font.getmask("\uffff")), b"")


def _fitted(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Return text that is at most `width` wide, with dots where its end is cut off."""
    if font.getlength(text) <= width:
        return text
    cut = bisect(range(len(text) + 1), width, key=lambda end: ceil(font.getlength(f"{text[:end]}..."))) - 1
    return f"{text[:cut].rstrip()}..." if cut > 0 else ""


def _place(canvas: Image.Image, picture: Image.Image, box: tuple[int, int, int, int]) -> None:
    """Paste a picture into the middle of a box (left, top, width, height), as large as it fits.

    An enlarged sample keeps its own pixels: what is not in it is not invented.
    """
    left, top, width, height = box
    is_small = picture.width < width and picture.height < height
    method = Image.Resampling.NEAREST if is_small else Image.Resampling.LANCZOS
    scale = min(width / picture.width, height / picture.height)
    # Of a sample that is much wider than high, a line of pixels is left.
    shown = picture.resize((max(1, round(scale * picture.width)), max(1, round(scale * picture.height))), method)
    canvas.paste(_color("--sunk"), (left, top, left + width, top + height))
    canvas.paste(shown, (left + (width - shown.width) // 2, top + (height - shown.height) // 2))


def _bar(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], share: float) -> None:
    """Draw a bar (left, top, width, height) of which a share is done."""
    left, top, width, height = box
    draw.rectangle((left, top, left + width - 1, top + height - 1), _color("--line"))
    done = round(width * min(1.0, share))
    if done:
        draw.rectangle((left, top, left + done - 1, top + height - 1), _color("--acc"))
