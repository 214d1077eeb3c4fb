"""From a phone's photos to a trained adapter: dropped, captioned by a model, one masked, crops seen; by the page in
Chromium, and the same by the command line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.app.browser import TRAINED_WITHIN_S, show, state_is
from tests.app.web.test_browser_captioning import ENDS_WITHIN_MS, start
from tests.app.web.test_mask import brush, open_mask, save, stroke
from tests.app.web.test_upload import done, drop
from tests.captioning.models import write_qwen2_5_vl
from tests.runs import make_pictures
from trainer.run.folder import RunDir

COUNT = 14

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2_5_vl(tmp_path_factory.mktemp("models") / "vl")


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Photos as a camera leaves them: some large, some on their side, without captions."""
    folder = make_pictures(tmp_path / "photos", COUNT)
    for file in folder.glob("*.txt"):
        file.unlink()
    turned = Image.Exif()
    turned[0x0112] = 6
    for file in sorted(folder.glob("*.png"))[::2]:
        with Image.open(file) as image:
            image.resize((4 * image.width, 4 * image.height)).save(file.with_suffix(".jpg"), exif=turned)
        file.unlink()
    return sorted(folder.iterdir())


@pytest.fixture
def empty(own_data: Path, page: Page) -> Iterator[Page]:
    """The screen Data of a form whose folder is empty."""
    for file in own_data.iterdir():
        file.unlink()
    page.on("dialog", lambda dialog: dialog.accept())
    show(page, "Data")
    yield page
    page.evaluate("localStorage.clear()")
    shutil.rmtree(own_data.with_name("own-masks"), ignore_errors=True)


def test_photos_become_a_trained_adapter_by_nothing_but_the_page(
    empty: Page, own_data: Path, runs: Path, photos: list[Path], model: Path
):
    page = empty
    drop(page, *photos)
    done(page, f"{COUNT} files added.")
    start(page.locator("#card-captioning"), model)
    page.locator("#caption-end", has_text=f"{COUNT} captions written").wait_for(timeout=ENDS_WITHIN_MS)
    dialog = open_mask(page, "00.jpg")
    brush(page, 40)
    stroke(page, dialog, (0.2, 0.2), (0.8, 0.8))
    save(page)
    page.locator(".pc[data-name='01.png']").get_by_role("button", name="Crop").click()
    crop = page.locator("dialog#crop")
    crop.get_by_role("status").first.wait_for()
    crop.get_by_role("button", name="Close").click()
    show(page, "New run")
    expect(page.locator("#start")).to_be_enabled(timeout=ENDS_WITHIN_MS)
    page.locator("#start").click()
    state_is(page, "finished", timeout_s=TRAINED_WITHIN_S)
    [run] = (RunDir.open(file.parent) for file in runs.glob("own-*/config.yaml"))
    assert len(list(run.export.glob("*.safetensors"))) == 1
    assert run.config().data.masks == str(own_data.with_name("own-masks"))
    assert len(list(own_data.glob("*.txt"))) == COUNT
    shutil.rmtree(run.path)
