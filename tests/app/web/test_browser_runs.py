"""Runs in Chromium: side by side, tags, and two pages on one folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.app.browser import (
    Server,
    answers_held,
    choose,
    opened,
    recorded,
    state_is,
    until,
    until_so,
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
    page.locator("#status", has_text="onerror").wait_for()
    page.locator("#log", has_text="onerror").wait_for()
    assert page.evaluate("window.taken") is None


def test_the_chosen_run_is_shown_also_when_an_answer_about_another_comes_late(page: Page):
    watch(page, "drawn")
    state_is(page, "finished")
    with answers_held(page) as held:
        until_so(page, lambda: bool(held))
        choose(page, "run-choice", "scripted")
        page.wait_for_timeout(1_000)
    state_is(page, "failed")
    page.wait_for_timeout(2_000)
    state_is(page, "failed")


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
        answers = [one.locator("#message [role]").inner_text() for one in (page, other)]
    second, first = sorted(answers, key=lambda answer: "already" not in answer)
    assert first == "Continuing from the newest checkpoint."
    assert "is already running" in second
    assert [event.state for event in EventReader(run.events_file).read() if isinstance(event, StatusEvent)].count(
        "starting"
    ) == 1
