"""Every screen of the page in Chromium: what it shows, light and dark, at each width, who can use it, what it costs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page

from tests.app.browser import BEYOND, Scheme, Server, recorded, serving, visited
from tests.app.web import screenshots
from tests.app.web.screens import Screen, console_of, screens, violations, walk
from tests.benchmarks import page as figures
from tests.runs import run_config
from trainer.launcher.queue import Queue, Settings
from trainer.run.events import ErrorEvent, ExportEvent, StatusEvent

FAILED, FINISHED = "screens-failed-20261124-211219-aebff6", "screens-finished-20261124-211220-aebff7"
LONG_PROMPT = "a very long prompt that does not fit into one line below a small image of 160 pixels"
LOOKS = (
    (390, 844, "light"),
    (1280, 800, "dark"),
    pytest.param(390, 844, "dark", marks=pytest.mark.slow),
    pytest.param(820, 1180, "light", marks=pytest.mark.slow),
    pytest.param(1280, 800, "light", marks=pytest.mark.slow),
    pytest.param(1920, 1080, "dark", marks=pytest.mark.slow),
)


FAULTS = """([isWide]) => [...document.querySelectorAll('#pages *')].flatMap(one => {
  if (!one.checkVisibility()) return [];
  const beyond = one.scrollHeight - one.clientHeight, name = one.id || one.className;
  const scrolls = ['auto', 'scroll'].includes(getComputedStyle(one).overflowY);
  return [scrolls && beyond > 0 && beyond <= 3 ? `a scroll bar for nothing: ${name}` : '',
    isWide && one.matches('.help') && beyond > 1 ? `a help that is cut: ${one.textContent}` : ''].filter(Boolean);
})"""


@pytest.fixture(scope="module")
def table(server: Server) -> Iterator[dict[str, Screen]]:
    """All screens, with a run that failed, one that left an export and lacks a sample, and one that waits."""
    error = ErrorEvent(message="boom", remedy="less", rank=1, step=40, retry=("train.checkpointing=full",))
    recorded(server.runs, FAILED, [error, StatusEvent(state="failed", step=40)], adapter={"type": "boft"})
    export = ExportEvent(step=40, path="export/fox.safetensors", what="adapter", format="auto", difference=1.3e-3)
    ended = [export, StatusEvent(state="finished", step=40)]
    run = recorded(server.runs, FINISHED, ended, sample__prompts=["a cat", LONG_PROMPT, "a dog"])
    (run.export / "fox.safetensors").write_bytes(b"0" * 1_500_000)
    (run.samples / "step-000040-2.png").unlink()
    queue = Queue(server.runs)
    queue.change(Settings(is_paused=True))
    queue.add(run_config(server.runs, name="a-run-with-a-name-that-is-longer-than-a-phone-is-wide"))
    yield {**screens(FAILED, FINISHED), "run that finished": screens(FINISHED, FAILED)["run"]}
    for entry in queue.waiting():
        queue.remove(entry.number)
    queue.change(Settings())


@pytest.mark.parametrize(("width", "height", "scheme"), LOOKS)
def test_every_screen_shows_its_parts_within_the_window_and_without_a_complaint(
    tab: Page, server: Server, draft: object, table: dict[str, Screen], width: int, height: int, scheme: Scheme
):
    at = {"width": width, "height": height, "scheme": scheme}
    with console_of(tab) as said, visited(tab, server.url, **at) as page:
        for name, screen in walk(page, table):
            for selector in screen.shows:
                page.locator(selector).first.wait_for(state="attached")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate(FAULTS, [width >= 1280]) == [], name
            if screen.within:
                inner, outer = (page.locator(selector) for selector in screen.within)
                assert inner.evaluate("one => one.scrollWidth") <= outer.evaluate("one => one.clientWidth"), name
    assert said == []


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "rules"), [("light", {}), ("dark", {"runOnly": ["color-contrast"]})])
def test_everybody_can_read_and_reach_it(
    tab: Page, server: Server, draft: object, table: dict[str, Screen], scheme: Scheme, rules: dict[str, list[str]]
):
    found = []
    with visited(tab, server.url, scheme=scheme) as page:
        for name, _ in walk(page, table):
            page.wait_for_timeout(100)  # for what moves or fades
            found += [(name, *violation) for violation in violations(page, rules)]
    assert found == []


OTHER = "ink-comic"
WAKES = 100
"""A second; gradio as it is wakes a thousand times."""


@pytest.fixture(scope="module")
def looked_at(server: Server) -> str:
    """The run that is looked at: with curves, samples and an error."""
    error = ErrorEvent(message="killed", remedy="more memory", rank=1, step=40, retry=("train.checkpointing=full",))
    recorded(server.runs, OTHER, adapter={"type": "boft"})
    recorded(server.runs, "looked-at", [error, StatusEvent(state="failed", step=40)])
    return "looked-at"


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
def test_every_page_can_be_photographed(browser: Browser, server: Server, looked_at: str, tmp_path: Path):
    for file in screenshots.take(browser, server.url, looked_at, OTHER, tmp_path):
        with Image.open(file) as picture:
            assert picture.size == (1280, 800)
            assert len(set(picture.convert("L").resize((64, 40)).tobytes())) > 8, file.name
