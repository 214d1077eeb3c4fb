"""The screen of one run in Chromium: state, samples, charts, log, notes, questions, and two pages on one folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from app.runs.monitor import SILENT_S
from tests.app.browser import (
    HANDLERS,
    LONG_AGO_S,
    Server,
    answers_held,
    ask_again,
    in_training,
    opened,
    recorded,
    state_is,
    until,
    until_so,
    visit,
    watch,
)
from tests.runs import make_text, step_event, text_config, write
from trainer.run import process
from trainer.run.events import (
    ErrorEvent,
    EventReader,
    EventWriter,
    ExportEvent,
    RankLine,
    SampleEvent,
    StatusEvent,
    WarningEvent,
)
from trainer.run.folder import RunDir
from trainer.system.gpus.load import GpuLoad, Load

LONG_PROMPT = "a very long prompt that does not fit into one line below a small image of 160 pixels"


@pytest.fixture(scope="module")
def finished(server: Server) -> str:
    """A finished run with an export, and one of its samples missing."""
    export = ExportEvent(
        step=40, path="export/fox.safetensors", what="adapter", format="auto", difference=1.3e-3, dtype="bf16"
    )
    run = recorded(
        server.runs,
        "fox-20261124-211219-aebff6",
        [export, StatusEvent(state="finished", step=40)],
        sample__prompts=["a cat", LONG_PROMPT, "a dog"],
    )
    (run.export / "fox.safetensors").write_bytes(b"0" * 1_500_000)
    (run.samples / "step-000040-2.png").unlink()
    return run.path.name


@pytest.fixture(scope="module")
def failed(server: Server) -> RunDir:
    error = ErrorEvent(
        step=40, message="boom", remedy="less", rank=1, retry=("train.checkpointing=full",), log="logs/launch-1.log"
    )
    run = recorded(server.runs, "failed", [error, StatusEvent(state="failed", step=40)])
    (run.logs / "launch-1.log").write_text("all is well\nUserWarning: look\nRuntimeError: boom\n")
    return run


@pytest.fixture
def running(server: Server) -> Iterator[RunDir]:
    """A run whose process lives and does nothing."""
    run = recorded(server.runs, "running", [StatusEvent(state="training", step=40)])
    with in_training(run):
        yield run
    shutil.rmtree(run.path)


def test_a_finished_run_says_what_it_made_and_each_chart_in_words_what_it_shows(page: Page, finished: str):
    watch(page, finished)
    assert page.locator("#run-title").inner_text() == "fox"
    assert page.locator("#run-state").inner_text() == "finished"
    done = page.locator("#run-done").inner_text()
    assert "fox.safetensors 1.5 MB, verified: reloaded and equal within bf16 rounding (1.3e-03)" in done
    assert page.locator("#run-done").get_by_role("button").all_inner_texts()[0] == "Download"
    assert page.locator("#run-actions").get_by_role("button").all_inner_texts() == ["Copy to a new run"]
    assert page.locator("#edit-prompts").is_hidden()
    until(page, "document.querySelector('#chart-loss canvas').dataset.n === '42'")
    label = page.locator("#chart-loss canvas").get_attribute("aria-label")
    assert label.startswith("Loss up to step 40. Last: each step 0.02")
    assert page.locator("#chart-margins").is_hidden()  # it compared no pairs
    assert page.locator("#ranks .rank").count() == 2
    assert "6.0 GiB allocated, 9.0 reserved, 11.0 peak, of 24.0" in page.locator(".rank").first.get_attribute("title")
    with page.expect_download() as download:
        page.locator("#download").click()
    assert download.value.suggested_filename == "fox.safetensors"


def test_samples_open_large_and_a_missing_file_is_a_small_mark(page: Page, finished: str):
    watch(page, finished)
    strip = page.locator("#newest")
    strip.locator("img").nth(1).wait_for()
    assert strip.locator("figure").count() == 3
    assert strip.locator(".missing").inner_text() == "missing"
    strip.get_by_role("button", name="20", exact=True).click()
    until(page, "document.querySelectorAll('#newest img').length === 3")
    strip.locator("button.enlarge").first.click()
    box = page.locator("#lightbox")
    until(page, "document.querySelector('#lightbox img').naturalWidth === 64")
    assert box.locator(".words").inner_text() == "Step 20 · 1 of 3\n\na cat"
    page.keyboard.press("ArrowLeft")
    assert box.locator(".words").inner_text() == "Step 20 · 3 of 3\n\na dog"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert LONG_PROMPT in box.locator(".words").inner_text()
    page.keyboard.press("Escape")
    box.wait_for(state="detached")


@pytest.mark.slow
def test_a_failure_names_rank_and_remedy_offers_a_retry_and_shows_its_log(page: Page, failed: RunDir):
    watch(page, failed.path.name)
    card = page.locator("#run-error[role=alert]")
    assert card.locator("h2").inner_text() == "Failed on rank 1 at step 40"
    assert "boom" in card.inner_text()
    assert "What to do: less" in card.inner_text()
    assert card.locator("#retry").inner_text() == "Retry with train.checkpointing=full"
    assert page.locator("#resume").get_attribute("title") == "There is no checkpoint: from the first step"
    page.locator("#error-log").click()
    until(page, "document.querySelector('#log').textContent.startsWith('all is well')")
    page.locator("#log-level").get_by_role("button", name="errors").click()
    until(page, "document.querySelector('#log').textContent === 'RuntimeError: boom\\n'")
    (failed.logs / "launch-1.log").write_text("all is well\n")
    page.locator("#no-log", has_text="No errors in this log.").wait_for()
    with (failed.logs / "launch-1.log").open("a") as log:
        log.write("ValueError: again\n")
    until(page, "document.querySelector('#log').textContent === 'ValueError: again\\n'")


def test_a_retry_and_a_copy_bring_the_settings_into_the_form(page: Page, failed: RunDir):
    watch(page, failed.path.name)
    page.locator("#retry").click()
    page.locator("#changes a[title='train.checkpointing']").wait_for()
    assert page.evaluate("location.hash") == "#/new"
    watch(page, failed.path.name)
    page.locator("#copy").click()
    page.locator("#changes a[title='train.checkpointing']").wait_for(state="detached")
    assert page.evaluate("location.hash") == "#/new"


def test_stop_asks_first_and_says_so_until_it_has_stopped(page: Page, running: RunDir):
    watch(page, running.path.name)
    state_is(page, "training")
    assert page.locator("#run-actions button").all_inner_texts() == ["Notify me", "Sample", "Save", "Stop"]
    page.locator("#stop").click()
    page.get_by_role("button", name="Keep training").click()
    assert not running.requested("stop")
    page.locator("#stop").click()
    dialog = page.get_by_role("dialog", name="Stop this run?")
    assert "writes a checkpoint" in dialog.inner_text()
    dialog.get_by_role("button", name="Stop").click()
    page.locator("#run-pending", has_text="It stops after this step and writes a checkpoint.").wait_for()
    assert running.requested("stop")
    write(running, StatusEvent(state="stopped", step=40))
    state_is(page, "stopped")
    assert page.locator("#run-pending").is_hidden()
    assert page.locator("#run-sentence").inner_text() == "Stopped at step 40 of 40; resume continues it"
    assert page.locator("#run-actions").inner_text() == "Ending …"  # its process still lives


@pytest.mark.slow
def test_sample_waits_for_prompts_in_a_run_that_has_none(page: Page, server: Server):
    run = recorded(server.runs, "mute", [StatusEvent(state="training", step=40)], sample__prompts=[], sample__every=0)
    with in_training(run):
        watch(page, run.path.name)
        sample = page.locator("#sample")
        assert sample.is_disabled()
        assert sample.get_attribute("title") == "It has no prompts: write some under Edit prompts"
        page.locator("#edit-prompts").click()
        page.locator("#prompts textarea").fill("a fox")
        page.locator("#prompts-save").click()
        until(page, "!document.querySelector('#sample').disabled")
        sample.click()
        page.locator("#run-pending", has_text="Samples are generated after this step.").wait_for()
        assert run.requested("sample")
    shutil.rmtree(run.path)


def test_a_run_that_says_nothing_is_shown_as_silent_and_not_as_running(page: Page, running: RunDir):
    said = time.time() - 2 * SILENT_S
    running.events_file.write_text("")
    write(running, StatusEvent(state="training", step=40, time=said))
    with EventWriter(running.rank_file(1)) as lines:
        lines.write(RankLine(rank=1, step=40, phase="training", allocated=1, reserved=1, peak=1, limit=2, time=said))
    watch(page, running.path.name)
    page.locator("#run.stuck .sentence", has_text="No step for").wait_for()
    assert page.locator("#run-state").inner_text() == "no sign of life"
    page.locator(".rank.late", has_text="silent for").last.wait_for()


@pytest.mark.slow
def test_notes_are_kept_and_another_window_does_not_overwrite_them(
    page: Page, browser: Browser, server: Server, finished: str
):
    file = server.runs / finished / "notes.md"
    watch(page, finished)
    page.locator("#notes").fill("Ears too round.")
    page.get_by_role("status").filter(has_text="Saved.").wait_for()
    assert file.read_text() == "Ears too round."
    with opened(browser, server.url) as other:
        watch(other, finished)
        until(other, "document.querySelector('#notes').value === 'Ears too round.'")
        page.locator("#notes").press_sequentially(" Next: rank 32.")
        other.locator("#notes").press_sequentially(" Or more images.")
        page.locator("#notes").blur()
        other.locator("#notes").blur()
        asked = [window.locator("#notes-mine") for window in (page, other)]
        until_so(page, lambda: any(mine.is_visible() for mine in asked))
        conflicted, winner = (page, other) if asked[0].is_visible() else (other, page)
        conflicted.locator("#notes-mine").click()
        mine = conflicted.locator("#notes").input_value()
        until(winner, f"document.querySelector('#notes').value === {json.dumps(mine)}")
    assert file.read_text() == mine
    file.unlink()


@pytest.mark.slow
def test_the_address_is_kept_and_tabs_have_their_own(page: Page, finished: str):
    watch(page, finished)
    page.locator("#tab-samples").click()
    page.locator("#run-samples .sample-row").first.wait_for()
    assert page.evaluate("location.hash") == f"#/runs/{finished}/samples"
    page.reload()
    page.locator("#run-samples .sample-row").first.wait_for()
    page.locator("#tab-files").click()
    page.locator("#run-files", has_text="fox.safetensors").wait_for()
    page.go_back()
    page.go_back()
    page.locator("#newest img").first.wait_for()
    assert page.locator("#tab-overview").get_attribute("aria-current") == "page"


def test_what_is_typed_stays_in_the_notes_and_the_log_stays_where_it_was_scrolled_to(page: Page, failed: RunDir):
    (failed.logs / "launch-1.log").write_text("line\n" * 500)
    watch(page, failed.path.name)
    until(page, "document.querySelector('#log').scrollTop > 100")
    page.locator("#log").evaluate("log => { log.scrollTop = 50; }")
    page.locator("#notes").press_sequentially("half a sen")
    with (failed.logs / "launch-1.log").open("a") as log:
        log.write("the last line\n")
    until(page, "document.querySelector('#log').textContent.endsWith('the last line\\n')")
    assert page.locator("#log").evaluate("log => log.scrollTop") == 50
    assert page.locator("#notes").input_value() == "half a sen"
    assert page.evaluate("document.activeElement.id") == "notes"


@pytest.mark.slow
def test_answers_that_come_at_once_are_drawn_once(page: Page, running: RunDir):
    (running.logs / "launch-1.log").write_text("one\n")
    watch(page, running.path.name)
    until(page, "document.querySelector('#log').textContent === 'one\\n'")
    write(running, WarningEvent(step=40, message="only once"))
    with (running.logs / "launch-1.log").open("a") as log:
        log.write("two\n")
    page.evaluate("Promise.all([1, 2, 3].map(() => studio.screens.run.tick()))")
    until(page, "document.querySelector('#log').textContent === 'one\\ntwo\\n'")
    assert page.locator("#events li", has_text="only once").count() == 1


@pytest.mark.slow
def test_a_run_before_its_first_samples_says_how_to_get_some(page: Page, running: RunDir):
    running.events_file.write_text("")
    write(running, StatusEvent(state="starting"))
    watch(page, running.path.name)
    assert page.locator("#newest").get_by_text("No samples yet. Sample generates some after this step.").is_visible()
    assert page.locator("#no-log").inner_text() == "There are no logs in the run folder."


@pytest.mark.slow
def test_a_run_that_was_away_comes_back_and_another_of_its_name_replaces_it(page: Page, server: Server):
    run = recorded(server.runs, "away")
    (run.logs / "launch-1.log").write_text("a long log of the first run\n")
    watch(page, "away")
    until(page, "document.querySelector('#log').textContent.startsWith('a long log')")
    aside = run.path.rename(server.runs.parent / "aside")
    page.locator("#run-gone").wait_for()
    assert page.locator("#page-run h1").inner_text() == "away"
    aside.rename(run.path)
    page.locator("#run").wait_for()
    shutil.rmtree(run.path)
    run = recorded(server.runs, "away", sample__prompts=["a bird"], train__steps=20)
    (run.logs / "launch-1.log").write_text(
        "and the log of the second run, which is a longer one than that of the first\n"
    )
    page.locator("#newest figcaption", has_text="a bird").wait_for()
    until(page, "document.querySelector('#log').textContent.startsWith('and the log of the second run, which')")
    assert "a long log" not in page.locator("#log").inner_text()
    assert page.locator("#newest figcaption").all_inner_texts() == ["a bird"]
    shutil.rmtree(run.path)


@pytest.mark.slow
def test_notes_that_cannot_be_saved_outlive_a_look_at_another_run(page: Page, server: Server, finished: str):
    run = recorded(server.runs, "noted")
    watch(page, "noted")
    page.route(HANDLERS, lambda route: route.abort())
    page.locator("#notes").fill("Do not lose this.")
    visit(page, "runs", finished)
    page.locator(".toast", has_text="The notes on noted are not saved yet.").wait_for()
    page.unroute(HANDLERS)
    watch(page, finished)
    assert page.locator("#notes").input_value() == ""
    watch(page, "noted")
    until(page, "document.querySelector('#notes').value === 'Do not lose this.'")
    until_so(page, (run.path / "notes.md").exists)
    assert (run.path / "notes.md").read_text() == "Do not lose this."
    shutil.rmtree(run.path)


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_said_and_margins_and_accuracies_have_charts_of_their_own(
    page: Page, server: Server
):
    run = recorded(server.runs, "diverged", [StatusEvent(state="finished", step=40)])
    lines = [json.loads(line) for line in run.events_file.read_text().splitlines()]
    for line in (line for line in lines if line["type"] == "step"):
        line |= {"metrics": {"margins": 0.5, "accuracies": 1.0}} | ({"loss": None} if line["step"] > 25 else {})
    run.events_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch(page, "diverged")
    assert "not a number since step 26" in page.locator(".figures").inner_text().replace("\n", " ")
    until(page, "document.querySelector('#chart-loss .readout').textContent.includes('smoothed –')")
    for title in ("margins", "accuracies"):
        until(page, f"document.querySelector('#chart-{title} canvas').dataset.last === '40'")
        assert page.locator(f"#chart-{title}").is_visible()
    shutil.rmtree(run.path)


@pytest.mark.slow
def test_a_language_model_writes_and_its_constant_speed_is_drawn(page: Page, server: Server):
    text = make_text(server.runs.parent / "text")
    config = text_config(text, sample__prompts=["Double 3: "], sample__every=20, train__steps=40)
    run = RunDir.create(server.runs, config, at=server.runs / "words")
    figures = {"seconds": 0.5, "tokens_per_second": 1234.5, "images_per_second": float("nan")}
    (run.samples / "one.txt").write_text("Double 3: 6.")
    sample = SampleEvent(step=40, prompt="Double 3: ", index=0, path="samples/one.txt", text="Double 3: 6.")
    write(run, *(step_event(at, **figures) for at in range(1, 41)), sample, StatusEvent(state="finished", step=40))
    watch(page, "words")
    assert "1,230 tokens/s" in page.locator(".figures").inner_text().replace("\n", " ")
    # Its smoothed values differ in the last bit: ticks of that size would be without end.
    until(page, "document.querySelector('#chart-speed canvas').dataset.n === '40'")
    page.locator("#newest .written", has_text="Double 3: 6.").wait_for()
    page.locator("#run-done").get_by_role("button", name="Write with it").click()
    page.get_by_role("dialog", name="Write with it").get_by_text("A text that continues the prompt").wait_for()
    page.keyboard.press("Escape")
    shutil.rmtree(run.path)


def test_a_later_export_changes_neither_the_main_file_nor_how_long_the_run_took(page: Page, runs: Path) -> None:
    main = ExportEvent(step=40, path="export/fox.safetensors", what="adapter", format="auto", difference=1e-3)
    run = recorded(runs, "exported-later", [main, StatusEvent(state="finished", step=40)])
    merged = ExportEvent(step=40, path="export/fox-merged", what="merged", format="diffusers", difference=1e-3)
    (run.export / "fox.safetensors").write_bytes(b"0" * 1_500_000)
    (run.export / "fox-merged").mkdir()
    (run.export / "fox-merged" / "model.safetensors").write_bytes(b"0" * 3_000_000)
    watch(page, run.path.name)
    page.locator("#run-done", has_text="fox.safetensors 1.5 MB").wait_for()
    before = page.locator("#run-done b").inner_text(), page.locator(".run-status").inner_text()
    write(run, merged)
    ask_again(page)
    page.locator("#other-exports", has_text="fox-merged 3.0 MB").wait_for()
    assert (page.locator("#run-done b").inner_text(), page.locator(".run-status").inner_text()) == before
    with page.expect_download() as download:
        page.locator("#download").click()
    assert download.value.suggested_filename == "fox.safetensors"
    (run.export / "fox.safetensors").unlink()  # the others are offered where the main file was removed
    ask_again(page)
    page.locator("#run-done b", has_text="fox-merged").wait_for()


BAD = '<img src=x onerror="window.taken = 1">'


@pytest.fixture(scope="module", autouse=True)
def recordings(server: Server) -> None:
    """Runs that are there before a page is opened."""
    recorded(server.runs, "drawn")
    recorded(server.runs, "shared", [StatusEvent(state="stopped", step=20)])
    scripted = recorded(server.runs, "scripted", sample__prompts=[BAD, BAD])
    (scripted.logs / "launch-1.log").write_text(BAD)
    write(scripted, ErrorEvent(step=40, message=BAD, remedy=BAD), StatusEvent(step=40, state="failed", message=BAD))


def test_text_of_a_run_is_never_a_script(page: Page):
    watch(page, "scripted")
    page.locator("#page-run [role=alert]", has_text="onerror").first.wait_for()
    page.locator("#log", has_text="onerror").wait_for()
    visit(page, "runs")
    page.locator("#page-runs tr", has_text="scripted").first.wait_for()
    visit(page, "runs", "scripted", "samples")
    page.locator("#samples-rows h3", has_text="onerror").first.wait_for()
    assert page.evaluate("window.taken") is None


@pytest.mark.slow
def test_the_chosen_run_is_shown_also_when_an_answer_about_another_comes_late(page: Page):
    watch(page, "drawn")
    state_is(page, "finished")
    with answers_held(page) as held:
        until_so(page, lambda: bool(held))
        asked = len(held)
        visit(page, "runs", "scripted")
        ask_again(page)
        until_so(page, lambda: len(held) > asked)
    state_is(page, "failed")
    page.wait_for_timeout(500)  # what comes late is here by now
    state_is(page, "failed")


@pytest.mark.slow
def test_two_pages_on_one_folder_see_the_same_and_one_resumes(page: Page, browser: Browser, runs: Path):
    run, other_server = RunDir.open(runs / "shared"), Server(runs)
    other_server.start()
    with ExitStack() as stack:
        stack.callback(process.terminate, run)
        stack.callback(other_server.kill)
        other = stack.enter_context(opened(browser, other_server.url))
        for one in (page, other):
            watch(one, "shared")
            state_is(one, "stopped")
            until(one, "!document.querySelector('#resume').disabled")
        for one in (page, other):  # without the time a mouse takes: soon the second button would be off
            one.evaluate("document.querySelector('#resume').click()")
        refused = "already running"
        until_so(
            page, lambda: any(one.locator("#page-run [role=alert]", has_text=refused).count() for one in (page, other))
        )
        for one in (page, other):
            until(one, "document.querySelector('#run').dataset.state !== 'stopped'")
    assert [event.state for event in EventReader(run.events_file).read() if isinstance(event, StatusEvent)].count(
        "starting"
    ) == 1


@pytest.mark.slow
def test_the_load_of_the_machine_is_drawn_and_a_gpu_that_is_slowed_down_is_said(page: Page, runs: Path):
    run = recorded(runs, "loaded", [StatusEvent(state="training", step=40)])
    gpu = GpuLoad(0, 97.0, 88.0, 299.0, 300.0, 1400.0, ("heat",))
    with EventWriter(run.machine_file(0)) as writer:
        for at in range(8):
            writer.write(Load((10 + at) * 2**30, 2**35, (gpu,), time.time() - LONG_AGO_S + 5 * at))
    with in_training(run):
        watch(page, run.path.name)
        said = "GPU 0 is slowed down by its temperature (88 °C): improve its cooling"
        page.locator("#run-slow", has_text=said).wait_for()
        for chart in ("gpu-load", "gpu-temperature", "gpu-power", "gpu-clock", "host-memory"):
            page.locator(f"#chart-{chart} canvas").wait_for()
    visit(page, "machine")
    page.locator("#host", has_text="GiB").wait_for()
    assert page.locator("#machine-slow").is_hidden()
