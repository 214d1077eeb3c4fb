"""The page in Chromium: the form, the images, the queue, runs side by side, and what goes wrong with each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import APIResponse, Browser, Page, Route

from tests.app.browser import (
    ROOT,
    Server,
    choose,
    opened,
    recorded,
    reload,
    show,
    state_is,
    until,
    write_over,
)
from tests.runs import make_pictures
from trainer.events import ErrorEvent, EventReader, EventWriter, StatusEvent

STEPS = "#field-train-steps textarea, #field-train-steps input"


@pytest.fixture
def own_data(page: Page, runs: Path) -> Iterator[Path]:
    """The form with a preset of its own pictures, which a test may change."""
    folder = make_pictures(runs.parent / "own")
    preset = runs / "presets" / "own.yaml"
    preset.parent.mkdir(exist_ok=True)
    preset.write_text(
        f"name: own\nmodel: {{family: flux2}}\ndata: {{path: {folder}, resolution: 64}}\ntrain: {{steps: 2}}\n"
    )
    reload(page)
    choose(page, "preset", "own")
    page.locator("#commands", has_text="own.yaml").wait_for()
    yield folder
    shutil.rmtree(folder)
    preset.unlink()


def fields(page: Page, step: str) -> None:
    """Open one of the form's steps."""
    page.locator("#steps").get_by_role("tab", name=step, exact=True).click()


def test_the_form_shows_what_the_adapter_has_and_tells_a_wrong_value_at_its_row(page: Page):
    fields(page, "Adapter")
    page.locator("#all-settings input").check()
    page.locator("#field-adapter-rank").wait_for()
    choose(page, "field-adapter-type", "boft")
    page.locator("#field-adapter-rank").wait_for(state="hidden")
    page.locator("#field-adapter-block_size").wait_for()
    fields(page, "Hardware")
    write_over(page, STEPS, "many")
    page.locator("#field-train-steps.wrong").wait_for()
    page.locator("#problems [role=alert]", has_text="train.steps").wait_for()
    assert page.locator("#start").is_disabled()


def test_the_draft_is_there_after_a_reload_and_in_another_browser(page: Page, browser: Browser, server: Server):
    fields(page, "Hardware")
    write_over(page, STEPS, "123")
    page.locator("#changes", has_text="123").wait_for()
    reload(page)
    page.locator("#changes", has_text="123").wait_for()
    with opened(browser, server.url) as other:
        other.locator("#changes", has_text="123").wait_for()
        assert "train.steps=123" in (other.locator("#commands").text_content() or "")


def test_a_folder_that_is_not_there_keeps_start_from_starting(page: Page):
    fields(page, "Dataset")
    write_over(page, "#field-data-path textarea, #field-data-path input", "/no/such/folder")
    page.locator("#field-data-path.wrong", has_text="/no/such/folder").wait_for()
    assert page.locator("#start").is_disabled()


def test_wrong_yaml_is_told_with_its_line_and_right_yaml_becomes_the_form(page: Page):
    page.get_by_role("button", name="The whole config").click()
    write_yaml(page, "train:\n  steps: 77\n  batch_size: [\n")
    page.locator("#take-yaml").click()
    page.locator("#problems [role=alert]", has_text="config.yaml:4").wait_for()
    write_yaml(page, "model: {family: flux2, path: demo}\ndata: {path: quickstart}\ntrain: {steps: 77}\n")
    page.locator("#take-yaml").click()
    page.locator("#changes tr", has_text="train.steps").get_by_text("77").wait_for()


def write_yaml(page: Page, text: str) -> None:
    page.locator("#yaml .cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text)


def test_a_preset_can_be_kept(page: Page, runs: Path):
    fields(page, "Hardware")
    write_over(page, STEPS, "55")
    page.locator("#changes", has_text="55").wait_for()
    page.get_by_role("button", name="The whole config").click()
    write_over(page, "#preset-name textarea, #preset-name input", "mine")
    page.locator("#save-preset").click()
    page.locator("#problems", has_text="Saved as").wait_for()
    assert "steps: 55" in (runs / "presets" / "mine.yaml").read_text()


def test_what_overtakes_an_answer_changes_nothing_but_what_was_typed(page: Page, own_data: Path):
    held: list[tuple[Route, APIResponse]] = []
    fields(page, "Hardware")
    page.route("**/gradio_api/run/**", lambda route: held.append((route, route.fetch())))
    choose(page, "preset", "quickstart")
    write_over(page, STEPS, "57")
    deadline = time.monotonic() + 30
    while not any(len(route.request.post_data_json["data"]) > 50 for route, _ in held):  # all the fields
        assert time.monotonic() < deadline
        page.wait_for_timeout(100)
    for route, answer in held:
        route.fulfill(response=answer)
    page.unroute("**/gradio_api/run/**")
    page.locator("#commands", has_text="quickstart.yaml").wait_for(state="attached")
    page.wait_for_timeout(1_500)  # for what else is under way
    shown, told = page.locator(STEPS).input_value(), page.locator("#commands").text_content() or ""
    assert "data.path" not in page.locator("#changes").inner_text()
    assert (f"train.steps={shown}" in told) == (shown != "100"), told


def test_a_caption_is_kept_as_it_is_typed_and_taken_back(page: Page, own_data: Path):
    show(page, "Dataset")
    write_over(page, "#card-0 textarea", "a red square")
    file = own_data / "00.txt"
    page.locator("#dataset-said", has_text="saved").wait_for()
    until_text(file, "a red square")
    write_over(page, "#search textarea, #search input", "picture")
    write_over(page, "#replacement textarea, #replacement input", "drawing")
    page.locator("#replace").click()
    page.locator("#dataset-said", has_text="Replaced in 7 captions").wait_for()
    assert (own_data / "01.txt").read_text() == "drawing number 1\n"
    page.locator("#undo").click()
    page.locator("#dataset-said", has_text="7 captions are as before").wait_for()
    assert (own_data / "01.txt").read_text() == "picture number 1\n"


def test_a_broken_image_is_named_and_keeps_start_from_starting(page: Page, own_data: Path):
    (own_data / "07.png").write_bytes(b"no image")
    show(page, "Dataset")
    page.locator("#dataset-problems [role=alert]", has_text="07.png").wait_for()
    show(page, "Train")
    until(page, "document.querySelector('#start').disabled")
    page.locator("#problems", has_text="07.png").wait_for()


def test_a_folder_that_takes_long_is_waited_for_in_peace(page: Page, own_data: Path):
    slow = own_data / "metadata.jsonl"
    os.mkfifo(slow)  # read no further until something is written to it, as on a slow disk
    show(page, "Dataset")
    page.locator("#counted", has_text="files so far").wait_for()
    show(page, "Train")
    page.locator("#problems", has_text="The images are being read").wait_for()
    assert page.locator("#start").is_disabled()
    fields(page, "Hardware")
    write_over(page, STEPS, "3")
    page.locator("#changes", has_text="train.steps").wait_for()
    writer = os.open(slow, os.O_RDWR)
    slow.unlink()
    os.close(writer)  # whoever reads it is at its end
    page.locator("#problems", has_text="Ready to start").wait_for()
    until(page, "!document.querySelector('#start').disabled")
    show(page, "Dataset")
    page.locator("#counted", has_text="8 images").wait_for()


def test_a_preset_whose_images_are_broken_is_shown_as_it_is(page: Page, runs: Path):
    folder = make_pictures(runs.parent / "broken")
    (folder / "00.png").write_bytes(b"no image")
    preset = runs / "presets" / "broken.yaml"
    preset.parent.mkdir(exist_ok=True)
    preset.write_text(f"name: broken\nmodel: {{family: flux2}}\ndata: {{path: {folder}, resolution: 64}}\n")
    reload(page)
    choose(page, "preset", "broken")
    page.locator("#problems [role=alert]", has_text="00.png").wait_for()
    fields(page, "Dataset")
    page.locator("#field-data-path.wrong").wait_for()
    assert page.locator("#field-data-path textarea, #field-data-path input").input_value() == str(folder)


def test_the_noise_images_are_trained_at_is_shown_per_bucket(page: Page, own_data: Path):
    show(page, "Dataset")
    page.locator("#compute-recipe").click()
    page.locator("#recipe tr", has_text="64 x 64").locator(".histogram").wait_for(timeout=60_000)


def until_text(file: Path, text: str) -> None:
    deadline = time.monotonic() + 10
    while file.read_text().strip() != text:
        assert time.monotonic() < deadline, file.read_text()
        time.sleep(0.05)


def test_runs_wait_in_the_queue_in_an_order_that_can_be_changed(page: Page, own_data: Path):
    show(page, "Queue")
    page.locator("#paused input").check()
    show(page, "Train")
    page.locator("#enqueue").click()
    page.locator("#problems", has_text="waits in the queue").wait_for()
    fields(page, "Hardware")
    write_over(page, "#field-name textarea, #field-name input", "second")
    page.locator("#changes", has_text="second").wait_for()
    write_over(page, "#gpus textarea, #gpus input", "0,1")
    page.locator("#enqueue").click()
    page.locator("#problems", has_text="second waits in the queue").wait_for()
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
    page.locator("#paused input").uncheck()


@pytest.mark.slow
def test_two_runs_of_the_queue_train_one_after_the_other(page: Page, own_data: Path, runs: Path):
    for number in (1, 2):
        page.locator("#enqueue").click()
        page.locator("#problems", has_text=f"own waits in the queue as number {number}").wait_for()
    show(page, "Queue")
    until(page, "document.querySelectorAll('#queue tr').length === 3")
    until(page, "document.querySelector('#queue').innerText.split('finished').length === 3", timeout_s=120)
    first, second = (EventReader(file).read() for file in sorted(runs.glob("own-*/events.jsonl")))
    assert first[-1].time < second[0].time


def test_runs_are_compared_by_what_differs(page: Page, runs: Path):
    recorded(runs, "slow", optim__lr=1e-4)
    recorded(runs, "fast", optim__lr=1e-2)
    show(page, "Runs")
    page.locator("#runs tr", has_text="fast").wait_for()
    choose(page, "compare", "fast")
    choose(page, "compare", "slow")
    page.locator("#differences tr", has_text="optim.lr").wait_for()
    assert page.locator("#differences table").first.locator("tbody tr").count() == 1
    assert page.locator("#differences .matrix img").count() == 4
    until(page, "document.querySelector('#compared-loss canvas').dataset.n === '80'")


def test_a_run_is_tagged_cloned_and_deleted_after_a_question(page: Page, runs: Path):
    run = recorded(runs, "gone", optim__lr=3e-3)
    show(page, "Runs")
    page.locator("#runs tr", has_text="gone").wait_for()
    choose(page, "one-run", "gone")
    write_over(page, "#tags textarea, #tags input", "first, good")
    page.locator("#keep-tags").click()
    page.locator("#runs tr", has_text="first, good").wait_for()
    page.locator("#delete").click()
    page.locator("#delete-no").click()
    page.locator("#delete-question").wait_for(state="hidden")
    assert run.path.exists()
    page.locator("#clone").click()
    page.locator("#start").wait_for()
    assert "optim.lr" not in page.locator("#changes").inner_text()
    show(page, "Runs")
    page.locator("#delete").click()
    page.locator("#delete-yes").click()
    page.locator("#runs tr", has_text="gone").wait_for(state="detached")
    assert not run.path.exists()


def test_samples_are_a_matrix_with_a_viewer_and_a_slider(page: Page, runs: Path):
    recorded(runs, "drawn")
    reload(page)
    choose(page, "run-choice", "drawn")
    show(page, "Samples")
    until(page, "document.querySelectorAll('#matrix img').length === 4")
    page.locator("#matrix a.picture").last.click()
    page.locator("#viewer[open]", has_text="a dog · step 40 · seed 0, prompt 2").wait_for()
    page.keyboard.press("Escape")
    until(page, "document.querySelectorAll('#slider img').length >= 2")


def test_text_of_a_run_is_never_a_script(page: Page, runs: Path):
    bad = '<img src=x onerror="window.taken = 1">'
    run = recorded(runs, "scripted", sample__prompts=[bad, bad])
    (run.logs / "launch-1.log").write_text(bad)
    with EventWriter(run.events_file) as events:
        events.write(ErrorEvent(step=40, message=bad, remedy=bad))
        events.write(StatusEvent(step=40, state="failed", message=bad))
    reload(page)
    choose(page, "run-choice", "scripted")
    show(page, "Monitor")
    page.locator("#figures", has_text="onerror").wait_for()
    page.locator("#log", has_text="onerror").wait_for()
    show(page, "Samples")
    page.locator("#matrix", has_text="onerror").wait_for()
    assert page.evaluate("window.taken") is None


def test_a_failed_export_is_told(page: Page, runs: Path):
    recorded(runs, "unsaved")
    reload(page)
    choose(page, "run-choice", "unsaved")
    show(page, "Export")
    page.locator("#exports", has_text="Nothing was exported yet").wait_for()
    page.locator("#export").click()
    page.locator("#export-said", has_text="has no complete checkpoint to export").wait_for(timeout=60_000)


def test_a_full_disk_is_told_and_the_page_goes_on(page: Page, server: Server):
    process = psutil.Process(server.process.pid)
    unlimited = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, unlimited[1]))
    try:
        fields(page, "Hardware")
        write_over(page, STEPS, "99")
        page.locator("#problems", has_text="cannot be kept for later").wait_for()
        page.locator("#start").click()
        page.locator("#problems [role=alert]", has_text="cannot be made a run folder").wait_for()
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, unlimited)


def test_two_pages_on_one_folder_see_the_same_and_one_resumes(page: Page, browser: Browser, runs: Path):
    run = recorded(runs, "shared", [StatusEvent(state="stopped", step=20)])
    other_server = Server(runs)
    other_server.start()
    with ExitStack() as stack:
        stack.callback(other_server.kill)
        other = stack.enter_context(opened(browser, other_server.url))
        for one in (page, other):
            reload(one)
            choose(one, "run-choice", "shared")
            show(one, "Monitor")
            state_is(one, "stopped")
            until(one, "!document.querySelector('#resume').disabled")
        for one in (page, other):  # without the time a mouse takes: soon the second button would be off
            one.evaluate("document.querySelector('#resume').click()")
        answers = [one.locator("#said [role]").inner_text() for one in (page, other)]
    second, first = sorted(answers, key=lambda answer: "already" not in answer)
    assert first == "Continuing from the newest checkpoint."
    assert "is running already" in second
    assert [event.state for event in EventReader(run.events_file).read() if isinstance(event, StatusEvent)].count(
        "starting"
    ) == 1


def test_a_port_that_is_taken_is_named(server: Server, tmp_path: Path):
    argv = [sys.executable, "launch.py", "--runs", str(tmp_path), "--port", str(server.port)]
    answer = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 2
    told = f"--port {server.port}: cannot be used on 127.0.0.1 (Address already in use); name another\n"
    assert answer.stderr == told
