"""The main path on a phone, by touch alone: pictures in, start, samples, the trained file. 400 pixels wide."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, CDPSession, Locator, Page, expect

from tests.app.browser import PATIENCE_S, TRAINED_WITHIN_S, Server, state_is, until, visited
from tests.app.web.screens import violations
from tests.app.web.test_upload import done
from tests.runs import make_pictures
from trainer.run.folder import RunDir

pytestmark = pytest.mark.slow
WIDTH, HEIGHT = 400, 800
LEAST_SIDE = 24
"""Pixels of whatever is touched: WCAG 2.2, 2.5.8."""
AT = """(element, [x, y]) => {
  const top = document.elementFromPoint(x, y);
  return Boolean(top) && (element.contains(top) || top.contains(element) && top.matches('label, a, button'));
}"""


class Finger:
    """A finger on the glass of a phone. It touches only what is seen and not covered."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._devtools: CDPSession = page.context.new_cdp_session(page)

    def _send(self, kind: str, *points: tuple[float, float]) -> None:
        touches = [{"x": x, "y": y} for x, y in points]
        self._devtools.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touches})

    def swipe(self, upwards: float) -> None:
        """Move the page by so many pixels."""
        start = HEIGHT * (0.6 if upwards > 0 else 0.3)
        self._send("touchStart", (WIDTH / 2, start))
        for part in range(1, 9):
            self._send("touchMove", (WIDTH / 2, start - upwards * part / 8))
        self.page.wait_for_timeout(100)  # a finger that rests before it leaves throws nothing
        self._send("touchEnd")

    def tap(self, target: Locator) -> None:
        """Bring a target into the middle of the screen, as a thumb does, and touch it."""
        expect(target).to_be_visible()
        for _ in range(60):
            box = target.bounding_box()
            assert box is not None
            middle = box["y"] + box["height"] / 2
            if target.evaluate(AT, [box["x"] + box["width"] / 2, middle]):
                break
            self.swipe(max(-240.0, min(240.0, middle - HEIGHT * 0.4)))
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        assert target.evaluate(AT, [x, y]), f"{target} is covered"
        assert min(box["width"], box["height"]) >= LEAST_SIDE and 0 <= x <= WIDTH, box
        self._send("touchStart", (x, y))
        self._send("touchEnd")


@pytest.fixture
def phone(browser: Browser, server: Server, own_data: Path) -> Iterator[Page]:
    """The page on a phone, its form with an empty folder of pictures and small samples after each step."""
    for file in own_data.iterdir():
        file.unlink()
    with (server.runs / "presets" / "own.yaml").open("a") as preset:
        preset.write("sample: {every: 1, size: [64, 64], steps: 2, prompts: [a dog]}\n")
    size = {"width": WIDTH, "height": HEIGHT}
    context = browser.new_context(has_touch=True, is_mobile=True, viewport=size, screen=size, device_scale_factor=2)
    with closing(context), visited(context.new_page(), server.url, WIDTH, HEIGHT) as page:
        yield page


def fits(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH


def test_pictures_become_a_trained_file_by_touch_alone(phone: Page, runs: Path, own_data: Path, tmp_path: Path):
    page, finger = phone, Finger(phone)
    assert page.locator("#page-new").get_attribute("data-preset") == "own"
    pictures = sorted(make_pictures(tmp_path / "photos", 6).iterdir())
    finger.tap(page.locator("#rail").get_by_role("link", name="Data"))
    with page.expect_file_chooser() as chosen:
        finger.tap(page.get_by_role("button", name="Choose files"))
    chosen.value.set_files(pictures)
    done(page, "12 files added.")
    fits(page)
    assert len(list(own_data.glob("*.png"))) == 6

    finger.tap(page.locator("#rail").get_by_role("link", name="New run"))
    until(page, "document.querySelector('#why').dataset.state === 'ready'")
    finger.tap(page.locator("#field-sample-prompts"))
    assert page.evaluate("document.activeElement.id") == "field-sample-prompts"
    page.keyboard.type("a cat\n")
    finger.tap(page.locator("#search"))  # away from it
    until(page, "document.querySelector('#why').dataset.busy === undefined")
    fits(page)
    finger.tap(page.locator(".phone").get_by_role("button", name="Start"))

    state_is(page, "finished", timeout_s=TRAINED_WITHIN_S)
    [run] = (RunDir.open(file.parent) for file in runs.glob("own-*/config.yaml"))
    fits(page)
    finger.tap(page.locator("#newest .enlarge").first)
    expect(page.locator("#lightbox")).to_be_visible()
    finger.tap(page.locator("#lightbox").get_by_role("button", name="Close"))
    expect(page.locator("#lightbox")).to_have_count(0)
    finger.tap(page.locator("#tab-samples"))
    page.locator(".sample-row img").first.wait_for()
    fits(page)
    finger.tap(page.locator("#tab-overview"))
    with page.expect_download(timeout=PATIENCE_S * 1e3) as download:
        finger.tap(page.locator("#download"))
    [file] = run.export.glob("*.safetensors")
    assert Path(download.value.path()).read_bytes() == file.read_bytes()
    finger.tap(page.locator("#tab-files"))
    finger.tap(page.locator("#files-export"))
    page.locator("#files-state", has_text="and verified.").wait_for(timeout=TRAINED_WITHIN_S * 1e3)
    fits(page)
    assert violations(page, {}) == []
    shutil.rmtree(run.path)
