"""Runs that wait for their turn: their order, and what becomes of them after a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gradio as gr
from markupsafe import Markup

from app.html import alert, note
from app.studio import Studio
from app.web.pages.parts import QUIET, table
from app.web.pages.renew import SKIP, Made, Tick, choices
from trainer.config.errors import InputError
from trainer.launcher.queue import AfterFailure, Entry, Queue, Settings

AFTER: dict[str, AfterFailure] = {"go on with the next": "go on", "pause": "pause"}
WORDS = {kind: word for word, kind in AFTER.items()}
PAUSE, GO_ON = "Pause: start nothing", "Go on"


def build(studio: Studio) -> Tick:
    """Lay out the page, inside a `gr.Blocks`."""
    queue = studio.queue
    with gr.Row():
        after = gr.Radio(
            list(AFTER), value=WORDS[queue.settings.after_failure], label="After a failure", elem_id="after"
        )
        pause = gr.Button(_offered(queue.settings), elem_id="pause")
    with gr.Row():
        chosen = gr.Dropdown([], label="Waiting run", elem_id="waiting")
        earlier = gr.Button("Earlier", elem_id="earlier")
        later = gr.Button("Later", elem_id="later")
        remove = gr.Button("Take out", elem_id="take-out")
    shown = gr.HTML(elem_id="queue")
    after.input(lambda word: _change(studio, after_failure=AFTER[word]), after, None, **QUIET)
    acted = gr.Number(0, visible=False)
    pause.click(partial(_pause, studio), [pause, acted], acted, **QUIET)
    earlier.click(_on_entry(lambda number: queue.move(number, -1)), [chosen, acted], acted, **QUIET)
    later.click(_on_entry(lambda number: queue.move(number, 1)), [chosen, acted], acted, **QUIET)
    remove.click(_on_entry(queue.remove), [chosen, acted], acted, **QUIET)
    return Tick(partial(_shown, studio), [chosen], [shown, chosen, pause, after], (acted.change,))


def _change(studio: Studio, **values: Any) -> None:
    studio.queue.change(replace(studio.queue.settings, **values))


def _offered(settings: Settings) -> str:
    return GO_ON if settings.is_paused else PAUSE


def _pause(studio: Studio, clicked: str, acted: float) -> float:
    """Do what the button said when it was clicked, whatever another browser did meanwhile."""
    _change(studio, is_paused=clicked == PAUSE)
    return acted + 1


def _on_entry(act: Callable[[int], None]) -> Callable[[str | None, float], float]:
    """A handler that counts what was done."""

    def handle(label: str | None, acted: float) -> float:
        if label:
            act(int(label.partition(" ")[0]))
        return acted + 1

    return handle


def _shown(studio: Studio, chosen: str | None) -> list[Any]:
    queue = studio.queue
    try:
        waiting, taken = queue.waiting(), queue.taken()
        rows = [_row(queue, entry) for entry in reversed(taken)] + [_waiting_row(entry) for entry in waiting]
        shown = table(("Number", "Name", "GPUs", "State", "Run"), rows) if rows else Markup("<p>Nothing waits.</p>")
        shown = Markup().join(map(alert, filter(None, (studio.queue_trouble, *queue.problems())))) + shown
        settings = queue.settings
        if settings.is_paused:
            shown = note("Paused: nothing is started.") + shown
        names = [f"{entry.number} {entry.name}" for entry in waiting]
        # What the user sets is sent to a new page only: a late answer would take the user's choice back.
        after = Made("after", lambda: WORDS[settings.after_failure])
        return [shown, choices(names, chosen, None), gr.update(value=_offered(settings)), after]
    except (InputError, OSError, ValueError) as error:
        return [alert(f"{queue.runs}/queue: {error}"), SKIP, SKIP, SKIP]


def _row(queue: Queue, entry: Entry) -> tuple[str, ...]:
    return str(entry.number), entry.name, _gpus(entry), queue.state_of(entry), entry.run


def _waiting_row(entry: Entry) -> tuple[str, ...]:
    return str(entry.number), entry.name, _gpus(entry), "waiting", ""


def _gpus(entry: Entry) -> str:
    return ", ".join(map(str, entry.gpus)) or "all"
