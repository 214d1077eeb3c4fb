"""The memory over a training step: in the form's panel, and in the page that `--plan --html` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from app import command_line
from tests.app.browser import Server, settled, until, visited

PRESET = "flux2-klein-9b-lora-2gpu"
HEIGHT = "document.querySelector('#step-picture path.{}').getBBox().height"


@pytest.fixture
def panel(tab: Page, server: Server, draft: Path):
    """The panel of a large model's plan for a card of 24 GB."""
    draft.write_text(json.dumps({"preset": PRESET, "values": {}}))
    with visited(tab, server.url) as page:
        page.locator("#plan-for").select_option("24gb")
        settled(page)
        yield page


def caption(page: Page) -> str:
    return page.locator("#step-picture figcaption").inner_text()


def test_the_memory_over_a_step_is_drawn_when_it_is_asked_for_and_follows_the_form(panel: Page):
    until(panel, "document.querySelector('#plan .notice, #plan .dim')")
    assert panel.locator("#step-picture figure").count() == 0
    panel.locator("#step-memory summary").focus()
    panel.keyboard.press("Enter")
    panel.locator("#step-picture figure").wait_for()
    found = panel.evaluate("studio.call('new_step', { target: '24gb' })")
    assert len(json.dumps(found)) <= 20_000
    assert caption(panel) == found["sentence"]
    peak = panel.locator("#step-picture .peak").text_content()
    assert f"at most {peak} of tensors, in backward of transformer." in caption(panel)
    assert caption(panel).endswith(" of the 23.99 GiB of 24 GB (RTX 4090).")
    kinds = ("weights", "optimizer", "gathered", "activations")
    heights = [panel.evaluate(HEIGHT.format(kind)) for kind in kinds]
    assert heights == sorted(heights) and heights[0] > 0
    assert panel.locator("#step-picture .tip title").first.text_content().endswith(" GiB")
    panel.locator("#plan-for").select_option("80gb")
    until(panel, "document.querySelector('#step-picture figcaption').textContent.endsWith('(H100).')")
    assert panel.locator("#step-memory").get_attribute("open") is not None
    panel.set_viewport_size({"width": 400, "height": 800})
    assert panel.evaluate("document.documentElement.scrollWidth") == 400


@pytest.mark.parametrize("width", [400, 1280])
def test_the_written_page_is_shown_without_a_complaint_and_fits_the_window(
    browser: Browser, tmp_path: Path, width: int
):
    file = tmp_path / "plan.html"
    assert command_line.main(["--plan", PRESET, "--gpus", "2x80gb", "--html", str(file)]) == 0
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if request.url != file.as_uri() else None)
    page.goto(file.as_uri())
    assert page.get_by_role("img", name="Memory over one training step: at most").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    colors = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colors.add(page.evaluate("getComputedStyle(document.querySelector('svg .peak')).fill"))
    assert colors == {"rgb(23, 24, 28)", "rgb(237, 237, 240)"}
    page.close()
    assert complaints == []
