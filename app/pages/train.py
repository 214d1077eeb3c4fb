"""The page a run is made on: four steps of rows from the schema, what comes of them, and Start."""

from __future__ import annotations

import html
import secrets
import threading
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
MOST_ANSWERS = 8
"""Of which is known what they showed: more are never under way."""
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


class Browser:
    """What one browser was sent, answer by answer. lock: held from reading `seen` to the next answer.

    A request may leave the browser before the answer to the one before it has arrived. It brings the token of the
    answer its inputs come from: what differs from that one was typed, and nothing else.
    """

    def __init__(self, seen: Seen) -> None:
        self.lock = threading.Lock()
        self.seen = seen
        self.token = ""
        self._sent = {self.token: seen}

    def sends(self, seen: Seen) -> None:
        """Another answer is given."""
        self.seen, self.token = seen, secrets.token_hex(8)
        self._sent[self.token] = seen
        for old in list(self._sent)[:-MOST_ANSWERS]:
            del self._sent[old]

    def sent(self, token: str) -> Seen:
        """What the inputs showed that come with a token; after a restart nobody knows."""
        return self._sent.get(token, self.seen)


@dataclass(frozen=True)
class TrainPage:
    """The components others listen to. built: what they show until a browser is told more.  browser: State of Browser.

    token: of the answer that is shown.  waiting: looks again while the images are being read.  started: name of the
    run that was just started.
    """

    studio: Studio
    built: Seen
    inputs: dict[str, Input]
    browser: gr.State
    token: gr.Textbox
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
    def shown(self) -> list[Any]:
        """What every handler takes first."""
        return [self.browser, self.token]

    @property
    def outputs(self) -> list[Any]:
        """What every look at the draft renews, in the order of `_renewed`."""
        texts = [self.problems, self.changes, self.commands, self.yaml, self.start]
        return [*self.shown, self.waiting, self.preset, *texts, *self.inputs.values()]


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
    browser, token = gr.State(None), gr.Textbox(visible=False)
    waiting = gr.Timer(WAITING_S, active=False)
    texts = (problems, changes, commands)
    page = TrainPage(studio, seen, inputs, browser, token, waiting, preset, wants_all, *texts, yaml, start, started)
    _connect(page, take, name, keep)
    enqueue.click(
        lambda *values: _queued(page, *values),
        [*page.shown, gpus, preset, wants_all, *inputs.values()],
        problems,
        **QUIET,
    )
    return page


def _connect(page: TrainPage, take: gr.Button, name: gr.Textbox, keep: gr.Button) -> None:
    values = [page.wants_all, *page.inputs.values()]
    gr.on(  # one listener for all: its events follow one another
        [*(component.input for component in values), page.waiting.tick],
        page_handler(page, _typed),
        [*page.shown, *values],
        page.outputs,
        trigger_mode="always_last",
        **QUIET,
    )
    page.preset.input(page_handler(page, _preset_chosen), [*page.shown, page.preset], page.outputs, **QUIET)
    take.click(page_handler(page, _yaml_taken), [*page.shown, page.yaml], page.outputs, **QUIET)
    keep.click(page_handler(page, _preset_kept), [*page.shown, name], page.outputs, **QUIET)
    page.start.click(
        lambda *values: _started(page, *values),
        [*page.shown, page.preset, *values],
        [page.started, page.problems],
        trigger_mode="once",
        **QUIET,
    )


def page_handler(page: TrainPage, change: Any) -> Any:
    """A handler that changes the draft, keeps it, and renews what differs from what is shown."""

    def handle(browser: Browser | None, token: str, *values: Any) -> list[Any]:
        browser = browser or Browser(_kept(page.studio))
        with browser.lock:
            try:
                after, said = change(page, browser.seen, browser.sent(token), *values)
            except (InputError, OSError) as error:
                return _refused(page, browser, str(error))
            try:
                page.studio.keep_draft(after.draft)
            except OSError as error:  # what is typed stays in the browser
                said = f"What you typed cannot be kept for later ({error.strerror}): free some space."
            return _renewed(page, browser, after, said)

    return handle


def opened(page: TrainPage) -> list[Any]:
    """What a browser is given that opens the page: of the inputs only those that changed since they were built.

    The answer may come after the first letters were typed.
    """
    return _renewed(page, Browser(page.built), _kept(page.studio), "")


def looked_again(page: TrainPage) -> Any:
    """A handler that reads the files and images of the draft again."""

    def handle(browser: Browser | None, _token: str) -> list[Any]:
        browser = browser or Browser(_kept(page.studio))
        with browser.lock:
            return _renewed(page, browser, browser.seen, "", is_fresh=True)

    return handle


def retried(page: TrainPage) -> Any:
    """A handler that shows a failed run as it was started, with what its error says to change."""
    return page_handler(page, _retry_wanted)


def cloned(page: TrainPage) -> Any:
    """A handler that shows a run as it was started, to start another."""
    return page_handler(page, _preset_chosen)


def _typed(page: TrainPage, seen: Seen, sent: Seen, wants_all: bool, *values: str | bool) -> tuple[Seen, str]:
    draft, typed = seen.draft, set()
    for name, value in zip(page.inputs, values, strict=True):
        row = sent.rows[name]
        if row.is_visible and value != row.value:
            draft = draft.typed(name, value)
            typed.add(name)
    if sent is not seen:  # an answer that is under way writes over what was typed
        typed = set()
    return replace(seen, draft=draft, wants_all=wants_all, typed=frozenset(typed)), ""


def _preset_chosen(page: TrainPage, seen: Seen, sent: Seen, name: str) -> tuple[Seen, str]:
    return replace(seen, draft=Draft(page.studio.preset(name))), ""


def _retry_wanted(page: TrainPage, seen: Seen, sent: Seen, name: str) -> tuple[Seen, str]:
    error = page.studio.follower(page.studio.run(name)).view().error
    retry = error.retry if error else ()
    draft = Draft(page.studio.preset(name))
    for field, _, value in (override.partition("=") for override in retry):
        draft = draft.typed(field, value)
    return replace(seen, draft=draft), f"As {name} was, with {', '.join(retry)}."


def _yaml_taken(page: TrainPage, seen: Seen, sent: Seen, text: str) -> tuple[Seen, str]:
    return replace(seen, draft=page.studio.from_yaml(form.check(seen.draft), text), yaml=text), ""


def _preset_kept(page: TrainPage, seen: Seen, sent: Seen, name: str) -> tuple[Seen, str]:
    file = page.studio.save_preset(form.check(seen.draft), name)
    return replace(seen, draft=Draft(file)), f"Saved as {file}"


def _kept(studio: Studio) -> Seen:
    """What a browser shows that was not told yet: the draft as it was kept."""
    checked = form.check(studio.draft())
    return Seen(checked.draft, _rows(checked), yaml=configfile.dump(checked.config))


def _rows(checked: Checked) -> dict[str, Row]:
    return {row.field: row for row in form.rows(checked)}


def _started(page: TrainPage, browser: Browser | None, token: str, *values: Any) -> tuple[Any, str]:
    try:
        run: RunDir = page.studio.start(_shown_draft(page, browser, token, *values))
    except (InputError, OSError) as error:
        return gr.skip(), alert(str(error))
    return run.path.name, ""


def _queued(page: TrainPage, browser: Browser | None, token: str, gpus: str, *values: Any) -> str:
    def add() -> str:
        entry = page.studio.enqueue(_shown_draft(page, browser, token, *values), gpus)
        return f"{entry.name} waits in the queue as number {entry.number}."

    return attempted(add)


def _shown_draft(page: TrainPage, browser: Browser | None, token: str, preset: str, *values: Any) -> Draft:
    """The draft as the browser shows it: a preset may have been chosen, or a letter typed, right before the click."""
    browser = browser or Browser(_kept(page.studio))
    with browser.lock:
        seen, sent = browser.seen, browser.sent(token)
    was, known = (page.studio.name_of(one.draft.preset) for one in (sent, seen))
    if preset not in (was, known):
        return Draft(page.studio.preset(preset))
    return _typed(page, seen, sent, *values)[0].draft


def _renewed(page: TrainPage, browser: Browser, after: Seen, said: str, is_fresh: bool = False) -> list[Any]:
    before, checked = browser.seen, page.studio.look(after.draft, is_fresh)
    now = replace(after, rows=_rows(checked), yaml=configfile.dump(checked.config))
    updates = [_update(before, now, name) for name in page.inputs]
    chosen = page.studio.name_of(after.draft.preset)
    preset: dict[str, Any] = {"choices": list(dict.fromkeys([*page.studio.presets(), chosen]))}
    if after.draft.preset != before.draft.preset:
        preset["value"] = chosen
    texts = [_problems(checked, said), _changes(checked), _commands(checked, page.studio)]
    yaml = now.yaml if now.yaml != after.yaml else gr.skip()
    start, waiting = gr.update(interactive=checked.can_start), gr.Timer(active=bool(checked.waiting))
    browser.sends(replace(now, typed=frozenset()))
    return [browser, browser.token, waiting, gr.update(**preset), *texts, yaml, start, *updates]


def _refused(page: TrainPage, browser: Browser, message: str) -> list[Any]:
    skipped = [gr.skip() for _ in page.outputs]
    skipped[0], skipped[page.outputs.index(page.problems)] = browser, alert(message)
    return skipped


def _update(before: Seen, now: Seen, name: str) -> Any:
    """What must change in one input. What is being typed stays as it is."""
    old, new = before.rows[name], now.rows[name]
    was, look = _look(before, old), _look(now, new)
    changed = {key: value for key, value in look.items() if value != was[key]}
    if new.value != old.value and name not in now.typed:
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
