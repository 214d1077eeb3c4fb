"""The browser's own notice when a run ends, for whoever looks at another window meanwhile."""

from __future__ import annotations

from contextlib import closing

import pytest
from playwright.sync_api import Browser

from tests.app.browser import Server, in_training, recorded, until, visited, watch
from trainer.run.events import EventWriter, StatusEvent

KEEP_NOTICES = """{
  const Real = window.Notification;
  window.notices = [];
  window.Notification = class extends Real {
    constructor(title, options) { super(title, options); window.notices.push([title, options.body]); }
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
            with EventWriter(run.events_file) as events:
                events.write(StatusEvent(state="finished", step=40))
            process.kill()
            process.wait()
            if is_allowed:
                until(page, "notices.length")
            page.wait_for_timeout(5000)
            said = [["ShardStudio", f"{run.path.name} has finished."]]
            assert page.evaluate("notices") == (said if is_allowed else [])
