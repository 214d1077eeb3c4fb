"""A rehearsal from New run to the real run, in Chromium: a real run of the demo model, cut short."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.app.browser import (
    ROOT,
    TRAINED_WITHIN_S,
    Server,
    opened,
    serving,
    settled,
    show,
    state_is,
    until,
    watch,
    write_over,
)
from tests.app.web.screens import violations
from tests.app.web.test_browser_download import OPEN, is_here, press, says, site_in
from tests.runs import make_pictures, write_preset
from tests.weights.test_download import MIB
from trainer.run.folder import RunDir

pytestmark = pytest.mark.slow
BRIEF = f"""\
import sys
sys.path.insert(0, {str(ROOT)!r})
from app import command_line
from trainer.launcher import rehearsal
rehearsal.TRAINED_S = 3
sys.exit(command_line.main(sys.argv[1:]))
"""


def brief_page(folder: Path) -> Path:
    """The page, whose rehearsals train for three seconds."""
    program = folder / "page.py"
    program.write_text(BRIEF)
    return program


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It, with own pictures in its form."""
    folder = tmp_path_factory.mktemp("rehearsal")
    runs = folder / "runs"
    pictures = make_pictures(folder / "own", count=6)
    write_preset(runs / "presets" / "own.yaml", pictures, steps=2)
    (runs / "drafts").mkdir(parents=True)
    (runs / "drafts" / "draft.json").write_text(json.dumps({"preset": "own", "values": {"data.trigger": "ohwx"}}))
    with serving(runs, program=brief_page(folder)) as server:
        yield server


def only(server: Server, pattern: str) -> RunDir:
    [run] = server.runs.glob(pattern)
    return RunDir.open(run)


def test_own_pictures_are_rehearsed_changed_and_then_trained_for_real(browser: Browser, brief: Server):
    with opened(browser, brief.url) as page:
        write_over(page, "field-sample-prompts", "[trigger] on a hill")
        settled(page)
        page.locator("#rehearse").dblclick()  # two clicks start one
        page.locator("#rehearsal").wait_for()
        run = only(brief, "own-rehearsal-*")
        page.locator("#rehearsal", has_text="of own, for Tiny model (flux2)").wait_for()
        page.locator("#rehearsal .notice", has_text="takes about 60 s").wait_for()
        # The page is closed, its server dies, and the rehearsal goes on.
        page.goto("about:blank")
        brief.kill()
        brief.start()
        page.goto(f"{brief.url}#/runs/{run.path.name}")
        state_is(page, "finished", timeout_s=TRAINED_WITHIN_S)
        until(page, "document.querySelectorAll('#rehearsal .loop').length === 2", TRAINED_WITHIN_S)
        until(page, "document.querySelectorAll('#rehearsal .both .real').length === 6")
        assert page.locator("#rehearsal [data-name='01.png'] .caption").all_inner_texts() == ["ohwx, picture number 1"]
        assert "Likeness and detail" in page.locator("#rehearsal .cannot li").first.inner_text()
        for gone in ("#run-done", "#extend", "#copy", "#upload", "#download"):
            assert not page.locator(gone).is_visible(), gone
        assert violations(page, {}) == []
        # Its weights are never exported.
        page.locator("#tab-files").click()
        page.locator("#files-export").click()
        page.locator("#files-state", has_text="is a rehearsal").wait_for()
        page.locator("#tab-overview").click()
        # The form is as it was left.
        page.locator("#rehearsal-change").click()
        expect(page.locator("#page-new")).to_have_attribute("data-preset", "own")
        assert page.locator("#field-sample-prompts").input_value() == "[trigger] on a hill"
        write_over(page, "field-name", "another")
        settled(page)
        # Changed since, it comes back.
        watch(page, run.path.name)
        page.locator("#rehearsal-change").click()
        expect(page.locator("#field-name")).to_have_value("own")
        watch(page, run.path.name)
        page.locator("#rehearsal-start").click()
        until(page, "/own-\\d/.test(document.querySelector('#run').dataset.run)")
        page.locator("#rehearsal").wait_for(state="hidden")
        assert only(brief, "own-2*").config().model.path == "tiny"


def test_while_a_model_downloads_its_pictures_are_rehearsed(browser: Browser, tmp_path: Path):
    with site_in(tmp_path, program=brief_page(tmp_path)) as site:
        site.choose("open")
        with site.hub(hold_after=3 * MIB) as hub, opened(browser, site.server.url) as page:
            press(page, "Download")
            says(page, "of 6.3 MB")
            page.locator("#rehearse-meanwhile").click()
            page.locator("#rehearsal", has_text="of open, for FLUX.2 klein 4B").wait_for()
            page.locator("#rehearsal-start").click()  # too early
            page.locator("#rehearsal .notice.bad", has_text=OPEN).wait_for()
            state_is(page, "finished", timeout_s=TRAINED_WITHIN_S)
            hub.released.set()
            show(page, "New run")
            is_here(page)


def test_pictures_that_are_deleted_after_it_leave_the_film(browser: Browser, brief: Server):
    run = only(brief, "own-rehearsal-*")
    shutil.rmtree(Path(str(run.config().data.path)))
    with opened(browser, brief.url, width=400, scheme="dark") as page:
        watch(page, run.path.name)
        page.locator("#rehearsal", has_text="The pictures cannot be read any more").wait_for()
        until(page, "document.querySelectorAll('#rehearsal .loop').length === 2")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert violations(page, {}) == []
