"""The memory of a combination without a table: worked out by itself, said with progress, while the form is used."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.app.browser import TRAINED_WITHIN_S, settled, until, write_over

TYPED_WITHIN_S = 5


@pytest.mark.slow
def test_a_combination_without_a_table_is_worked_out_while_the_form_is_used(page: Page, draft: Path):
    page.locator("#plan .mem").wait_for()
    former = page.locator("#plan .big").inner_text()
    page.locator("#search").fill("adapter dropout")
    write_over(page, "field-adapter-dropout", "0.1")
    page.locator("#plan .former").wait_for()
    assert page.locator("#plan .former").inner_text() == f"{former} before the last change"
    bar = page.get_by_role("progressbar", name="Memory is being worked out")
    page.locator("#plan", has_text="Being worked out, once for this combination: about").wait_for()
    began = time.monotonic()
    write_over(page, "field-name", "meanwhile")
    settled(page)
    assert time.monotonic() - began < TYPED_WITHIN_S
    assert json.loads(draft.read_text())["values"]["name"] == "meanwhile"
    assert bar.is_visible()
    until(page, "Number(document.querySelector('#record-bar')?.ariaValueNow) > 0", TRAINED_WITHIN_S)
    assert "s more." in page.locator("#plan").inner_text()
    page.locator("#plan .mem").wait_for(timeout=1000 * TRAINED_WITHIN_S)
    assert page.locator("#plan .former").count() == bar.count() == 0


@pytest.mark.slow
def test_a_combination_that_cannot_be_worked_out_says_why_and_is_not_tried_again_by_itself(page: Page):
    page.locator("#plan .mem").wait_for()
    page.locator("#search").fill("targets")
    write_over(page, "field-adapter-targets", "no_such_layer")
    button = page.locator("#record", has_text="Try again")
    button.wait_for(timeout=1000 * TRAINED_WITHIN_S)
    assert "no_such_layer" in page.locator("#plan").inner_text()
    page.wait_for_timeout(3000)
    assert button.is_visible()
