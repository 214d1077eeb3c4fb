"""The panel "Caption with a model" of the screen Data in Chromium, with a tiny real model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.app.browser import opened, show, until_so
from tests.app.web.test_browser_download import site_in
from tests.captioning.models import write_qwen2_5_vl
from trainer.config.models import captioners

ENDS_WITHIN_MS = 120_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2_5_vl(tmp_path_factory.mktemp("models") / "vl")


@pytest.fixture
def panel(own_data: Path, page: Page) -> Iterator[Locator]:
    """The panel, with eight images of which one has a caption."""
    for number in range(1, 8):
        (own_data / f"0{number}.txt").unlink()
    show(page, "Data")
    page.locator("#card-captioning").wait_for()
    yield page.locator("#card-captioning")
    page.evaluate("localStorage.clear()")


def start(panel: Locator, model: Path | str) -> None:
    panel.get_by_label("Model", exact=False).first.fill(str(model))
    panel.locator("summary", has_text="Model and devices").click()
    panel.locator("#caption-device").select_option("cpu")
    panel.locator("#caption-trigger").check()
    panel.locator("#caption-start").click()


def take_back(panel: Locator, count: int, folder: Path) -> None:
    """Undo a whole job, which asks first and names what it will change."""
    panel.locator("#caption-undo", has_text=f"Take back these {count} caption").click()
    dialog = panel.page.get_by_role("dialog", name=f"Take back {count} captions?")
    expect(dialog).to_contain_text(f"wrote them in {folder}. Captions that were changed since stay.")
    dialog.get_by_role("button", name="Take back").click()


@pytest.mark.slow
def test_a_model_captions_the_images_of_a_page_that_was_closed_and_all_is_undone(own_data: Path, panel: Locator, model):
    page = panel.page
    start(panel, model)
    panel.locator("#caption-now").wait_for()
    address = page.url
    page.goto("about:blank")  # captions are written although no window shows the job
    until_so(page, lambda: len([*own_data.glob("*.txt")]) == 8)
    page.goto(address)  # a page that is opened again finds the job
    panel.locator("#caption-end", has_text="7 captions written").wait_for(timeout=ENDS_WITHIN_MS)
    written = {file.name: file.read_text(encoding="utf-8") for file in sorted(own_data.glob("*.txt"))}
    assert written.pop("00.txt") == "picture number 0"
    assert len(written) == 7 and all(text.startswith("[trigger], ") for text in written.values())
    for name, text in written.items():
        box = page.locator(f".pc[data-name='{name.replace('.txt', '.png')}']").get_by_role("textbox")
        expect(box).to_have_value(text.strip())
    take_back(panel, 7, own_data)
    panel.locator("#caption-said", has_text="7 captions taken back.").wait_for()
    assert [file.name for file in own_data.glob("*.txt")] == ["00.txt"]
    expect(page.locator(".pc[data-name='03.png']").get_by_role("textbox")).to_have_value("")
    expect(panel.locator("#caption-undo")).to_have_count(0)


@pytest.mark.slow
def test_a_job_is_stopped_and_continued_and_what_is_refused_is_said(own_data: Path, panel: Locator, model):
    start(panel, "/nowhere")
    panel.get_by_role("alert").filter(has_text="--model /nowhere: no config.json").wait_for()
    panel.locator("#caption-model").fill(str(model))
    panel.locator("#caption-start").click()
    panel.locator("#caption-stop").click()
    panel.locator("#caption-end", has_text=re.compile(r"Stopped at \d of 7 images")).wait_for(timeout=ENDS_WITHIN_MS)
    panel.locator("#caption-resume").click()
    panel.locator("#caption-end", has_text="7 captions written").wait_for(timeout=ENDS_WITHIN_MS)
    until_so(panel.page, lambda: len([*own_data.glob("*.txt")]) == 8)
    panel.locator("#caption-start").click()
    panel.locator("#caption-said", has_text="Every image has a caption.").wait_for()


@pytest.mark.slow
def test_the_panel_follows_the_folder_that_is_shown(own_data: Path, panel: Locator):
    page, other = panel.page, own_data.with_name("second")
    start(panel, "demo")
    until_so(page, lambda: len([*own_data.glob("*.txt")]) == 8)  # the end of an earlier job may be shown until then
    panel.locator("#caption-end", has_text="7 captions written").wait_for(timeout=ENDS_WITHIN_MS)
    job = page.evaluate("folder => studio.call('captioning_state', { folder })", str(own_data))["job"]["name"]
    page.locator("#upload-to").select_option(f"new:{own_data.parent}")
    page.get_by_label("called").fill(other.name)
    page.locator("#upload-input").set_input_files([own_data / "01.png", own_data / "02.png"])
    page.locator("#upload-done").get_by_text("2 files added.", exact=True).wait_for()
    expect(page.locator("#folder")).to_have_text(str(other))
    expect(panel.locator("#caption-undo")).to_have_count(0)  # the job is of the folder before
    for name in ("undo", "stop", "resume"):
        refused = page.evaluate(
            "([name, job, folder]) => studio.call(name, { job, folder }).catch(error => error.message)",
            [f"captioning_{name}", job, str(own_data)],
        )
        assert refused == "New run has another folder meanwhile, which is shown now; nothing was changed"
    assert len([*own_data.glob("*.txt")]) == 8
    panel.locator("#caption-start").click()  # and the first click begins that of the folder that is shown
    panel.locator("#caption-end", has_text="2 captions written").wait_for(timeout=ENDS_WITHIN_MS)
    until_so(page, lambda: len([*other.glob("*.txt")]) == 2)
    take_back(panel, 2, other)
    panel.locator("#caption-said", has_text="2 captions taken back.").wait_for()
    assert (len([*own_data.glob("*.txt")]), [*other.glob("*.txt")]) == (8, [])
    shutil.rmtree(other)


@pytest.mark.slow
def test_a_model_that_is_offered_is_downloaded_and_writes_captions(browser: Browser, tmp_path: Path, model: Path):
    offered = next(iter(captioners().values()))
    files = {str(file.relative_to(model)): file.read_bytes() for file in model.rglob("*") if file.is_file()}
    with site_in(tmp_path) as site, site.hub(offered.id, files=files, hold_after=1) as hub:
        pictures = tmp_path / "pictures"
        for caption in pictures.glob("*.txt"):
            caption.unlink()
        site.choose("open")
        with opened(browser, site.server.url) as page:
            show(page, "Data")
            line = page.locator(f"#caption-offers [data-model='{offered.id}']")
            expect(line).to_contain_text("Florence-2 base")
            expect(line).to_contain_text("500 MB · MIT")
            expect(line.get_by_role("link")).to_have_attribute("href", f"https://huggingface.co/{offered.id}")
            line.get_by_role("button", name="Download").click()
            line.get_by_role("progressbar").wait_for()
            line.get_by_role("button", name="Pause").click()
            line.get_by_text("Paused.").wait_for()
            hub.released.set()
            hub.hold_after = None
            line.get_by_role("button", name="Continue").click()
            line.get_by_text("is on this machine").wait_for()
            line.get_by_role("button", name="Use").click()
            expect(page.locator("#caption-model")).to_have_value(offered.id)
            expect(page.locator("#caption-start")).to_have_text("Caption pictures")
            page.locator("summary", has_text="Model and devices").click()
            page.locator("#caption-device").select_option("cpu")
            page.locator("#caption-start").click()
            page.locator("#caption-end", has_text="4 captions written").wait_for(timeout=ENDS_WITHIN_MS)
            until_so(page, lambda: len([*pictures.glob("*.txt")]) == 4)
