"""What the tests of the page say when their browser fails."""

from __future__ import annotations

import psutil
import pytest
from playwright.sync_api import BrowserContext, Page

from tests.app.browser import faultless


def renderers() -> list[psutil.Process]:
    """The processes that draw pages of this test's browser."""
    return [one for one in psutil.Process().children(recursive=True) if "--type=renderer" in one.cmdline()]


def test_a_tab_whose_process_dies_says_by_which_signal_and_the_next_test_has_another(
    tab: Page, context: BrowserContext
):
    said = r"the tab's process died \(killed, SIGKILL\b.*MiB of memory are free"
    with pytest.raises(AssertionError, match=said), faultless(tab, "about:blank"):
        tab.goto("about:blank")
        for process in renderers():
            process.kill()
        tab.wait_for_function("false")
    assert tab.is_closed() and context.pages == []
