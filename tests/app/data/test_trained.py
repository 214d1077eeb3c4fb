"""Images as they are trained: cropped around their focus, covered outside their mask, with borders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageColor

from app.data.trained import OUTSIDE, compared, drawn
from tests.runs import run_config
from trainer.config.size import Size
from trainer.system.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A wide image, red at its left and blue at its right, and a mask of which the upper half is in the loss."""
    image = Image.new("RGB", (400, 100), "red")
    image.paste("blue", (200, 0, 400, 100))
    (tmp_path / "own").mkdir()
    image.save(tmp_path / "own" / "wide.png")
    (tmp_path / "own" / "wide.txt").write_text("a flag")
    mask = Image.new("L", (400, 100), 255)
    mask.paste(0, (0, 50, 400, 100))
    (tmp_path / "masks").mkdir()
    mask.save(tmp_path / "masks" / "wide.png")
    return tmp_path


def picture(folder: Path, **changes: Any) -> Image.Image:
    cfg = run_config(folder / "own", **{"data__resolution": 256, "data__max_aspect": 2.0} | changes)
    [(one, _)] = compared(cfg, cfg)
    return drawn(one, cfg.data, 128)


def test_an_image_is_cropped_in_its_middle_or_around_its_focus(folder: Path) -> None:
    assert picture(folder).size == (128, 64)
    assert [picture(folder).getpixel((x, 30)) for x in (2, 125)] == [(255, 0, 0), (0, 0, 255)]
    row = {"file_name": "wide.png", "text": "a flag", "focus": [0.1, 0.5]}
    (folder / "own" / "metadata.jsonl").write_text(json.dumps(row))
    assert [picture(folder).getpixel((x, 30)) for x in (2, 115)] == [(255, 0, 0), (255, 0, 0)]


def test_what_a_mask_takes_out_of_the_loss_is_covered_as_far_as_it_is_taken_out(folder: Path) -> None:
    masks, outside = {"data__masks": str(folder / "masks")}, ImageColor.getrgb(OUTSIDE)
    masked = picture(folder, **masks)
    assert masked.getpixel((2, 2)) == (255, 0, 0)
    red, _, _ = masked.getpixel((2, 57))
    assert red == pytest.approx(0.25 * 255 + 0.75 * outside[0], abs=3)
    partly, _, _ = picture(folder, **masks, data__mask_background=0.5).getpixel((2, 57))
    assert partly == pytest.approx((1 - 0.375) * 255 + 0.375 * outside[0], abs=3)


def test_borders_of_a_padded_image_are_covered_and_all_of_it_is_there(folder: Path) -> None:
    padded = picture(folder, data__fit="pad", data__masks=str(folder / "masks"))
    assert padded.getpixel((2, 24)) == (255, 0, 0) and padded.getpixel((125, 24)) == (0, 0, 255)
    assert padded.getpixel((64, 2)) != (255, 255, 255)  # white borders are not in the loss


def test_two_runs_train_the_same_images_at_sizes_of_their_own(folder: Path) -> None:
    real = run_config(folder / "own", data__resolutions=[512, 1024], data__trigger="ohwx")
    own = run_config(folder / "own", data__trigger="ohwx")
    [(one, other)] = compared(real, own)
    assert (one.size, other.size) == (Size(1408, 736), Size(80, 48))
    assert (one.image.captions, one.is_held_out) == (("ohwx, a flag",), False)
    assert one.share == pytest.approx(1408 / 736 / 4, rel=0.01)


def test_an_image_that_is_left_out_or_gone_is_said(folder: Path) -> None:
    with pytest.raises(InputError, match=r"wide\.png: left out, since too much of it would be cut off"):
        picture(folder, data__fit="drop")
    cfg = run_config(folder / "own")
    [(one, _)] = compared(cfg, cfg)
    (folder / "own" / "wide.png").unlink()
    with pytest.raises(InputError, match=r"wide\.png: cannot be read"):
        drawn(one, cfg.data, 64)
