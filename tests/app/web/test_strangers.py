"""A run folder from a stranger in the page: its texts are shown as text, and a script that got in would be dead."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.app.browser import Server, opened, recorded, serving, until, visit, watch
from tests.app.web.screens import console_of, screens
from tests.runs import make_pictures, step_event
from trainer.run.events import (
    ErrorEvent,
    ExportEvent,
    SampleEvent,
    StageEvent,
    StatusEvent,
    ValidationEvent,
    WarningEvent,
)
from trainer.run.folder import RunDir

SETTLED_MS = 4000
"""Longer than it takes until the page has asked for everything that it shows."""


def evil(place: str) -> str:
    """Markup that says in the page's own variable where it was taken for markup, in each way gradio fills templates."""
    script = f"window.taken = (window.taken || '') + ' {place}'"
    return f'"><img src=x onerror="{script}"><b>{place}</b>${{window.taken = 1}}{{{{{place}}}}}'


def make_hostile(runs: Path, name: str = "hostile") -> RunDir:
    """A run folder whose every text is markup, as its sender may have written it by hand."""
    events = [
        step_event(41, losses={evil("loss"): 1.0}),
        StatusEvent(state="training", message=evil("status")),
        StageEvent(name=evil("stage"), number=1, count=1),
        SampleEvent(prompt=evil("prompt"), index=0, path=f"samples/{evil('picture')}.png", step=41),
        SampleEvent(prompt=evil("text prompt"), index=1, path="samples/a.txt", text=evil("text"), step=41),
        ValidationEvent(step=41, loss=1.0, losses={evil("validation"): 1.0}),
        ExportEvent(path=f"export/{evil('export')}", what=evil("what"), format=evil("format")),
        WarningEvent(message=evil("warning")),
        ErrorEvent(message=evil("error"), remedy=evil("remedy"), retry=(evil("retry"),), log=evil("log")),
        StatusEvent(state="failed", message=evil("end")),
    ]
    run = recorded(runs, name, events, sample__prompts=[evil("config prompt")], data__trigger=evil("trigger"))
    with run.events_file.open("a") as lines:
        lines.write(json.dumps({"type": "status", "state": evil("state"), "step": 41, "time": time.time()}) + "\n")
    line = {"rank": 0, "step": 41, "phase": evil("phase"), "time": 1.0}
    line |= {"allocated": 1, "reserved": 1, "peak": 1, "limit": 2}
    run.rank_file(0).write_text(f"{json.dumps(line)}\n")
    run.logs.mkdir(exist_ok=True)
    (run.logs / "torchrun.log").write_text(f"error {evil('log line')}\n")
    (run.logs / f"{evil('log name').replace('/', '')}.log").write_text("x\n")
    run.export.mkdir(exist_ok=True)
    (run.export / f"{evil('file').replace('/', '')}.safetensors").write_bytes(b"x")
    (runs / "tags.json").write_text(json.dumps({name: [evil("tag")]}))
    taken = runs / "queue" / "taken"
    taken.mkdir(parents=True, exist_ok=True)
    entry = {"number": 7, "name": evil("queued"), "config": "", "gpus": [], "run": "", "error": evil("queue error")}
    (taken / "000007.json").write_text(json.dumps(entry))
    return run


def make_hostile_pictures(runs: Path) -> None:
    """The draft of the page is of pictures with such captions and names."""
    folder = make_pictures(runs.parent / "strangers", 4)
    (folder / "00.txt").write_text(evil("caption"))
    (folder / f"{evil('name').replace('/', '')}.png").write_bytes((folder / "01.png").read_bytes())
    preset = runs / "presets" / "strangers.yaml"
    preset.parent.mkdir(parents=True, exist_ok=True)
    model, data = "{family: flux2}", json.dumps({"path": str(folder), "resolution": 64, "trigger": evil("draft")})
    preset.write_text(f"name: strangers\nmodel: {model}\ndata: {data}\n")
    (runs / "drafts").mkdir(exist_ok=True)
    values = {"sample.prompts": evil("draft prompt"), "data.caption_dropout": evil("draft value")}
    (runs / "drafts" / "draft.json").write_text(json.dumps({"preset": "strangers", "values": values}))


@pytest.fixture(scope="module")
def visited_by_strangers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    runs = tmp_path_factory.mktemp("strangers") / "runs"
    make_hostile(runs)
    make_hostile(runs, "other")
    make_hostile_pictures(runs)
    with serving(runs) as server:
        yield server


HOLE = "markup => document.body.append(Object.assign(document.createElement('div'), { id: 'hole', innerHTML: markup }))"
"""Shows markup as it comes, as if escaping had been forgotten."""


@pytest.mark.slow
def test_no_text_of_a_strangers_run_folder_is_taken_for_markup(browser: Browser, visited_by_strangers: Server):
    with opened(browser, visited_by_strangers.url) as page, console_of(page) as said:
        watch(page, "hostile")
        assert "onerror=" in page.locator("#events").text_content(), "it was shown, as text"
        visited = screens("hostile", "other")
        for screen in visited.values():
            visit(page, *screen.place)
            page.wait_for_timeout(SETTLED_MS / len(visited))
        visit(page, *visited["compare"].place)
        until(page, "document.querySelector('#page-compare table th') !== null")
        page.wait_for_timeout(SETTLED_MS / 4)
        assert page.evaluate("window.taken") is None
        assert page.locator("img[onerror]").count() == 0
        assert [text for text in said if "Content Security Policy" in text] == []


@pytest.mark.slow
def test_a_script_that_got_in_by_a_forgotten_escape_is_not_run(browser: Browser, tmp_path: Path):
    markup = f"{evil('hole')}<a href='javascript:window.taken = 2' id='link'>link</a><svg onload='window.taken = 3'/>"
    with serving(tmp_path / "runs") as server, opened(browser, server.url) as page:
        page.evaluate(HOLE, markup)
        page.locator("#hole img").wait_for(state="attached")
        page.locator("#link").click()
        page.wait_for_timeout(SETTLED_MS / 4)
        assert page.evaluate("window.taken") is None
        page.evaluate("setTimeout('window.taken = 5')")
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'window.taken = 4'}))"
        )
        assert page.evaluate("window.taken") is None
