"""From nothing to a trained adapter in a file of its own, by nothing but the page in Chromium.

The first of these files: its run goes on while another process does the tests of the others.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.app.browser import (
    TRAINED_WITHIN_S,
    Server,
    form_step,
    opened,
    reload,
    show,
    state_is,
    until,
    write_over,
)
from trainer.run import process
from trainer.run.events import EventReader, StatusEvent
from trainer.run.folder import RunDir


@pytest.fixture(scope="module")
def trained(browser: Browser, server: Server) -> RunDir:
    """A run of the quickstart by nothing but the page, with everything on the way that may happen to a page."""
    with opened(browser, server.url) as page:
        form_step(page, "Hardware")
        write_over(page, "field-train-steps", "24")  # one click more
        write_over(page, "field-sample-steps", "4")
        page.locator("#start").dblclick()  # the third: two of them start one run
        state_is(page, "training", timeout_s=TRAINED_WITHIN_S)
        until(page, "document.querySelector('#chart-loss canvas').dataset.n > 0")
        assert page.locator("#ranks .rank").count() == 2
        until(page, "document.querySelectorAll('#newest img').length === 4")
        [run] = (RunDir.open(file.parent) for file in server.runs.glob("quickstart-*/config.yaml"))
        page.locator("#stop").click()
        state_is(page, "stopped")
        reload(page)
        show(page, "Monitor")
        state_is(page, "stopped")
        page.locator("#resume").click()
        state_is(page, "training")
        server.kill()
        assert process.alive(run)
        page.goto("about:blank")  # a page that was left open loads itself again at any moment from here
        server.start()
        page.goto(server.url)
        show(page, "Monitor")
        state_is(page, "training", "sampling", "saving", "exporting", "finished")
        with opened(browser, server.url) as other:
            show(other, "Monitor")
            state_is(other, "finished", timeout_s=TRAINED_WITHIN_S)
        state_is(page, "finished")
        until(page, "document.querySelector('#chart-loss canvas').dataset.last === '24'")
    return run


def test_one_click_trains_the_quickstart_and_no_mishap_of_the_page_ends_it(trained: RunDir):
    states = [event.state for event in EventReader(trained.events_file).read() if isinstance(event, StatusEvent)]
    assert states.count("starting") == 2
    assert states[-1] == "finished"


def test_what_was_exported_is_listed_with_its_check_and_downloaded(trained: RunDir, page: Page):
    page.evaluate(f"location.hash = '#/runs/{trained.path.name}/files'")
    [file] = trained.export.glob("*.safetensors")
    row = page.locator("#files-exported tr", has_text=file.name)
    row.get_by_text("verified: reloaded and equal within bf16 rounding").wait_for()
    assert "Adapter · Automatic · bf16" in row.inner_text()
    row.get_by_role("button", name="Checksum").click()
    row.locator(".sum", has_text=hashlib.sha256(file.read_bytes()).hexdigest()).wait_for()
    with page.expect_download() as download:
        row.get_by_role("button", name="Download").click()
    assert Path(download.value.path()).read_bytes() == file.read_bytes()
    assert page.locator("#files-checkpoints tbody tr").count() == len(list(trained.checkpoints.glob("step-*")))


@pytest.mark.slow
def test_another_export_is_begun_from_what_the_adapter_allows(trained: RunDir, page: Page):
    page.evaluate(f"location.hash = '#/runs/{trained.path.name}/files'")
    page.locator("#files-what").select_option("merged")
    page.locator("#files-export").click()
    page.locator("#files-state", has_text="Exported and verified").wait_for(timeout=180_000)
    page.locator("#files-exported tr", has_text="merged").first.wait_for()
    page.wait_for_timeout(2_500)
    assert page.locator("#files-state").inner_text() == "Exported and verified.", "it stays"
