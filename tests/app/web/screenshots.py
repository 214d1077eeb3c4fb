"""The pictures of the page in the READMEs: `python -m tests.app.web.screenshots`, or `make screenshots`.

With a folder as its argument it takes a picture of every screen at four widths, light and dark, to be looked at.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.app.browser import (
    ROOT,
    TRAINED_WITHIN_S,
    Scheme,
    opened,
    recorded,
    serving,
    start_chromium,
    state_is,
    until,
)
from tests.app.notebook.lab import choose as choose_menu
from tests.app.notebook.lab import position_of, serving_lab
from tests.app.web.screens import screens, walk
from trainer.run import process
from trainer.run.folder import RunDir
from trainer.view.report import write_report

PICTURES = ROOT / "tests" / "pictures"
WIDTHS = (390, 820, 1280, 1920)
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
PICTURED = ("new", "dropped", "run", "samples", "runs", "compare", "data")
"""Screens of which app/README.md has a picture."""
COLOURS = 64
FORM_HEIGHT = 1000
WITHOUT_FOLDERS = """([checkout, temporary, home]) => {
  const own = new RegExp(`${temporary}/[^/]*`, 'g');
  const plain = text => text.replaceAll(checkout, '~/shardstudio').replaceAll(own, '~').replaceAll(home, '~');
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) walker.currentNode.data = plain(walker.currentNode.data);
  for (const input of document.querySelectorAll('input, textarea')) input.value = plain(input.value);
  document.querySelector('#toasts')?.replaceChildren();
}"""


def take(browser: Browser, url: str, run: str, other: str, folder: Path) -> list[Path]:
    """A picture of each of PICTURED, with a run that has ended."""
    chosen = {name: screen for name, screen in screens(run, other).items() if name in PICTURED}
    with opened(browser, url, height=800) as page:
        return [_save(_taken(page), folder / f"page-{name}.png") for name, _ in walk(page, chosen)]


def take_report(browser: Browser, run: RunDir, folder: Path) -> Path:
    """A picture of what a run's report begins with."""
    with closing(browser.new_page(viewport={"width": 1200, "height": 1400})) as page:
        page.goto(write_report(run).as_uri())
        return _save(_taken(page), folder / "report.png", colours=4 * COLOURS)  # its thin lines are the only blue


def _taken(page: Page) -> bytes:
    """A picture without the folders of this machine and without passing notices."""
    page.wait_for_timeout(700)
    page.evaluate(WITHOUT_FOLDERS, [str(ROOT), tempfile.gettempdir(), str(Path.home())])
    return page.screenshot()


def take_all(browser: Browser, url: str, run: str, other: str, folder: Path) -> Iterator[Path]:
    """Every screen, whole, at each width and in each scheme."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            with opened(browser, url, width=width, scheme=scheme) as page:
                for name, _ in walk(page, screens(run, other)):
                    file = folder / f"{name}-{width}-{scheme}.png"
                    _whole(page, file)
                    yield file


def _whole(page: Page, file: Path) -> None:
    """A picture of a window as high as the screen: what is fixed to the window's edges is not in the middle."""
    width = page.evaluate("innerWidth")
    page.set_viewport_size({"width": width, "height": page.evaluate("document.documentElement.scrollHeight")})
    _images_shown(page)
    page.screenshot(path=file)
    page.set_viewport_size({"width": width, "height": 900})


def _images_shown(page: Page) -> None:
    page.wait_for_timeout(700)  # images that are loaded when they come into view
    until(page, "[...document.images].filter(image => image.offsetParent).every(image => image.complete)")


def take_notebook(browser: Browser, folder: Path) -> Iterator[Path]:
    """Pictures of the quickstart notebook's form, and of its dashboard while it trains."""
    with tempfile.TemporaryDirectory() as temporary, serving_lab(Path(temporary)) as lab:
        runs = Path(temporary) / "runs"
        file = lab.copy("01_quickstart", {"RUNS": runs, "STEPS": 400})
        position, form = (position_of(file, text) for text in ("notebook.dashboard(run)", "notebook.form("))
        with closing(browser.new_context(viewport={"width": 1280, "height": 1100})) as context:
            page = context.new_page()
            lab.open(page, file.name)
            choose_menu(page, "Run", "Run All Cells")
            widget = page.locator(".jp-CodeCell").nth(position).locator(".shardstudio").first
            figures = f"document.querySelectorAll('.jp-CodeCell')[{position}].querySelector('.run').dataset.step"
            until(page, f"{figures} >= 25", TRAINED_WITHIN_S)
            widget.scroll_into_view_if_needed()
            page.wait_for_timeout(500)
            yield _save(widget.screenshot(), folder / "notebook.png")
            page.set_viewport_size({"width": 1280, "height": 3000})
            cards = page.locator(".jp-CodeCell").nth(form).locator(".shardstudio-form")
            cards.scroll_into_view_if_needed()
            page.wait_for_timeout(1000)
            page.evaluate(WITHOUT_FOLDERS, [str(ROOT), tempfile.gettempdir(), str(Path.home())])
            with Image.open(io.BytesIO(cards.screenshot())) as whole:
                top = io.BytesIO()
                whole.crop((0, 0, whole.width, FORM_HEIGHT)).save(top, "PNG")
            yield _save(top.getvalue(), folder / "notebook-form.png")
        for config in runs.glob("*/config.yaml"):
            process.terminate(RunDir.open(config.parent))


def _save(png: bytes, file: Path, colours: int = COLOURS) -> Path:
    """Few colours: READMEs are read over the network."""
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(file, optimize=True)
    return file


def main() -> int:
    """Train the quickstart by the page and take the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.app.web.screenshots", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="for a picture of every screen")
    wanted = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        browser = start_chromium(playwright)
        runs = Path(temporary) / "runs"
        other = recorded(runs, "ink-comic", adapter={"type": "boft"}).path.name
        with serving(runs) as server:
            with opened(browser, server.url) as page:
                page.locator("#start").click()
                state_is(page, "finished", timeout_s=TRAINED_WITHIN_S)
            [run] = runs.glob("quickstart-*")
            folder = wanted or PICTURES
            folder.mkdir(parents=True, exist_ok=True)
            for file in (take_all if wanted else take)(browser, server.url, run.name, other, folder):
                print(file)
        if not wanted:
            print(take_report(browser, RunDir.open(run), PICTURES))
            print(*take_notebook(browser, PICTURES), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
