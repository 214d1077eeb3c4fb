"""The frame of the page in Chromium: addresses, where one was, and a page that the server lets in no longer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.app.browser import Server, opened, recorded, serving, until, visit

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
        page.locator("#why[data-state]").wait_for()
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
