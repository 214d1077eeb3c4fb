"""Small copies of pictures for the page."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from app.thumbnails import Thumbnails
from tests.data.test_pixels import ORIENTED


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
