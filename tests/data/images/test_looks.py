"""Near copies, blurred and flat images among scenes of smooth noise, and hashes by the ten thousand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from tests.app.browser import BEYOND
from trainer.data.images import looks
from trainer.data.images.looks import Look, known_looks
from trainer.system.index import Index

NUM_SCENES = 240
SHARPEST, SMOOTHEST = 1.0, 1.6
"""Exponents of the amplitudes' fall with the frequency; photos have about 1."""

SAME = "".join(chr(65 + number % 26) for number in range(192))
"""A signature in base64."""


def scene(numbers: np.random.Generator, width: int = 240, height: int = 180) -> Image.Image:
    """Noise with the spectrum of a photo."""
    waves = np.fft.rfft2(numbers.normal(size=(height, width, 3)), axes=(0, 1))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    waves /= (frequency ** numbers.uniform(SHARPEST, SMOOTHEST))[..., None]
    levels = np.fft.irfft2(waves, s=(height, width), axes=(0, 1))
    levels *= numbers.uniform(30, 60) / levels.std()
    return Image.fromarray(np.clip(128 + levels, 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, numbers = tmp_path_factory.mktemp("scenes"), np.random.default_rng(3)
    files = [folder / f"{number:03d}.jpg" for number in range(NUM_SCENES)]
    for file in files:
        scene(numbers).save(file, quality=95)
    return files


@pytest.fixture(scope="module")
def found(scenes: list[Path]) -> list[Look]:
    return [looks.measure(file) for file in scenes]


def cropped(image: Image.Image) -> Image.Image:
    width, height = image.size
    return image.crop((round(0.03 * width), round(0.01 * height), width, round(0.98 * height)))


COPIED: dict[str, Callable[[Image.Image], Image.Image]] = {
    "enlarged": lambda image: image.resize((900, 675), Image.Resampling.BICUBIC),
    "shrunk": lambda image: image.resize((100, 75), Image.Resampling.BICUBIC),
    "another shape": lambda image: image.resize((200, 200)),
    "brightened": lambda image: ImageEnhance.Brightness(image).enhance(1.25),
    "less contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.6),
    "without colour": lambda image: image.convert("L"),
    "cropped": cropped,
    "mirrored": ImageOps.mirror,
    "mirrored, shrunk and cropped": lambda image: ImageOps.mirror(cropped(image)).resize((120, 90)),
}


def test_different_scenes_are_not_grouped_nor_blurred_nor_flat(found: list[Look]):
    assert looks.copies(found) == [] == looks.blurred(found) == looks.flat(found)


@pytest.mark.parametrize("change", COPIED)
def test_a_changed_copy_is_found(change: str, scenes: list[Path], found: list[Look], tmp_path: Path):
    chosen = range(0, NUM_SCENES, 20)
    copied = []
    for index in chosen:
        COPIED[change](Image.open(scenes[index])).save(tmp_path / "copy.jpg", quality=40)
        copied.append(looks.measure(tmp_path / "copy.jpg"))
    groups = looks.copies([*found, *copied])
    assert [group.members for group in groups] == [(index, NUM_SCENES + at) for at, index in enumerate(chosen)]
    assert [bool(group.mirrored) for group in groups] == ["mirrored" in change] * len(groups)


def test_an_upright_copy_of_a_turned_photo_and_one_on_white_are_copies(scenes: list[Path], tmp_path: Path):
    image = Image.open(scenes[0])
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.jpg", exif=exif, quality=90)
    image.convert("RGBA").save(tmp_path / "clear.png")
    image.convert("CMYK").save(tmp_path / "print.tif")
    files = [scenes[0], *(tmp_path / name for name in ("turned.jpg", "clear.png", "print.tif"))]
    assert [group.members for group in looks.copies([looks.measure(file) for file in files])] == [(0, 1, 2, 3)]


def test_a_symmetric_image_has_one_hash_and_a_flat_one_is_not_compared(scenes: list[Path], tmp_path: Path):
    half = Image.open(scenes[0]).crop((0, 0, 120, 180))
    whole = Image.new("RGB", (240, 180))
    whole.paste(half, (0, 0))
    whole.paste(ImageOps.mirror(half), (120, 0))
    whole.save(tmp_path / "symmetric.jpg", quality=50)
    look = looks.measure(tmp_path / "symmetric.jpg")
    assert (look.hash ^ look.mirrored).bit_count() <= 2
    for level in (0, 255):
        Image.new("RGB", (64, 64), (level, level, level)).save(tmp_path / f"{level}.png")
    Image.new("L", (1, 1)).save(tmp_path / "pixel.png")
    flat = [looks.measure(tmp_path / name) for name in ("0.png", "255.png", "pixel.png")]
    assert looks.copies(flat) == [] and looks.flat(flat) == [0, 1, 2] == looks.blurred(flat)


def test_blurred_and_flat_images_are_found_among_others(scenes: list[Path], found: list[Look], tmp_path: Path):
    image = Image.open(scenes[7]).resize((960, 720), Image.Resampling.BICUBIC)
    image.filter(ImageFilter.GaussianBlur(8)).save(tmp_path / "blurred.jpg")
    ImageEnhance.Contrast(image).enhance(0.1).save(tmp_path / "flat.png")
    changed = [looks.measure(tmp_path / name) for name in ("blurred.jpg", "flat.png")]
    assert NUM_SCENES in looks.blurred([*found, *changed]) and looks.flat([*found, *changed]) == [NUM_SCENES + 1]
    assert looks.blurred(changed[:1]) == [0], "also alone"
    similar = [look._replace(sharpness=100.0, contrast=50.0) for look in found]
    assert looks.blurred([*similar, similar[0]._replace(sharpness=60.0)]) == [], "less than the others, but not by far"
    assert looks.blurred([*similar, similar[0]._replace(sharpness=24.0)]) == [NUM_SCENES]


def test_a_second_look_reads_nothing_and_a_changed_file_is_read_again(
    scenes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The index is given other numbers, which only those see that read no file."""
    kept, changed = tmp_path / "data" / "kept.jpg", tmp_path / "data" / "changed.jpg"
    kept.parent.mkdir()
    kept.write_bytes(scenes[0].read_bytes())
    changed.write_bytes(scenes[1].read_bytes())
    known, kind = known_looks(tmp_path), looks.KIND
    known.read(kept)
    known.save()
    assert Index(tmp_path).all(kind) == {}, "it may change again without another time stamp"
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", 0)
    known = known_looks(tmp_path)
    look = known.read(kept).value
    known.read(changed)
    known.save()
    records = Index(tmp_path).all(kind)
    changed_numbers = {key: row.replace(str(look.sharpness).encode(), b"-1.0") for key, row in records.items()}
    Index(tmp_path).put(kind, changed_numbers)
    changed.write_bytes(scenes[9].read_bytes())
    again = known_looks(tmp_path)
    assert again.read(kept).value == look._replace(sharpness=-1.0)
    assert again.read(changed).value == looks.measure(scenes[9])


def random_looks(count: int) -> list[Look]:
    numbers = np.random.default_rng(0)
    hashes = numbers.integers(0, 2**64, (2, count), dtype=np.uint64).tolist()
    return [Look(one, other, 100.0, 50.0, "AAAA") for one, other in zip(*hashes, strict=True)]


def test_twenty_thousand_hashes_are_grouped_within_seconds():
    many = random_looks(20_000)
    many[11] = Look(1234567, 3, 100.0, 50.0, SAME)
    farthest = sum(1 << bit for bit in (0, 5, 11, 12, 18, 24, 25, 37, 38, 50, 51, 63))  # at least two in each part
    many[19_000] = Look(1234567 ^ farthest, 4, 100.0, 50.0, SAME)
    many[19_500] = Look(1234567 ^ farthest ^ 2, 5, 100.0, 50.0, SAME[::-1])
    began = time.monotonic()
    groups = looks.copies(many)
    assert [group.members for group in groups] == [(11, 19_000)]
    assert time.monotonic() - began < 5 * BEYOND
    assert looks.copies([many[11]] * 20_000)[0].members == tuple(range(20_000))
    assert looks.copies(many, is_stopped=lambda: True) == []
