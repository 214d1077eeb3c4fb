"""The model of `model.path: demo`: small, complete, with its licence; it draws what its captions say."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.benchmarks import demo_base
from tests.benchmarks.style_transfer import subjects
from tests.demo_model.__main__ import make_model
from tests.demo_model.pictures import Picture, glyphs
from tests.demo_model.style import HELD_OUT, LOOKS, TAUGHT
from tests.models.common import load
from tests.runs import run_config
from trainer.config.sections import DEMO
from trainer.models import families
from trainer.system.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return demo_base.load()


def drawn(pipeline: Any, *captions: str) -> NDArray[np.float32]:
    """(N, H, W, 3), 0 to 255."""
    return np.stack([np.asarray(image, dtype=np.float32) for image in demo_base.draw(pipeline, captions)])


def test_it_is_small_and_comes_with_its_licence() -> None:
    files = [file for file in (DEMO / "flux2").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 25e6
    assert {"LICENSE", "SOURCE.md", "model_index.json"} <= {file.name for file in files}


@pytest.mark.slow
def test_a_drawing_is_nearest_to_the_picture_of_its_own_name(pipeline: Any) -> None:
    pictures = subjects()
    pixels = np.stack([np.asarray(picture, dtype=np.float32) for picture in pictures.values()])
    images = demo_base.draw(pipeline, list(pictures))
    places = [demo_base.place(image, index, pixels) for index, image in enumerate(images)]
    assert sum(place == 1 for place in places) >= 22, places


def test_a_colour_in_the_caption_colours_the_object(pipeline: Any) -> None:
    red, green, blue = (
        image[image.min(-1) < 200].mean(0) for image in drawn(pipeline, "red car", "green car", "blue car")
    )
    assert red.argmax() == 0
    assert green.argmax() == 1
    assert blue.argmax() == 2


def test_a_number_in_the_caption_is_the_number_of_objects(pipeline: Any) -> None:
    """Two stand in the middle of the height, four fill it."""
    two, four = (255 - image for image in drawn(pipeline, "two keys", "four keys"))
    assert two[:14].mean() < 0.3 * four[:14].mean()


def test_a_look_in_the_caption_colours_the_ground(pipeline: Any) -> None:
    plain, blueprint = (image[:4, :4].mean((0, 1)) for image in drawn(pipeline, "cat face", "cat face blueprint"))
    assert plain.min() > 240
    assert abs(blueprint - LOOKS["blueprint"][-1]).max() < 40


def test_a_word_without_a_meaning_changes_nothing(pipeline: Any) -> None:
    [plain], [other] = drawn(pipeline, "cat face"), drawn(pipeline, "cat face risograph")
    assert abs(plain - other).mean() < 10


@torch.no_grad()
def test_it_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    family = families.make(run_config(tmp_path, model__path="demo"), tmp_path)
    encoder = family.text_encoder(load)
    assert family.encode_text(encoder, "cat face")["prompt_embeds"].shape == (12, 384)
    assert not list(tmp_path.iterdir())


def test_the_quickstart_has_the_taught_subjects_and_the_benchmark_others() -> None:
    captions = [file.read_text().strip() for file in sorted((ROOT / "presets" / "quickstart").glob("*.txt"))]
    assert captions == [f"{name} [trigger]" for name in TAUGHT]
    assert tuple(subjects()) == HELD_OUT
    assert not set(TAUGHT) & set(HELD_OUT)


def test_a_font_that_is_not_there_is_named_with_the_package_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.ttf: cannot open resource; install fonts-noto-color-emoji, or name"):
        glyphs(tmp_path / "none.ttf")


@pytest.mark.slow
def test_it_is_made_by_one_command_from_pictures(tmp_path: Path) -> None:
    """A few steps of each part; the parts fit together and diffusers draws with them."""
    taught = [Picture(name, image.convert("RGBA")) for name, image in subjects().items()]
    few = ("train.steps=2", "train.batch_size=4", "train.micro_batch=2", "sample.every=0", "optim.warmup=0")
    make_model(tmp_path, taught, 2, few)
    [image] = demo_base.draw(demo_base.load(tmp_path / "demo"), ["cat face"])
    assert image.size == (64, 64)
    assert _half_precision(tmp_path / "demo")
    assert not [file for file in (tmp_path / "demo").rglob("*.json") if str(tmp_path) in file.read_text()]


def _half_precision(folder: Path) -> bool:
    from safetensors import safe_open

    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            kinds: Sequence[str] = [tensors.get_slice(name).get_dtype() for name in tensors.keys()]  # noqa: SIM118
            if "F32" in kinds:
                return False
    return True
