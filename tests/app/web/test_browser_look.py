"""The closer look on the screen Data in Chromium: the crop of an image, near copies, and edit pairs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageOps
from playwright.sync_api import Page, expect

from tests.app.browser import Server, data_screen, show, until, visited
from tests.app.web.test_browser_data import card
from tests.runs import make_pictures


@pytest.fixture
def photos(own_data: Path) -> Path:
    """The eight images, of which 06 is wide, 07 a mirrored copy of 01, and 05 has hardly any contrast."""
    picture = Image.effect_noise((240, 60), 90).convert("RGB").resize((960, 240))
    picture.save(own_data / "06.png")
    ImageOps.mirror(Image.open(own_data / "01.png")).save(own_data / "07.png")
    Image.effect_noise((320, 320), 5).save(own_data / "05.png")
    return own_data


@pytest.fixture
def data(photos: Path, tab: Page, server: Server) -> Iterator[Page]:
    with visited(tab, server.url) as page, data_screen(page) as page:
        yield page


def rows(folder: Path) -> list[dict[str, object]]:
    file = folder / "metadata.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_click_sets_what_stays_in_the_middle_the_arrow_keys_move_it_and_undo_takes_it_back(photos: Path, data: Page):
    card(data, "06.png").get_by_role("button", name="Crop of 06.png").click()
    dialog = data.locator("dialog#crop")
    dialog.get_by_text("scaled ×").wait_for()
    stage = dialog.locator(".stage")
    until(data, "document.querySelector('#crop .whole img').complete")
    box = stage.bounding_box()
    assert box is not None and abs(box["width"] / box["height"] - 4) < 0.05
    stage.click(position={"x": 0.1 * box["width"], "y": box["height"] / 2})
    dialog.get_by_role("button", name="Back to the middle").and_(data.locator(":enabled")).wait_for()
    (row,) = rows(photos)
    assert row["file_name"] == "06.png" and row["focus"] == pytest.approx([0.1, 0.5], abs=0.01)
    frame = dialog.locator(".kept").evaluate("one => [one.offsetLeft, one.offsetWidth / one.parentNode.offsetWidth]")
    assert frame[0] == 0 and 0.3 < frame[1] < 0.6, "the frame lies at the left edge"
    stage.focus()
    for _ in range(5):
        data.keyboard.press("Shift+ArrowRight")
    until(data, "document.querySelector('#crop .stage').getAttribute('aria-label').includes('60 % from the left')")
    expect(dialog.locator(".kept")).not_to_have_css("left", "0px")
    assert rows(photos)[0]["focus"] == pytest.approx([0.6, 0.5], abs=0.01)
    data.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(card(data, "06.png").get_by_role("button", name="Crop of 06.png")).to_be_focused()
    expect(card(data, "06.png").locator(".cr")).to_have_attribute("style", re.compile("inset"))
    card(data, "06.png").get_by_role("button", name="Crop of 06.png").click()
    undo = dialog.get_by_role("button", name="Undo")
    undo.click()
    until(data, "document.querySelector('#crop .stage').getAttribute('aria-label').includes('10 % from the left')")
    undo.click()
    expect(undo).to_be_disabled()
    assert rows(photos) == []
    dialog.get_by_role("button", name="Close").click()


@pytest.mark.slow
def test_a_card_shows_the_borders_of_an_image_that_is_trained_whole(
    photos: Path, runs: Path, tab: Page, server: Server
):
    preset = runs / "presets" / "own.yaml"
    preset.write_text(preset.read_text().replace("resolution: 64", "resolution: 64, fit: pad, background: '#204080'"))
    with visited(tab, server.url) as page:
        show(page, "Data")
        frame = card(page, "06.png").locator(".fr")
        expect(frame).to_have_css("background-color", "rgb(32, 64, 128)")
        outer, inner = frame.bounding_box(), frame.locator("img").bounding_box()
        assert outer and inner and outer["height"] > 1.5 * inner["height"] and abs(outer["width"] - inner["width"]) < 1
        expect(frame.locator(".cr")).to_be_hidden()
        card(page, "06.png").get_by_role("button", name="Crop of 06.png").click()
        dialog = page.locator("dialog#crop")
        dialog.get_by_text("on each side, in #204080; nothing cut off").wait_for()
        dialog.get_by_text("nothing is cropped, so the focus point has no effect").wait_for()
        dialog.locator(".stage").click()
        assert rows(photos) == []
        dialog.get_by_role("button", name="Close").click()


@pytest.mark.slow
def test_copies_are_found_shown_side_by_side_and_filtered(photos: Path, data: Page):
    data.get_by_role("button", name="Look at all images").click()
    panel = data.locator("#card-look")
    group = panel.locator(".group")
    group.get_by_text("2 images alike").wait_for()
    assert [name.strip() for name in group.locator(".one .dim").all_inner_texts()] == ["01.png", "07.png"]
    assert group.get_by_text("mirrored").count() == 1
    until(data, "[...document.querySelectorAll('#card-look .group img')].every(one => one.naturalWidth)")
    group.get_by_role("button", name="Show", exact=True).click()
    expect(data.locator(".pc")).to_have_count(2)
    data.locator("#marked").get_by_role("button").click()
    expect(data.locator(".pc")).to_have_count(8)
    panel.get_by_role("button", name="Low contrast 1").click()
    expect(data.locator(".pc")).to_have_count(1)
    expect(card(data, "05.png")).to_be_visible()
    panel.get_by_role("button", name="Low contrast 1").click()
    data.get_by_role("button", name="Look again").click()
    group.get_by_text("2 images alike").wait_for()


@pytest.mark.slow
def test_images_before_an_edit_stand_in_front_of_those_after_it(photos: Path, data: Page):
    before = make_pictures(photos.parent / "before")
    shutil.copy(before / "00.png", before / "00_0.png")
    (before / "00.png").rename(before / "00_1.png")
    try:
        data.get_by_role("button", name="Read again").click()
        show(data, "New run")
        hint = data.locator("#pair-hint")
        hint.get_by_text("The folder “before” has an image of the same name for 8 of 8 images.").wait_for()
        show(data, "Data")
        notice = data.locator("#pair-notice")
        notice.get_by_text("The folder “before” has an image of the same name for 8 of 8 images.").wait_for()
        notice.get_by_role("button").click()
        sources = card(data, "01.png").locator(".sources .before")
        sources.get_by_text("before").wait_for()
        assert card(data, "00.png").locator(".before").all_inner_texts() == ["before 1", "before 2"]
        until(data, "[...document.querySelectorAll('.sources img')].every(one => one.naturalWidth)")
        expect(notice).to_be_hidden()
        edge = card(data, "01.png").locator(".im").bounding_box()
        other = card(data, "01.png").locator(".sources").bounding_box()
        assert edge and other and other["x"] + other["width"] <= edge["x"] + 1 and other["y"] == edge["y"]
        sources.click()
        data.locator("#lightbox").get_by_text("01.png").wait_for()
        data.keyboard.press("Escape")
        show(data, "New run")
        expect(hint).to_be_empty()
        show(data, "Data")
        (before / "07.png").unlink()
        data.get_by_role("button", name="Read again").click()
        data.locator("#data-problems").get_by_text("1 of 8 images have no reference").wait_for()
    finally:
        shutil.rmtree(before)
