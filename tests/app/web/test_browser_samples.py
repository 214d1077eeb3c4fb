"""The tab Samples of a run in Chromium: every step can be reached, two steps side by side, all of it as a zip."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from PIL import Image
from playwright.sync_api import Page

from tests.app.browser import Server, ask_again, recorded, until
from tests.app.runs.test_sample_kinds import drawn_kinds
from tests.runs import step_event, write
from trainer.run.events import EventWriter, SampleEvent
from trainer.run.folder import RunDir

MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def recordings(server: Server) -> None:
    """Runs that are there before a page is opened."""
    many = recorded(server.runs, "many-samples")
    draw_more(many, range(60, 1020, 20))
    (many.samples / "step-000100-1.png").unlink()
    recorded(server.runs, "no-samples", sample__prompts=[], sample__every=0)
    drawn_kinds(server.runs)
    write_text_samples(recorded(server.runs, "text-samples", sample__prompts=[], sample__every=0))


def draw_more(run: RunDir, steps: range) -> None:
    """Samples of two prompts at more steps."""
    with EventWriter(run.events_file) as events:
        for step in steps:
            for index, prompt in enumerate(("a cat", "a dog")):
                file = run.samples / f"step-{step:06d}-{index}.png"
                Image.new("RGB", (64, 64), (step % 256, 90 * index, 9)).save(file)
                events.write(SampleEvent(step=step, prompt=prompt, index=index, path=f"samples/{file.name}"))


def write_text_samples(run: RunDir) -> None:
    with EventWriter(run.events_file) as events:
        for step in (20, 40):
            path = f"samples/step-{step:06d}-0.txt"
            (run.path / path).write_text(f"a story of step {step}")
            events.write(SampleEvent(step=step, prompt="once", index=0, path=path, text=f"a story of step {step}"))


def open_samples(page: Page, run: str) -> None:
    page.evaluate(f"location.hash = '#/runs/{run}/samples'")


def shows(page: Page, step: str) -> None:
    page.locator("#samples-scrub .bign", has_text=step).wait_for()


def test_each_step_is_reached_by_scrubber_and_keys_and_only_those_near_it_are_loaded(page: Page):
    open_samples(page, "many-samples")
    page.locator("#samples-summary", has_text="2 prompts, 100 samples").wait_for()
    shows(page, "1,000")
    until(page, "document.querySelectorAll('#page-run .sample img').length === 14")
    page.keyboard.press("ArrowLeft")
    shows(page, "980")
    page.keyboard.press("Shift+ArrowLeft")
    shows(page, "780")
    until(page, "[...document.querySelectorAll('#page-run .now img')].every(img => img.alt.endsWith('step 780'))")
    page.keyboard.press("Home")
    shows(page, "20")
    page.locator("#samples-step").focus()
    page.keyboard.press("ArrowRight")
    shows(page, "40")
    assert page.locator("#samples-step").get_attribute("aria-valuetext") == "step 40"
    page.get_by_role("button", name="60", exact=True).first.click()
    shows(page, "60")
    page.keyboard.press("End")
    shows(page, "1,000")
    num_loaded = "performance.getEntriesByType('resource').filter(one => one.name.includes('-256.webp')).length"
    assert page.evaluate(num_loaded) <= 60, "those of 4 places and the first step, of 2 prompts"


def test_a_missing_file_is_a_mark_that_is_found_from_anywhere(page: Page):
    open_samples(page, "many-samples")
    page.locator("#samples-missing", has_text="1 file missing").click()
    shows(page, "100")
    mark = page.locator("#page-run .now .missing")
    assert mark.inner_text() == "file missing"
    assert page.locator("#samples-scrub path.gone").get_attribute("d").count("M") == 1
    assert page.locator("#samples-step").get_attribute("aria-valuetext") == "step 100, a file is missing"
    assert mark.bounding_box()["height"] <= 200


@pytest.mark.slow
def test_play_goes_on_by_itself_and_stops_at_the_end(page: Page):
    open_samples(page, "many-samples")
    shows(page, "1,000")
    page.locator("#samples-step").fill("46")
    shows(page, "940")
    page.keyboard.press("Space")
    page.get_by_role("button", name="Pause").wait_for()
    shows(page, "1,000")
    page.get_by_role("button", name="Play").wait_for()


def test_two_steps_of_a_prompt_are_compared_by_a_slider_the_first_and_the_last_at_first(page: Page):
    open_samples(page, "many-samples")
    shows(page, "1,000")
    page.keyboard.press("p")
    until(page, "document.querySelectorAll('#samples-pair .slide img[src*=\"-2048\"]').length === 2")
    facts = page.locator("#samples-pair p")
    assert facts.inner_text() == "a cat · step 20 and step 1,000 · seed 0, prompt 1"
    before = page.viewport_size
    page.set_viewport_size({"width": 1920, "height": 1080})
    page.locator("#samples-pair").scroll_into_view_if_needed()
    slide, pair = (page.locator(part).bounding_box() for part in ("#samples-pair .slide", "#samples-pair"))
    assert slide and pair and slide["y"] >= 0 and slide["y"] + slide["height"] <= 1080  # it is seen whole
    assert pair["width"] > 1920 / 2 and slide["width"] > pair["width"] / 3
    page.set_viewport_size(before or {"width": 1280, "height": 900})
    page.locator("#samples-share").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#samples-pair .slide").evaluate("one => one.style.getPropertyValue('--x')") == "51%"
    shows(page, "1,000")
    page.locator("#samples-left").fill("1")
    page.locator("#samples-pair button", has_text="a dog").click()
    until(page, "document.querySelector('#samples-pair p').innerText.startsWith('a dog · step 40 and step 1,000')")
    with page.expect_download() as download:
        page.keyboard.press("d")
    assert download.value.suggested_filename == "many-samples-step-001000-1.png"
    page.keyboard.press("p")
    page.locator("#samples-rows").wait_for()


def test_texts_are_shown_as_text_and_side_by_side(page: Page):
    open_samples(page, "text-samples")
    page.locator("#page-run .now pre", has_text="a story of step 40").wait_for()
    assert "100 tokens" in page.locator("#samples-settings").inner_text()
    page.get_by_role("button", name="Pair").click()
    until(page, "document.querySelectorAll('#samples-pair pre').length === 2")
    assert page.locator("#samples-pair pre").all_inner_texts() == ["a story of step 20", "a story of step 40"]
    page.get_by_role("button", name="Rows").click()


def test_samples_that_are_drawn_meanwhile_appear_and_a_step_that_was_chosen_stays(page: Page, runs: Path):
    run = recorded(runs, "growing-samples")
    open_samples(page, "growing-samples")
    shows(page, "40")
    draw_more(run, range(60, 120, 20))
    ask_again(page)
    shows(page, "100")
    page.keyboard.press("Home")
    draw_more(run, range(120, 140, 20))
    ask_again(page)
    page.locator("#samples-summary", has_text="6 steps").wait_for()
    shows(page, "20")


def test_a_run_without_samples_says_how_to_get_some(page: Page):
    open_samples(page, "no-samples")
    page.locator("#samples-empty", has_text="sample.prompts").wait_for()


@contextmanager
def client_of(server: Server) -> Iterator[httpx.Client]:
    """A browser that has opened the page."""
    with httpx.Client(base_url=server.origin, timeout=60) as client:
        client.get(server.url)
        yield client


@pytest.mark.parametrize("size", [256 * MIB, pytest.param(2**31 + MIB, marks=pytest.mark.slow)])
def test_the_server_holds_no_more_of_a_zip_than_a_piece(server: Server, runs: Path, size: int):
    run = recorded(runs, f"large-samples-{size}")
    (run.samples / "large.png").touch()
    os.truncate(run.samples / "large.png", size)
    assert server.process is not None
    process, num_bytes = psutil.Process(server.process.pid), 0
    with client_of(server) as client:
        client.get("/runs/many-samples/samples.zip")
        before = peak = process.memory_info().rss
        with client.stream("GET", f"/runs/{run.path.name}/samples.zip") as answer:
            for number, piece in enumerate(answer.iter_raw()):
                num_bytes += len(piece)
                peak = max(peak, process.memory_info().rss) if number % 64 == 0 else peak
    (run.samples / "large.png").unlink()
    assert num_bytes > size
    assert peak - before < 50 * MIB


@pytest.mark.slow  # a bound on time, on whatever machine
def test_a_run_of_10000_steps_and_400_samples_opens_within_a_second(page: Page, runs: Path):
    run = recorded(runs, "long-samples")
    write(run, *(step_event(step) for step in range(41, 10_001)))
    draw_more(run, range(60, 4020, 20))
    began = time.monotonic()
    open_samples(page, "long-samples")
    until(page, "document.querySelectorAll('#page-run .now img').length === 2")
    first_s = time.monotonic() - began
    page.evaluate("location.hash = '#/runs/many-samples/samples'")
    page.locator("#samples-summary", has_text="50 steps").wait_for()
    began = time.monotonic()
    open_samples(page, "long-samples")
    until(page, "document.querySelectorAll('#page-run .now img').length === 2")
    assert (first_s < 3, time.monotonic() - began < 1) == (True, True)


def test_what_has_a_duration_is_shown_by_its_poster_or_name_and_played(page: Page):
    open_samples(page, "kinds")
    shows(page, "60")
    for words in ("a text", "a clip", "a sound"):
        page.locator("#page-run").get_by_text(words, exact=True).first.scroll_into_view_if_needed()
    poster = page.locator("#page-run .now img[alt='a clip, step 60']")
    until(page, "document.querySelector(\".now img[alt='a clip, step 60']\")?.naturalWidth === 64")
    poster.click()
    until(page, "document.querySelector('#lightbox video').src.endsWith('step-000060-2.mp4')")
    assert page.locator("#lightbox video").get_attribute("poster")
    page.keyboard.press("Escape")
    page.locator("#page-run .now").get_by_text("step-000060-3.wav", exact=True).click()
    until(page, "document.querySelector('#lightbox video')?.duration === 0.1")
    page.keyboard.press("Escape")
    page.locator("#page-run .now pre", has_text="Once <b>upon</b> a time").wait_for()
