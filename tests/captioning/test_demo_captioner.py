"""`--caption FOLDER --model demo`: the captioner that comes with the program names drawings in looks it never saw."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.benchmarks.captioner import looks, right_names
from tests.benchmarks.style_transfer import subjects
from tests.commands import launch_py
from tests.demo_model.captioner import Captions, batched, random_model, train, write
from tests.demo_model.captioner_images import SIDE, Glyphs
from tests.demo_model.pictures import Picture
from trainer.captioning.work import LIMITS_OF_DEMO
from trainer.config.sections import DEMO_CAPTIONER, TRIGGER_PLACE
from trainer.models.vision_language import VisionLanguageFolder

ROOT = Path(__file__).parents[2]
SHOWN = 10
"""Images of the quickstart that are captioned; one may get another name."""


def test_it_is_small_and_comes_with_its_licence() -> None:
    files = [file for file in DEMO_CAPTIONER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 8e6
    assert {"LICENSE", "SOURCE.md", "config.json"} <= {file.name for file in files}


def test_it_names_drawings_in_the_quickstarts_look_which_it_never_saw_and_says_what_it_cannot(tmp_path: Path) -> None:
    folder = tmp_path / "drawings"
    folder.mkdir()
    (tmp_path / "demo").mkdir()  # not the model that is meant, as for `model.path`
    names = {}
    for text in sorted((ROOT / "presets" / "quickstart").glob("*.txt"))[:SHOWN]:
        names[text.stem] = text.read_text(encoding="utf-8").replace(TRIGGER_PLACE, "").strip()
        shutil.copy(text.with_suffix(".png"), folder)
    done = launch_py(tmp_path, "--caption", folder, "--model", "demo", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert LIMITS_OF_DEMO in done.stdout + done.stderr
    written = {text.stem: text.read_text(encoding="utf-8").strip() for text in folder.glob("*.txt")}
    assert written.keys() == names.keys()
    assert sum(written[stem].lower() == name for stem, name in names.items()) >= SHOWN - 1, written


@torch.no_grad()
def test_what_it_is_trained_with_computes_what_transformers_does() -> None:
    """Patches, places and attention of many images at once, against the model's own with the image processor."""
    model = random_model(len(Captions.of(("cat face",)).tokenizer)).eval()
    source = VisionLanguageFolder(str(DEMO_CAPTIONER))
    noise = torch.randint(256, (3, SIDE, SIDE, 3), dtype=torch.uint8)
    inputs = [source.inputs(Image.fromarray(one.numpy()), "x") for one in noise]
    theirs = [model.model.visual(one["pixel_values"], one["image_grid_thw"]).pooler_output for one in inputs]
    ours = batched(model)(noise.permute(0, 3, 1, 2) / 255)
    assert (ours - torch.cat(theirs)).abs().max() < 1e-5


@pytest.mark.slow
def test_a_model_that_is_trained_for_half_a_minute_names_most_of_a_few_glyphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = [Picture(name, image.convert("RGBA")) for name, image in subjects().items()]
    drawn = Glyphs.of(pictures)
    captions = Captions.of(drawn.names)
    write(tmp_path / "captioner", train(drawn, captions, 30.0, 0, print), captions.tokenizer)
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    right, wrong = right_names("captioner", pictures, looks(rng)["font"], rng)
    assert right > len(pictures) / 2, wrong
