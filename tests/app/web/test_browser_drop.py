"""Drop and name in Chromium: from an empty home to a run of own pictures, and what may happen on the way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.app.browser import (
    TRAINED_WITHIN_S,
    Server,
    faultless,
    held_back,
    serving,
    state_is,
    until,
    until_so,
    visit,
    write_over,
)
from tests.app.web.screens import violations
from tests.app.web.test_browser_two_windows import window
from tests.runs import make_pictures, write_preset
from trainer.run import process
from trainer.run.captioning import jobs
from trainer.run.folder import RunDir

pytestmark = pytest.mark.slow  # each has a home of its own; what the server answers is tested in test_drop.py
MOST_CLICKS, MOST_TEXTS = 4, 2
COUNTS = """
  window.clicks = 0;
  window.texts = new Set();
  addEventListener('pointerdown', event => { if (event.isTrusted) clicks++; }, true);
  addEventListener('input', ({ target }) => {
    if (target.matches('[type=text], textarea')) texts.add(target.id);
  }, true);
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without runs, with a preset of a small random model."""
    runs = tmp_path_factory.mktemp("home") / "runs"
    preset = write_preset(runs / "presets" / "other.yaml", runs.parent / "none", steps=2)
    preset.write_text(preset.read_text() + "parallel: {device: cpu}\nsample: {every: 0}\n")
    with serving(runs) as server:
        yield server


@pytest.fixture
def page(home: Server, browser: Browser) -> Iterator[Page]:
    """The address that the terminal printed, opened in an empty home, which it is again afterwards."""
    with at_home(home, browser) as page:
        yield page
    for file in home.runs.glob("*/config.yaml"):
        process.terminate(RunDir.open(file.parent))
        shutil.rmtree(file.parent)
    for name in ("draft.json", "pending.json"):
        (home.runs / "drafts" / name).unlink(missing_ok=True)
    shutil.rmtree(home.runs / "captioning", ignore_errors=True)
    shutil.rmtree(home.runs.parent / "pictures", ignore_errors=True)


@contextmanager
def at_home(home: Server, browser: Browser, **options) -> Iterator[Page]:
    with closing(browser.new_context(**options)) as context:
        page = context.new_page()
        page.add_init_script(COUNTS)
        page.on("dialog", lambda dialog: dialog.accept())
        with faultless(page, home.url):
            page.goto(home.url)
            page.locator("#upload-drop:visible").wait_for()
            yield page


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    return sorted(make_pictures(tmp_path / "photos", 20).glob("*"))


def choose(page: Page, files: list[Path]) -> None:
    """Choose files in the browser's dialog."""
    with page.expect_file_chooser() as chooser:
        page.locator("#upload-files").click()
    chooser.value.set_files(files)


def name(page: Page, word: str) -> None:
    """Type the word where the keyboard is, and go on."""
    until(page, "document.activeElement.id === 'drop-word'")
    page.keyboard.type(word)
    page.keyboard.press("Enter")


def proposed(page: Page, number: int) -> None:
    page.locator("#drop-count", has_text=f"{number} pictures").wait_for()


def run_of(home: Server, name: str) -> RunDir:
    [file] = home.runs.glob(f"{name}-*/config.yaml")
    return RunDir.open(file.parent)


def test_own_pictures_on_another_model_take_four_clicks_and_two_texts_from_an_empty_home(
    page: Page, home: Server, photos: list[Path]
):
    choose(page, photos)
    name(page, "Milo")
    proposed(page, 20)
    page.locator("#drop-preset").select_option("other")
    until(page, "document.querySelector('#drop-preset').value === 'other'")
    expect(page.locator("#drop-start")).to_be_enabled()
    page.locator("#drop-start").click()
    state_is(page, "finished", timeout_s=TRAINED_WITHIN_S)
    opened_and_chosen = 2  # the list of models, which is no element of the page
    assert page.evaluate("clicks") + opened_and_chosen == MOST_CLICKS
    assert 1 <= page.evaluate("texts.size") <= MOST_TEXTS
    config = run_of(home, "Milo").config()
    assert (config.model.path, config.data.trigger, config.data.path) == (
        "tiny",
        "milo",
        str(home.runs.parent / "pictures" / "milo"),
    )
    assert config.sample.prompts == tuple(f"[trigger], picture number {at}" for at in (0, 1, 2, 3))
    page.goto(f"{home.origin}/")  # with a run, the page begins with New run
    page.locator("#page-new h1").wait_for()


def test_what_is_proposed_can_be_changed_and_is_in_the_form_behind_it(page: Page, home: Server, photos: list[Path]):
    choose(page, [file for file in photos if file.suffix == ".png" or file.stem > "12"])
    name(page, "Milo")
    proposed(page, 20)
    expect(page.locator("#drop-prompts")).to_have_value(
        "[trigger], picture number 16\n[trigger], picture number 17\n[trigger], picture number 18\n"
        "[trigger], picture number 19"
    )
    until(page, "document.activeElement.id === 'drop-writer'")
    assert page.locator("#drop-writer").input_value() == ""  # the demo's captions are no proposal
    assert "13 of 20 pictures have no caption" in page.locator("#drop-writing").inner_text()
    page.locator("#drop-writer").select_option("florence-community/Florence-2-base")
    expect(page.locator("#drop-writing")).to_contain_text("Start downloads 500 MB and has them written first")
    expect(page.locator("#drop-writing")).to_contain_text("Its licence is MIT: free to use, commercially too.")
    page.locator("#drop-writer").select_option("")
    assert "Demo model: LoRA" in page.locator("#drop-preset option:checked").inner_text()
    expect(page.locator("#drop-warnings")).to_contain_text("blurred")
    write_over(page, "drop-trigger", "m1lo")
    page.keyboard.press("Tab")
    page.locator("#drop-all").click()
    page.locator("#field-data-trigger").wait_for()
    until(page, "document.querySelector('#field-sample-prompts').value.startsWith('[trigger], picture number 16')")
    assert page.locator("#field-data-trigger").input_value() == "m1lo"
    assert page.locator("#field-name").input_value() == "Milo"
    assert page.locator("#proposals").is_hidden()
    page.go_back()
    expect(page.locator("#drop-trigger")).to_have_value("m1lo")
    page.reload()
    expect(page.locator("#drop-trigger")).to_have_value("m1lo")
    visit(page, "drop")
    page.locator("#drop-other").get_by_role("link", name="milo").click()
    proposed(page, 20)


def test_a_word_that_cannot_name_is_refused_in_a_sentence_and_the_pictures_stay(
    page: Page, home: Server, photos: list[Path]
):
    page.keyboard.type("early")  # the word before the pictures
    page.keyboard.press("Enter")
    page.locator("#drop-first-note", has_text="Now the pictures").wait_for()
    choose(page, photos[:6])
    proposed(page, 3)
    page.locator("#drop-new").click()
    choose(page, photos[:6])
    page.locator("#drop-first-note", has_text="6 files chosen").wait_for()
    for word, sentence in (
        ("", "One word for what the pictures show is missing"),
        ("m" * 200, "The word has 200 letters, the limit is 64"),
        ("🦊", "'🦊' has neither a letter nor a digit"),
        ("cache", "not a name for a folder of images"),
    ):
        page.locator("#drop-word").fill(word)
        page.keyboard.press("Enter")
        page.locator("#drop-said [role=alert]", has_text=sentence).wait_for()
    page.locator("#drop-word").fill("red/fox")
    page.keyboard.press("Enter")
    proposed(page, 3)
    assert sorted(os.listdir(home.runs.parent / "pictures")) == ["early", "red-fox"]
    expect(page.locator("#drop-name")).to_have_value("red-fox")
    assert page.locator("#drop-said").inner_text() == ""


def test_of_five_hundred_files_of_which_half_are_no_pictures_the_others_are_taken_and_each_refusal_is_said(
    page: Page, home: Server, tmp_path: Path
):
    for number in range(250):
        Image.new("RGB", (64, 64), (number, 255 - number, 7)).save(tmp_path / f"{number:03d}.png")
        (tmp_path / f"note {number:03d}.png").write_text("no picture")
    choose(page, sorted(tmp_path.glob("*.png")))
    name(page, "colours")
    page.locator("#drop-count", has_text="250 pictures").wait_for(timeout=240_000)
    results = page.locator("#upload-results")
    expect(results).to_contain_text("250 files were not taken")
    expect(results).to_contain_text("note 249.png")
    expect(page.locator("#drop-start")).to_be_enabled()
    assert len(os.listdir(home.runs.parent / "pictures" / "colours")) == 250


def test_two_windows_that_name_the_same_folder_get_one_each_and_neither_starts_the_other_ones(
    page: Page, home: Server, photos: list[Path]
):
    with window(page, home, "drop") as other:
        other.locator("#upload-drop:visible").wait_for()
        choose(page, photos[:20])
        choose(other, photos[20:])
        for one in (page, other):
            one.locator("#drop-word").fill("milo")
        with held_back(page, "drop_make"), held_back(other, "drop_make"):
            for one in (page, other):
                one.locator("#drop-word").press("Enter")
                one.wait_for_timeout(200)
        pictures = home.runs.parent / "pictures"
        until_so(page, lambda: [len([*(pictures / one).glob("*.*")]) for one in ("milo", "milo-2")] == [20, 20])
        mine, theirs = sorted((page, other), key=lambda one: one.locator("#drop-card").is_hidden())
        proposed(mine, 10)
        theirs.locator("#drop-other", has_text="Another window has named other pictures").wait_for()
        assert theirs.locator("#drop-start").is_hidden()
        theirs.locator("#drop-other a").click()
        proposed(theirs, 10)


def test_a_server_that_goes_away_in_the_middle_of_each_step_costs_nothing(
    page: Page, home: Server, photos: list[Path], tmp_path: Path
):
    Image.frombytes("RGB", (2000, 2000), os.urandom(12_000_000)).save(tmp_path / "large.png")
    lost = page.locator("#drop-said", has_text="What was dropped and typed is kept here")
    choose(page, [*photos, tmp_path / "large.png"])
    home.kill()
    name(page, "milo")
    lost.wait_for()
    page.route("**/uploads/*", lambda route: (home.kill(), route.abort()))  # in the middle of the largest file
    home.start()
    page.locator("#upload-current", has_text="The server does not answer").wait_for()
    page.unroute("**/uploads/*")
    home.start()
    proposed(page, 21)
    home.kill()
    write_over(page, "drop-name", "late")
    page.keyboard.press("Tab")
    lost.wait_for()
    home.start()
    lost.wait_for(state="detached")
    until_so(page, lambda: '"late"' in (home.runs / "drafts" / "draft.json").read_text())
    page.locator("#drop-preset").select_option("other")
    expect(page.locator("#drop-start")).to_be_enabled()
    home.kill()
    page.locator("#drop-start").click()
    lost.wait_for()
    home.start()
    state_is(page, "starting", "loading", "encoding", "training", "saving", "finished", timeout_s=TRAINED_WITHIN_S)
    assert run_of(home, "late").config().data.path == str(home.runs.parent / "pictures" / "milo")


def choose_uncaptioned(page: Page, photos: list[Path]) -> None:
    """Name pictures without captions, which the demo model is to write before another one is trained."""
    choose(page, [file for file in photos if file.suffix == ".png"])
    name(page, "signs")
    proposed(page, 20)
    page.locator("#drop-preset").select_option("other")
    page.locator("#drop-writer").select_option("demo")


def test_start_has_the_captions_written_first_and_begins_although_the_page_is_closed_and_its_server_starts_anew(
    page: Page, home: Server, photos: list[Path]
):
    choose_uncaptioned(page, photos)
    page.locator("#drop-writing", has_text="Start has them written first").wait_for()
    expect(page.locator("#drop-start")).to_be_enabled()
    page.locator("#drop-start").click()
    page.locator("#drop-pending", has_text="signs starts by itself").wait_for()
    page.goto("about:blank")
    home.kill()
    home.start()
    until_so(page, lambda: bool([*home.runs.glob("signs-*/config.yaml")]))
    run = run_of(home, "signs")
    assert len([*(home.runs.parent / "pictures" / "signs").glob("*.txt")]) == 20
    assert len(run.config().sample.prompts) == 4 and all("[trigger], " in one for one in run.config().sample.prompts)
    page.goto(f"{home.url}#/drop")
    page.locator("#drop-pending", has_text="signs has started").wait_for()


def test_captions_that_are_stopped_keep_the_run_from_starting_and_it_is_started_without(
    page: Page, home: Server, photos: list[Path]
):
    choose_uncaptioned(page, photos)
    expect(page.locator("#drop-start")).to_be_enabled()
    page.locator("#drop-start").click()
    page.locator("#drop-pending", has_text="signs starts by itself").wait_for()
    [job] = jobs(home.runs)
    process.terminate(job.run)
    page.locator("#drop-pending [role=alert]", has_text="signs was not started").wait_for()
    page.locator("#drop-writer").select_option("")
    expect(page.locator("#drop-start")).to_be_enabled()
    page.locator("#drop-start").click()
    page.locator("#run").wait_for()


def test_captions_that_are_written_now_become_the_prompts(page: Page, home: Server, photos: list[Path]):
    choose(page, [file for file in photos if file.suffix == ".png"])
    name(page, "signs")
    proposed(page, 20)
    expect(page.locator("#drop-prompts")).to_have_value("[trigger]")
    page.locator("#drop-writer").select_option("demo")
    page.locator("#drop-write").click()
    page.locator("#drop-writer option", has_text="All pictures have one").wait_for(state="attached")
    until(page, "document.querySelector('#drop-prompts').value.split('\\n').length === 4")
    assert page.locator("#drop-write").is_hidden()


def test_what_is_proposed_is_rehearsed_first(page: Page, home: Server, photos: list[Path]):
    choose(page, photos)
    name(page, "milo")
    proposed(page, 20)
    page.locator("#drop-rehearse").click()
    page.locator("#rehearsal .trained li").first.wait_for()
    rehearsed = run_of(home, "milo").config()
    assert rehearsed.data.trigger == "milo" and rehearsed.data.path == str(home.runs.parent / "pictures" / "milo")
    assert (rehearsed.model.path, len(rehearsed.sample.prompts)) == ("demo", 4)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_takes_the_path_by_touch_and_the_keyboard_reaches_all_of_it(
    home: Server, browser: Browser, page: Page, photos: list[Path], scheme: str
):
    options = {"viewport": {"width": 400, "height": 800}, "has_touch": True, "is_mobile": True, "color_scheme": scheme}
    with at_home(home, browser, **options) as phone:
        assert violations(phone, {}) == []
        with phone.expect_file_chooser() as chooser:
            phone.locator("#upload-files").tap()
        chooser.value.set_files(photos)
        phone.locator("#drop-word").fill("milo")
        phone.locator("#drop-go").tap()
        proposed(phone, 20)
        assert phone.evaluate("document.documentElement.scrollWidth") <= 400
        assert violations(phone, {}) == []
        for part in ("start", "preset", "name"):
            box = phone.locator(f"#drop-{part}").bounding_box()
            assert box["height"] >= 34, part
        expect(phone.locator("#drop-start")).to_be_enabled()
        reached = []
        phone.locator("#drop-all").focus()
        for _ in range(16):
            phone.keyboard.press("Tab")
            reached.append(phone.evaluate("document.activeElement.id"))
        lines = {f"drop-{part}" for part in ("writer", "name", "trigger", "prompts", "preset", "start")}
        assert {"upload-files", *lines} <= {*reached}
        phone.locator("#drop-start").tap()
        phone.locator("#run").wait_for()
