"""The tab Files of a run in Chromium: exports, checkpoints, the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.app.browser import Server, recorded, watch
from trainer.run.events import EventWriter, ExportEvent
from trainer.run.folder import RunDir
from trainer.run.manifest import sealed

pytestmark = pytest.mark.slow  # what is offered, and downloaded, is tested without a browser too


@pytest.fixture(scope="module", autouse=True)
def recordings(server: Server) -> None:
    """Runs that are there before a page is opened."""
    for name in ("files-one", "files-two"):
        run = recorded(server.runs, name)
        (run.export / "same.safetensors").write_text(name)
        with EventWriter(run.events_file) as events:
            event = ExportEvent(path="export/same.safetensors", what="adapter", format="auto", difference=1.3e-3)
            events.write(event)
    recorded(server.runs, "files-unsaved")


def open_files(page: Page, run: str) -> None:
    page.evaluate(f"location.hash = '#/runs/{run}/files'")


def downloaded(page: Page) -> str:
    with page.expect_download() as download:
        page.locator("#files-exported .download").click()
    return Path(download.value.path()).read_text()


def test_what_is_downloaded_is_of_the_run_that_is_shown(page: Page, runs: Path):
    for name in ("files-one", "files-two"):
        open_files(page, name)
        page.locator("#files-folder", has_text=str(runs / name)).wait_for()
        row = page.locator("#files-exported tr", has_text="same.safetensors")
        row.get_by_text("verified: reloaded and equal within rounding (1.3e-03)").wait_for()
        assert downloaded(page) == name
    row.get_by_role("button", name="Checksum").click()
    row.locator(".sum", has_text="SHA-256 ").wait_for()
    assert len(row.locator(".sum").inner_text()) == len("SHA-256 ") + 64


def test_an_export_that_cannot_start_says_why_and_only_possible_combinations_are_offered(page: Page):
    open_files(page, "files-unsaved")
    page.locator("#files-exported", has_text="No exports yet").wait_for()
    page.locator("#files-source", has_text="no complete checkpoint").wait_for()
    assert page.locator("#files-export").is_disabled()
    assert page.locator("#files-dtype option").all_inner_texts() == ["bf16", "fp16", "fp32"]
    page.locator("#files-what").select_option("merged")
    page.locator("#files-format").select_option("single_file")
    assert page.locator("#files-dtype option").all_inner_texts() == ["bf16", "fp16", "fp32", "fp8"]
    page.locator("#files-dtype").select_option("fp8")
    page.locator("#files-format").select_option("diffusers")
    assert page.locator("#files-dtype").input_value() == "bf16"


@pytest.mark.slow  # loads torch in a process of its own
def test_an_export_that_failed_says_why(page: Page, runs: Path):
    run = recorded(runs, "files-broken")
    save_checkpoint(run, 40)
    open_files(page, "files-broken")
    page.locator("#files-export").click()
    page.locator("#files-state [role=status]", has_text="Exporting").wait_for()
    page.locator("#files-state [role=alert]").wait_for()
    page.wait_for_timeout(2_500)
    assert page.locator("#files-state [role=alert]").count() == 1, "it stays"


def save_checkpoint(run: RunDir, step: int, loss: float | None = None) -> Path:
    folder = run.checkpoints / f"step-{step:06d}"
    folder.mkdir()
    facts = {"step": step, "files": {}, "config": {}, "validation_loss": loss}
    (folder / "manifest.json").write_bytes(sealed(facts))
    return folder


def test_the_best_checkpoint_is_marked_and_offered_where_the_last_is_worse(page: Page, runs: Path):
    run = recorded(runs, "files-better")
    save_checkpoint(run, 20, 0.5)
    save_checkpoint(run, 40, 0.75)
    watch(page, "files-better")
    page.locator("#better", has_text="The validation loss was lower at step 20: 0.5, 0.75 at the end.").wait_for()
    page.locator("#export-best").click()
    page.locator("#files-state", has_text="step 20").first.wait_for()
    assert page.locator("#files-checkpoints tr .best").count() == 1
    page.locator("#files-checkpoints tr", has_text="best").get_by_role("button", name="Delete").click()
    page.locator("dialog", has_text="It has the lowest validation loss.").get_by_role("button", name="Keep it").click()


def test_a_checkpoint_is_deleted_after_a_question_that_says_what_is_lost(page: Page, runs: Path):
    run = recorded(runs, "files-saved")
    first, last = save_checkpoint(run, 20), save_checkpoint(run, 40)
    open_files(page, "files-saved")
    page.get_by_role("button", name="Delete the checkpoint of step 40").click()
    page.locator("dialog", has_text="a resume goes on from step 20").get_by_role("button", name="Keep it").click()
    page.get_by_role("button", name="Delete the checkpoint of step 20").click()
    page.locator("dialog", has_text="A resume does not need it").get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete the checkpoint of step 20").wait_for(state="detached")
    assert not first.exists()
    assert last.is_dir()


def test_the_report_opens_in_a_tab_of_its_own(page: Page):
    open_files(page, "files-one")
    page.locator("#files-report").wait_for()
    with page.expect_popup() as popup:
        page.locator("#files-report").click()
    popup.value.locator("h1", has_text="files-one").wait_for()
    popup.value.close()
