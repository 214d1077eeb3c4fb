"""The page a run is made on: four steps of rows from the schema, what comes of them, and Start."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from app import form
from app.form import Checked, Draft, Row
from app.pages.parts import QUIET, alert, attempted
from app.studio import Studio
from trainer import configfile
from trainer.config import InputError
from trainer.fields import shown
from trainer.rundir import RunDir

Input = gr.Dropdown | gr.Checkbox | gr.Textbox
WAITING_S = 1.0
"""Between two looks while the images are being read."""


@dataclass(frozen=True)
class Seen:
    """What one browser shows: the draft, its rows by field, whether all settings are wanted, and the draft as YAML.

    typed: fields whose inputs show what was typed, which may be longer by the time an answer comes.
    """

    draft: Draft
    rows: dict[str, Row]
    wants_all: bool = False
    yaml: str = ""
    typed: frozenset[str] = frozenset()

    def shows(self, row: Row) -> bool:
        return row.is_visible and (self.wants_all or row.in_front or bool(row.error))


@dataclass(frozen=True)
class TrainPage:
    """The components others listen to. built: what they show until a browser is told more.  seen: a State of Seen.

    waiting: looks again while the images are being read.  started: name of the run that was just started.
    """

    studio: Studio
    built: Seen
    inputs: dict[str, Input]
    seen: gr.State
    waiting: gr.Timer
    preset: gr.Dropdown
    wants_all: gr.Checkbox
    problems: gr.HTML
    changes: gr.HTML
    commands: gr.HTML
    yaml: gr.Code
    start: gr.Button
    started: gr.Textbox

    @property
    def outputs(self) -> list[Any]:
        """What every look at the draft renews, in the order of `_renewed`."""
        texts = [self.problems, self.changes, self.commands, self.yaml, self.start]
        return [self.seen, self.waiting, self.preset, *texts, *self.inputs.values()]


def build(studio: Studio) -> TrainPage:
    """Lay out the page and connect it, inside a `gr.Blocks`."""
    seen = _kept(studio)
    rows = seen.rows
    with gr.Row(equal_height=True):
        preset = gr.Dropdown(
            list(studio.presets()), value=studio.name_of(seen.draft.preset), label="Preset", elem_id="preset"
        )
        wants_all = gr.Checkbox(False, label="All settings", elem_id="all-settings")
    inputs: dict[str, Input] = {}
    with gr.Row():
        with gr.Column(scale=3), gr.Tabs(elem_id="steps"):
            for step in form.STEPS:
                with gr.Tab(step, render_children=True):
                    for row in rows.values():
                        if form.step_of(row.field) == step:
                            inputs[row.field] = _input(seen, row)
        with gr.Column(scale=2, elem_id="review"):
            problems = gr.HTML(elem_id="problems")
            start = gr.Button("Start", variant="primary", elem_id="start")
            with gr.Row():
                gpus = gr.Textbox(label="GPUs in the queue", info="0,1; empty: all", elem_id="gpus", max_lines=1)
                enqueue = gr.Button("Add to queue", elem_id="enqueue")
            changes = gr.HTML(elem_id="changes")
            commands = gr.HTML(elem_id="commands")
            with gr.Accordion("The whole config", open=False):
                yaml = gr.Code(
                    seen.yaml, language="yaml", label="YAML, can be edited", interactive=True, elem_id="yaml", lines=20
                )
                take = gr.Button("Take over the YAML", elem_id="take-yaml")
                with gr.Row():
                    name = gr.Textbox(label="Name of a preset", elem_id="preset-name", max_lines=1)
                    keep = gr.Button("Save as preset", elem_id="save-preset")
            started = gr.Textbox(visible=False, elem_id="started")
    state = gr.State(None)
    waiting = gr.Timer(WAITING_S, active=False)
    texts = (problems, changes, commands)
    page = TrainPage(studio, seen, inputs, state, waiting, preset, wants_all, *texts, yaml, start, started)
    _connect(page, take, name, keep)
    enqueue.click(
        lambda seen, text, *values: _queued(page, seen, text, *values),
        [state, gpus, wants_all, *inputs.values()],
        problems,
        **QUIET,
    )
    return page


def _connect(page: TrainPage, take: gr.Button, name: gr.Textbox, keep: gr.Button) -> None:
    values = [page.wants_all, *page.inputs.values()]
    gr.on(  # one listener for all: its events follow one another
        [*(component.input for component in values), page.waiting.tick],
        page_handler(page, _typed),
        [page.seen, *values],
        page.outputs,
        trigger_mode="always_last",
        **QUIET,
    )
    page.preset.input(page_handler(page, _preset_chosen), [page.seen, page.preset], page.outputs, **QUIET)
    take.click(page_handler(page, _yaml_taken), [page.seen, page.yaml], page.outputs, **QUIET)
    keep.click(page_handler(page, _preset_kept), [page.seen, name], page.outputs, **QUIET)
    page.start.click(
        lambda seen, *values: _started(page, seen, *values),
        [page.seen, *values],
        [page.started, page.problems],
        trigger_mode="once",
        **QUIET,
    )


def page_handler(page: TrainPage, change: Any) -> Any:
    """A handler that changes the draft, keeps it, and renews what differs from what is shown."""

    def handle(seen: Seen | None, *values: Any) -> list[Any]:
        before = seen or _kept(page.studio)
        try:
            after, said = change(page, before, *values)
        except (InputError, OSError) as error:
            return _refused(page, before, str(error))
        try:
            page.studio.keep_draft(after.draft)
        except OSError as error:  # what is typed stays in the browser
            said = f"What you typed cannot be kept for later ({error.strerror}): free some space."
        return _renewed(page, before, after, said)

    return handle


def opened(page: TrainPage) -> list[Any]:
    """What a browser is given that opens the page: of the inputs only those that changed since they were built.

    The answer may come after the first letters were typed.
    """
    return _renewed(page, page.built, _kept(page.studio), "")


def looked_again(page: TrainPage) -> Any:
    """A handler that reads the files and images of the draft again."""

    def handle(seen: Seen | None) -> list[Any]:
        before = seen or _kept(page.studio)
        return _renewed(page, before, before, "", is_fresh=True)

    return handle


def retried(page: TrainPage, name: str) -> list[Any]:
    """The form as a failed run was started, with what its error says to change."""
    run = page.studio.run(name)
    error = page.studio.follower(run).view().error
    return page_handler(page, _retry_wanted)(None, name, error.retry if error else ())  # type: ignore[no-any-return]


def cloned(page: TrainPage, name: str) -> list[Any]:
    """The form as a run was started, to start another."""
    return page_handler(page, _preset_chosen)(None, name)  # type: ignore[no-any-return]


def _typed(page: TrainPage, seen: Seen, wants_all: bool, *values: str | bool) -> tuple[Seen, str]:
    draft, typed = seen.draft, set()
    for name, value in zip(page.inputs, values, strict=True):
        row = seen.rows[name]
        if row.is_visible and value != row.value:
            draft = draft.typed(name, value)
            typed.add(name)
    return replace(seen, draft=draft, wants_all=wants_all, typed=frozenset(typed)), ""


def _preset_chosen(page: TrainPage, seen: Seen, name: str) -> tuple[Seen, str]:
    return replace(seen, draft=Draft(page.studio.preset(name))), ""


def _retry_wanted(page: TrainPage, seen: Seen, name: str, retry: Sequence[str]) -> tuple[Seen, str]:
    draft = Draft(page.studio.preset(name))
    for field, _, value in (override.partition("=") for override in retry):
        draft = draft.typed(field, value)
    return replace(seen, draft=draft), f"As {name} was, with {', '.join(retry)}."


def _yaml_taken(page: TrainPage, seen: Seen, text: str) -> tuple[Seen, str]:
    return replace(seen, draft=page.studio.from_yaml(form.check(seen.draft), text), yaml=text), ""


def _preset_kept(page: TrainPage, seen: Seen, name: str) -> tuple[Seen, str]:
    file = page.studio.save_preset(form.check(seen.draft), name)
    return replace(seen, draft=Draft(file)), f"Saved as {file}"


def _kept(studio: Studio) -> Seen:
    """What a browser shows that was not told yet: the draft as it was kept."""
    checked = form.check(studio.draft())
    return Seen(checked.draft, _rows(checked), yaml=configfile.dump(checked.config))


def _rows(checked: Checked) -> dict[str, Row]:
    return {row.field: row for row in form.rows(checked)}


def _started(page: TrainPage, seen: Seen | None, *values: Any) -> tuple[Any, str]:
    try:
        run: RunDir = page.studio.start(_shown_draft(page, seen, *values))
    except (InputError, OSError) as error:
        return gr.skip(), alert(str(error))
    return run.path.name, ""


def _queued(page: TrainPage, seen: Seen | None, gpus: str, *values: Any) -> str:
    def add() -> str:
        entry = page.studio.enqueue(_shown_draft(page, seen, *values), gpus)
        return f"{entry.name} waits in the queue as number {entry.number}."

    return attempted(add)


def _shown_draft(page: TrainPage, seen: Seen | None, *values: Any) -> Draft:
    """The draft as the browser shows it: the last letter may have been typed right before the click."""
    return _typed(page, seen or _kept(page.studio), *values)[0].draft


def _renewed(page: TrainPage, before: Seen, after: Seen, said: str, is_fresh: bool = False) -> list[Any]:
    checked = page.studio.look(after.draft, is_fresh)
    now = replace(after, rows=_rows(checked), yaml=configfile.dump(checked.config))
    updates = [_update(before, now, name) for name in page.inputs]
    chosen = page.studio.name_of(after.draft.preset)
    preset: dict[str, Any] = {"choices": list(dict.fromkeys([*page.studio.presets(), chosen]))}
    if after.draft.preset != before.draft.preset:
        preset["value"] = chosen
    texts = [_problems(checked, said), _changes(checked), _commands(checked, page.studio)]
    yaml = now.yaml if now.yaml != after.yaml else gr.skip()
    start, waiting = gr.update(interactive=checked.can_start), gr.Timer(active=bool(checked.waiting))
    return [replace(now, typed=frozenset()), waiting, gr.update(**preset), *texts, yaml, start, *updates]


def _refused(page: TrainPage, seen: Seen, message: str) -> list[Any]:
    skipped = [gr.skip() for _ in page.outputs]
    skipped[0], skipped[3] = seen, alert(message)
    return skipped


def _update(before: Seen, now: Seen, name: str) -> Any:
    """What must change in one input. What is being typed stays as it is."""
    old, new = before.rows[name], now.rows[name]
    was, look = _look(before, old), _look(now, new)
    changed = {key: value for key, value in look.items() if value != was[key]}
    if new.value != old.value and not new.error and name not in now.typed:
        changed["value"] = new.value
    return gr.update(**changed) if changed else gr.skip()


def _look(seen: Seen, row: Row) -> dict[str, Any]:
    look: dict[str, Any] = {"visible": seen.shows(row), "info": _info(row), "elem_classes": _classes(row)}
    return look | {"choices": list(row.choices)} if row.kind == "choice" else look


def _input(seen: Seen, row: Row) -> Input:
    common: dict[str, Any] = {
        "value": row.value,
        "label": row.label,
        "interactive": True,
        "elem_id": f"field-{row.field.replace('.', '-')}",
        **_look(seen, row),
    }
    if row.kind == "choice":
        return gr.Dropdown(**common)
    if row.kind == "switch":
        return gr.Checkbox(**common)
    lines = {"text": 1, "lines": 3, "yaml": 2}[row.kind]
    return gr.Textbox(lines=lines, max_lines=1 if lines == 1 else 12, **common)


def _info(row: Row) -> str:
    return f"✗ {row.error}" if row.error else row.help


def _classes(row: Row) -> list[str]:
    return ["row", "wrong"] if row.error else ["row"]


def _problems(checked: Checked, said: str) -> str:
    if not checked.errors:
        return f'<p role="status">{html.escape(said or checked.waiting or "Ready to start.")}</p>'
    lines = [f"<li><b>{html.escape(name)}</b> {html.escape(text)}</li>" for name, text in checked.errors.items()]
    return f'<div role="alert" class="alert"><p>Start waits for:</p><ul>{"".join(lines)}</ul></div>'


def _changes(checked: Checked) -> str:
    rows = [
        f"<tr><th scope='row'>{html.escape(name)}</th><td>{html.escape(shown(old))}</td>"
        f"<td>{html.escape(shown(new))}</td></tr>"
        for name, (old, new) in checked.changes.items()
    ]
    if not rows:
        return "<p>As in the preset.</p>"
    head = "<tr><th scope='col'>Changed</th><th scope='col'>preset</th><th scope='col'>now</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _commands(checked: Checked, studio: Studio) -> str:
    blocks: Sequence[tuple[str, str]] = (
        ("Without this page", form.headless_command(checked.draft)),
        ("What Start executes", form.torchrun_command(checked.config, studio.runs)),
    )
    return "".join(
        f"<details><summary>{name}</summary><pre tabindex='0'>{html.escape(text)}</pre>"
        "<button class='copy'>Copy</button></details>"
        for name, text in blocks
    )
