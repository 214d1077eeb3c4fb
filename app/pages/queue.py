"""Runs that wait for their turn: their order, and what becomes of them after a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gradio as gr

from app.pages.parts import QUIET, Sent, Tick, alert, changed, table
from app.studio import Studio
from trainer import launch
from trainer.config import InputError
from trainer.queue import AfterFailure, Entry, Queue

AFTER: dict[str, AfterFailure] = {"go on with the next": "go on", "pause": "pause"}


def build(studio: Studio) -> Tick:
    """Lay out the page, inside a `gr.Blocks`."""
    queue = studio.queue
    words = {kind: word for word, kind in AFTER.items()}
    with gr.Row():
        after = gr.Radio(
            list(AFTER), value=words[queue.settings.after_failure], label="After a failure", elem_id="after"
        )
        is_paused = gr.Checkbox(queue.settings.is_paused, label="Paused: start nothing", elem_id="paused")
    with gr.Row():
        chosen = gr.Dropdown([], label="Waiting run", elem_id="waiting")
        earlier = gr.Button("Earlier", elem_id="earlier")
        later = gr.Button("Later", elem_id="later")
        remove = gr.Button("Take out", elem_id="take-out")
    shown = gr.HTML(elem_id="queue")
    sent = gr.State(())
    outputs = [sent, shown, chosen, is_paused]
    after.input(lambda word: _changed(studio, after_failure=AFTER[word]), after, outputs, **QUIET)
    is_paused.input(lambda value: _changed(studio, is_paused=value), is_paused, outputs, **QUIET)
    earlier.click(_on_entry(studio, lambda number: queue.move(number, -1)), chosen, outputs, **QUIET)
    later.click(_on_entry(studio, lambda number: queue.move(number, 1)), chosen, outputs, **QUIET)
    remove.click(_on_entry(studio, queue.remove), chosen, outputs, **QUIET)
    return Tick(_renewer(studio), [sent], outputs)


def _renewer(studio: Studio) -> Callable[[Sent], list[Any]]:
    def renew(before: Sent) -> list[Any]:
        sent, values = changed(before, _renewed(studio))
        return [sent, *values]

    return renew


def _changed(studio: Studio, **values: Any) -> list[Any]:
    studio.queue.change(replace(studio.queue.settings, **values))
    return _renewer(studio)(())


def _on_entry(studio: Studio, act: Callable[[int], None]) -> Callable[[str | None], list[Any]]:
    def handle(label: str | None) -> list[Any]:
        if label:
            act(int(label.partition(" ")[0]))
        return _renewer(studio)(())

    return handle


def _renewed(studio: Studio) -> list[Any]:
    queue = studio.queue
    try:
        waiting, taken = queue.waiting(), queue.taken()
        rows = [_row(queue, entry) for entry in reversed(taken)] + [_waiting_row(entry) for entry in waiting]
        shown = table(("Number", "Name", "GPUs", "State", "Run"), rows) if rows else "<p>Nothing waits.</p>"
        if studio.queue_trouble:
            shown = alert(studio.queue_trouble) + shown
        choices = [f"{entry.number} {entry.name}" for entry in waiting]
        return [shown, gr.update(choices=choices), gr.update(value=queue.settings.is_paused)]
    except (InputError, OSError, ValueError) as error:
        return [alert(f"{queue.runs}/queue: {error}"), gr.skip(), gr.skip()]


def _row(queue: Queue, entry: Entry) -> tuple[str, ...]:
    state = entry.error or launch.status(queue.run_of(entry)) if entry.run or entry.error else "starting"
    return str(entry.number), entry.name, _gpus(entry), state, entry.run


def _waiting_row(entry: Entry) -> tuple[str, ...]:
    return str(entry.number), entry.name, _gpus(entry), "waiting", ""


def _gpus(entry: Entry) -> str:
    return ", ".join(map(str, entry.gpus)) or "all"
