"""The page in Chromium with the keyboard alone: what has the focus is seen, and it stays near what was done."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.app.browser import in_training, recorded, settled, show, until, until_so, visit, watch, write_over
from tests.runs import run_config
from trainer.launcher.queue import Queue, Settings
from trainer.run.events import EventWriter, ExportEvent, StatusEvent
from trainer.run.folder import RunDir

pytestmark = pytest.mark.slow
SEEN = """() => {
  const element = document.activeElement, box = element.getBoundingClientRect(), style = getComputedStyle(element);
  if (element === document.body) return null;
  const name = `${element.tagName} ${element.id} ${element.getAttribute('aria-label') || element.textContent}`.trim();
  const isInside = box.width > 1 && box.height > 1 && box.bottom > 0 && box.top < innerHeight && box.right > 0;
  const ring = element.matches('.slide > input') ? element.parentElement.querySelector('u') : element;
  const hasRing = ring !== element || (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1);
  return [name.slice(0, 80), isInside && hasRing];
}"""


@pytest.fixture
def running(runs: Path) -> Iterator[list[RunDir]]:
    """Two runs whose processes live and do nothing."""
    made = [recorded(runs, f"going-{letter}", [StatusEvent(state="training", step=40)]) for letter in "ab"]
    with ExitStack() as stack:
        for run in made:
            stack.enter_context(in_training(run))
        yield made
    for run in made:
        shutil.rmtree(run.path)


@pytest.fixture
def finished(runs: Path) -> Iterator[RunDir]:
    export = ExportEvent(step=40, path="export/fox.safetensors", what="adapter", format="auto", difference=1e-3)
    run = recorded(runs, "ended", [export, StatusEvent(state="finished", step=40)])
    (run.export / "fox.safetensors").write_bytes(b"0" * 1000)
    (run.checkpoints / "step-000020").mkdir(parents=True)
    yield run
    shutil.rmtree(run.path)


def test_the_first_stop_of_tab_skips_the_pages(page: Page):
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    assert page.evaluate(SEEN)[1]
    page.keyboard.press("Enter")
    expect(page.locator("#pages")).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('#pages').contains(document.activeElement)")
    assert page.evaluate("location.hash") != "#pages"


def press(page: Page, selector: str, key: str = "Enter") -> None:
    """Press a key on an element that is reached by Tab."""
    place = page.locator(selector).first
    place.wait_for()
    assert place.evaluate("element => element.tabIndex >= 0 && !element.disabled")
    place.focus()
    page.keyboard.press(key)


def walked(page: Page) -> list[str]:
    """What Tab reaches from the top of the page; each of it is seen, with a ring."""
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    reached = []
    for _ in range(300):
        page.keyboard.press("Tab")
        found = page.evaluate(SEEN)
        if found is None:
            break
        assert found[1], found[0]
        reached.append(found[0])
    return reached


def test_all_that_tab_reaches_is_seen(page: Page, running: list[RunDir], finished: RunDir):
    screens = {
        "new": ("#start:enabled", ["Browse", "field-train-steps", "search", "start"]),
        "runs/going-a": ("#newest img", ["stop", "save", "sample", "edit-prompts", "notes", "CANVAS"]),
        "runs/going-a/samples": (".sample-row img", ["samples-step", "samples-play", "Pair"]),
        "runs/ended/files": ("#files-folder", ["files-what", "files-report", "Checksum"]),
        "runs": ("#runs tr[data-run=ended] img", ["runs-filter", "Choose ended", "Add a tag to ended"]),
        "compare/ended,going-a": ("#compare-samples img", ["compare-link", "Samples"]),
    }
    for place, (sign, expected) in screens.items():
        visit(page, *place.split("/"))
        page.locator(sign).first.wait_for()
        reached = walked(page)
        assert [word for word in expected if not any(word in name for name in reached)] == []
    visit(page, "runs", "going-a", "samples")
    page.locator(".sample-row img").first.wait_for()
    page.keyboard.press("p")
    page.locator("#samples-pair").wait_for()
    assert any("samples-share" in name for name in walked(page))


def test_a_question_about_a_run_goes_with_the_run(page: Page, running: list[RunDir]):
    watch(page, "going-b")
    watch(page, "going-a")
    press(page, "#stop")
    page.get_by_role("dialog", name="Stop this run?").wait_for()
    page.keyboard.press("Escape")
    expect(page.locator("#stop")).to_be_focused()
    press(page, "#stop")
    page.get_by_role("dialog").wait_for()
    page.go_back()
    until(page, "document.querySelector('#run').dataset.run === 'going-b'")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator("#stop")).to_be_enabled()
    page.wait_for_timeout(500)
    assert [list(run.path.glob("requests/*")) for run in running] == [[], []]


def test_a_prompt_that_is_removed_hands_the_focus_to_the_next(page: Page, running: list[RunDir]):
    watch(page, "going-a")
    press(page, "#edit-prompts")
    rows = page.locator("#prompts textarea")
    expect(rows.first).to_be_focused()
    press(page, "#prompts .prompt-row button")
    expect(rows).to_have_count(1)
    expect(rows.first).to_be_focused()
    press(page, "#prompts .prompt-row button")
    expect(page.get_by_role("button", name="Add a prompt")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#edit-prompts")).to_be_focused()


def test_a_folder_is_chosen_and_the_form_is_reset_without_losing_the_place(page: Page, runs: Path):
    (runs.parent / "pics").mkdir(exist_ok=True)
    write_over(page, "field-data-path", str(runs.parent / "pics"))
    page.keyboard.press("Tab")
    settled(page)
    press(page, "#browse")
    press(page, "#picker li button")
    until(page, f"document.querySelector('#picker').dataset.path === '{runs.parent}'")
    until(page, "document.activeElement.closest('#picker li')")
    page.keyboard.press("Escape")
    expect(page.locator("#browse")).to_be_focused()
    press(page, "#reset")
    undo = page.locator("#left").get_by_role("button", name="Undo")
    expect(undo).to_be_focused()
    page.keyboard.press("Enter")
    expect(undo).to_have_count(0)
    expect(page.locator("#tiles .on")).to_be_focused()
    expect(page.locator("#field-data-path")).to_have_value(str(runs.parent / "pics"))
    press(page, "#yaml-drawer summary")
    page.locator("#yaml").focus()
    page.keyboard.type("x")
    press(page, "#discard-yaml")
    expect(page.locator("#yaml")).to_be_focused()


def test_runs_are_tagged_chosen_and_deleted_without_losing_the_place(page: Page, runs: Path):
    for name in ("keyed-a", "keyed-b"):
        recorded(runs, name)
    show(page, "Runs")
    press(page, "tr[data-run=keyed-a] .add")
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    press(page, "tr[data-run=keyed-a] .x")
    expect(page.locator("tr[data-run=keyed-a] .x")).to_have_count(0)
    expect(page.locator("tr[data-run=keyed-a] .add")).to_be_focused()
    press(page, "tr[data-run=keyed-a] input", "Space")
    press(page, "#runs-none")
    expect(page.locator("#runs-all")).to_be_focused()
    for name in ("keyed-a", "keyed-b"):
        press(page, f"tr[data-run={name}] input", "Space")
    press(page, "#runs-delete")
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).focus()
    page.keyboard.press("Enter")
    page.locator("tr[data-run=keyed-a]").wait_for(state="detached")
    all_runs = page.locator("#runs-all")  # there while other tests' runs are
    expect(all_runs if all_runs.is_visible() else page.locator("#runs-filter")).to_be_focused()


def test_the_last_run_that_goes_elsewhere_hands_the_place_on(page: Page, runs: Path):
    folder = recorded(runs, "keyed-last").path
    show(page, "Runs")
    page.locator("#runs-filter").fill("keyed-last")
    page.locator("tr[data-run=keyed-last] input").focus()
    shutil.rmtree(folder)
    page.locator("tr[data-run=keyed-last]").wait_for(state="detached")
    expect(page.locator("#runs-filter")).to_be_focused()
    page.locator("#runs-filter").fill("")


def test_a_tag_is_typed_to_its_end_though_a_row_above_goes_and_others_change_places(page: Page, runs: Path):
    for letter in "abc":
        recorded(runs, f"typed-{letter}")
    show(page, "Runs")
    page.locator("#runs-filter").fill("typed-")
    page.locator("th[data-sort=state] button").click()
    order = "[...document.querySelectorAll('#runs tbody tr')].map(row => row.dataset.run).join()"
    until(page, f"{order}.split(',').length === 3")
    above, *rest = page.evaluate(order).split(",")
    press(page, f"tr[data-run={rest[1]}] .add")
    page.keyboard.type("po")
    shutil.rmtree(runs / above)
    until(page, f"{order} === '{','.join(rest)}'")
    for letters in ("rt", "ra"):  # the first row goes behind the one that is typed in, then that one behind it
        page.keyboard.type(letters)
        with EventWriter(RunDir(runs / rest[0]).events_file) as writer:
            writer.write(StatusEvent(state="failed", step=40))
        rest.reverse()
        until(page, f"{order} === '{','.join(rest)}'")
    page.keyboard.type("it")
    page.keyboard.press("Enter")
    page.locator(f"tr[data-run={rest[1]}] .tag", has_text="portrait").wait_for()
    page.locator("#runs-filter").fill("")
    for name in rest:
        shutil.rmtree(runs / name)


def test_the_queue_is_emptied_without_losing_the_place(page: Page, runs: Path):
    queue = Queue(runs)
    queue.change(Settings(is_paused=True))
    queue.add(run_config(runs, name="only"))
    visit(page, "queue")
    press(page, "#waiting tr[data-name=only]", "Delete")
    page.get_by_role("dialog").get_by_role("button", name="Remove").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#queue-waiting").get_by_role("link", name="New run")).to_be_focused()
    queue.change(Settings())


def test_files_and_samples_keep_the_place(page: Page, finished: RunDir):
    visit(page, "runs", "ended", "files")
    press(page, ".checksum")
    page.locator(".sum").wait_for()
    expect(page.locator(".checksum")).to_be_focused()
    press(page, ".delete")
    page.get_by_role("dialog").get_by_role("button", name="Delete").focus()
    page.keyboard.press("Enter")
    until_so(page, lambda: not list(finished.checkpoints.iterdir()))
    expect(page.locator("#files-report")).to_be_focused()
    page.locator("#tab-samples").click()
    press(page, "#samples-before")
    expect(page.locator("#samples-step")).to_be_focused()
    press(page, "#samples-after")
    expect(page.locator("#samples-step")).to_be_focused()


def test_an_undo_that_was_the_last_one_hands_the_focus_on(own_data: Path, page: Page, runs: Path):
    (runs / "drafts" / "captions.jsonl").unlink(missing_ok=True)  # another test's undo would be the next one
    show(page, "Data")
    box = page.locator(".pc[data-name='00.png'] textarea")
    box.fill("by keyboard")
    expect(page.locator("#data-undo")).to_have_text(re.compile("1 caption"))
    press(page, "#data-undo")
    page.locator("#data-message", has_text="1 caption restored.").wait_for()
    expect(page.locator("#data-open-replace")).to_be_focused()
    press(page, "#compute-timesteps")
    page.locator("#timesteps table").wait_for()
    expect(page.locator("#compute-timesteps")).to_be_focused()
