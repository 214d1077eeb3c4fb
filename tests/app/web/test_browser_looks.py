"""How the page looks and what it costs: contrast, keyboard, sizes of screens, ten thousand points, memory."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page

from tests.app.browser import BEYOND, Server, recorded, serving
from tests.app.web import screenshots
from tests.benchmarks import page as figures
from trainer.run.events import ErrorEvent, StatusEvent

OTHER = "ink-comic"
WAKES = 100
"""A second; gradio as it is wakes a thousand times."""


@pytest.fixture(scope="module", autouse=True)
def finished(server: Server) -> str:
    """The run that is looked at: with curves, samples and an error."""
    error = ErrorEvent(message="killed", remedy="more memory", rank=1, step=40, retry=("train.checkpointing=full",))
    recorded(server.runs, OTHER, adapter={"type": "boft"})
    recorded(server.runs, "looked-at", [error, StatusEvent(state="failed", step=40)])
    return "looked-at"


def test_start_is_reached_and_pressed_by_the_keyboard(page: Page):
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "start":
            break
    assert page.evaluate("document.activeElement.id") == "start"


def test_a_page_nobody_looks_at_sleeps(server: Server):
    before, seconds = woken(server), 2
    time.sleep(seconds)
    assert (woken(server) - before) / seconds < WAKES


def woken(server: Server) -> int:
    """How often the threads of the server went to sleep until now."""
    told = [file.read_text() for file in Path(f"/proc/{server.process.pid}/task").glob("*/status")]
    return sum(int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE)[1]) for text in told)


@pytest.mark.slow
def test_ten_thousand_points_and_a_viewer_cost_little(browser: Browser, tmp_path: Path):
    with serving(tmp_path / "runs") as fresh:  # the other tests' server has grown by all that they opened
        cost = figures.long_run(browser, fresh, seconds=4)
    assert cost.refresh_ms <= BEYOND * figures.REFRESH_MS, cost
    assert cost.page_mb <= 1.15 * figures.PAGE_MB, cost
    assert cost.core_percent <= BEYOND * figures.CORE_PERCENT, cost


@pytest.mark.slow
def test_every_page_can_be_photographed(browser: Browser, server: Server, finished: str, tmp_path: Path):
    for file in screenshots.take(browser, server.url, finished, OTHER, tmp_path):
        with Image.open(file) as picture:
            assert picture.size == (1280, 800)
            assert len(set(picture.convert("L").resize((64, 40)).tobytes())) > 8, file.name
