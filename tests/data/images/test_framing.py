"""Crops around a focus point, borders, mirrored images and backgrounds, against plain loops over Pillow's functions."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.data.images.profiles import DISPLAY_P3, rgb_profile, srgb_curve
from tests.data.images.test_image_files import data, problems_of
from trainer.config.sections import DataConfig, DataFolder
from trainer.config.size import Size
from trainer.data.images.buckets import Buckets, bucket_sizes
from trainer.data.images.image_files import scan
from trainer.data.images.image_io import (
    Framing,
    ImageFile,
    crop_start,
    inner_size,
    is_invisible,
    load_bordered_mask,
    load_mask,
    load_rgb,
    read_header,
)

SIZES = ((64, 64), (96, 48), (40, 80))
POINTS = ((0.5, 0.5), (0.0, 0.0), (1.0, 1.0), (0.3, 0.8))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A wide, a tall and a turned photo of smooth noise."""
    folder = tmp_path_factory.mktemp("photos")
    numbers = np.random.default_rng(0)
    files = []
    for name, (width, height), orientation in (
        ("wide", (150, 70), 1),
        ("tall", (61, 190), 1),
        ("turned", (150, 70), 6),
    ):
        blocks = numbers.integers(0, 256, (height // 10, width // 10, 3), dtype=np.uint8)
        image = Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC)
        exif = Image.Exif()
        exif[0x0112] = orientation
        files.append(folder / f"{name}.png")
        image.save(files[-1], exif=exif)
    return files


def cropped_by_hand(file: Path, size: tuple[int, int], focus: tuple[float, float], resampling: Any) -> Image.Image:
    """Cut out the largest part of the size's aspect ratio that has the focus in its middle, and scale it."""
    image = ImageOps.exif_transpose(Image.open(file))
    scale = max(size[0] / image.width, size[1] / image.height)
    width, height = min(size[0] / scale, image.width), min(size[1] / scale, image.height)
    left = min(max(focus[0] * image.width - width / 2, 0), image.width - width)
    top = min(max(focus[1] * image.height - height / 2, 0), image.height - height)
    return image.resize(size, resampling, box=(left, top, left + width, top + height))


def padded_by_hand(image: Image.Image, size: tuple[int, int], colour: Any, resampling: Any) -> Image.Image:
    """Scale the whole image into the size, in the middle of a canvas."""
    scale = min(size[0] / image.width, size[1] / image.height)
    small = image.resize((round(image.width * scale), round(image.height * scale)), resampling)
    canvas = Image.new(image.mode, size, colour)
    canvas.paste(small, ((size[0] - small.width) // 2, (size[1] - small.height) // 2))
    return canvas


def difference(one: Image.Image, other: Image.Image) -> float:
    assert one.size == other.size and one.mode == other.mode
    return float(np.abs(np.array(one, dtype=float) - np.array(other, dtype=float)).max())


@pytest.mark.parametrize("focus", POINTS)
def test_a_crop_has_its_focus_in_the_middle_pixel_by_pixel(photos: list[Path], focus: tuple[float, float]) -> None:
    for file, size, mirrored in product(photos, SIZES, (False, True)):
        expected = cropped_by_hand(file, size, focus, Image.Resampling.LANCZOS)
        loaded = load_rgb(read_header(file), size, Framing(focus, is_mirrored=mirrored))
        assert difference(loaded, ImageOps.mirror(expected) if mirrored else expected) <= 1


@pytest.mark.parametrize("colour", ["#ffffff", "#204080"])
def test_borders_surround_the_whole_image_pixel_by_pixel(photos: list[Path], colour: str) -> None:
    for file, size, mirrored in product(photos, SIZES, (False, True)):
        image = ImageOps.exif_transpose(Image.open(file))
        expected = padded_by_hand(image, size, colour, Image.Resampling.LANCZOS)
        framing = Framing(is_padded=True, is_mirrored=mirrored, background=colour)
        loaded = load_rgb(read_header(file), size, framing)
        assert difference(loaded, ImageOps.mirror(expected) if mirrored else expected) == 0


@pytest.mark.parametrize("focus", POINTS)
def test_a_mask_is_cropped_as_its_image(photos: list[Path], focus: tuple[float, float]) -> None:
    for file, size, mirrored in product(photos, SIZES, (False, True)):
        grey = file.parent / f"{file.stem}-mask-{focus}.png"
        ImageOps.exif_transpose(Image.open(file)).convert("L").save(grey)
        latents = (size[0] // 8, size[1] // 8)
        floats = file.parent / "mask.tif"
        Image.open(grey).convert("F").save(floats)
        expected = cropped_by_hand(floats, latents, focus, Image.Resampling.BOX)
        loaded = load_mask(read_header(grey), latents, Framing(focus, is_mirrored=mirrored))
        assert difference(loaded, ImageOps.mirror(expected) if mirrored else expected) < 0.01


@pytest.mark.parametrize("outside", [0.0, 0.25])
def test_borders_are_not_learned_and_inside_them_the_mask_counts(photos: list[Path], outside: float) -> None:
    for file, size, mirrored in product(photos, SIZES, (False, True)):
        grey = file.parent / f"{file.stem}-grey.png"
        ImageOps.exif_transpose(Image.open(file)).convert("L").save(grey)
        levels = Image.open(grey).convert("F").point(lambda level: level / 255 * (1 - outside) + outside)
        framing = Framing(is_padded=True, is_mirrored=mirrored)
        for mask, weights in ((read_header(grey), levels), (None, Image.new("F", levels.size, 1.0))):
            expected = padded_by_hand(weights, size, 0.0, Image.Resampling.BOX)
            loaded = load_bordered_mask(read_header(file), mask, size, outside, framing)
            assert difference(loaded, ImageOps.mirror(expected) if mirrored else expected) < 1e-5


def test_the_middle_is_cropped_as_every_version_did(photos: list[Path]) -> None:
    for file, size in product(photos, SIZES):
        image = ImageOps.exif_transpose(Image.open(file))
        expected = ImageOps.fit(image, size, Image.Resampling.LANCZOS)
        assert load_rgb(read_header(file), size).tobytes() == expected.tobytes()


def test_transparent_parts_lie_on_the_background_whatever_the_profile(tmp_path: Path) -> None:
    glass = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    glass.putpixel((0, 0), (255, 0, 0, 255))
    glass.save(tmp_path / "plain.png")
    glass.save(tmp_path / "p3.png", icc_profile=rgb_profile(DISPLAY_P3, srgb_curve()))
    for name in ("plain", "p3"):
        file = read_header(tmp_path / f"{name}.png")
        for colour, levels in (("#ffffff", (255,) * 3), ("#204080", (32, 64, 128))):
            loaded = load_rgb(file, (32, 32), Framing(background=colour))
            assert loaded.getpixel((20, 20)) == levels


@pytest.mark.parametrize("colour", ["#ffffff", "#204080"])
def test_a_fully_transparent_image_is_seen_on_any_background(tmp_path: Path, colour: str) -> None:
    for name, alpha in (("empty", 0), ("full", 255)):
        Image.new("RGBA", (32, 32), (*bytes.fromhex(colour[1:]), alpha)).save(tmp_path / f"{name}.png")
    found = {}
    for name in ("empty", "full"):
        file = read_header(tmp_path / f"{name}.png")
        found[name] = is_invisible(file, load_rgb(file, (16, 16), Framing(background=colour)))
    assert found == {"empty": True, "full": False}


def test_crops_stay_inside_the_image() -> None:
    for focus, kept in product((0.0, 0.1, 0.5, 0.77, 1.0), (0.2, 0.5, 0.9, 1.0)):
        start = crop_start(focus, kept)
        assert 0 <= start <= 1 - kept + 1e-12
        if kept / 2 <= focus <= 1 - kept / 2:
            assert start + kept / 2 == pytest.approx(focus)


def test_a_whole_image_fills_one_side_of_its_bucket() -> None:
    for width, height, size in product((30, 100, 999), (30, 100, 999), SIZES):
        inner = inner_size(width, height, size)
        assert inner[0] == size[0] or inner[1] == size[1]
        assert inner[0] <= size[0] and inner[1] <= size[1]


# --- resolutions ------------------------------------------------------------------------------------------------------


def buckets(at: Any = "each", least_kept: float = 0.0) -> Buckets:
    return Buckets({side: bucket_sizes(side, 16, 2.0) for side in (64, 128, 256)}, at, least_kept)


def image(width: int, height: int) -> ImageFile:
    return ImageFile("a.png", width, height)


def test_an_image_is_trained_at_each_resolution_in_the_bucket_of_its_shape() -> None:
    sides = (64, 256)
    assert buckets().of_image(image(300, 300), sides) == ((64, Size(64, 64)), (256, Size(256, 256)))
    assert buckets().of_image(image(600, 300), sides) == ((64, Size(80, 48)), (256, Size(352, 176)))


@pytest.mark.parametrize(
    ("width", "side"), [(1000, 256), (256, 256), (255, 128), (128, 128), (127, 64), (64, 64), (20, 64)]
)
def test_by_its_size_an_image_is_trained_at_the_largest_resolution_that_it_fills(width: int, side: int) -> None:
    assert buckets("largest").of_image(image(width, width), (64, 128, 256)) == ((side, Size(side, side)),)


def test_an_image_that_loses_too_much_is_left_out() -> None:
    assert buckets(least_kept=0.5).of_image(image(1000, 100), (64, 256)) == ()
    assert len(buckets(least_kept=0.1).of_image(image(1000, 100), (64, 256))) == 2


def test_resolutions_with_the_same_bucket_train_an_image_once() -> None:
    both = Buckets({64: (Size(64, 64),), 70: (Size(64, 64),)})
    assert both.of_image(image(90, 90), (64, 70)) == ((64, Size(64, 64)),)


# --- rows of metadata.jsonl -------------------------------------------------------------------------------------------


def metadata(folder: Path, *rows: dict[str, Any]) -> None:
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "metadata.jsonl").write_text(text, encoding="utf-8")


def test_a_row_may_have_several_captions_and_a_focus_point(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        Image.new("RGB", (32, 32)).save(tmp_path / f"{name}.png")
    (tmp_path / "c.txt").write_text("one line\n\nanother line\n", encoding="utf-8")
    metadata(
        tmp_path,
        {"file_name": "a.png", "text": [" first ", "second"], "focus": [0, 0.25]},
        {"file_name": "b.png", "text": "only"},
        {"file_name": "c.png", "focus": [1, 1]},
    )
    whole, lines = (scan(data(tmp_path, caption_lines=lines)).train for lines in (False, True))
    assert [(one.captions, one.focus) for one in whole] == [
        (("first", "second"), (0.0, 0.25)),
        (("only",), (0.5, 0.5)),
        (("one line\n\nanother line",), (1.0, 1.0)),
    ]
    assert [one.captions for one in lines][2] == ("one line", "another line")


@pytest.mark.parametrize("focus", [[0.5], [0.5, 1.1], [-0.1, 0], "middle", [True, False], None, [0.1, "0.2"]])
def test_a_wrong_focus_point_is_named_with_its_line(tmp_path: Path, focus: Any) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    metadata(tmp_path, {"file_name": "a.png", "text": "a", "focus": focus})
    found = problems_of(data(tmp_path, missing_caption="empty"))
    assert found == [
        f"{tmp_path}/metadata.jsonl:1: focus of a.png: {focus} is not a point; give [x, y], shares from 0 to 1 of its "
        "width from the left and of its height from the top"
    ]


@pytest.mark.parametrize("text", [[], ["a", 1], [None], 5])
def test_a_wrong_list_of_captions_is_named_with_its_line(tmp_path: Path, text: Any) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    metadata(tmp_path, {"file_name": "a.png", "text": text})
    found = problems_of(data(tmp_path, missing_caption="empty"))
    assert found == [
        f'{tmp_path}/metadata.jsonl:1: no "text" or "caption" for a.png; add the caption as a string, or several as a '
        "list"
    ]


# --- settings of folders ----------------------------------------------------------------------------------------------


def test_a_folder_has_its_own_settings_and_else_those_of_the_data(tmp_path: Path) -> None:
    for name in ("own", "other", "masks", "others"):
        (tmp_path / name).mkdir()
    for name in ("own/a", "other/b"):
        Image.new("RGB", (32, 32)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a [trigger] dog", encoding="utf-8")
    Image.new("L", (32, 32)).save(tmp_path / "masks" / "a.png")
    own = {
        "path": str(tmp_path / "own"),
        "weight": 2,
        "resolutions": [256, 64],
        "micro_batch": 2,
        "caption_prefix": "photo of [trigger],",
        "caption_dropout": 0.5,
        "masks": str(tmp_path / "masks"),
        "flip": True,
    }
    config = data(tmp_path / "other", folders=[own], trigger="ohwx", resolution=64, caption_dropout=0.25, repeats=3)
    other, image = scan(config).train
    assert (other.sides, other.micro_batch, other.caption, other.caption_dropout) == ((64,), None, "a ohwx dog", 0.25)
    assert (other.mask, other.may_flip, other.weight) == (None, False, 3)
    assert (image.sides, image.micro_batch, image.caption_dropout, image.weight) == ((64, 256), 2, 0.5, 6)
    assert image.caption == "photo of ohwx, a ohwx dog"
    assert image.mask is not None and image.mask.path == tmp_path / "masks" / "a.png"
    assert image.may_flip and config.all_sides == (64, 256)


def test_masks_of_a_folder_that_fit_no_image_are_named(tmp_path: Path) -> None:
    for name in ("own", "masks"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "own" / "a.png")
    (tmp_path / "own" / "a.txt").write_text("a", encoding="utf-8")
    Image.new("L", (32, 32)).save(tmp_path / "masks" / "z.png")
    folder = {"path": str(tmp_path / "own"), "masks": str(tmp_path / "masks")}
    (found,) = problems_of(DataConfig(folders=(DataFolder.model_validate(folder),)))
    assert found.startswith(f"data.folders.0.masks: {tmp_path}/masks: none of its images has the name of an image")


def test_a_mask_s_levels_average_the_pixels_of_a_latent(tmp_path: Path) -> None:
    Image.fromarray((torch.arange(64).reshape(8, 8) * 4).byte().numpy()).save(tmp_path / "m.png")
    levels = np.array(load_mask(read_header(tmp_path / "m.png"), (2, 2)))
    assert levels == pytest.approx(np.array(Image.open(tmp_path / "m.png"), float).reshape(2, 4, 2, 4).mean((1, 3)))


def test_a_background_has_one_spelling_so_that_nothing_is_encoded_twice() -> None:
    assert DataConfig(background="#FFFFFF") == DataConfig() and DataConfig(background="#AbCdEf").background == "#abcdef"
