"""The pictures of the page in the READMEs: `python -m tests.app.web.screenshots`, or `make screenshots`."""

from __future__ import annotations

import io
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.app.browser import ROOT, TRAINED_WITHIN_S, opened, serving, show, start_chromium, state_is, until, watch
from tests.app.notebook.lab import choose as choose_menu
from tests.app.notebook.lab import position_of, serving_lab
from trainer.run import process
from trainer.run.folder import RunDir

PICTURES = ROOT / "tests" / "pictures"
PAGES = ("Train", "Monitor", "Samples", "Dataset", "Queue", "Runs", "Export", "Doctor")
COLOURS = 64


def take(browser: Browser, url: str, run: str, folder: Path) -> list[Path]:
    """A picture of every page, with a run that has ended."""
    files = []
    with opened(browser, url, height=800) as page:
        watch(page, run)
        until(page, "document.querySelector('#chart-loss canvas').dataset.n > 0")
        for name in PAGES:
            show(page, name)
            _settle(page, name)
            files.append(_save(page.screenshot(), folder / f"page-{name.lower()}.png"))
    return files


def take_notebook(browser: Browser, folder: Path) -> Path:
    """A picture of the quickstart notebook's dashboard while it trains."""
    with tempfile.TemporaryDirectory() as temporary, serving_lab(Path(temporary)) as lab:
        runs = Path(temporary) / "runs"
        file = lab.copy("01_quickstart", {"RUNS": runs, "STEPS": 400})
        position = position_of(file, "notebook.dashboard(run)")
        with closing(browser.new_context(viewport={"width": 1280, "height": 1100})) as context:
            page = context.new_page()
            lab.open(page, file.name)
            choose_menu(page, "Run", "Run All Cells")
            widget = page.locator(".jp-CodeCell").nth(position).locator(".shardstudio").first
            figures = f"document.querySelectorAll('.jp-CodeCell')[{position}].querySelector('.run').dataset.step"
            until(page, f"{figures} >= 25", TRAINED_WITHIN_S)
            widget.scroll_into_view_if_needed()
            page.wait_for_timeout(500)
            picture = _save(widget.screenshot(), folder / "notebook.png")
        for config in runs.glob("*/config.yaml"):
            process.terminate(RunDir.open(config.parent))
    return picture


def _settle(page: Page, name: str) -> None:
    """Wait for what the page shows last."""
    last = {"Samples": "#matrix img", "Dataset": "#counted p", "Runs": "#runs tr", "Export": "#exports p, #exports tr"}
    last |= {"Doctor": "#checks tr", "Queue": "#queue p, #queue tr", "Monitor": "#newest img", "Train": "#start"}
    page.locator(last[name]).first.wait_for()
    until(page, "[...document.images].every(image => image.complete)")
    page.wait_for_timeout(500)


def _save(png: bytes, file: Path) -> Path:
    """Few colours: READMEs are read over the network."""
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    return file


def main() -> int:
    """Train the quickstart by the page and take the pictures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = start_chromium(playwright)
        runs = Path(folder) / "runs"
        with serving(runs) as server:
            with opened(browser, server.url) as page:
                page.locator("#start").click()
                state_is(page, "finished", timeout_s=TRAINED_WITHIN_S)
            [run] = runs.glob("quickstart-*")
            for file in take(browser, server.url, run.name, PICTURES):
                print(file)
        print(take_notebook(browser, PICTURES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
