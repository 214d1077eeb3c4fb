"""How many clicks and texts it takes, counted: from nothing to a running job."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page

from tests.app.browser import settled, until
from tests.runs import make_pictures, write_preset


class Counted:
    """A person at the page whose clicks and texts are counted."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.num_clicks = 0
        self.num_texts = 0

    def click(self, selector: str) -> None:
        self.num_clicks += 1
        self.page.locator(selector).click()

    def write(self, selector: str, text: str) -> None:
        self.num_clicks += 1
        self.num_texts += 1
        self.page.locator(selector).click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)


def test_own_images_on_another_model_take_four_clicks_and_two_texts(page: Page, runs: Path):
    images = make_pictures(runs.parent / "mine")
    preset = write_preset(runs / "presets" / "other.yaml", runs.parent / "none", steps=2)
    text = preset.read_text().replace("family: flux2", "family: flux2, path: tiny")
    text = text.replace("resolution: 64", "resolution: 64, trigger: TOK")
    preset.write_text(f"{text}sample: {{prompts: ['[trigger]'], every: 0}}\n")
    page.reload()
    settled(page)
    person = Counted(page)
    page.locator("#model-filter button").last.click()  # to see it: the list of a person with a real model has it
    person.click("[data-model=tiny]")
    until(page, "document.querySelector('#page-new').dataset.preset === 'other'")
    settled(page)
    person.write("#field-data-path", str(images))
    person.write("#field-data-trigger", "fox")
    page.keyboard.press("Tab")
    until(page, "document.querySelector('#why').dataset.state === 'ready'")
    assert not page.locator("#start").is_disabled()
    person.num_clicks += 1  # Start itself, which test_browser_all_the_way presses
    assert (person.num_clicks, person.num_texts) == (4, 2)
    preset.unlink()
