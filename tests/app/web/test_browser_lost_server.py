"""The page in Chromium while its server hangs or starts again: it says so, loses nothing, sends nothing twice."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from app.web import scripts
from tests.app.browser import (
    Server,
    answers_held,
    in_training,
    opened,
    recorded,
    serving,
    settled,
    until,
    until_so,
    visit,
    write_over,
)
from tests.app.web.test_browser_two_windows import window
from tests.runs import make_pictures, run_config, step_event, write
from trainer.launcher.queue import Queue, Settings
from trainer.run.events import SampleEvent, StatusEvent

pytestmark = pytest.mark.slow
SAID_WITHIN_S = 15


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that may be stopped: no other test uses it."""
    with serving(tmp_path_factory.mktemp("lost") / "runs") as server:
        yield server


@contextmanager
def hanging(server: Server) -> Iterator[None]:
    """The server holds its connections and answers nothing meanwhile, as on a machine that swaps."""
    assert server.process
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_a_page_that_asks_for_what_its_server_does_not_know_says_that_it_is_of_another_version(
    browser: Browser, own: Server
):
    asked = "async at => { const { call } = await import(at); return call('gone').catch(error => error.message); }"
    with opened(browser, own.url) as page:
        assert page.evaluate(asked, f"{scripts.folder()}/requests.js") == (
            "This page is of another version of ShardStudio than its server: reload it."
        )


def count_calls(page: Page) -> Counter[str]:
    """What the page sends from now on: {name of the function: how often}."""
    sent: Counter[str] = Counter()

    def note(request) -> None:
        if "/calls/" in request.url:
            sent[request.url.rpartition("/")[2]] += 1

    page.on("request", note)
    return sent


def test_a_server_that_hangs_is_said_soon_and_what_was_typed_arrives_once(browser: Browser, own: Server):
    with opened(browser, own.url) as page:
        sent = count_calls(page)
        with hanging(own):
            began = time.monotonic()
            write_over(page, "field-name", "patient")
            page.locator("#lost", has_text="does not answer").wait_for(timeout=30_000)
            assert time.monotonic() - began < SAID_WITHIN_S
            write_over(page, "field-optim-lr", "0.002")
            page.wait_for_timeout(6000)  # nothing piles up meanwhile
            assert sent["live"] <= 2 and sent["new_edit"] == 1
        page.locator("#lost").wait_for(state="hidden", timeout=5000)
        settled(page)
        assert json.loads((own.runs / "drafts" / "draft.json").read_text())["values"] == {
            "name": "patient",
            "optim.lr": 0.002,
        }


def test_an_action_while_the_server_hangs_is_refused_and_one_from_before_is_done_once(browser: Browser, own: Server):
    queue = Queue(own.runs)
    queue.change(Settings(is_paused=True))
    for name in ("first", "second", "third", "fourth"):
        queue.add(run_config(own.runs, name=name))
    with opened(browser, own.url) as page:
        visit(page, "queue")
        until(page, "document.querySelectorAll('#waiting tbody tr').length === 4")
        with hanging(own):
            page.get_by_label("first: Move down").click()
            page.locator("#lost").wait_for(timeout=30_000)
            page.get_by_label("first: Move down").click()
            page.locator("#queue-message", has_text="does not answer").wait_for(timeout=30_000)
        page.locator("#lost").wait_for(state="hidden", timeout=5000)
        expect(page.locator("#waiting tbody th")).to_have_text(["second", "first", "third", "fourth"])
        expect(page.locator("#queue-message")).to_be_empty()
    assert [entry.name for entry in queue.waiting()] == ["second", "first", "third", "fourth"]


def test_an_answer_that_takes_long_is_not_taken_for_a_lost_server(browser: Browser, own: Server):
    with opened(browser, own.url) as page:
        with answers_held(page):
            write_over(page, "field-name", "slow")
            page.wait_for_timeout(1000 * SAID_WITHIN_S)
            assert page.locator("#lost").is_hidden()
        settled(page)
        assert page.locator("#lost").is_hidden()


def test_a_server_that_is_killed_while_it_hangs_is_asked_again(browser: Browser, tmp_path: Path):
    with serving(tmp_path / "runs") as server, opened(browser, server.url) as page:
        with hanging(server):
            write_over(page, "field-name", "killed")
            page.locator("#lost").wait_for(timeout=30_000)
            server.kill()
        assert page.locator("#lost").is_visible()
        server.start()
        page.locator("#lost").wait_for(state="hidden")
        settled(page)
        assert json.loads((server.runs / "drafts" / "draft.json").read_text())["values"] == {"name": "killed"}


def test_every_screen_goes_on_live_after_a_restart_and_nothing_typed_is_lost(browser: Browser, tmp_path: Path):
    runs, pictures = tmp_path / "runs", make_pictures(tmp_path / "own")
    run = recorded(runs, "going", [StatusEvent(state="training", step=40)])
    other = recorded(runs, "other")
    queue = Queue(runs)
    queue.change(Settings(is_paused=True))
    queue.add(run_config(runs, name="waits"))
    with in_training(run), serving(runs) as server, opened(browser, server.url) as new, ExitStack() as stack:
        write_over(new, "field-data-path", str(pictures))
        new.keyboard.press("Tab")
        settled(new)
        places = (
            "runs/going",
            "runs/going/samples",
            "runs/going/files",
            "queue",
            "data",
            "compare/going,other",
            "runs",
        )
        windows = [stack.enter_context(window(new, server, place)) for place in places]
        watched, samples, files, waiting, data, compared, table = windows
        watched.locator("#run[data-state=training]").wait_for()
        samples.locator(".sample-row").first.wait_for()
        files.locator("#files-folder", has_text="going").wait_for()
        waiting.locator("#waiting tr[data-name=waits]").wait_for()
        data.locator(".pc[data-name='00.png'] textarea").wait_for()
        compared.locator("#compare-results").wait_for()
        table.locator("#runs tr[data-run=going]").wait_for()
        server.kill()
        watched.locator("#notes").fill("typed without a server")
        watched.locator("#notes").blur()
        data.locator(".pc[data-name='00.png'] textarea").fill("a caption without a server")
        new.locator("#field-name").fill("renamed")
        for page in (new, *windows):
            page.locator("#lost").wait_for(timeout=30_000)
        drawn = SampleEvent(step=60, prompt="a cat", index=0, path="samples/step-000040-0.png")
        write(run, *(step_event(step) for step in range(41, 61)), drawn)
        queue.add(run_config(runs, name="joins"))
        shutil.rmtree(other.path)
        server.start()
        for page in (new, *windows):
            page.locator("#lost").wait_for(state="hidden", timeout=30_000)
        watched.locator("#run[data-step='60']").wait_for(timeout=20_000)
        watched.locator("#newest [data-step='60'][aria-pressed=true]").wait_for(timeout=20_000)
        assert watched.locator("#notes").input_value() == "typed without a server"
        until_so(watched, lambda: (run.path / "notes.md").is_file())
        assert (run.path / "notes.md").read_text() == "typed without a server"
        expect(samples.locator("#samples-scrub")).to_contain_text("60")
        expect(waiting.locator("#waiting tbody th")).to_have_text(["waits", "joins"])
        until_so(data, lambda: (pictures / "00.txt").read_text() == "a caption without a server\n")
        compared.locator("#compare-problems [role=alert]").wait_for(timeout=20_000)
        table.locator("#runs tr[data-run=other]").wait_for(state="detached", timeout=20_000)
        table.locator("#runs tr[data-run=going]", has_text="60 / ").wait_for(timeout=20_000)
        settled(new)
        until_so(new, lambda: "renamed" in (runs / "drafts" / "draft.json").read_text())
        for page in windows:
            assert page.locator("[role=alert]:visible").count() == (page is compared), page.url
