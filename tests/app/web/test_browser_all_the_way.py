"""From nothing to a trained adapter in a file of its own, by nothing but the page in Chromium.

The first of these files: its run goes on while another process does the tests of the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.app.browser import (
    TRAINED_WITHIN_S,
    Server,
    open_group,
    opened,
    state_is,
    until,
    visit,
    watch,
    write_over,
)
from trainer.run import process
from trainer.run.events import EventReader, StatusEvent
from trainer.run.folder import RunDir


@pytest.fixture(scope="module")
def trained(browser: Browser, server: Server) -> RunDir:
    """A run of the quickstart by nothing but the page, with everything on the way that may happen to a page."""
    with opened(browser, server.url) as page:
        write_over(page, "field-train-steps", "24")
        open_group(page, "Sampling")
        write_over(page, "field-sample-steps", "4")
        page.locator("#start").dblclick()  # two clicks start one run
        state_is(page, "training", timeout_s=TRAINED_WITHIN_S)
        until(page, "document.querySelector('#chart-loss canvas').dataset.n > 0")
        assert page.locator("#ranks .rank").count() == 2
        until(page, "document.querySelectorAll('#newest img').length === 4")
        [run] = (RunDir.open(file.parent) for file in server.runs.glob("quickstart-*/config.yaml"))
        page.locator("#stop").click()
        page.get_by_role("dialog").get_by_role("button", name="Stop").click()
        state_is(page, "stopped")
        page.reload()
        state_is(page, "stopped")
        assert page.locator("#run-pending").is_hidden()
        page.locator("#resume").click()
        state_is(page, "training")
        server.kill()
        assert process.alive(run)
        page.goto("about:blank")
        server.start()
        page.goto(f"{server.url}#/runs/{run.path.name}")
        state_is(page, "training", "sampling", "saving", "exporting", "finished")
        with opened(browser, server.url) as other:
            watch(other, run.path.name)
            state_is(other, "finished", timeout_s=TRAINED_WITHIN_S)
        state_is(page, "finished")
        until(page, "document.querySelector('#chart-loss canvas').dataset.last === '24'")
    return run


@pytest.mark.slow
def test_one_click_trains_the_quickstart_and_no_mishap_of_the_page_ends_it(trained: RunDir):
    states = [event.state for event in EventReader(trained.events_file).read() if isinstance(event, StatusEvent)]
    assert states.count("starting") == 2
    assert states[-1] == "finished"


@pytest.mark.slow
def test_what_was_exported_is_named_with_its_check_and_downloaded(trained: RunDir, page: Page):
    [file] = trained.export.glob("*.safetensors")
    watch(page, trained.path.name)
    done = page.locator("#run-done").inner_text()
    assert file.name in done
    assert "verified: reloaded and equal within" in done
    with page.expect_download() as download:
        page.locator("#download").click()
    assert Path(download.value.path()).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_another_export_is_begun_from_what_the_adapter_allows(trained: RunDir, page: Page):
    visit(page, "runs", trained.path.name, "files")
    page.locator("#files-exported tr").first.wait_for()
    page.locator("#files-what").select_option("merged")
    page.locator("#files-export").click()
    page.locator("#files-state", has_text="and verified.").wait_for(timeout=180_000)
    page.locator("#files-exported tr", has_text="merged").first.wait_for()


@pytest.mark.slow
def test_a_finished_run_goes_on_for_more_steps_and_is_not_resumed_as_it_is(trained: RunDir, page: Page):
    watch(page, trained.path.name)
    state_is(page, "finished")
    assert page.locator("#run-actions button").all_inner_texts() == ["Go on for …", "Copy to a new run"]
    page.locator("#extend").click()
    page.locator("#extend-steps").fill("3")
    page.locator("#extend-go").click()
    state_is(page, "starting", "loading", "encoding", "training", "saving")
    state_is(page, "finished", timeout_s=TRAINED_WITHIN_S)
    assert page.locator("#run").get_attribute("data-step") == "27"
    assert trained.config().train.steps == 27
