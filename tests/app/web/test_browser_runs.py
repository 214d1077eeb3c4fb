"""Runs in Chromium: side by side, tags, and two pages on one folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.app.browser import (
    Server,
    answers_held,
    ask_again,
    opened,
    recorded,
    state_is,
    until,
    until_so,
    visit,
    watch,
)
from trainer.run import process
from trainer.run.events import ErrorEvent, EventReader, EventWriter, StatusEvent
from trainer.run.folder import RunDir

BAD = '<img src=x onerror="window.taken = 1">'


@pytest.fixture(scope="module", autouse=True)
def recordings(server: Server) -> None:
    """Runs that are there before a page is opened."""
    recorded(server.runs, "drawn")
    recorded(server.runs, "shared", [StatusEvent(state="stopped", step=20)])
    scripted = recorded(server.runs, "scripted", sample__prompts=[BAD, BAD])
    (scripted.logs / "launch-1.log").write_text(BAD)
    with EventWriter(scripted.events_file) as events:
        events.write(ErrorEvent(step=40, message=BAD, remedy=BAD))
        events.write(StatusEvent(step=40, state="failed", message=BAD))


def test_text_of_a_run_is_never_a_script(page: Page):
    watch(page, "scripted")
    page.locator("#page-run [role=alert]", has_text="onerror").first.wait_for()
    page.locator("#log", has_text="onerror").wait_for()
    visit(page, "runs")
    page.locator("#page-runs tr", has_text="scripted").first.wait_for()
    visit(page, "runs", "scripted", "samples")
    page.locator("#page-run", has_text="onerror").wait_for()
    assert page.evaluate("window.taken") is None


@pytest.mark.slow
def test_the_chosen_run_is_shown_also_when_an_answer_about_another_comes_late(page: Page):
    watch(page, "drawn")
    state_is(page, "finished")
    with answers_held(page) as held:
        until_so(page, lambda: bool(held))
        asked = len(held)
        visit(page, "runs", "scripted")
        ask_again(page)
        until_so(page, lambda: len(held) > asked)
    state_is(page, "failed")
    page.wait_for_timeout(500)  # what comes late is here by now
    state_is(page, "failed")


@pytest.mark.slow
def test_two_pages_on_one_folder_see_the_same_and_one_resumes(page: Page, browser: Browser, runs: Path):
    run, other_server = RunDir.open(runs / "shared"), Server(runs)
    other_server.start()
    with ExitStack() as stack:
        stack.callback(process.terminate, run)
        stack.callback(other_server.kill)
        other = stack.enter_context(opened(browser, other_server.url))
        for one in (page, other):
            watch(one, "shared")
            state_is(one, "stopped")
            until(one, "!document.querySelector('#resume').disabled")
        for one in (page, other):  # without the time a mouse takes: soon the second button would be off
            one.evaluate("document.querySelector('#resume').click()")
        refused = "already running"
        until_so(
            page, lambda: any(one.locator("#page-run [role=alert]", has_text=refused).count() for one in (page, other))
        )
        for one in (page, other):
            until(one, "document.querySelector('#run').dataset.state !== 'stopped'")
    assert [event.state for event in EventReader(run.events_file).read() if isinstance(event, StatusEvent)].count(
        "starting"
    ) == 1
