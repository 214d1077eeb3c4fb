"""Every screen of the page, as a table: its address, what it shows, and what it shows last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ConsoleMessage, Page

from tests.app.browser import visit
from trainer.system.installation import PRESETS


@dataclass(frozen=True)
class Screen:
    """A screen.

    Attributes:
        place: Its address.
        last: Selector of what it shows last.
        shows: Selectors of what it shows besides.
        within: (selector of an element, selector of what it may not be wider than).
    """

    place: tuple[str, ...]
    last: str
    shows: tuple[str, ...] = ()
    within: tuple[str, str] | None = None


def screens(run: str, other: str) -> dict[str, Screen]:
    """Return {name: screen}, with these runs."""
    run_parts = (".run-status", ".figures", "#chart-loss canvas", "#newest img", "#log")
    compared = ("#compare-loss canvas", "#compare-samples img", "#compare-link")
    return {
        "new": Screen(("new",), "#thumbs img", ("#tiles", "#field-data-path", "#field-train-steps", "#plan", "#start")),
        "drop": Screen(("drop",), "#upload-files", ("#drop-word", "#drop-go")),
        "dropped": Screen(("drop", str(PRESETS / "quickstart")), "#drop-thumbs img", ("#drop-prompts", "#drop-start")),
        "run": Screen(("runs", run), "#page-run img:visible", run_parts),
        "samples": Screen(("runs", run, "samples"), "#page-run img:visible", ("#samples-step", ".sample-row img")),
        "files": Screen(("runs", run, "files"), "#files-folder", ("#files-what", "#files-report", "#files-exported")),
        "runs": Screen(("runs",), "#page-runs tbody img", ("#runs-filter", "#runs thead"), ("#runs", "#runs-card")),
        "compare": Screen(("compare", f"{run},{other}"), "#page-compare table", compared),
        "queue": Screen(("queue",), "#page-queue h1", ("#queue-waiting",)),
        "data": Screen(("data",), "#page-data img", ("#folder", "#data-open-replace", "#card-captioning")),
        "machine": Screen(("machine",), "#checks tr", ("#headline", "#versions", "#disk")),
    }


def walk(page: Page, table: Mapping[str, Screen]) -> Iterator[tuple[str, Screen]]:
    """Open one screen after the other, each until it shows what it shows last."""
    for name, screen in table.items():
        visit(page, *screen.place)
        page.locator(screen.last).first.wait_for()
        yield name, screen


@contextmanager
def console_of(page: Page) -> Iterator[list[str]]:
    """What the browser complains of meanwhile."""
    said: list[str] = []

    def listen(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            said.append(message.text)

    page.on("console", listen)
    yield said
    page.remove_listener("console", listen)


def violations(page: Page, rules: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return (rule, elements) of what keeps some people from reading or reaching what a page shows.

    Args:
        rules: Options of axe; {} for all its rules.
    """
    found = Axe().run(page, options={"resultTypes": ["violations"], **rules}).response["violations"]
    return [(one["id"], [node["html"][:160] for node in one["nodes"][:3]]) for one in found]
