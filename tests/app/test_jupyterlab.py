"""A notebook as its reader meets it: JupyterLab in Chromium, a run of two ranks, a kernel that is restarted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.app.browser import TRAINED_WITHIN_S, faultless, until, until_so
from tests.app.lab import Lab, choose, serving_lab
from trainer import launch
from trainer.rundir import RunDir

STOP_S = 1.0
NOTEBOOK_BYTES = 500_000
IMPORTS = "from pathlib import Path\nfrom app import notebook\nRUNS = Path({runs!r})"
CELLS = (
    'config = notebook.config("quickstart", "train.steps=2000", "sample.every=0", "checkpoint.every=0", '
    '"data.validation=0", "export.what=none")\nrun = notebook.start(config, RUNS)',
    "notebook.dashboard(run)",
    'print("the run has", await notebook.ended(run))',
)
AGAIN = (
    "run = notebook.attach(runs=RUNS)\nnotebook.dashboard(run)",
    'print("the run has", await notebook.ended(run))',
)
DASHBOARD, DASHBOARD_AGAIN, LAST = 2, 4, 5
"""Positions of cells."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with serving_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def page(browser: Browser, lab: Lab) -> Iterator[Page]:
    with closing(browser.new_context(viewport={"width": 1280, "height": 1000})) as context:
        page = context.new_page()
        with faultless(page, lab.url):
            yield page


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """Where the notebook's runs lie; none of them goes on after the test."""
    yield tmp_path / "runs"
    for file in (tmp_path / "runs").glob("*/config.yaml"):
        launch.terminate(RunDir.open(file.parent), grace_s=1)


def test_a_run_is_watched_and_stopped_from_a_notebook_whose_kernel_was_restarted(lab: Lab, page: Page, runs: Path):
    imports = IMPORTS.format(runs=str(runs))
    file = lab.write("train.ipynb", [imports, *CELLS, f"{imports}\n{AGAIN[0]}", AGAIN[1]])
    lab.open(page, file.name)
    choose(page, "Run", "Run All Cells")
    _grows(page, DASHBOARD)
    [run] = (RunDir.open(config.parent) for config in runs.glob("*/config.yaml"))

    choose(page, "Kernel", "Restart Kernel…")
    page.locator(".jp-Dialog button.jp-mod-accept").click()
    lab.await_kernel(page)
    page.locator(".jp-CodeCell").nth(DASHBOARD_AGAIN).locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Shift+Enter")
    _grows(page, DASHBOARD_AGAIN)
    assert launch.alive(run)

    stop_s = _stopped_after_s(page, DASHBOARD_AGAIN)
    assert stop_s <= STOP_S
    until(page, f"{_cell(LAST)}.innerText.includes('the run has stopped')", TRAINED_WITHIN_S)
    until(page, f"{_cell(DASHBOARD_AGAIN)}.querySelector('.run').dataset.state === 'stopped'")
    until(page, f"!{_cell(DASHBOARD_AGAIN)}.querySelector('button.jupyter-button')")
    page.keyboard.press("Control+s")
    until_so(page, lambda: "Stopped at step" in _html_of(file, DASHBOARD_AGAIN))
    assert "<svg" in _html_of(file, DASHBOARD_AGAIN)
    assert file.stat().st_size <= NOTEBOOK_BYTES
    print(f"Stop was answered after {stop_s:.2f} s; the notebook has {file.stat().st_size} bytes")


def _cell(position: int) -> str:
    return f"document.querySelectorAll('.jp-CodeCell')[{position}]"


def _grows(page: Page, position: int) -> None:
    """Wait until the loss chart below a cell has more points than it had."""
    points = f"{_cell(position)}.querySelector('.chart path.c0').getAttribute('d').split('L').length"
    until(page, f"{points} > 1", TRAINED_WITHIN_S)
    before = page.evaluate(points)
    until(page, f"{points} > {before}")


def _stopped_after_s(page: Page, position: int) -> float:
    """Press Stop while the run trains. Returns the seconds until it was answered."""
    button = page.locator(".jp-CodeCell").nth(position).locator("button.jupyter-button", has_text="Stop")
    until(page, f"{_cell(position)}.querySelector('.run').dataset.state === 'training'")
    clicked = time.monotonic()
    button.click()
    until(page, f"{_cell(position)}.innerText.includes('Stopping after this step')")
    return time.monotonic() - clicked


def _html_of(notebook: Path, position: int) -> str:
    """What the saved notebook shows below a cell."""
    outputs = json.loads(notebook.read_text(encoding="utf-8"))["cells"][position]["outputs"]
    return "".join("".join(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {}))
