"""Two windows of the page in Chromium: what one of them changes is neither lost nor undone unseen by the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from tests.app.browser import (
    HANDLERS,
    Server,
    faultless,
    in_training,
    look_settled,
    recorded,
    show,
    until,
    until_so,
    watch,
)
from trainer.run.events import ExportEvent, StatusEvent

pytestmark = pytest.mark.slow


@contextmanager
def window(page: Page, server: Server, place: str = "new") -> Iterator[Page]:
    """Another window of the same browser."""
    other = page.context.new_page()
    try:
        with faultless(other, server.origin):
            other.goto(f"{server.origin}/#/{place}")
            yield other
    finally:
        other.close()


@pytest.fixture
def other(page: Page, server: Server) -> Iterator[Page]:
    with window(page, server) as other:
        look_settled(other)
        yield other


def test_a_preset_that_one_window_saves_is_chosen_in_the_other(page: Page, other: Page, runs: Path):
    other.locator("#save-preset").click()
    other.keyboard.type("shared")
    other.keyboard.press("Enter")
    page.locator("#presets .on[data-preset=shared]").wait_for(timeout=15_000)
    expect(page.locator("#tiles .on")).to_have_count(1)
    (runs / "presets" / "shared.yaml").unlink()


def test_prompts_to_come_of_another_window_are_not_replaced_unseen(page: Page, other: Page, runs: Path):
    run = recorded(runs, "prompted", [StatusEvent(state="training", step=40)])
    with in_training(run):
        for tab in (page, other):
            watch(tab, "prompted")
            tab.locator("#edit-prompts").click()
        other.locator("#prompts textarea").first.fill("theirs")
        other.locator("#prompts-save").click()
        other.locator("#prompts").wait_for(state="detached")
        page.locator("#prompts textarea").last.fill("mine")
        page.get_by_role("button", name="Add a prompt").click()
        page.keyboard.type("a fox")
        page.locator("#prompts-save").click()
        page.locator("#prompts [role=alert]", has_text="meanwhile: “theirs”, “a dog”.").wait_for()
        asked = run.requests / "prompts.json"
        assert json.loads(asked.read_text()) == ["theirs", "a dog"]
        page.locator("#prompts-save").click()
        page.locator("#prompts").wait_for(state="detached")
        assert json.loads(asked.read_text()) == ["a cat", "mine", "a fox"]
        page.locator("#newest", has_text="The next samples are of 3 other prompts.").wait_for()
    shutil.rmtree(run.path)


def test_a_window_that_opens_while_another_types_does_not_send_its_half_caption(
    own_data: Path, page: Page, server: Server
):
    show(page, "Data")
    box = page.locator(".pc[data-name='00.png'] textarea")
    held: list[Route] = []
    page.route(
        HANDLERS,
        lambda route: held.append(route) if route.request.url.endswith("data_save") else route.continue_(),
    )
    box.fill("half a cap")
    until_so(page, lambda: bool(held))
    with window(page, server, "data") as second:
        second.locator(".pc[data-name='00.png'] textarea").wait_for()
        second.route(HANDLERS, lambda route: route.abort())
        box.fill("half a caption, and the rest")
        page.unroute(HANDLERS)
        held.clear()  # they go on
        page.locator(".pc[data-name='00.png']").get_by_text("saved", exact=True).wait_for()
        second.unroute(HANDLERS)
        expect(second.locator(".pc[data-name='00.png'] textarea")).to_have_value(
            "half a caption, and the rest", timeout=15_000
        )
        assert second.locator(".conflict").count() == 0
    assert (own_data / "00.txt").read_text() == "half a caption, and the rest\n"
    page.evaluate("localStorage.clear()")


def test_a_run_that_one_window_deletes_is_missed_by_every_screen_of_the_others(page: Page, server: Server, runs: Path):
    export = ExportEvent(step=40, path="export/fox.safetensors", what="adapter", format="auto", difference=1e-3)
    run = recorded(runs, "doomed", [export, StatusEvent(state="finished", step=40)])
    with window(page, server, "runs/doomed/samples") as samples, window(page, server, "runs/doomed/files") as files:
        samples.locator(".sample-row").first.wait_for()
        files.locator("#files-folder").wait_for()
        watch(page, "doomed")
        page.locator("#draw").click()
        page.locator("#draw-prompt").fill("a fox")
        shutil.rmtree(run.path)
        for tab in (samples, files):
            tab.locator("#run-gone").wait_for()
            expect(tab.locator("[role=alert]:visible")).to_have_count(0)
        page.locator("#draw-dialog #draw").click()
        page.locator("#draw-dialog [role=alert]", has_text="not a run folder").wait_for()
        assert page.locator("#draw-prompt").input_value() == "a fox"
        page.keyboard.press("Escape")
        page.locator("#run-gone", has_text="It was moved or deleted").get_by_role("link", name="Runs").click()
        until(page, "location.hash === '#/runs'")


def test_a_sample_that_was_asked_for_without_a_server_is_shown_when_it_is_back(page: Page, runs: Path):
    run = recorded(runs, "asked-for")
    watch(page, "asked-for")
    page.locator("#newest [data-step='40'][aria-pressed=true]").wait_for()
    page.locator("#newest img").first.wait_for()
    page.route(HANDLERS, lambda route: route.abort())
    page.locator("#newest [data-step='20']").click()
    page.locator("#lost").wait_for()
    page.unroute(HANDLERS)
    page.locator("#newest img[alt='a cat, step 20']").wait_for(timeout=15_000)
    expect(page.locator("#newest .missing")).to_have_count(0)
    shutil.rmtree(run.path)
