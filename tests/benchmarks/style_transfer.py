"""How much of a style each adapter learns: the demo model, 32 pictures, and subjects that are not among them.

    python -m tests.benchmarks.style_transfer        writes the table and picture of tests/README.md

Each method trains on the quickstart's pictures; then 24 other subjects are drawn from the same noise as before. Beside
each stands the picture the font and the style make of it, so that it can be said how far the drawn one is from it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tests.demo_model.style import in_style
from tests.readme import write_section
from tests.runs import alone, make_run, step_numbers
from trainer.config.load import load_config
from trainer.train.loop import Trainer

ROOT = Path(__file__).parents[2]
PRESET = ROOT / "presets" / "quickstart.yaml"
HELD_OUT = Path(__file__).parent / "held_out"
SHEET = ROOT / "tests" / "pictures" / "style.png"
METHODS: dict[str, tuple[str, ...]] = {
    "lora": (),
    "locon": ("adapter.type=locon",),
    "dora": ("adapter.type=dora",),
    "loha": ("adapter.type=loha",),
    "lokr": ("adapter.type=lokr",),
    "diag-oft": ("adapter.type=diag-oft",),
    "boft": ("adapter.type=boft", "optim.lr=5e-4"),
    "full": ("adapter.type=none", "optim.lr=5e-4"),
}
"""What is changed in the preset."""
Pixels = NDArray[np.float64]
WHITE = 0.97


@dataclass(frozen=True)
class Distances:
    """Means over the subjects, of pixels from 0 to 1.

    to_style, to_base: root mean square of the difference to the picture in the style and in the font's own look.
    thing_to_style: to_style without the ground, which is white in the font's look.  palette: mean absolute difference
    of the sorted values of each channel to those of the picture in the style; it does not see where a colour is.
    """

    to_style: float
    thing_to_style: float
    to_base: float
    palette: float


@dataclass(frozen=True)
class Outcome:
    """One method. parameters: that were trained.  seconds: of the training alone.  losses: of each step."""

    before: Distances
    after: Distances
    parameters: int
    seconds: float
    losses: list[float]
    pictures: tuple[list[Image.Image], list[Image.Image]]


def subjects() -> dict[str, Image.Image]:
    """{caption: picture in the font's own look} of the held-out subjects."""
    files = sorted(HELD_OUT.glob("*.png"))
    return {file.with_suffix(".txt").read_text().strip(): Image.open(file).convert("RGB") for file in files}


def trainer_of(root: Path, changes: Sequence[str]) -> Trainer:
    """Of the preset with the changes, in this process."""
    here = ("parallel.devices=1", "train.micro_batch=16", "data.validation=0")
    cfg = load_config(PRESET, (*here, *changes)).config
    return Trainer(cfg, make_run(root, cfg, "run"), alone(), root / "cache", lambda event: None)


def learn(root: Path, changes: Sequence[str]) -> Outcome:
    """Train the preset with the changes in this process, and draw before and after."""
    originals = subjects()
    prompts = ", ".join(f"'{caption} [trigger]'" for caption in originals)
    trainer = trainer_of(root, (f"sample.prompts=[{prompts}]", *changes))
    try:
        before = [Image.open(path).convert("RGB") for path in trainer.generate_samples()]
        began = time.perf_counter()
        losses = [step_numbers(trainer).loss for _ in range(trainer.cfg.train.steps)]
        seconds = time.perf_counter() - began
        after = [Image.open(path).convert("RGB") for path in trainer.generate_samples()]
        count = sum(parameter.numel() for parameter in trainer.trainables.values())
    finally:
        trainer.close()
    found = [distances(drawn, list(originals.values())) for drawn in (before, after)]
    return Outcome(found[0], found[1], count, seconds, losses, (before, after))


def distances(drawn: Sequence[Image.Image], originals: Sequence[Image.Image]) -> Distances:
    """Of drawn pictures to the same subjects in the style and in the font's look."""
    pictures = [_pixels(image) for image in drawn]
    base = [_pixels(image) for image in originals]
    styled = [_pixels(in_style(image)) for image in originals]
    things = [image.min(-1) < WHITE for image in base]
    return Distances(
        statistics.mean(map(_rmse, pictures, styled)),
        statistics.mean(_rmse(a[thing], b[thing]) for a, b, thing in zip(pictures, styled, things, strict=True)),
        statistics.mean(map(_rmse, pictures, base)),
        statistics.mean(map(_palette, pictures, styled)),
    )


def table(found: Mapping[str, Outcome]) -> str:
    """Markdown: a row per method."""
    lines = [
        "| | trained parameters | seconds | to the style, before | after | | without the ground | palette "
        "| to the base, before | after |",
        "|---" * 10 + "|",
    ]
    for method, outcome in found.items():
        before, after = outcome.before, outcome.after
        lines.append(
            f"| {method} | {outcome.parameters / 1e3:,.0f} k | {outcome.seconds:.0f} | {before.to_style:.3f} "
            f"| {after.to_style:.3f} | {_change(before.to_style, after.to_style)} "
            f"| {_change(before.thing_to_style, after.thing_to_style)} | {_change(before.palette, after.palette)} "
            f"| {before.to_base:.3f} | {after.to_base:.3f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Train every method, or those named, print the table, and write it when all were trained."""
    names = sys.argv[1:] or list(METHODS)
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found[name] = learn(Path(folder) / name, METHODS[name])
            print(table({name: found[name]}).splitlines()[-1], flush=True)
    if list(found) == list(METHODS):
        write_section("tests", "styles", table(found))
        write_sheet(found)
    return 0


def write_sheet(found: Mapping[str, Outcome], count: int = 12) -> None:
    """A row of pictures before, one per method, and one of the style's own."""
    originals = list(subjects().values())[:count]
    rows = {"before": next(iter(found.values())).pictures[0]}
    rows |= {method: outcome.pictures[1] for method, outcome in found.items()}
    rows["the style"] = [in_style(image) for image in originals]
    side = originals[0].width
    sheet = Image.new("RGB", ((count + 1) * side, len(rows) * side), "white")
    pen = ImageDraw.Draw(sheet)
    for row, (label, pictures) in enumerate(rows.items()):
        pen.text((side - 6, (row + 0.5) * side), label, fill="black", anchor="rm")
        for column, image in enumerate(pictures[:count]):
            sheet.paste(image, ((column + 1) * side, row * side))
    sheet.save(SHEET, optimize=True)


def _pixels(image: Image.Image) -> Pixels:
    return np.asarray(image, dtype=np.float64) / 255


def _rmse(a: Pixels, b: Pixels) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2)))


def _palette(a: Pixels, b: Pixels) -> float:
    channels = (np.sort(pixels.reshape(-1, 3), axis=0) for pixels in (a, b))
    return float(np.mean(np.abs(np.subtract(*channels))))


def _change(before: float, after: float) -> str:
    return f"{(after / before - 1) * 100:+.0f} %"


if __name__ == "__main__":
    sys.exit(main())
