"""The images and the queue in Chromium: captions, what is broken or slow, who goes first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.app.browser import (
    TRAINED_WITHIN_S,
    answers_held,
    choose,
    form_step,
    reload,
    show,
    until,
    until_so,
    write_over,
)
from trainer.run.events import EventReader


def test_a_caption_is_kept_as_it_is_typed_and_taken_back(own_data: Path, page: Page):
    show(page, "Dataset")
    write_over(page, "card-0", "a red square")
    file = own_data / "00.txt"
    page.locator("#dataset-message", has_text="saved").wait_for()
    until_so(page, lambda: file.read_text().strip() == "a red square")
    write_over(page, "search", "picture")
    write_over(page, "replacement", "drawing")
    page.locator("#replace").click()
    page.locator("#dataset-message", has_text="Replaced in 7 captions").wait_for()
    assert (own_data / "01.txt").read_text() == "drawing number 1\n"
    page.locator("#undo").click()
    page.locator("#dataset-message", has_text="7 captions restored").wait_for()
    assert (own_data / "01.txt").read_text() == "picture number 1\n"


def test_a_broken_image_is_named_and_keeps_start_from_starting(own_data: Path, page: Page):
    (own_data / "07.png").write_bytes(b"no image")
    show(page, "Dataset")
    page.locator("#dataset-problems [role=alert]", has_text="07.png").wait_for()
    show(page, "Train")
    until(page, "document.querySelector('#start').disabled")
    page.locator("#problems", has_text="07.png").wait_for()


def test_a_folder_that_takes_long_is_waited_for_in_peace(own_data: Path, page: Page):
    slow = own_data / "metadata.jsonl"
    slow.write_bytes(b"\n" * 4 * 10**8)  # minutes to read
    show(page, "Dataset")
    page.locator("#counted", has_text="files so far").wait_for()
    show(page, "Train")
    page.locator("#problems", has_text="Reading the images").wait_for()
    assert page.locator("#start").is_disabled()
    form_step(page, "Hardware")
    write_over(page, "field-train-steps", "3")
    page.locator("#changes", has_text="train.steps").wait_for()
    os.truncate(slow, 0)  # whoever reads it is at its end
    page.locator("#problems", has_text="Ready to start").wait_for()
    until(page, "!document.querySelector('#start').disabled")
    show(page, "Dataset")
    page.locator("#counted", has_text="8 images").wait_for()


@pytest.mark.slow  # loads torch in a process of its own
def test_the_noise_images_are_trained_at_is_shown_per_bucket(own_data: Path, page: Page):
    show(page, "Dataset")
    page.locator("#compute-timesteps").click()
    page.locator("#timesteps tr", has_text="64 x 64").locator(".histogram").wait_for()


def test_runs_wait_in_the_queue_in_an_order_that_can_be_changed(own_data: Path, page: Page):
    show(page, "Queue")
    page.get_by_role("button", name="Pause").click()
    page.locator("#queue", has_text="Paused").wait_for()
    show(page, "Train")
    page.locator("#enqueue").click()
    page.locator("#outcome", has_text="was queued").wait_for()
    form_step(page, "Hardware")
    write_over(page, "field-name", "second")
    page.locator("#changes", has_text="second").wait_for()
    write_over(page, "gpus", "0,1")
    page.locator("#enqueue").click()
    page.locator("#outcome", has_text="second was queued").wait_for()
    show(page, "Queue")
    row = page.locator("#queue tr", has_text="second")
    row.get_by_text("0, 1").wait_for()
    label = f"{row.locator('th').inner_text()} second"
    choose(page, "waiting", label)
    page.locator("#earlier").click()
    until(page, "[...document.querySelectorAll('#queue tbody tr')].at(-2).innerText.includes('second')")
    for name in ("second", "own"):
        label = f"{page.locator('#queue tr', has_text=name).locator('th').inner_text()} {name}"
        choose(page, "waiting", label)
        page.locator("#take-out").click()
        page.locator("#queue tr", has_text=name).wait_for(state="detached")
    page.get_by_role("button", name="Resume queue").click()
    page.locator("#queue", has_text="Paused").wait_for(state="detached")


def test_what_the_queue_was_told_outlives_answers_that_come_late(own_data: Path, page: Page):
    show(page, "Queue")
    with answers_held(page) as held:
        until_so(page, lambda: bool(held))
        page.get_by_role("button", name="Pause").click()
        page.get_by_label("pause", exact=True).check()
    page.locator("#queue", has_text="Paused").wait_for()
    reload(page)
    show(page, "Queue")
    page.get_by_role("button", name="Resume queue").click()
    page.get_by_role("button", name="Pause").wait_for()
    until(page, "document.querySelector('#after input[value=pause]').checked")


@pytest.mark.slow
def test_two_runs_of_the_queue_train_one_after_the_other(own_data: Path, page: Page, runs: Path):
    for number in (1, 2):
        page.locator("#enqueue").click()
        page.locator("#outcome", has_text=f"own was queued as number {number}").wait_for()
    show(page, "Queue")
    until(page, "document.querySelectorAll('#queue tr').length === 3")
    until(page, "document.querySelector('#queue').innerText.split('finished').length === 3", timeout_s=TRAINED_WITHIN_S)
    first, second = (EventReader(file).read() for file in sorted(runs.glob("own-*/events.jsonl")))
    assert first[-1].time < second[0].time


def test_what_is_cut_of_a_caption_is_marked_until_it_is_short_enough(own_data: Path, page: Page):
    """The tiny model reads 48 tokens with its template; letters of another alphabet take two each."""
    (own_data / "00.txt").write_text(f"{'ж' * 40} <b>hat</b>")
    show(page, "Dataset")
    end = page.locator("#end-0 .cut")
    end.locator("del", has_text="<b>hat</b>").wait_for()
    assert "text_encoder reads 48 of" in end.inner_text()
    assert page.locator("#end-1 .cut").count() == 0
    page.locator("#cut", has_text="1 of 8 captions is longer than the model reads").wait_for()
    write_over(page, "card-0", "a hat")
    end.wait_for(state="detached")
    page.locator("#cut", has_text="No caption is truncated.").wait_for()
