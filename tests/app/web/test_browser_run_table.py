"""The screens Runs and compare in Chromium."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page

from app.runs import run_table
from tests.app.browser import BEYOND, CORE, Server, faultless, recorded, serving, until, until_so
from trainer.run.events import ErrorEvent, StatusEvent
from trainer.run.folder import RunDir

NAMES = "[...document.querySelectorAll('#runs tbody tr')].map(row => row.dataset.run)"
USABLE_S, IDLE_SHARE = 2.0, 0.02
"""Limits with 500 runs: from the address to a table that can be used, and of a core with the table open."""


@pytest.fixture(scope="module", autouse=True)
def recordings(server: Server) -> None:
    """Runs that are there before a page is opened."""
    fox = {"sample__prompts": ["fox face [trigger]", "a cat"]}
    recorded(server.runs, "table-slow-20261124-211219-aebff6", optim__lr=1e-4, data__trigger="sks", **fox)
    recorded(server.runs, "table-fast-20261124-211220-aebff7", optim__lr=1e-2, data__trigger="qqq", **fox)
    recorded(server.runs, "table-half", [StatusEvent(state="stopped", step=40)])
    for name in ("doomed-one", "doomed-two", "doomed-brief"):
        recorded(server.runs, name, [StatusEvent(state="stopped", step=40)])
    recorded(server.runs, "table-sad", [ErrorEvent(message="CUDA out of memory"), StatusEvent(state="failed")])


@pytest.fixture
def table(tab: Page, server: Server) -> Iterator[Page]:
    """The screen Runs, filtered to the runs of these tests."""
    tab.set_viewport_size({"width": 1280, "height": 900})
    try:
        with faultless(tab, server.url):
            tab.goto(f"{server.url}#/runs")
            tab.locator("#runs tbody tr").first.wait_for()
            tab.evaluate(CORE)
            tab.locator("#runs-filter").fill("table-")
            until(tab, "!document.querySelector('#runs [data-state=unread]')")
            yield tab
    finally:
        tab.goto("about:blank")


def renew(page: Page) -> None:
    """Let the table ask for what changed, as it does every two seconds, and wait until it shows that."""
    page.evaluate("(async () => { for (let i = 0; i < 2; i++) await studio.screens.runs.tick() })()")


def row(run: str) -> str:
    return f"#runs tr[data-run='{run}']"


def test_runs_are_filtered_counted_by_state_and_sorted_by_each_column(table: Page):
    table.locator("#runs-groups [data-group=failed]").click()
    until(table, f"{NAMES}.join() === 'table-sad'")
    assert table.locator(f"{row('table-sad')} .c-state").inner_text().splitlines()[2] == "CUDA out of memory"
    assert table.locator("#runs-groups [data-group=failed]").get_attribute("aria-pressed") == "true"
    table.locator("#runs-groups [data-group=all]").click()
    table.locator("th.c-best button").click()
    until(table, f"{NAMES}.at(-1) === 'table-fast-20261124-211220-aebff7'")
    assert table.locator("th.c-best").get_attribute("aria-sort") == "ascending"
    table.locator("th.c-name button").click()
    names = ["table-fast-20261124-211220-aebff7", "table-half", "table-sad", "table-slow-20261124-211219-aebff6"]
    until(table, f"JSON.stringify({NAMES}) === {json.dumps(json.dumps(names, separators=(',', ':')))}")
    for column in ("state", "loss", "duration", "size", "started"):
        table.locator(f"th.c-{column} button").click()
        until(table, f"document.querySelector('th.c-{column}').hasAttribute('aria-sort') && {NAMES}.length === 4")
    table.locator("#runs-filter").fill("table- nothing like this")
    table.locator("#runs-empty", has_text="No run matches").wait_for()


def test_a_row_shows_the_run_and_opens_it(table: Page):
    one = table.locator(row("table-fast-20261124-211220-aebff7"))
    one.locator("img[alt='Last sample of table-fast']").wait_for()
    assert one.locator(".c-name").inner_text().splitlines()[:3] == [
        "table-fast", "Tiny model (flux2) · LoRA 4", "20261124-211220-aebff7",
    ]  # fmt: skip
    assert one.locator(".c-best").inner_text().split() == ["0.035", "step", "40"]
    assert one.locator(".c-duration").inner_text() == "10 h 0 min"
    assert one.locator("svg.spark polyline").count() == 1
    until(table, "document.querySelector('#runs tbody tr .c-size').textContent.endsWith('B')")
    one.locator(".c-duration").click()
    until(table, "location.hash === '#/runs/table-fast-20261124-211220-aebff7'")


def test_tags_are_added_and_removed_in_place(table: Page, runs: Path):
    place = table.locator(f"{row('table-half')} .tags")
    place.locator(".add").click()
    table.keyboard.type("first, good")
    run_table.change_tags(runs, ["table-half"], "meanwhile")
    renew(table)  # what is typed stays
    table.keyboard.press("Enter")
    place.locator(".tag", has_text="good").wait_for()
    assert run_table.read_tags(runs)["table-half"] == ("meanwhile", "first", "good")
    table.locator("#runs-filter").fill("first")
    until(table, f"{NAMES}.join() === 'table-half'")
    place.locator("[aria-label='Remove the tag first from table-half']").click()
    until_so(table, lambda: run_table.read_tags(runs)["table-half"] == ("meanwhile", "good"))
    table.locator("#runs-empty", has_text="No run matches").wait_for()


def test_a_run_is_renamed_in_the_table_and_on_its_screen(table: Page, runs: Path):
    table.locator(f"{row('table-half')} input").check()
    table.locator("#runs-rename").click()
    assert table.locator("#rename-to").input_value() == "table-half"
    table.keyboard.type("<b>table- my fox</b> 🦊")
    table.keyboard.press("Enter")
    link = table.locator(f"{row('table-half')} .run-link", has_text="<b>table- my fox</b> 🦊")
    link.wait_for()
    assert table.locator(f"{row('table-half')} .c-name .key").inner_text() == "table-half"
    link.click()
    table.locator("#run-title", has_text="<b>table- my fox</b> 🦊").wait_for()
    until(table, "document.title === '<b>table- my fox</b> 🦊 · ShardStudio'")
    table.locator("#rename").click()
    table.locator("#rename-to").fill("")
    table.get_by_role("button", name="Rename", exact=True).last.click()
    until(table, "document.querySelector('#run-title').textContent === 'table-half'")
    until(table, "document.activeElement.id === 'rename'")
    assert (runs / "table-half" / "title.txt").read_text() == "table-half\n"
    (runs / "table-half" / "title.txt").unlink()


def test_runs_are_deleted_undone_restored_and_removed_for_good(table: Page, runs: Path):
    table.locator("#runs-filter").fill("doomed")
    run_table.change_tags(runs, ["doomed-one"], "good")
    for name in ("doomed-one", "doomed-two"):
        table.locator(f"{row(name)} input").check()
    until(table, "![...document.querySelectorAll('tr.sel .c-size')].some(cell => cell.textContent === '…')")
    table.locator("#runs-delete").click()
    question = table.locator("dialog[open]").inner_text()
    assert "Delete 2 runs?" in question
    assert "doomed-one, doomed-two" in question
    assert "kB, with all checkpoints" in question
    assert "Kept: your images and captions" in question
    table.get_by_role("button", name="Cancel").click()
    assert (runs / "doomed-one").exists()
    for _ in range(2):
        table.locator("#runs-delete").click()
        table.locator("dialog[open]").get_by_role("button", name="Delete").click()
        until(table, f"!{NAMES}.includes('doomed-one')")
        table.locator("#runs-bar").wait_for(state="hidden")
        assert not (runs / "doomed-one").exists()
        table.get_by_role("button", name="Undo").last.click()
        table.locator(f"{row('doomed-one')} .tag", has_text="good").wait_for()
        for name in ("doomed-one", "doomed-two"):
            table.locator(f"{row(name)} input").check()
    table.locator("#runs-delete").click()
    table.locator("dialog[open]").get_by_role("button", name="Delete").click()
    summary = table.locator("#deleted-runs summary", has_text="Deleted runs (2, ")
    summary.click()
    recorded(runs, "doomed-two", [StatusEvent(state="stopped", step=40)])  # another of its name
    table.get_by_role("button", name="Restore doomed-two").click()
    table.locator(".toast.bad", has_text="doomed-two: is there again; delete or move that one first").wait_for()
    table.get_by_role("button", name="Restore doomed-one").click()
    table.locator(row("doomed-one")).wait_for()
    table.locator("#empty-runs").click()
    table.locator("dialog[open]", has_text="It frees").get_by_role("button", name="Remove for good").click()
    table.locator("#deleted-runs").wait_for(state="hidden")
    assert list((runs / ".trash-shardstudio").iterdir()) == list(runs.glob(".deleted-*")) == []


def test_a_run_that_was_deleted_elsewhere_goes_and_a_damaged_one_says_why(table: Page, runs: Path):
    hurt = RunDir(runs / "doomed-hurt")
    hurt.logs.mkdir(parents=True)
    (hurt.path / "format").write_text("format: 1\n")
    hurt.config_file.write_text("{[")
    try:
        table.locator("#runs-filter").fill("doomed")
        table.locator(f"{row('doomed-brief')} input").check()
        renew(table)
        table.locator(f"{row('doomed-hurt')}[data-state=damaged]", has_text="config.yaml:1: not YAML").wait_for()
        shutil.rmtree(runs / "doomed-brief")
        renew(table)
        table.locator(row("doomed-brief")).wait_for(state="detached")
        table.locator("#runs-bar").wait_for(state="hidden")
        assert table.locator("[role=alert]:visible").count() == 0
    finally:
        shutil.rmtree(hurt.path)


def test_runs_are_compared_in_the_forms_language_and_their_samples_pair(table: Page):
    for name in ("table-slow-20261124-211219-aebff6", "table-fast-20261124-211220-aebff7"):
        table.locator(f"{row(name)} input").check()
    table.locator("#runs-compare", has_text="Compare (2)").click()
    table.locator("#compare-settings tr[data-field='optim.lr']").wait_for()
    assert table.evaluate("location.hash").startswith("#/compare/table-slow-20261124-211219-aebff6,table-fast-")
    cells = "[...document.querySelectorAll('#compare-settings tbody tr')].map(row => row.innerText.split(/[\\t\\n]+/))"
    assert sorted(table.evaluate(cells)) == [
        ["Learning rate", "optim.lr", "0.0001", "0.01"],
        ["Trigger word", "data.trigger", "sks", "qqq"],
    ]
    assert table.locator("#compare-settings thead").inner_text().split() == ["table-slow", "table-fast"]
    assert table.locator("#compare-results tr", has_text="lowest").inner_text().split()[:5] == [
        "Best", "validation", "loss", "0.0251", "lowest",
    ]  # fmt: skip
    assert table.locator("#compare-loss canvas").get_attribute("aria-label").endswith("table-fast 0.03647.")
    rows = table.locator("#compare-samples tbody tr")
    assert [text.splitlines()[0].strip() for text in rows.all_inner_texts()] == ["fox face [trigger]", "a cat"]
    assert rows.locator("img").count() == 4
    rows.first.locator("button").last.click()
    table.locator("#lightbox[open]", has_text="table-fast · 2 of 2").wait_for()
    table.keyboard.press("ArrowLeft")
    table.locator("#lightbox[open]", has_text="fox face [trigger] · step 40").wait_for()
    table.keyboard.press("Escape")
    table.reload()
    table.locator("h1", has_text="Comparison of 2 runs").wait_for()


@pytest.mark.slow
def test_a_run_of_any_name_is_opened_compared_and_asked_about_by_keyboard(table: Page, runs: Path):
    odd = "table- my best, run #1 50%"
    shutil.copytree(runs / "table-half", runs / odd)
    renew(table)
    for name in (odd, "table-half"):
        table.locator(f'#runs tr[data-run="{name}"] input').check()
    table.locator("#runs-delete").focus()
    table.keyboard.press("Enter")
    table.get_by_role("dialog").wait_for()
    table.keyboard.press("Escape")
    until(table, "document.activeElement.id === 'runs-delete'")
    table.keyboard.press("c")
    table.locator("h1", has_text="Comparison of 2 runs").wait_for()
    assert table.locator("#compare-results thead a").all_inner_texts() == [odd, "table-half"]
    assert table.locator("#compare-results .tag", has_text="lowest").count() == 0  # equal ones
    table.locator("#compare-results thead a").first.click()
    until(table, f"document.querySelector('#run').dataset.run === '{odd}'")
    shutil.rmtree(runs / odd)


def test_a_comparison_of_runs_that_are_not_there_says_so(table: Page):
    table.evaluate("location.hash = '#/compare/table-half,nothing'")
    table.locator("#compare-problems", has_text="This run is not there: nothing.").wait_for()
    table.locator("#compare-problems", has_text="Choose at least two runs").wait_for()


@pytest.mark.slow
def test_a_table_of_500_runs_is_there_at_once_and_costs_little(browser: Browser, tmp_path: Path):
    runs = tmp_path / "runs"
    recorded(runs, "run-000")
    for number in range(1, 500):
        shutil.copytree(runs / "run-000", runs / f"run-{number:03d}")
    with serving(runs) as server, opened_table(browser, server) as page:
        page.locator("#runs-count", has_text="500 runs").wait_for()
        until(page, "!document.querySelector('#runs [data-state=unread]')")
        took, shares = [], []
        while len(took) < 8 and min(took, default=math.inf) > USABLE_S:  # other processes slow this one down
            page.goto("about:blank")
            began = time.monotonic()
            page.goto(f"{server.origin}/#/runs")
            page.locator("#runs tbody tr:not([data-state=unread]) .c-best b").first.wait_for()
            page.locator("#runs-filter").fill("run-49")
            until(page, f"{NAMES}.length === 10")
            took.append(time.monotonic() - began)
        assert min(took) <= USABLE_S, took
        page.locator("#runs-filter").fill("")
        for number in range(60, 500, 60):
            until(page, f"{NAMES}.length >= {number}")
            page.locator("#runs-more").scroll_into_view_if_needed()
        until(page, "document.querySelectorAll('#runs img').length === 500")
        assert server.process is not None
        while len(shares) < 8 and min(shares, default=math.inf) > IDLE_SHARE:
            shares.append(share_of_a_core(page, server.process.pid))
        assert min(shares) <= BEYOND * IDLE_SHARE, shares


@contextmanager
def opened_table(browser: Browser, server: Server) -> Iterator[Page]:
    """The screen Runs in a browser context of its own."""
    with closing(browser.new_context(viewport={"width": 1280, "height": 900})) as context:
        page = context.new_page()
        with faultless(page, server.url):
            page.goto(f"{server.url}#/runs")
            yield page


def share_of_a_core(page: Page, pid: int, seconds: float = 8) -> float:
    """The share of a core that a process takes while the page is left alone."""
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    page.wait_for_timeout(seconds * 1e3)
    return (sum(process.cpu_times()[:2]) - before) / seconds
