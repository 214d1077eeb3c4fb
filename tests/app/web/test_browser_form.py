"""The form in Chromium: its rows, drafts and presets, and what keeps Start from starting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
from playwright.sync_api import Browser, Page

from tests.app.browser import (
    ROOT,
    Server,
    answers_held,
    box,
    choose,
    form_step,
    opened,
    reload,
    until_so,
    write_over,
)
from tests.runs import make_pictures, write_preset


def test_the_form_shows_what_the_adapter_has_and_tells_a_wrong_value_at_its_row(page: Page):
    form_step(page, "Adapter")
    page.locator("#all-settings input").check()
    page.locator("#field-adapter-rank").wait_for()
    choose(page, "field-adapter-type", "boft")
    page.locator("#field-adapter-rank").wait_for(state="hidden")
    page.locator("#field-adapter-block_size").wait_for()
    form_step(page, "Hardware")
    write_over(page, "field-train-steps", "many")
    page.locator("#field-train-steps.wrong").wait_for()
    page.locator("#problems [role=alert]", has_text="train.steps").wait_for()
    assert page.locator("#start").is_disabled()


def test_all_settings_are_there_when_they_are_asked_for(page: Page):
    form_step(page, "Hardware")
    restarts, timeout = page.locator("#field-parallel-max_restarts"), page.locator("#field-parallel-timeout")
    restarts.wait_for(state="hidden")
    page.locator("#all-settings input").check()
    restarts.wait_for()
    write_over(page, "field-parallel-max_restarts", "3")
    page.locator("#changes", has_text="parallel.max_restarts").wait_for()
    page.locator("#all-settings input").uncheck()
    timeout.wait_for(state="hidden")
    assert restarts.is_visible()  # what was set stays


def test_the_draft_is_there_after_a_reload_and_in_another_browser(page: Page, browser: Browser, server: Server):
    form_step(page, "Hardware")
    write_over(page, "field-train-steps", "123")
    page.locator("#changes", has_text="123").wait_for()
    reload(page)
    page.locator("#changes", has_text="123").wait_for()
    with opened(browser, server.url) as other:
        other.locator("#changes", has_text="123").wait_for()
        assert "train.steps=123" in (other.locator("#commands").text_content() or "")


def test_a_folder_that_is_not_there_keeps_start_from_starting(page: Page):
    form_step(page, "Dataset")
    write_over(page, "field-data-path", "/no/such/folder")
    page.locator("#field-data-path.wrong", has_text="/no/such/folder").wait_for()
    assert page.locator("#start").is_disabled()


def test_wrong_yaml_is_told_with_its_line_and_right_yaml_becomes_the_form(page: Page):
    page.get_by_role("button", name="Full config").click()
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
    form_step(page, "Hardware")
    write_over(page, "field-train-steps", "55")
    page.locator("#changes", has_text="55").wait_for()
    page.get_by_role("button", name="Full config").click()
    write_over(page, "preset-name", "mine")
    page.locator("#save-preset").click()
    page.locator("#problems", has_text="Saved as").wait_for()
    assert "steps: 55" in (runs / "presets" / "mine.yaml").read_text()


def test_what_overtakes_an_answer_changes_nothing_but_what_was_typed(own_data: Path, page: Page):
    form_step(page, "Hardware")
    with answers_held(page) as held:
        choose(page, "preset", "quickstart")
        write_over(page, "field-train-steps", "57")
        until_so(page, lambda: any(len(route.request.post_data_json["data"]) > 50 for route, _ in held))  # all fields
    page.locator("#commands", has_text="quickstart.yaml").wait_for(state="attached")
    page.wait_for_timeout(1_500)  # for what else is under way
    shown, told = box(page, "field-train-steps").input_value(), page.locator("#commands").text_content() or ""
    assert "data.path" not in page.locator("#changes").inner_text()
    assert (f"train.steps={shown}" in told) == (shown != "100"), told


def test_a_page_that_opens_asks_for_the_kept_draft_once(page: Page):
    """A second answer would show it again, over a preset chosen meanwhile."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or "") if request.method == "POST" else None)
    reload(page)
    page.wait_for_timeout(1_500)
    asking = [json.loads(data)["data"] for data in asked if data.startswith("{")]
    assert len(asking) >= 3  # the draft, the run's state, what is slow
    assert not [values for values in asking if len(values) > 50], asking  # all fields


def test_a_preset_whose_images_are_broken_is_shown_as_it_is(page: Page, runs: Path):
    folder = make_pictures(runs.parent / "broken")
    (folder / "00.png").write_bytes(b"no image")
    write_preset(runs / "presets" / "broken.yaml", folder)
    reload(page)
    choose(page, "preset", "broken")
    page.locator("#problems [role=alert]", has_text="00.png").wait_for()
    form_step(page, "Dataset")
    page.locator("#field-data-path.wrong").wait_for()
    assert box(page, "field-data-path").input_value() == str(folder)


def test_a_full_disk_is_told_and_the_page_goes_on(page: Page, server: Server):
    process = psutil.Process(server.process.pid)
    unlimited = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, unlimited[1]))
    try:
        form_step(page, "Hardware")
        write_over(page, "field-train-steps", "99")
        page.locator("#problems", has_text="The form cannot be saved").wait_for()
        page.locator("#start").click()
        told = page.locator("#outcome [role=alert]", has_text="the run folder cannot be made")
        told.wait_for()
        write_over(page, "field-train-steps", "98")  # no answer to what is typed takes it away
        page.locator("#changes", has_text="98").wait_for()
        assert told.is_visible()
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, unlimited)


def test_a_port_that_is_taken_is_named(server: Server, tmp_path: Path):
    argv = [sys.executable, "launch.py", "--runs", str(tmp_path), "--port", str(server.port)]
    answer = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 2
    told = f"--port {server.port}: cannot be used on 127.0.0.1 (Address already in use); name another\n"
    assert answer.stderr == told
