"""The frame of the page in Chromium: addresses, where one was, notices, a page that is let in no longer."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.app.browser import Server, in_training, opened, recorded, serving, until, visit, visited, watch
from tests.runs import write
from trainer.run.events import StatusEvent

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("address", ["#/nothing", "#/constructor", "#/__proto__", "#/run", "#/files", "#/Runs"])
def test_an_address_that_leads_nowhere_says_so_and_shows_a_new_run(page: Page, address: str):
    page.evaluate("address => { location.hash = address; }", address)
    page.locator(".toast", has_text=f"No page has the address {address}.").wait_for()
    assert page.evaluate("location.hash") == "#/new"
    assert page.title() == "New run · ShardStudio"
    expect(page.locator("#page-new")).to_be_visible()


def test_a_run_is_shown_from_its_top_and_the_table_as_it_was_left(page: Page, runs: Path):
    recorded(runs, "far-000")
    for number in range(1, 30):
        shutil.copytree(runs / "far-000", runs / f"far-{number:03d}")
    visit(page, "runs")
    page.locator("#runs-filter").fill("far-")
    until(page, "document.querySelectorAll('#runs tbody tr:not([data-state=unread])').length === 30")
    page.mouse.move(700, 500)
    page.mouse.wheel(0, 1500)
    until(page, "scrollY === 1500")
    page.mouse.click(700, 500)
    until(page, "document.querySelector('#run').dataset.run.startsWith('far-') && scrollY === 0")
    page.go_back()
    until(page, "scrollY === 1500")
    for folder in runs.glob("far-*"):
        shutil.rmtree(folder)


def test_a_browser_that_is_let_in_no_longer_says_how_it_is_again_and_goes_on_then(server: Server, browser: Browser):
    with opened(browser, server.url) as page:
        page.context.clear_cookies()
        page.locator("#lost", has_text="the address that ShardStudio printed").wait_for()
        assert "does not answer" not in page.locator("#lost").inner_text()
        other = page.context.new_page()
        other.goto(server.url)
        other.close()
        page.locator("#lost").wait_for(state="hidden")


def test_a_browser_that_is_logged_out_is_offered_the_login(tmp_path: Path, browser: Browser):
    with serving(tmp_path / "runs", environment={"SHARDSTUDIO_AUTH": "me:secret-word"}) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{server.origin}/")
        log_in(page)
        page.locator("#page-drop h1").wait_for()
        context.clear_cookies()
        link = page.locator("#lost").get_by_role("link", name="Log in again")
        link.wait_for()
        with context.expect_page() as opening:
            link.click()
        log_in(opening.value)
        page.locator("#lost").wait_for(state="hidden")
        context.close()


def log_in(page: Page) -> None:
    page.get_by_label("User").fill("me")
    page.get_by_label("Password").fill("secret-word")
    page.get_by_role("button", name="Log in").click()


KEEP_NOTICES = """{
  const Real = window.Notification;
  window.notices = [];
  window.Notification = class extends Real {
    constructor(title, options) {
      super(title, options);
      window.notices.push([title, options.body, options.icon]);
      window.last = this;
    }
  };
}"""
HIDE = """() => {
  Object.defineProperty(document, 'hidden', { get: () => true });
  document.dispatchEvent(new Event('visibilitychange'));
}"""


@pytest.mark.slow
@pytest.mark.parametrize("is_allowed", [True, False], ids=["allowed", "not allowed"])
def test_a_window_that_is_not_seen_notices_the_end_of_a_run_if_it_may(
    browser: Browser, server: Server, is_allowed: bool
):
    run = recorded(server.runs, f"unseen-{is_allowed}", [StatusEvent(state="training", step=40)])
    with closing(browser.new_context()) as context:
        if is_allowed:
            context.grant_permissions(["notifications"], origin=server.origin)
        context.add_init_script(KEEP_NOTICES)
        with in_training(run) as process, visited(context.new_page(), server.url) as page:
            watch(page, run.path.name)
            until(page, f"document.querySelector('#job').dataset.run === '{run.path.name}'")
            page.evaluate(HIDE)
            write(run, StatusEvent(state="finished", step=40))
            process.kill()
            process.wait()
            if is_allowed:
                until(page, "notices.length")
            page.wait_for_timeout(5000)
            if not is_allowed:
                assert page.evaluate("notices") == []
                return
            [[headline, sentence, image]] = page.evaluate("notices")
            assert headline == f"{run.path.name} has finished"
            assert re.fullmatch(r"Finished after 40 steps\. Loss, smoothed: 0\.\d+\.", sentence)
            assert page.request.get(f"{server.origin}{image}").body()[8:12] == b"WEBP"
            visit(page, "machine")
            page.evaluate("last.onclick()")
            until(page, f"location.hash === '#/runs/{run.path.name}'")


def test_a_button_of_a_running_run_asks_the_browser_for_notices(browser: Browser, server: Server):
    run = recorded(server.runs, "asked", [StatusEvent(state="training", step=40)])
    with closing(browser.new_context()) as context, in_training(run), visited(context.new_page(), server.url) as page:
        watch(page, run.path.name)
        button = page.locator("#notify")
        button.click()  # this Chromium has nobody who could allow it
        page.locator("#message [role=alert]", has_text="does not allow notifications of this page").wait_for()
        context.grant_permissions(["notifications"], origin=server.origin)
        button.click()
        page.locator("#message", has_text="This browser tells you when a run ends").wait_for()
        button.wait_for(state="detached")
