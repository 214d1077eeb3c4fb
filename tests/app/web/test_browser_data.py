"""The screen Data in Chromium: captions, what is broken or slow, and that nothing typed is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.app.browser import HANDLERS, data_screen, held_back, reload, show, until, until_so, visit, write_over
from tests.runs import make_pictures, write_preset


def card(page: Page, name: str) -> Locator:
    return page.locator(f".pc[data-name='{name}']")


def caption(page: Page, name: str) -> Locator:
    return card(page, name).get_by_role("textbox")


@contextmanager
def typed(page: Page, name: str, text: str) -> Iterator[None]:
    """A caption that was typed reaches the server at the end: the page has not looked at its file since."""
    with held_back(page, "data_save") as held:
        caption(page, name).fill(text)
        until_so(page, lambda: bool(held))
        yield


def said(folder: Path, name: str) -> str:
    return (folder / name).read_text().strip()


@pytest.fixture
def data(own_data: Path, page: Page) -> Iterator[Page]:
    """The screen with eight images in the form."""
    with data_screen(page) as page:
        yield page


def test_a_caption_is_saved_as_it_is_typed_and_undone(own_data: Path, data: Page):
    undo, replace = data.locator("#data-undo"), data.locator("#data-replace")
    caption(data, "00.png").fill("a red square")
    card(data, "00.png").get_by_text("saved", exact=True).wait_for()
    assert said(own_data, "00.txt") == "a red square"
    data.locator("#data-open-replace").click()
    assert replace.is_disabled()
    write_over(data, "data-search", "picture")
    data.get_by_text("Replace in 7 captions").wait_for()
    assert data.locator(".pc").count() == 7
    write_over(data, "data-replacement", "drawing")
    replace.click()
    data.locator("#data-message", has_text="7 captions changed.").wait_for()
    assert (own_data / "01.txt").read_text() == "drawing number 1\n"
    expect(undo).to_have_text("Undo (7 captions)")
    undo.click()
    data.locator("#data-message", has_text="7 captions restored.").wait_for()
    assert (own_data / "01.txt").read_text() == "picture number 1\n"
    expect(caption(data, "01.png")).to_have_value("picture number 1")
    data.locator("#data-undo", has_text="Undo (1 caption)").click()
    until_so(data, lambda: said(own_data, "00.txt") == "picture number 0")


@pytest.mark.slow
def test_a_search_shows_what_it_found_though_a_saved_caption_asked_meanwhile(own_data: Path, data: Page):
    held: list[Route] = []

    def hold_two(route: Route) -> None:
        if route.request.url.endswith("data_view") and len(held) < 2:
            held.append(route)
        else:
            route.continue_()

    data.route(HANDLERS, hold_two)
    caption(data, "00.png").fill("a red square")
    data.locator("#data-search").fill("picture")  # saves the caption first
    until_so(data, lambda: len(held) == 2)  # that of the search, and that of what was saved
    for route in held:
        route.continue_()
    expect(data.locator(".pc")).to_have_count(7)
    data.unroute(HANDLERS)


def test_figures_filters_and_words_choose_images(own_data: Path, page: Page):
    (own_data / "02.txt").unlink()
    (own_data / "05.txt").write_text("a boat in snow")
    preset = own_data.parent / "runs" / "presets" / "own.yaml"
    preset.write_text(preset.read_text().replace("resolution: 64", "resolution: 64, validation: 2"))
    show(page, "Data")
    expect(page.locator("#counted")).to_have_text("8 images, 7 captions, 3 shapes, 2 held out")
    expect(page.locator("#trained")).to_have_text("6 images to train on; 2 held out.")
    assert page.locator("#held .one").all_inner_texts() == ["06.png", "07.png"]
    for name, shown in (("uncaptioned", ["02.png"]), ("held_out", ["06.png", "07.png"])):
        page.locator(f"#shows [data-show={name}]").click()
        until(
            page, f"[...document.querySelectorAll('.pc')].map(card => card.dataset.name).join() === '{','.join(shown)}'"
        )
    assert card(page, "06.png").get_by_text("held out").is_visible()
    page.locator("#shows [data-show=all]").click()
    page.locator("#words [data-word=boat]").click()
    until(page, "document.querySelectorAll('.pc').length === 1")
    assert card(page, "05.png").is_visible()
    expect(page.locator("#data-search")).to_have_value("boat")
    inset = page.evaluate("getComputedStyle(document.querySelector('.pc .cr')).inset")
    assert re.fullmatch(r"0px [\d.]+px|[\d.]+px 0px", inset), inset  # 48 x 96 in a bucket of 48 x 80


@pytest.mark.slow
def test_a_card_stays_while_its_caption_is_typed_though_it_no_longer_matches(own_data: Path, page: Page):
    (own_data / "02.txt").unlink()
    show(page, "Data")
    page.locator("#shows [data-show=uncaptioned]").click()
    until(page, "document.querySelectorAll('.pc').length === 1")
    caption(page, "02.png").press_sequentially("a boat")
    card(page, "02.png").get_by_text("saved", exact=True).wait_for()
    expect(page.locator("#shows [data-show=uncaptioned]")).to_have_text("No caption 0")
    expect(caption(page, "02.png")).to_be_focused()
    assert said(own_data, "02.txt") == "a boat"


def test_of_two_texts_for_one_caption_none_is_overwritten_unasked(own_data: Path, data: Page):
    with typed(data, "00.png", "from the page"):
        (own_data / "00.txt").write_text("from another window")
    card(data, "00.png").get_by_text("It says: “from another window”").wait_for()
    assert said(own_data, "00.txt") == "from another window"
    card(data, "00.png").get_by_role("button", name="Use mine").click()
    until_so(data, lambda: said(own_data, "00.txt") == "from the page")
    with typed(data, "01.png", "from the page"):
        (own_data / "01.txt").write_text("from an editor")
    card(data, "01.png").get_by_role("button", name="Use the file").click()
    expect(caption(data, "01.png")).to_have_value("from an editor")
    expect(card(data, "01.png").get_by_role("alert")).to_have_count(0)
    assert said(own_data, "01.txt") == "from an editor"


@pytest.mark.slow
def test_a_caption_in_conflict_can_be_decided_also_when_its_card_is_not_shown(own_data: Path, data: Page):
    with typed(data, "00.png", "from the page"):
        (own_data / "00.txt").unlink()
    card(data, "00.png").get_by_text("file was removed meanwhile").wait_for()
    data.locator("#data-search").fill("number 5")
    until(data, "document.querySelectorAll('.pc').length === 1")
    data.reload()
    unsaved = data.locator("#data-unsaved")
    expect(unsaved).to_be_hidden()  # all cards are shown again
    data.locator("#data-search").fill("number 5")
    until(data, "document.querySelectorAll('.pc').length === 1")
    unsaved.get_by_text("00.png").wait_for()
    assert not (own_data / "00.txt").exists()
    unsaved.get_by_role("button", name="Use mine").click()
    until_so(data, lambda: (own_data / "00.txt").exists() and said(own_data, "00.txt") == "from the page")
    expect(unsaved).to_be_hidden()
    (own_data / "05.png").unlink()
    caption(data, "05.png").fill("a red square")
    card(data, "05.png").get_by_text("no such image").wait_for()
    data.locator("#data-search").fill("number 6")
    unsaved.get_by_text("no such image").wait_for()
    unsaved.get_by_role("button", name="Discard").click()
    expect(unsaved).to_be_hidden()


@pytest.mark.slow
def test_undo_waits_for_a_caption_that_is_on_its_way(own_data: Path, data: Page):
    caption(data, "00.png").fill("one")
    card(data, "00.png").get_by_text("saved", exact=True).wait_for()
    with typed(data, "00.png", "two"):
        data.locator("#data-undo").click()
        data.wait_for_timeout(300)  # what does not wait is sent by now
    data.locator("#data-message", has_text="1 caption restored.").wait_for()
    until_so(data, lambda: said(own_data, "00.txt") == "one")
    expect(caption(data, "00.png")).to_have_value("one")


@pytest.mark.slow
def test_a_caption_that_was_not_saved_before_a_reload_is_sent_after_it_from_any_screen(own_data: Path, data: Page):
    data.route(HANDLERS, lambda route: route.abort())
    caption(data, "03.png").fill("typed before the reload")
    card(data, "03.png").get_by_text("not saved yet").wait_for()
    visit(data, "queue")
    data.unroute(HANDLERS)
    data.reload()
    until_so(data, lambda: said(own_data, "03.txt") == "typed before the reload")


@pytest.mark.slow
def test_a_caption_that_is_refused_says_so_and_stays(own_data: Path, data: Page):
    text = caption(data, "00.png")
    text.evaluate("(box, text) => { box.value = text; box.dispatchEvent(new Event('input')); }", "a" * 70_000)
    card(data, "00.png").get_by_text("70000 bytes are too many for a caption").wait_for()
    assert said(own_data, "00.txt") == "picture number 0" and len(text.input_value()) == 70_000
    text.fill("shorter")
    card(data, "00.png").get_by_text("saved", exact=True).wait_for()


def test_a_broken_image_is_named_and_keeps_start_from_starting(own_data: Path, page: Page):
    (own_data / "07.png").write_bytes(b"no image")
    show(page, "Data")
    page.locator("#data-problems [role=alert]", has_text="07.png").wait_for()
    card(page, "07.png").get_by_text("cannot be shown").wait_for()
    show(page, "New run")
    until(page, "document.querySelector('#start').disabled")
    page.locator("#why", has_text="07.png").wait_for()


@pytest.mark.slow
def test_a_folder_that_takes_long_is_waited_for_in_peace(own_data: Path, page: Page):
    slow = own_data / "metadata.jsonl"
    slow.write_bytes(b"\n" * 4 * 10**8)  # minutes to read
    show(page, "Data")
    page.locator("#counted", has_text="files so far").wait_for()
    show(page, "New run")
    page.locator("#why", has_text="Reading the images").wait_for()
    assert page.locator("#start").is_disabled()
    os.truncate(slow, 0)  # whoever reads it is at its end
    until(page, "!document.querySelector('#start').disabled")
    show(page, "Data")
    page.locator("#counted", has_text="8 images").wait_for()


@pytest.mark.slow
def test_what_is_typed_keeps_the_focus_though_the_files_are_read_again(own_data: Path, page: Page):
    (own_data / "02.txt").unlink()
    show(page, "Data")
    box = caption(page, "02.png")
    box.wait_for()
    slow = own_data / "metadata.jsonl"
    slow.write_bytes(b"\n" * 4 * 10**8)  # minutes to read
    box.press_sequentially("a boat")
    page.locator("#data-reading").wait_for()
    expect(box).to_be_focused()
    box.press_sequentially(" in snow")
    os.truncate(slow, 0)
    until_so(page, lambda: (own_data / "02.txt").exists() and said(own_data, "02.txt") == "a boat in snow")
    expect(page.locator("#data-reading")).to_be_hidden()
    expect(box).to_be_focused()


@pytest.mark.slow
def test_a_folder_without_images_says_what_to_do(own_data: Path, page: Page):
    aside = own_data.with_name("aside")
    own_data.rename(aside)
    own_data.mkdir()
    show(page, "Data")
    page.locator("#data-empty", has_text="No images here.").wait_for()
    page.locator("#data-problems", has_text="the folder is empty").wait_for()
    shutil.copytree(aside, own_data, dirs_exist_ok=True)
    page.locator("#data-again").click()
    caption(page, "07.png").wait_for()
    shutil.rmtree(aside)


@pytest.mark.slow  # the numbers of pages are tested in test_dataset.py and test_data.py
def test_pages_of_images_and_one_of_them_in_full_size(runs: Path, draft: Path, page: Page):
    folder = make_pictures(runs.parent / "many", 100)
    preset = write_preset(runs / "presets" / "many.yaml", folder)
    draft.write_text(json.dumps({"preset": "many", "values": {}}))
    reload(page)
    show(page, "Data")
    expect(page.locator("#data-range")).to_have_text("1–48 of 100")
    expect(page.get_by_role("button", name="Previous")).to_be_disabled()
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#data-range")).to_have_text("49–96 of 100")
    assert page.locator(".pc").count() == 48
    heights = page.evaluate("[...document.querySelectorAll('.pc')].map(card => card.offsetHeight)")
    assert len(set(heights)) == 1
    card(page, "49.png").locator(".fr").click()
    box = page.locator("#lightbox")
    box.get_by_text("49.png · 2 of 48").wait_for()
    until(page, "document.querySelector('#lightbox img').naturalWidth > 0")
    box.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#data-range")).to_have_text("97–100 of 100")
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    for number, shown in (("2", "49–96 of 100"), ("99", "97–100 of 100")):
        page.locator("#data-page").fill(number)
        page.keyboard.press("Enter")
        expect(page.locator("#data-range")).to_have_text(shown)
    preset.unlink()
    shutil.rmtree(folder)


@pytest.mark.slow  # loads torch in a process of its own
def test_the_noise_images_are_trained_at_is_shown_per_bucket(data: Page):
    data.locator("#compute-timesteps").click()
    data.locator("#timesteps tr", has_text="64 × 64").locator(".histogram").wait_for()


@pytest.mark.slow  # loads torch in a process of its own
def test_what_is_cut_of_a_caption_is_marked_until_it_is_short_enough(own_data: Path, page: Page):
    """The tiny model reads 48 tokens with its template; letters of another alphabet take two each."""
    (own_data / "00.txt").write_text(f"{'ж' * 40} <b>hat</b>")
    show(page, "Data")
    end = card(page, "00.png").locator(".cut")
    end.locator("del", has_text="<b>hat</b>").wait_for()
    assert "text_encoder reads 48 of" in end.inner_text()
    assert card(page, "01.png").locator(".cut").count() == 0
    page.locator("#data-cut", has_text="1 of 8 captions is longer than the model reads").wait_for()
    caption(page, "00.png").fill("a hat")
    end.wait_for(state="detached")
    page.locator("#data-cut", has_text="No caption is truncated.").wait_for()


def test_a_language_models_documents_are_counted_and_a_conversation_is_shown(own_data: Path, page: Page):
    shutil.rmtree(own_data)
    own_data.mkdir()
    talk = [{"role": "user", "content": "Hi <b>you</b>"}, {"role": "assistant", "content": "Hello."}]
    (own_data / "a.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 3)
    preset = own_data.parent / "runs" / "presets" / "own.yaml"
    preset.write_text(f"name: own\nmodel: {{family: causal_lm}}\ndata: {{path: {own_data}}}\n")
    show(page, "Data")
    expect(page.locator("#counted")).to_have_text("1 text file")
    assert page.locator("#figures div", has_text="documents").inner_text().split() == ["documents", "3"]
    assert page.locator("#texts p").all_inner_texts() == [
        "The first conversation; the assistant\u2019s words are in the loss:",
        "user: Hi <b>you</b>",
        "assistant: Hello.",
    ]
