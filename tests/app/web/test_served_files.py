"""Small copies of pictures for the page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from app.data.thumbnails import Thumbnails
from app.runs.exports import exported
from tests.data.images.test_image_io import ORIENTED
from tests.data.test_hostile_data import NOT_REGULAR, POSTSCRIPT, called, png_of, refused
from trainer.data.images.image_io import load_preview, load_rgb, read_header
from trainer.run.folder import RunDir

__all__ = ["called"]  # a fixture

MIB = 2**20
PEAK = """
import sys
from pathlib import Path
from app.web import server
from app.data.thumbnails import FULL, Thumbnails
Thumbnails(Path(sys.argv[1])).of(Path(sys.argv[2]), FULL)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""
"""Prints the most KiB that a process of the page held in memory when it showed one picture."""


def test_a_thumbnail_shows_a_picture_as_it_is_trained(tmp_path: Path):
    (tmp_path / "late.png").write_bytes(ORIENTED["late.png"](6))
    Image.new("RGBA", (600, 200), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    thumbnails = Thumbnails(tmp_path / "thumbnails")
    with (
        Image.open(thumbnails.of(tmp_path / "late.png")) as upright,
        Image.open(thumbnails.of(tmp_path / "clear.png")) as clear,
    ):
        assert (upright.size, clear.size) == ((48, 96), (256, 85))
        assert clear.convert("RGB").getpixel((9, 9)) == (255, 255, 255)


@pytest.mark.parametrize("name", ORIENTED)
@pytest.mark.parametrize("side", [96, 12])
def test_a_preview_is_the_picture_that_is_trained_on_scaled_down(tmp_path: Path, name: str, side: int):
    for orientation in (1, 6, 7):
        (tmp_path / name).write_bytes(ORIENTED[name](orientation))
        picture = read_header(tmp_path / name)
        preview = load_preview(picture, side)
        assert max(preview.size) == side
        trained = load_rgb(picture, preview.size)
        # A reduced picture is a mean over squares, and a JPEG is scaled before its colours are known.
        assert np.abs(np.array(preview, dtype=int) - np.array(trained, dtype=int)).mean() < 8


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "CMYK", "L", "P", "I;16", "1", "LA"])
def test_a_preview_has_the_colours_of_the_picture_in_each_mode(tmp_path: Path, mode: str):
    file = tmp_path / "a.tif"
    if mode == "I;16":
        pixels = Image.fromarray((np.mgrid[0:2048, 0:1500][0] * 30).astype(np.uint16))
    else:
        pixels = Image.radial_gradient("L").resize((1500, 2048)).convert("RGB").convert(mode)
    pixels.save(file)
    picture = read_header(file)
    preview = load_preview(picture, 100)
    trained = load_rgb(picture, preview.size)
    assert np.abs(np.array(preview, dtype=int) - np.array(trained, dtype=int)).mean() < 2


def test_postscript_and_pipes_are_refused_by_a_sentence_and_start_no_program(tmp_path: Path, called: Path):
    (tmp_path / "a.png").write_bytes(POSTSCRIPT)
    os.mkfifo(tmp_path / "b.png")
    thumbnails = Thumbnails(tmp_path / "thumbnails")
    unknown = f"{tmp_path}/a.png: cannot be read (not an image of a known format); replace or remove it"
    assert refused(lambda: thumbnails.of(tmp_path / "a.png")) == [unknown]
    assert refused(lambda: thumbnails.of(tmp_path / "b.png")) == [f"{tmp_path}/b.png: {NOT_REGULAR}"]
    assert not called.exists()


def test_a_picture_that_takes_a_gibibyte_to_decode_is_not_shown(tmp_path: Path):
    file = tmp_path / "a.png"
    file.write_bytes(png_of(13_300, 13_300, num_rows=1))
    assert refused(lambda: Thumbnails(tmp_path / "thumbnails").of(file)) == [
        f"{file}: 176.9 megapixels are too many to show, the limit is 67.1; training can still use it, or scale it down"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "jpg", "tif", "webp"])
def test_the_page_takes_less_than_700_mib_for_the_largest_picture_it_shows(tmp_path: Path, kind: str):
    file = tmp_path / f"a.{kind}"
    if kind == "png":
        file.write_bytes(png_of(8192, 8192, colour=6))
    elif kind == "webp":
        Image.new("RGBA", (8192, 4096), (1, 2, 3, 9)).save(file, lossless=True, method=0)
    else:
        more = {"jpg": {"progressive": True, "subsampling": 0}, "tif": {"tiffinfo": {0x112: 6}}}[kind]
        Image.new("RGB", (8192, 8192), "red").save(file, **more)
    argv = [sys.executable, "-c", PEAK, str(tmp_path / "thumbnails"), str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 700 * MIB


def test_a_link_to_a_name_that_is_not_utf_8_is_shown(tmp_path: Path):
    target = tmp_path / os.fsdecode(b"\xff.png")
    Image.new("RGB", (8, 8), "plum").save(tmp_path / "plain.png")
    (tmp_path / "plain.png").rename(target)
    (tmp_path / "link.png").symlink_to(target)
    assert Thumbnails(tmp_path / "thumbnails").of(tmp_path / "link.png").is_file()


def test_a_link_that_leads_out_of_an_export_is_not_offered(tmp_path: Path):
    run = RunDir(tmp_path / "run")
    run.export.mkdir(parents=True)
    (tmp_path / "key").write_text("private")
    (run.export / "lora.safetensors").write_bytes(b"weights")
    (run.export / "other.safetensors").symlink_to(tmp_path / "key")
    (run.export / "folder").symlink_to(tmp_path)
    assert exported(run) == [run.export / "lora.safetensors"]
