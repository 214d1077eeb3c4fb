"""The page Queue: the waiting runs, their order, and what happens after a failure."""

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
from app.web.pages.renew import SKIP, Lazy, Tick, choices
from trainer.config.errors import InputError
from trainer.launcher.queue import AfterFailure, Entry, Settings

AFTER: dict[str, AfterFailure] = {"start the next run": "go on", "pause": "pause"}
WORDS = {kind: word for word, kind in AFTER.items()}
PAUSE, GO_ON = "Pause queue", "Resume queue"


def build(studio: Studio) -> Tick:
    """Lay out the page, inside a `gr.Blocks`."""
    queue = studio.queue
    with gr.Row():
        after = gr.Radio(
            list(AFTER), value=WORDS[queue.settings.after_failure], label="After a failure", elem_id="after"
        )
        pause = gr.Button(_pause_label(queue.settings), elem_id="pause")
    with gr.Row():
        chosen = gr.Dropdown([], label="Waiting run", elem_id="waiting")
        earlier = gr.Button("Move up", elem_id="earlier")
        later = gr.Button("Move down", elem_id="later")
        remove = gr.Button("Remove", elem_id="take-out")
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


def _pause_label(settings: Settings) -> str:
    return GO_ON if settings.is_paused else PAUSE


def _pause(studio: Studio, clicked: str, acted: float) -> float:
    """Do what the button's label said when it was clicked, even if another browser has paused or resumed since."""
    _change(studio, is_paused=clicked == PAUSE)
    return acted + 1


def _on_entry(act: Callable[[int], None]) -> Callable[[str | None, float], float]:
    """Return a handler that acts on the chosen entry, and increases the counter whose change updates the page."""

    def handle(label: str | None, acted: float) -> float:
        if label:
            act(int(label.partition(" ")[0]))
        return acted + 1

    return handle


def _shown(studio: Studio, chosen: str | None) -> list[Any]:
    queue = studio.queue
    try:
        waiting, taken = queue.waiting(), queue.taken()
        rows = [_row(entry, queue.state_of(entry), entry.run) for entry in reversed(taken)]
        rows += [_row(entry, "waiting") for entry in waiting]
        shown = (
            table(("Number", "Name", "GPUs", "State", "Run"), rows) if rows else Markup("<p>The queue is empty.</p>")
        )
        shown = Markup().join(map(alert, filter(None, (studio.queue_problem, *queue.problems())))) + shown
        settings = queue.settings
        if settings.is_paused:
            shown = note("Paused: no run is started.") + shown
        names = [f"{entry.number} {entry.name}" for entry in waiting]
        # The setting is sent to a new page only: a late response would revert the user's choice.
        after = Lazy("after", lambda: WORDS[settings.after_failure])
        return [shown, choices(names, chosen, None), gr.update(value=_pause_label(settings)), after]
    except (InputError, OSError, ValueError) as error:
        return [alert(f"{queue.runs}/queue: {error}"), SKIP, SKIP, SKIP]


def _row(entry: Entry, state: str, run: str = "") -> tuple[str, ...]:
    return str(entry.number), entry.name, ", ".join(map(str, entry.gpus)) or "all", state, run
