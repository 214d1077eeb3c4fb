"""The screens Queue and Machine in Chromium: who goes first, and what this machine is good for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.app.browser import TRAINED_WITHIN_S, answers_held, show, until, until_so, visit
from tests.runs import run_config
from trainer.launcher.queue import Queue, Settings
from trainer.run.events import EventReader


@pytest.fixture
def queue(runs: Path) -> Iterator[Queue]:
    """The queue of the page, paused and empty; empty and working afterwards."""
    queue = Queue(runs)
    queue.change(Settings(is_paused=True))
    yield queue
    for entry in queue.waiting():
        queue.remove(entry.number)
    queue.change(Settings())


def names(page: Page) -> list[str]:
    return page.locator("#waiting tbody th").all_inner_texts()


def test_runs_wait_in_an_order_that_buttons_and_keys_change(queue: Queue, runs: Path, page: Page):
    for name, gpus in (("first", ()), ("second", (0, 1)), ("third", ())):
        queue.add(run_config(runs, name=name), gpus)
    show(page, "Queue")
    until(page, "document.querySelectorAll('#waiting tbody tr').length === 3")
    second = page.locator("#waiting tr[data-name=second]")
    assert "0, 1" in second.inner_text() and "LoRA" in second.inner_text()
    assert "CPU" in page.locator("#waiting tr[data-name=first]").inner_text()
    expect(page.locator("#queue-next")).to_have_text("Paused: no run is started until you resume the queue.")
    assert page.get_by_label("first: Move up").is_disabled() and page.get_by_label("third: Move down").is_disabled()
    page.get_by_label("second: Move up").click()
    until_so(page, lambda: names(page) == ["second", "first", "third"])
    expect(second).to_be_focused()
    page.keyboard.press("Control+ArrowDown")
    until_so(page, lambda: names(page) == ["first", "second", "third"])
    page.keyboard.press("Delete")
    page.get_by_role("dialog").get_by_role("button", name="Keep").click()
    expect(second).to_be_focused()
    page.get_by_label("second: Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    until_so(page, lambda: names(page) == ["first", "third"])
    assert [entry.name for entry in queue.waiting()] == ["first", "third"]


def test_an_empty_queue_has_a_way_on_and_nothing_to_press(queue: Queue, page: Page):
    show(page, "Queue")
    page.locator("#queue-waiting", has_text="Nothing is waiting.").get_by_role("link", name="New run").wait_for()
    page.locator("#queue-paused", has_text="Paused").wait_for()
    assert page.locator("#page-queue button:visible").all_inner_texts() == [
        "start the next run", "pause the queue", "Resume the queue",
    ]  # fmt: skip


def test_a_damaged_queue_is_named(queue: Queue, runs: Path, page: Page):
    file = runs / "queue" / "taken" / "000099.json"
    file.write_text("null")
    show(page, "Queue")
    page.locator("#queue-problems [role=alert]", has_text="000099.json: damaged").wait_for()
    file.unlink()


@pytest.mark.slow
def test_what_the_queue_was_told_outlives_answers_that_come_late(queue: Queue, page: Page):
    queue.change(Settings())
    show(page, "Queue")
    page.locator("#pause").wait_for()
    with answers_held(page) as held:
        until_so(page, lambda: bool(held))
        page.get_by_role("button", name="Pause the queue", exact=True).click()
        page.locator("#after [data-after=pause]").click()
    page.locator("#queue-paused", has_text="Paused").wait_for()
    page.reload()
    expect(page.locator("#after [data-after=pause]")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Resume the queue").click()
    page.locator("#pause", has_text="Pause the queue").wait_for()
    assert queue.settings == Settings("pause", is_paused=False)


@pytest.mark.slow
def test_two_runs_of_the_queue_train_one_after_the_other(own_data: Path, page: Page, runs: Path):
    number = len(Queue(runs).taken())
    for added in (1, 2):
        page.locator("#enqueue").click()
        page.locator("#outcome", has_text=f"own waits in the queue as number {number + added}.").wait_for()
    show(page, "Queue")
    ended = (
        "[...document.querySelectorAll('#started tr[data-name=own]')].filter(row => row.innerText.includes('finished'))"
    )
    until(page, f"{ended}.length === 2", timeout_s=TRAINED_WITHIN_S)
    first, second = (EventReader(file).read() for file in sorted(runs.glob("own-*/events.jsonl")))
    assert first[-1].time < second[0].time
    page.locator("#started a").first.click()
    until(page, "location.hash.startsWith('#/runs/own-')")


@pytest.mark.slow
def test_the_machine_says_in_a_sentence_what_it_is_good_for(page: Page):
    visit(page, "machine")
    page.locator("#headline", has_text="CPU only: the demo model trains here").wait_for()
    until(page, "!document.querySelector('#check-again').disabled")
    assert page.locator("#checks tr", has_text="disk").locator(".tag").inner_text() in ("ok", "warning")
    page.locator("#versions", has_text="torch").wait_for()
    page.locator("#disk", has_text="Free").wait_for()
    show(page, "Queue")
    page.locator("#page-queue h1").wait_for()
    with answers_held(page) as held:
        show(page, "Machine")
        until_so(page, lambda: bool(held))
        assert page.locator("#checks tr").count() > 4  # the last ones, at once
    page.locator("#check-again").click()
    page.locator("#checked", has_text="Checked at").wait_for()
