"""A closer look at a draft's images: in the background, remembered, and held-out copies first."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps

from app.data import dataset, looks
from app.data.looks import Group, LookResult, Looks
from app.data.pairs import Pairs, suggested
from app.data.scans import Framed
from tests.app.data.test_dataset import config_of, scanned
from tests.data.images.test_looks import scene
from tests.runs import make_pictures
from trainer.config.schema import RunConfig
from trainer.data.images.image_io import read_header
from trainer.data.images.looks import KIND
from trainer.system.errors import InputError
from trainer.system.index import Index

WITHIN_S = 60


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def looked(found: Looks, config: RunConfig) -> LookResult:
    """Look at a config's images and wait for the result."""
    found.start(config, scanned(config))
    until(lambda: not result_of(found, config).is_running)
    return result_of(found, config)


def result_of(found: Looks, config: RunConfig) -> LookResult:
    result = found.of(config)
    assert result is not None
    return result


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """Six scenes: 1 is a copy of 0, 4 is held out and a mirrored copy of 2, 3 is blurred, 5 is held out and damaged."""
    folder, numbers = tmp_path / "scenes", np.random.default_rng(1)
    folder.mkdir()
    images = [scene(numbers) for _ in range(6)]
    images[1] = images[0].resize((120, 90))
    images[4] = ImageOps.mirror(images[2])
    images[3] = images[3].filter(ImageFilter.GaussianBlur(6))
    for number, image in enumerate(images):
        image.save(folder / f"{number}.jpg", quality=80)
        (folder / f"{number}.txt").write_text("a scene")
    content = (folder / "5.jpg").read_bytes()
    (folder / "5.jpg").write_bytes(content[:600])
    return folder


def test_a_copy_that_is_held_out_is_named_first_and_each_mark_has_its_images(scenes: Path, tmp_path: Path):
    config = config_of(scenes)
    found, result = scanned(config), looked(Looks(tmp_path / "runs"), config)
    paths = [scenes / f"{number}.jpg" for number in range(6)]
    assert result.groups == (
        Group((paths[2], paths[4]), frozenset({paths[4]}), leaks=True),
        Group((paths[0], paths[1]), frozenset(), leaks=False),
    )
    assert (result.num_done, result.is_complete, result.blurred, result.flat) == (6, True, (paths[3],), ())
    assert list(result.failed) == [paths[5]] and result.failed[paths[5]].startswith(f"{paths[5]}: ")
    marks = {
        mark: looks.marked(result, found, mark) for mark in ("leaks", "copies", "1", "7", "blurred", "failed", "x")
    }
    assert marks == {
        "leaks": {paths[2], paths[4]},
        "copies": {paths[0], paths[1], paths[2], paths[4]},
        "1": {paths[0], paths[1]},
        "7": set(),
        "blurred": {paths[3]},
        "failed": {paths[5]},
        "x": set(),
    }
    chosen = dataset.view(config.data, found, (), dataset.Filter("held_out", only=marks["copies"]), 0)
    assert [item.image for item in chosen.items] == [paths[4]]


def test_a_regularization_image_that_is_a_copy_is_found(scenes: Path, tmp_path: Path):
    others = tmp_path / "others"
    others.mkdir()
    for suffix in (".jpg", ".txt"):
        shutil.copy(scenes / f"4{suffix}", others / f"9{suffix}")
    (scenes / "5.jpg").unlink()
    config = config_of(scenes, data__regularization=str(others))
    result = looked(Looks(tmp_path / "runs"), config)
    assert result.groups[0].images == (scenes / "2.jpg", scenes / "4.jpg", others / "9.jpg")
    assert [scanned(config).framed[image].is_own for image in result.groups[0].images] == [True, True, False]


def test_a_look_can_be_stopped_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", 0)  # images that changed just now are remembered
    folder = make_pictures(tmp_path / "images", 1)
    Image.effect_noise((800, 600), 50).save(folder / "00.png")
    for number in range(1, 60):
        shutil.copy(folder / "00.png", folder / f"{number:02d}.png")
    config = config_of(folder, data__validation=0)
    found, scan = Looks(tmp_path / "runs"), scanned(config)
    found.start(config, scan)
    until(lambda: result_of(found, config).num_done > 0)
    found.stop(config)
    until(lambda: not result_of(found, config).is_running)
    assert not result_of(found, config).is_complete
    assert len(Index(tmp_path / "runs" / "cache").all(KIND)) == result_of(found, config).num_done < 60
    result = looked(found, config)
    assert result.is_complete and result.num_done == 60 and not result.failed


def test_no_images_are_refused_and_nothing_is_known_before_a_look(tmp_path: Path):
    config = config_of(make_pictures(tmp_path / "images", 1), data__validation=0)
    found = Looks(tmp_path / "runs")
    assert found.of(config) is None and looks.marked(None, scanned(config), "copies") == frozenset()
    (tmp_path / "images" / "00.png").unlink()
    with pytest.raises(InputError, match="There are no images to look at"):
        found.start(config, scanned(config))


def test_images_smaller_than_their_size_are_named(tmp_path: Path):
    folder = make_pictures(tmp_path / "images", 3)
    Image.new("RGB", (40, 40)).save(folder / "01.png")
    Image.new("RGB", (20, 20)).save(folder / "02.png")
    found = scanned(config_of(folder, data__validation=0))
    assert [image.name for image in looks.enlarged(found)] == ["02.png", "01.png"]
    assert found.framed[folder / "01.png"].scale == pytest.approx(64 / 40)


def test_the_frames_of_each_size_are_those_of_training(tmp_path: Path):
    folder = make_pictures(tmp_path / "images", 1)
    Image.new("RGB", (300, 100)).save(folder / "00.png")
    (folder / "metadata.jsonl").write_text('{"file_name": "00.png", "focus": [1, 0.5]}\n')
    image, sizes = folder / "00.png", {"data__resolutions": (64, 128), "data__validation": 0}
    file = read_header(image)
    small, large = dataset.frames(file, scanned(config_of(folder, **sizes)).framed[image])
    assert (small.size, large.size) == ((80, 48), (160, 96)) and not large.is_left_out
    assert large.start == (pytest.approx(4 / 9), 0) and large.kept == (pytest.approx(5 / 9), 1)
    assert (small.scale, large.scale) == (0.48, 0.96) and large.cut == pytest.approx(4 / 9)
    drop = scanned(config_of(folder, data__fit="drop", data__missing_caption="empty", **sizes)).framed[image]
    assert [(frame.size, frame.is_left_out) for frame in dataset.frames(file, drop)] == [
        ((80, 48), True), ((160, 96), True),
    ]  # fmt: skip
    padded = scanned(config_of(folder, data__fit="pad", **sizes)).framed[image]
    _, frame = dataset.frames(file, padded, is_padded=True)
    assert frame.kept[0] == 1 and frame.kept[1] > 1 and frame.start[1] < 0 == frame.start[0] == frame.cut
    assert dataset.frames(file, Framed((), (0.5, 0.5))) == []


def test_the_images_before_an_edit_are_found_next_to_the_data(tmp_path: Path):
    folder = make_pictures(tmp_path / "target", 4)
    before = make_pictures(tmp_path / "control", 3)
    make_pictures(tmp_path / "other", 4)
    Image.new("RGB", (64, 64)).save(before / "03_0.png")
    config = config_of(folder, data__validation=0)
    assert suggested(config, scanned(config)) == Pairs(before, 4, 4)
    edits = config_of(folder, data__validation=0, data__references=str(before))
    found = scanned(edits)
    assert suggested(edits, found) is None
    assert found.framed[folder / "03.png"].references == (before / "03_0.png",)
    assert suggested(config_of(folder, data__validation=0, model__family="sdxl"), found) is None
    for architecture, pair in (("dev", None), ("kontext", Pairs(before, 4, 4))):
        options = {"model__family": "flux1", "model__options__architecture": architecture}
        assert suggested(config_of(folder, data__validation=0, **options), found) == pair
    for name in ("00", "01", "02"):
        (before / f"{name}.png").rename(before / f"x{name}.png")
    assert suggested(config, scanned(config)) is None, "one of four is chance"


def test_sets_of_images_before_an_edit_are_found_in_numbered_folders(tmp_path: Path):
    folder = make_pictures(tmp_path / "target", 4)
    sets = tmp_path / "controls"
    make_pictures(sets / "control_1", 3)
    make_pictures(sets / "control_2", 4)
    config = config_of(folder, data__validation=0)
    assert suggested(config, scanned(config)) == Pairs(sets, 4, 4)
    found = scanned(config_of(folder, data__validation=0, data__references=str(sets)))
    assert [file.parent.name for file in found.framed[folder / "00.png"].references] == ["control_1", "control_2"]
    (sets / "control_2").rename(sets / "other")
    assert suggested(config, scanned(config)) == Pairs(sets, 3, 4), "a folder without a number is not a set's"
