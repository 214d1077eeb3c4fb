"""The dialog Mask in Chromium: what is painted is what a run learns, and nothing that was painted is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from playwright.sync_api import Locator, Page, expect

from tests.app.browser import data_screen, until, until_so
from tests.data.test_encode import encoded
from tests.models.test_segmentation import write_tiny
from tests.runs import run_config
from trainer.data.loader import ImageItem
from trainer.models.segmentation import Question, Segmenter

SIDE = 512


def points_of(dialog: Locator, *points: tuple[float, float]) -> list[tuple[float, float]]:
    """Where points of the image are in the window. They are given in shares of its sides."""
    box = dialog.locator(".stage").bounding_box()
    assert box is not None
    return [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]


def stroke(page: Page, dialog: Locator, *points: tuple[float, float], button: str = "left") -> None:
    first, *others = points_of(dialog, *points)
    page.mouse.move(*first)
    page.mouse.down(button=button)  # type: ignore[arg-type]
    for point in others:
        page.mouse.move(*point)
    page.mouse.up(button=button)  # type: ignore[arg-type]


def brush(page: Page, size: int) -> None:
    """Set the size of the brush by its slider."""
    slider = page.locator("#mask").get_by_label("Brush size")
    slider.evaluate(f"slider => {{ slider.step = 'any'; slider.value = 100 * Math.log({size}) / Math.log(800); }}")
    slider.dispatch_event("input")
    expect(page.locator("#mask .sized").first).to_have_text(f"{size} px")


def open_mask(page: Page, name: str = "00.png") -> Locator:
    page.locator(f".pc[data-name='{name}']").get_by_role("button", name=f"Mask of {name}").click()
    dialog = page.locator("#mask")
    dialog.wait_for()
    return dialog


def save(page: Page) -> None:
    page.locator("#mask").get_by_role("button", name="Save").click()
    expect(page.locator("#mask")).to_have_count(0)


def levels(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        assert (image.format, image.mode) == ("PNG", "L")
        return np.asarray(image).astype(int)


@pytest.fixture
def data(own_data: Path, draft: Path, page: Page) -> Iterator[Page]:
    """The screen with one image of 512 pixels and seven small ones."""
    with Image.open(own_data / "00.png") as image:
        image.resize((SIDE, SIDE)).save(own_data / "00.png")
    with data_screen(page) as page:
        page.locator(".pc[data-name='00.png'] .fr").wait_for()
        yield page
    for file in own_data.parent.glob("own-masks/*"):
        file.unlink()


@pytest.mark.slow
def test_what_is_painted_is_what_a_run_learns(own_data: Path, draft: Path, data: Page):
    dialog = open_mask(data)
    brush(data, 80)
    stroke(data, dialog, (0.25, 0.25), (0.75, 0.25), (0.75, 0.5))
    data.keyboard.press("e")
    brush(data, 40)
    stroke(data, dialog, (0.5, 0.25), (0.5, 0.25))
    stroke(data, dialog, (0.75, 0.5), (0.75, 0.5), button="right")
    save(data)
    file = own_data.with_name("own-masks") / "00.png"
    expect(data.locator(".pc[data-name='00.png'] .tags")).to_contain_text("mask")
    assert json.loads(draft.read_text())["values"] == {"data.masks": str(file.parent)}
    found, drawn = levels(file), by_pillow()
    far = np.abs(found - drawn)
    is_edge = np.asarray(Image.fromarray(drawn.astype("uint8")).convert("L")) != found
    assert far.mean() < 0.5
    assert far[~near_edges(drawn)].max() == 0, np.argwhere((far > 0) & ~near_edges(drawn))[:5]
    assert is_edge.any()  # the browser's edges are smooth
    given = run_config(own_data, data__masks=str(file.parent), data__bad_image="stop")
    mask = encoded(given)[0].example(ImageItem(0, False))["mask"].numpy()
    blocks = found.reshape(mask.shape[0], SIDE // mask.shape[0], mask.shape[1], SIDE // mask.shape[1])
    assert np.abs(mask - blocks.mean((1, 3)) / 255).max() < 1e-5


def by_pillow() -> np.ndarray:
    """The same strokes, drawn by Pillow at eight times the size."""
    image = Image.new("L", (8 * SIDE, 8 * SIDE))
    draw = ImageDraw.Draw(image)

    def line(points: list[tuple[float, float]], size: float, level: int) -> None:
        scaled = [(8 * SIDE * x, 8 * SIDE * y) for x, y in points]
        draw.line(scaled, level, round(8 * size))
        for x, y in scaled:
            draw.ellipse((x - 4 * size, y - 4 * size, x + 4 * size, y + 4 * size), level)

    line([(0.25, 0.25), (0.75, 0.25), (0.75, 0.5)], 80, 255)
    line([(0.5, 0.25)], 40, 0)
    line([(0.75, 0.5)], 40, 0)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX)).astype(int)


def near_edges(drawn: np.ndarray) -> np.ndarray:
    """Pixels within 3 of one whose neighbour differs."""
    grown = np.zeros(drawn.shape, bool)
    for down in range(-3, 4):
        for right in range(-3, 4):
            grown |= np.roll(drawn, (down, right), (0, 1)) != drawn
    return grown


@pytest.mark.slow
def test_every_step_is_undone_and_done_again(own_data: Path, data: Page):
    dialog = open_mask(data)
    undo, redo = dialog.get_by_role("button", name="Undo"), dialog.get_by_role("button", name="Redo")

    def learned(share: float) -> None:
        until(data, f"Math.abs(document.querySelector('#mask').dataset.learned - {share}) < 0.01")

    learned(0)
    assert undo.is_disabled()
    data.keyboard.press("f")
    learned(1)
    data.keyboard.press("i")
    learned(0)
    brush(data, 400)
    stroke(data, dialog, (0.5, 0.5), (0.5, 0.5))
    disc = np.pi * 200**2 / SIDE**2
    learned(disc)
    data.keyboard.press("i")
    learned(1 - disc)
    for share in (disc, 0, 1, 0):
        data.keyboard.press("Control+z")
        learned(share)
    assert undo.is_disabled()
    for share in (1, 0, disc, 1 - disc):
        redo.click()
        learned(share)
    data.keyboard.press("x")
    learned(0)
    assert redo.is_disabled()
    dialog.get_by_role("button", name="Close").click()
    data.get_by_role("button", name="Discard").click()
    expect(dialog).to_have_count(0)
    assert not own_data.with_name("own-masks").joinpath("00.png").exists()


@pytest.mark.slow
def test_a_mask_is_painted_by_keys_alone_and_zoomed(own_data: Path, data: Page):
    dialog = open_mask(data)
    brush(data, 40)
    dialog.locator(".view").focus()
    data.keyboard.press("]")
    expect(dialog.locator(".sized").first).to_have_text("48 px")
    data.keyboard.press("[")
    data.keyboard.press("Enter")
    for _ in range(4):
        data.keyboard.press("Shift+ArrowRight")
    for _ in range(3):
        data.keyboard.press("+")
    expect(dialog.get_by_role("button", name="195 %")).to_be_visible()
    wide = dialog.locator(".stage").bounding_box()
    data.keyboard.press("0")
    fit = dialog.locator(".stage").bounding_box()
    assert wide is not None and fit is not None
    assert wide["width"] / fit["width"] == pytest.approx(1.953, abs=0.05)
    data.keyboard.press("Control+s")
    expect(dialog).to_have_count(0)
    found = levels(own_data.with_name("own-masks") / "00.png")
    across, down = np.nonzero((found > 127).any(0))[0], np.nonzero((found > 127).any(1))[0]
    assert (across[0], across[-1], down[0], down[-1]) == pytest.approx((236, 315, 236, 275), abs=1)


@pytest.mark.slow
def test_one_finger_paints_and_two_zoom(own_data: Path, data: Page):
    dialog = open_mask(data)
    brush(data, 100)
    devtools = data.context.new_cdp_session(data)

    def touch(kind: str, *points: tuple[float, float]) -> None:
        where = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        devtools.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": where})

    start, stop, *fingers = points_of(dialog, (0.25, 0.5), (0.75, 0.5), (0.4, 0.3), (0.6, 0.3), (0.3, 0.3), (0.7, 0.3))
    touch("touchStart", start)
    touch("touchMove", stop)
    touch("touchEnd")
    until(data, "document.querySelector('#mask').dataset.learned > 0.12")
    learned = dialog.get_attribute("data-learned")
    touch("touchStart", fingers[0])
    touch("touchStart", *fingers[:2])
    touch("touchMove", *fingers[2:])
    touch("touchEnd")
    expect(dialog.get_by_title("Whole image, key 0")).to_have_text("200 %")
    assert dialog.get_attribute("data-learned") == learned
    data.keyboard.press("Control+z")
    until(data, "document.querySelector('#mask').dataset.learned == 0")
    devtools.detach()
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_have_count(0)


@pytest.mark.slow
def test_what_was_painted_is_there_again_after_the_browser_closed_the_dialog(own_data: Path, data: Page):
    dialog = open_mask(data)
    data.keyboard.press("f")
    dialog.evaluate("dialog => dialog.close()")
    expect(dialog).to_have_count(0)
    dialog = open_mask(data)
    dialog.get_by_text("Your unsaved painting is here again").wait_for()
    save(data)
    assert levels(own_data.with_name("own-masks") / "00.png").min() == 255


@pytest.mark.slow  # test_masks.py asks without a browser
def test_a_mask_that_was_changed_meanwhile_is_not_overwritten_unasked(own_data: Path, data: Page):
    folder = own_data.with_name("own-masks")
    dialog = open_mask(data)
    data.keyboard.press("f")
    save(data)
    first = (folder / "00.png").read_bytes()
    dialog = open_mask(data)
    data.keyboard.press("i")
    other = Image.new("L", (SIDE, SIDE), 99)
    other.save(folder / "00.png")
    dialog.get_by_role("button", name="Save").click()
    dialog.get_by_text("Not saved: the mask was changed meanwhile.").wait_for()
    assert levels(folder / "00.png").min() == 99
    dialog.get_by_role("button", name="Use mine").click()
    save(data)
    assert levels(folder / "00.png").max() == 0
    dialog = open_mask(data)
    dialog.get_by_role("button", name="Former mask").click()
    dialog.get_by_text("Former mask 1 of 1").wait_for()  # the first was replaced by another program, which kept nothing
    save(data)
    assert levels(folder / "00.png").min() == 99
    assert first != (folder / "00.png").read_bytes()


@pytest.mark.slow
def test_cards_show_their_masks_and_a_removed_one_is_gone(own_data: Path, draft: Path, data: Page):
    dialog = open_mask(data)
    brush(data, 200)
    stroke(data, dialog, (0.5, 0.5), (0.5, 0.5))
    save(data)
    cover = data.locator(".pc[data-name='00.png'] .mk")
    expect(cover).to_have_count(0)
    data.locator("#data-masks").check()
    expect(cover).to_have_attribute("src", re.compile("^data:image/png"))
    assert data.locator(".mk").count() == 1
    open_mask(data).get_by_role("button", name="Remove mask").click()
    data.get_by_role("button", name="Remove", exact=True).click()
    expect(data.locator("#mask")).to_have_count(0)
    expect(cover).to_have_count(0)
    expect(data.locator(".pc[data-name='00.png'] .tags")).not_to_contain_text("mask")
    until_so(data, lambda: json.loads(draft.read_text())["values"] == {"data.masks": None})
    assert list(own_data.with_name("own-masks").iterdir()) == []


@pytest.mark.slow
def test_an_object_that_a_model_finds_is_added_and_taken_away(own_data: Path, data: Page, tmp_path: Path):
    model = write_tiny(tmp_path / "sam2")
    with Image.open(own_data / "00.png") as image:  # as the page shows it
        image.convert("RGB").save(tmp_path / "shown.webp", quality=90)
    with Image.open(tmp_path / "shown.webp") as shown:
        found = Segmenter.load(str(model), torch.device("cpu")).find(
            shown.convert("RGB"), Question("", ((128, 256, True), (400, 128, False)))
        )
    expected = np.asarray(found).astype(int)
    dialog = open_mask(data)
    data.keyboard.press("o")
    dialog.get_by_label("Model").fill("nobody/nothing")
    stroke(data, dialog, (0.5, 0.5))
    dialog.get_by_text("hf download nobody/nothing").wait_for()
    dialog.get_by_label("Model").fill(str(model))
    add = dialog.get_by_role("button", name="Add")
    assert add.is_disabled()
    stroke(data, dialog, (128 / SIDE, 0.5))
    expect(add).to_be_enabled()
    stroke(data, dialog, (400 / SIDE, 0.25), button="right")
    expect(dialog).to_have_attribute("data-found", "3")  # the number of the question that is answered
    data.keyboard.press("Enter")
    save(data)
    file = own_data.with_name("own-masks") / "00.png"
    assert (levels(file) != expected).mean() < 0.01  # clicks are at whole pixels of the window
    dialog = open_mask(data)
    data.keyboard.press("o")
    assert dialog.get_by_label("Model").input_value() == str(model)
    stroke(data, dialog, (0.1, 0.1), (0.9, 0.9))
    expect(add).to_be_enabled()
    dialog.get_by_role("button", name="Take away").click()
    data.keyboard.press("Control+z")
    until(data, f"Math.abs(document.querySelector('#mask').dataset.learned - {expected.mean() / 255}) < 0.01")
