"""One server and one Chromium for all tests of the page; a browser context for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.app.browser import Server, opened_in, serving, start_chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield start_chromium(playwright)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    runs = tmp_path_factory.mktemp("page") / "runs"
    with serving(runs) as server:
        yield server


@pytest.fixture(scope="session")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """One for all tests: the page's scripts are read and compiled once."""
    with closing(browser.new_context(viewport={"width": 1280, "height": 900})) as context:
        yield context


@pytest.fixture
def page(context: BrowserContext, server: Server) -> Iterator[Page]:
    """The page as a newcomer finds it, with the quickstart in the form."""
    (server.runs / "drafts" / "draft.json").unlink(missing_ok=True)
    with opened_in(context, server.url) as page:
        yield page


@pytest.fixture
def runs(server: Server) -> Path:
    """The folder the page shows."""
    return server.runs
