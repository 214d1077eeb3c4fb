"""Captions of many images in Chromium: all by the keyboard alone, as tags, and changes of all of them at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.app.browser import Server, data_screen, show, until, until_so, visited, write_over
from tests.app.web.screens import violations
from tests.app.web.test_browser_data import caption, card, said
from tests.runs import make_pictures, write_preset

COUNT = 300
FOCUSED = "document.activeElement.closest('.pc')?.dataset.name"


@pytest.fixture
def many(runs: Path, draft: Path) -> Iterator[Path]:
    """300 images without captions in the form: 010 has one that is not UTF-8, 020 one that is read-only."""
    folder = make_pictures(runs.parent / "many", COUNT)
    for file in [*folder.iterdir()]:
        if file.suffix == ".txt":
            file.unlink()
        else:
            file.rename(folder / f"{int(file.stem):03d}.png")
    (folder / "010.txt").write_bytes(b"caf\xe9")
    (folder / "020.txt").write_text("kept")
    (folder / "020.txt").chmod(0o444)
    preset = write_preset(runs / "presets" / "many.yaml", folder)
    draft.write_text(json.dumps({"preset": "many", "values": {}}))
    yield folder
    shutil.rmtree(folder)
    preset.unlink()


@pytest.fixture
def tagged(own_data: Path, tab: Page, server: Server) -> Iterator[Page]:
    """The screen with eight images, whose captions are shown as tags."""
    for number in range(8):
        (own_data / f"0{number}.txt").write_text(f'number {number}, snow, it\'s "new", \U0001f98a')
    with visited(tab, server.url) as page, data_screen(page):
        page.locator("#data-as-tags").check()
        yield page


def tags(page: Page, name: str) -> list[str]:
    return card(page, name).locator(".chip").all_inner_texts()


@pytest.mark.slow  # three hundred captions
@pytest.mark.timeout(600)
def test_three_hundred_images_get_their_captions_by_the_keyboard_alone(many: Path, page: Page):
    page.keyboard.press("g")
    page.keyboard.press("d")
    caption(page, "000.png").wait_for()
    page.keyboard.press("Control+Enter")
    for number in range(COUNT):
        name = f"{number:03d}.png"
        if name == "010.png":
            continue  # its file cannot be read, so its box is closed
        until(page, f"{FOCUSED} === '{name}'")
        if number == 1:  # one stop of Tab between two captions, with the arrow keys for the others
            page.keyboard.press("Tab")
            expect(card(page, name).get_by_role("button", name=f"Crop of {name}")).to_be_focused()
            page.keyboard.press("ArrowRight")
            expect(card(page, name).get_by_role("button", name="Mask")).to_be_focused()
            page.keyboard.press("Tab")
            expect(caption(page, "002.png")).to_be_focused()
            page.keyboard.press("Control+Shift+Enter")
        text = "x" * 10_000 if number == 5 else f"a picture, number {number}"
        page.keyboard.insert_text(text)
        if number == 30:
            (many / "030.txt").write_text("of another program")
        if number == 20:
            card(page, name).get_by_text("is read-only; make it writable").wait_for()
        page.keyboard.press("Control+Enter")
    page.get_by_text("That was the last caption.").wait_for()
    expect(page.locator("#data-range")).to_have_text("289–300 of 300")
    kept = {10: b"caf\xe9", 20: b"kept", 30: b"of another program"}
    until_so(page, lambda: len([*many.glob("*.txt")]) == COUNT)
    for number in range(COUNT):
        expected = f"a picture, number {number}\n" if number != 5 else "x" * 10_000 + "\n"
        assert (many / f"{number:03d}.txt").read_bytes() == kept.get(number, expected.encode())
    page.evaluate("localStorage.clear()")


@pytest.mark.slow
def test_all_captions_get_a_text_in_front_and_a_tag_is_renamed_everywhere_and_undone(own_data: Path, tagged: Page):
    tagged.locator("#data-open-replace").click()
    expect(tagged.locator("#data-text")).to_have_value("[trigger]")
    tagged.locator("#data-front").click()
    expect(tagged.locator("#data-message")).to_have_text("8 captions changed.")
    assert said(own_data, "03.txt") == '[trigger], number 3, snow, it\'s "new", \U0001f98a'
    expect(tagged.locator("#tags [data-tag='[trigger]']")).to_have_text("[trigger] 8")
    tagged.locator("#tags [data-tag='number 3']").click()
    expect(tagged.locator(".pc")).to_have_count(1)
    write_over(tagged, "tag-name", "red, snow")
    tagged.locator("#tag-rename").click()
    expect(tagged.locator("#data-message")).to_have_text("1 caption changed.")
    assert said(own_data, "03.txt") == '[trigger], red, snow, it\'s "new", \U0001f98a'
    expect(tagged.locator("#tags [aria-pressed=true]")).to_have_text("red 1")
    tagged.locator("#data-undo").click()
    expect(tagged.locator("#data-message")).to_have_text("1 caption restored.")
    expect(tagged.locator(".pc")).to_have_count(8)
    tagged.locator("#data-undo", has_text="Undo (8 captions)").click()
    expect(tagged.locator("#data-message")).to_have_text("8 captions restored.")
    until_so(tagged, lambda: said(own_data, "03.txt") == 'number 3, snow, it\'s "new", \U0001f98a')


@pytest.mark.slow
def test_tags_are_moved_added_and_removed_by_mouse_and_keyboard(own_data: Path, tagged: Page):
    first = card(tagged, "00.png")
    chip = first.get_by_role("button", name="number 0", exact=True)
    chip.drag_to(first.locator("li", has_text="\U0001f98a"), target_position={"x": 25, "y": 8})
    until_so(tagged, lambda: said(own_data, "00.txt") == 'snow, it\'s "new", \U0001f98a, number 0')
    for elsewhere in (
        card(tagged, "01.png").locator(".tagged"),
        tagged.locator("#folder"),
        tagged.locator("#data-search"),
    ):
        chip.drag_to(elsewhere)
    expect(tagged.locator("#data-search")).to_have_value("")
    assert tags(tagged, "00.png") == ["snow", 'it\'s "new"', "\U0001f98a", "number 0"]
    assert tags(tagged, "01.png")[0] == "number 1"
    add = first.get_by_placeholder("Add a tag")
    add.fill(" <b>, snow,")  # a comma ends a tag; one that is there stays once
    expect(add).to_have_value("")
    assert tags(tagged, "00.png")[-1] == "<b>"
    add.press("ArrowLeft")
    tagged.keyboard.press("Shift+ArrowLeft")
    assert tags(tagged, "00.png")[-2:] == ["<b>", "number 0"]
    tagged.keyboard.press("ArrowLeft")
    tagged.keyboard.press("Delete")
    expect(first.get_by_role("button", name="<b>", exact=True)).to_be_focused()
    chip.click()  # without dragging
    first.get_by_role("button", name="Earlier: number 0").click()
    first.get_by_role("button", name="Earlier: number 0").click()
    assert tags(tagged, "00.png") == ["snow", "number 0", 'it\'s "new"', "<b>"]
    first.get_by_role("button", name="Remove: number 0").click()
    until_so(tagged, lambda: said(own_data, "00.txt") == 'snow, it\'s "new", <b>')
    add.fill("last")
    add.press("Control+Enter")
    expect(card(tagged, "01.png").get_by_placeholder("Add a tag")).to_be_focused()
    until_so(tagged, lambda: said(own_data, "00.txt").endswith("<b>, last"))
    for scheme in ("light", "dark"):
        tagged.emulate_media(color_scheme=scheme)
        assert violations(tagged, {}) == []


@pytest.mark.slow
def test_captions_that_are_nearly_equal_are_found_and_many_tags_are_searched(own_data: Path, page: Page):
    for number in range(8):
        (own_data / f"0{number}.txt").write_text(", ".join(f"tag {number}-{at}" for at in range(20)))
    (own_data / "01.txt").write_text("A red fox in deep snow.")
    (own_data / "06.txt").write_text("a red fox, in deep snow")
    show(page, "Data")
    page.locator("#shows [data-show=alike]").click()
    until(page, "[...document.querySelectorAll('.pc')].map(card => card.dataset.name).join() === '01.png,06.png'")
    expect(card(page, "06.png").locator(".tags")).to_have_text("like 01.png")
    expect(page.locator("#tags-more")).to_have_text("and 63 more; find them by their text")
    page.locator("#tag-find").fill("4-1")
    expect(page.locator("#tags button")).to_have_count(11)
    page.locator("#shows [data-show=all]").click()
    expect(page.locator(".pc")).to_have_count(8)
    page.evaluate("localStorage.clear()")
