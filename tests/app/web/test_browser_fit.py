"""The button Fit in Chromium: what fits is shown, and taken with the keyboard as one edit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.app.browser import Server, open_group, settled, until, visited, write_over

LARGE = "flux2-dev-lora-4gpu"

pytestmark = pytest.mark.slow  # what is proposed and taken is tested without a browser in test_new_run_fit.py


@pytest.fixture
def panel(tab: Page, server: Server, draft: Path) -> Iterator[Page]:
    """The form with a large model, planned for GPUs that it does not fit."""
    draft.write_text(json.dumps({"preset": LARGE, "values": {}}))
    with visited(tab, server.url) as page:
        page.locator("#plan-for").select_option("16gb")
        settled(page)
        page.locator("#fit-search", has_text="Fit to 4 × 16 GB").wait_for()
        yield page


def values(draft: Path) -> dict[str, object]:
    return json.loads(draft.read_text())["values"]


def verdict_is(page: Page, verdict: str) -> None:
    until(page, f"document.querySelector('#plan .mem').dataset.verdict === {json.dumps(verdict)}")


def focused(page: Page) -> str:
    return page.evaluate("document.activeElement.id || document.activeElement.textContent")


def test_what_fits_is_searched_taken_and_undone_with_the_keyboard(panel: Page, draft: Path):
    verdict_is(panel, "does not fit")
    panel.locator("#fit-search").focus()
    panel.keyboard.press("Enter")
    panel.locator("#fit .proposal").first.wait_for()
    assert focused(panel) == "fit-search"
    lines = panel.locator("#fit .proposal").first.locator(".diff li").all_inner_texts()
    assert "Base quantization: none → int8" in lines
    panel.get_by_role("button", name="Take this").first.focus()
    panel.keyboard.press("Enter")
    verdict_is(panel, "fits")
    assert focused(panel) == "fit-search"
    assert panel.locator("#fit .proposal").count() == 0
    taken = values(draft)
    assert taken["quantize.format"] == "int8" and len(taken) == len(lines)
    panel.locator("#fit-said", has_text=f"{len(lines)} settings changed.").get_by_role("button", name="Undo").click()
    panel.locator("#changes", has_text="As in the preset").wait_for()
    verdict_is(panel, "does not fit")


def test_a_change_of_the_form_takes_the_proposals_away_until_they_are_searched_again(panel: Page):
    panel.locator("#fit-search").click()
    panel.locator("#fit .proposal").first.wait_for()
    write_over(panel, "field-data-resolution", "512")
    settled(panel)
    panel.locator("#fit-found", has_text="were changed after this search").wait_for()
    assert panel.locator("#fit .proposal").count() == 0
    panel.get_by_role("button", name="Search again").click()
    panel.locator("#fit .proposal").first.wait_for()
    panel.get_by_label("4 bits").check()
    panel.locator("#fit .diff", has_text="none → nf4").first.wait_for()
    assert panel.get_by_label("4 bits").is_checked()
    panel.set_viewport_size({"width": 400, "height": 800})
    assert panel.evaluate("document.documentElement.scrollWidth") == 400
    panel.locator("#fit-close").click()
    assert focused(panel) == "fit-search"
    write_over(panel, "field-train-steps", "many")
    panel.locator("#fit-why", has_text="Correct the errors of the form first.").wait_for()
    assert panel.locator("#fit-search").is_disabled()


def test_undo_leaves_what_was_changed_after_and_goes_with_the_preset(panel: Page, draft: Path):
    panel.locator("#fit-search").click()
    panel.get_by_role("button", name="Take this").first.click()
    undo = panel.locator("#fit-said").get_by_role("button", name="Undo")
    undo.wait_for()
    panel.evaluate("studio.call('new_edit', { edits: { 'quantize.format': 'nf4' } })")  # as another window does
    undo.click()
    panel.locator("#fit-said", has_text="Not undone, as it was changed after: Base quantization.").wait_for()
    assert values(draft) == {"quantize.format": "nf4"}
    panel.locator("#fit-search").click()
    panel.get_by_role("button", name="Take this").first.click()
    undo.wait_for()
    panel.locator("#presets [data-preset=flux2-dev-lora-8gpu]").click()
    panel.locator("#presets .on[data-preset=flux2-dev-lora-8gpu]").wait_for()
    assert panel.locator("#fit-said").inner_text() == ""
    assert values(draft) == {}


def test_a_double_click_takes_once_and_can_be_undone(panel: Page, draft: Path):
    panel.locator("#fit-search").click()
    panel.get_by_role("button", name="Take this").first.evaluate("button => { button.click(); button.click(); }")
    undo = panel.locator("#fit-said").get_by_role("button", name="Undo")
    undo.wait_for()
    settled(panel)
    assert panel.locator("#fit-said [role=alert]").count() == 0
    undo.evaluate("button => { button.click(); button.click(); }")
    panel.locator("#changes", has_text="As in the preset").wait_for()
    assert values(draft) == {} and panel.locator("#fit-said").inner_text() == ""


def test_words_are_suggested_where_numbers_and_mixtures_can_be_typed_too(panel: Page, draft: Path):
    open_group(panel, "Hardware")
    row = panel.locator("#row-field-train-checkpointing")
    assert row.locator(".chip[aria-pressed=true]").inner_text() == "auto"
    row.get_by_role("button", name="selective").click()
    settled(panel)
    assert values(draft)["train.checkpointing"] == "selective"
    write_over(panel, "field-train-checkpointing", "full 12, selective 20")
    settled(panel)
    assert values(draft)["train.checkpointing"] == "full 12, selective 20"
    assert row.locator(".chip[aria-pressed=true]").count() == 0 and "wrong" not in row.get_attribute("class")
    write_over(panel, "field-parallel-offload_blocks", "0.5")
    settled(panel)
    assert values(draft)["parallel.offload_blocks"] == 0.5
