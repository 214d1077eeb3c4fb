"""The page Train: four steps of config fields, the checks and the memory plan of the config, and Start."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gradio as gr
from markupsafe import Markup

from app import form
from app.form import Checked, Draft, Row
from app.html import alert, attempted, blockers, note, plan_bar
from app.plan_preview import TARGETS, THIS_MACHINE, PlanPreview
from app.studio import Studio
from app.web.pages.parts import QUIET, WAITING_S, column_heads
from trainer.config.errors import InputError
from trainer.config.fields import shown
from trainer.config.load import COMMAND_LINE, dump_config
from trainer.plan.fixes import MOST
from trainer.run.folder import RunDir

Input = gr.Dropdown | gr.Checkbox | gr.Textbox
MOST_RESPONSES = 64
"""Responses whose content is remembered. For older ones, and after a restart, the saved draft is used."""


@dataclass(frozen=True)
class FormView:
    """The form as one browser shows it.

    Attributes:
        preset: The name that is chosen.
        rows: {field: row}.
        wants_all: Whether "All settings" is checked.
        yaml: The draft's config as YAML.
        typed: Fields that the user typed into since the last response, and may still be typing into.
        refreshes: How often files and images were to be read again.
        target: GPUs to plan for, one of TARGETS.
    """

    draft: Draft
    preset: str
    rows: Mapping[str, Row]
    wants_all: bool = False
    yaml: str = ""
    typed: frozenset[str] = frozenset()
    refreshes: float = 0
    target: str = THIS_MACHINE

    def shows(self, row: Row) -> bool:
        return row.is_visible and (self.wants_all or row.in_front or bool(row.error))


class Responses:
    """The form views that browsers were sent, by token.

    A browser sends requests before earlier responses have arrived, and responses may overtake each other. So each
    request carries the token of the response that the browser shows; input values that differ from it were typed.

    Attributes:
        built: The view that every browser shows until its first response, with an empty token.
    """

    def __init__(self, built: FormView) -> None:
        self.built = built
        self._sent: dict[str, FormView] = {}
        self._lock = threading.Lock()

    def add(self, view: FormView) -> str:
        """Remember the view that a response shows, and return its token."""
        token = secrets.token_hex(8)
        with self._lock:
            self._sent[token] = view
            for old in list(self._sent)[:-MOST_RESPONSES]:
                del self._sent[old]
        return token

    def get(self, token: str) -> FormView | None:
        """Return the view that the response with this token showed, or None when it is no longer known."""
        return self._sent.get(token) if token else self.built


@dataclass(frozen=True)
class PlanParts:
    """Components of the memory plan.

    Attributes:
        target: The GPUs to plan for.
        record: Button that records the model, visible where a plan needs that.
        fixes: Buttons that apply a change that makes the run fit.
        verify: Button that compares the plan with a trace.
    """

    target: gr.Dropdown
    bar: gr.HTML
    record: gr.Button
    fixes: list[gr.Button]
    verify: gr.Button


@dataclass(frozen=True)
class TrainPage:
    """Components of the page that other pages use.

    Attributes:
        token: Token of the response that is shown.
        new_token: Token of the response that is being applied.
        waiting: Timer that repeats the request while images are being read.
        refreshes: Increased to read files and images again.
        started: Name of the run that was just started.
    """

    studio: Studio
    responses: Responses
    inputs: dict[str, Input]
    token: gr.Textbox
    new_token: gr.Textbox
    waiting: gr.Timer
    preset: gr.Dropdown
    wants_all: gr.Checkbox
    refreshes: gr.Number
    plan: PlanParts
    problems: gr.HTML
    changes: gr.HTML
    commands: gr.HTML
    yaml: gr.Code
    start: gr.Button
    started: gr.Textbox

    @property
    def sent(self) -> list[Any]:
        """The first inputs of every handler: the state of the form, in the order of `_form_view`."""
        return [self.token, self.preset, self.wants_all, self.refreshes, self.plan.target, *self.inputs.values()]

    @property
    def outputs(self) -> list[Any]:
        """The outputs of every handler, in the order of `_response`."""
        texts = [self.problems, self.changes, self.commands, self.yaml, self.start]
        plan = [self.plan.bar, self.plan.record, self.plan.verify, *self.plan.fixes]
        return [self.new_token, self.waiting, self.preset, *texts, *plan, *self.inputs.values()]


def build(studio: Studio) -> TrainPage:
    """Lay out the page and connect it, inside a `gr.Blocks`."""
    view = _saved_view(studio)
    rows = view.rows
    with gr.Row(equal_height=True):
        preset = gr.Dropdown(list(studio.presets()), value=view.preset, label="Preset", elem_id="preset")
        wants_all = gr.Checkbox(False, label="All settings", elem_id="all-settings")
    inputs: dict[str, Input] = {}
    with gr.Row():
        with gr.Column(scale=3), gr.Tabs(elem_id="steps"):
            for step in form.STEPS:
                with gr.Tab(step, render_children=True):
                    for row in rows.values():
                        if form.step_of(row.field) == step:
                            inputs[row.field] = _input(view, row)
        with gr.Column(scale=2, elem_id="review"):
            problems = gr.HTML(elem_id="problems")
            start = gr.Button("Start", variant="primary", elem_id="start")
            with gr.Row():
                gpus = gr.Textbox(label="GPUs of the queued run", info="0,1; empty: all", elem_id="gpus", max_lines=1)
                enqueue = gr.Button("Add to queue", elem_id="enqueue")
            plan = PlanParts(
                gr.Dropdown(list(TARGETS), value=THIS_MACHINE, label="Plan for", elem_id="plan-for"),
                gr.HTML(elem_id="plan"),
                gr.Button("Record this model (up to a few minutes)", visible=False, size="sm", elem_id="record"),
                [gr.Button(visible=False, size="sm", elem_id=f"fix-{number}") for number in range(MOST)],
                gr.Button("Verify with a full trace (a minute or more)", visible=False, size="sm", elem_id="verify"),
            )
            outcome = gr.HTML(elem_id="outcome")  # not an output of the form's handlers: a late response would clear it
            changes = gr.HTML(elem_id="changes")
            commands = gr.HTML(elem_id="commands")
            with gr.Accordion("Full config", open=False):
                yaml = gr.Code(
                    view.yaml, language="yaml", label="YAML (editable)", interactive=True, elem_id="yaml", lines=20
                )
                take = gr.Button("Apply YAML", elem_id="take-yaml")
                with gr.Row():
                    name = gr.Textbox(label="Preset name", elem_id="preset-name", max_lines=1)
                    keep = gr.Button("Save as preset", elem_id="save-preset")
            started = gr.Textbox(visible=False, elem_id="started")
    token, new_token, refreshes = gr.Textbox(visible=False), gr.Textbox(visible=False), gr.Number(0, visible=False)
    waiting = gr.Timer(WAITING_S, active=False)
    review = (problems, changes, commands, yaml, start)
    page = TrainPage(
        studio, Responses(view), inputs, token, new_token, waiting, preset, wants_all, refreshes, plan, *review, started
    )
    edits = [component.input for component in (preset, wants_all, plan.target, *inputs.values())]
    # One listener for all of them, so that their requests are sent in order.
    any_edit = partial(gr.on, [*edits, waiting.tick, refreshes.change], trigger_mode="always_last")
    connect(page, any_edit, on_edit(page), page.sent)
    connect(page, take.click, page_handler(page, _apply_yaml), [*page.sent, yaml])
    connect(page, keep.click, page_handler(page, _save_preset), [*page.sent, name])
    connect(page, plan.record.click, page_handler(page, _record), page.sent)
    connect(page, plan.verify.click, page_handler(page, _verify), page.sent)
    for number, fix in enumerate(plan.fixes):
        connect(page, fix.click, page_handler(page, partial(_apply_fix, number)), page.sent)
    start.click(lambda *sent: _start(page, *sent), page.sent, [started, outcome], trigger_mode="once", **QUIET)
    enqueue.click(lambda *sent: _enqueue(page, *sent), [*page.sent, gpus], outcome, **QUIET)
    return page


def connect(page: TrainPage, listen: Callable[..., Any], handler: Any, inputs: list[Any] | None) -> Any:
    """Run a handler on an event and update the page. Returns the listener that fires when the response is shown.

    A response is applied component by component, so it counts as shown after the last.
    """
    applied = listen(handler, inputs, page.outputs, **QUIET)
    return applied.then(None, page.new_token, page.token, js="token => token", **QUIET)


def page_handler(page: TrainPage, change: Any) -> Any:
    """Return a handler that changes the draft, saves it, and updates what differs from the form shown."""
    count = len(page.sent)

    def handle(*sent: Any) -> list[Any]:
        try:
            last = _last_view(page, sent[0])
            shown = _form_view(page, last, *sent[1:count])
            after, message = change(page, shown, *sent[count:])
            if after.draft != last.draft:
                message = _save_draft(page, after.draft) or message
            before = replace(shown, wants_all=last.wants_all)  # like the rows: the new choice is not shown yet
            return _response(page, before, after, message, is_fresh=shown.refreshes != last.refreshes)
        except (InputError, OSError) as error:
            return _error_response(page, str(error))

    return handle


def on_open(page: TrainPage) -> list[Any]:
    """Handle the opening of the page: update the inputs that changed since the page was built.

    Other inputs are left alone, because the user may already be typing when the response arrives.
    """
    saved = _saved_view(page.studio)
    return _response(page, page.responses.built, saved, page.studio.draft_problem)


def refresh_on(page: TrainPage, listen: Callable[..., Any]) -> None:
    """Read the draft's files and images again on an event, after earlier edits.

    Does nothing before the first response is shown: that one has just read them, and a request without a token would
    bring the saved draft back over a preset that was chosen in between.
    """
    listen(
        None,
        [page.refreshes, page.token],
        page.refreshes,
        js="(refreshes, token) => refreshes + (token ? 1 : 0)",
        **QUIET,
    )


def on_edit(page: TrainPage) -> Any:
    """Return the handler of edits and refreshes."""
    return page_handler(page, _unchanged)


def on_retry(page: TrainPage) -> Any:
    """Return a handler that loads the config of a failed run with the changes its error suggests."""
    return page_handler(page, _load_retry)


def on_clone(page: TrainPage) -> Any:
    """Return a handler that loads the config of a run."""
    return page_handler(page, _load_run)


def _form_view(
    page: TrainPage, view: FormView, preset: str, wants_all: bool, refreshes: float, target: str, *values: str | bool
) -> FormView:
    """The form as the browser shows it: the last response, with the preset that was chosen and what was typed since."""
    draft, rows, typed, given = view.draft, dict(view.rows), set(), view.rows
    if preset != view.preset:
        draft = Draft(page.studio.preset(preset))
        given = _rows_by_field(form.check(draft))  # the response may be applied in part
    for name, value in zip(page.inputs, values, strict=True):
        if rows[name].is_visible and value != rows[name].value:
            rows[name] = replace(rows[name], value=value)
            if value != given[name].value:
                draft = draft.typed(name, value)
                typed.add(name)
    return FormView(draft, preset, rows, wants_all, view.yaml, frozenset(typed), refreshes, target)


def _draft(page: TrainPage, token: str, *sent: Any) -> Draft:
    return _form_view(page, _last_view(page, token), *sent).draft


def _last_view(page: TrainPage, token: str) -> FormView:
    """The view of the response with this token. Before the first, the page as built, with the saved draft."""
    view = page.responses.get(token)
    if view is None:
        return _saved_view(page.studio)
    return view if token else replace(view, draft=page.studio.draft())


def _unchanged(page: TrainPage, shown: FormView) -> tuple[FormView, str]:
    return shown, ""


def _load_run(page: TrainPage, shown: FormView, name: str) -> tuple[FormView, str]:
    return _with_draft(shown, Draft(page.studio.preset(name))), ""


def _load_retry(page: TrainPage, shown: FormView, name: str) -> tuple[FormView, str]:
    error = page.studio.follower(page.studio.run(name)).view().error
    retry = error.retry if error else ()
    draft = Draft(page.studio.preset(name))
    for field, _, value in (override.partition("=") for override in retry):
        draft = draft.typed(field, value)
    return _with_draft(shown, draft), f"Config of {name}, with {', '.join(retry)}."


def _record(page: TrainPage, shown: FormView) -> tuple[FormView, str]:
    page.studio.plan_previews.record(form.check(shown.draft).config)
    return shown, ""


def _verify(page: TrainPage, shown: FormView) -> tuple[FormView, str]:
    page.studio.verify_plan(form.check(shown.draft), shown.target)
    return shown, ""


def _apply_fix(number: int, page: TrainPage, shown: FormView) -> tuple[FormView, str]:
    """Apply one of the fixes that were offered for this view."""
    fixes = page.studio.plan(form.check(shown.draft), shown.target).fixes
    draft = shown.draft
    for field, value in fixes[number].changes.items() if number < len(fixes) else ():
        draft = draft.typed(field, value if isinstance(value, bool) else str(value))
    return _with_draft(shown, draft), f"Applied: {fixes[number]}." if number < len(fixes) else ""


def _apply_yaml(page: TrainPage, shown: FormView, text: str) -> tuple[FormView, str]:
    return replace(_with_draft(shown, page.studio.from_yaml(form.check(shown.draft), text)), yaml=text), ""


def _save_preset(page: TrainPage, shown: FormView, name: str) -> tuple[FormView, str]:
    file = page.studio.save_preset(form.check(shown.draft), name)
    return _with_draft(shown, Draft(file)), f"Saved as {file}"


def _save_draft(page: TrainPage, draft: Draft) -> str:
    """Save the draft. Returns the error as a sentence; the draft then stays in the browser only."""
    try:
        page.studio.save_draft(draft)
    except OSError as error:
        return f"The form cannot be saved ({error.strerror}): free some space."
    return ""


def _with_draft(shown: FormView, draft: Draft) -> FormView:
    """The view with another draft, which replaces what was typed."""
    return replace(shown, draft=draft, typed=frozenset())


def _saved_view(studio: Studio) -> FormView:
    """The view of the saved draft."""
    checked = form.check(studio.draft())
    return FormView(
        checked.draft, studio.name_of(checked.draft.preset), _rows_by_field(checked), yaml=dump_config(checked.config)
    )


def _rows_by_field(checked: Checked) -> dict[str, Row]:
    return {row.field: row for row in form.rows(checked)}


def _start(page: TrainPage, *sent: Any) -> tuple[Any, str]:
    try:
        run: RunDir = page.studio.start(_draft(page, *sent))
    except (InputError, OSError) as error:
        return gr.skip(), alert(str(error))
    return run.path.name, ""


def _enqueue(page: TrainPage, *sent: Any) -> str:
    *shown, gpus = sent

    def add() -> str:
        entry = page.studio.enqueue(_draft(page, *shown), gpus)
        return f"{entry.name} was queued as number {entry.number}."

    return attempted(add)


def _response(page: TrainPage, before: FormView, after: FormView, message: str, is_fresh: bool = False) -> list[Any]:
    checked, chosen = page.studio.check(after.draft, is_fresh), page.studio.name_of(after.draft.preset)
    now = replace(after, preset=chosen, rows=_rows_by_field(checked), yaml=dump_config(checked.config))
    updates = [_update(before, now, name) for name in page.inputs]
    preset: dict[str, Any] = {"choices": list(dict.fromkeys([*page.studio.presets(), chosen]))}
    if chosen != before.preset:
        preset["value"] = chosen
    texts = [_problems(checked, message), _changes(checked), _commands(checked, page.studio)]
    yaml = now.yaml if now.yaml != after.yaml else gr.skip()
    preview = page.studio.plan(checked, now.target)
    waiting = gr.Timer(active=bool(checked.waiting) or preview.is_waiting)
    start, plan = gr.update(interactive=checked.can_start), _plan_updates(preview)
    return [page.responses.add(now), waiting, gr.update(**preset), *texts, yaml, start, *plan, *updates]


def _plan_updates(preview: PlanPreview) -> list[Any]:
    """Updates of the bar, of the buttons that record and verify, and of a button per fix."""
    fixes = [f"Make it fit: {fix}" for fix in preview.fixes]
    buttons = [gr.update(value=text, visible=True) for text in fixes]
    buttons += [gr.update(visible=False)] * (MOST - len(buttons))
    bar = plan_bar(preview.plan, preview.checked) if preview.plan else Markup("<p>{}</p>").format(preview.note)
    asking = [gr.update(visible=wanted) for wanted in (preview.can_record, preview.can_verify)]
    return [bar, *asking, *buttons]


def _error_response(page: TrainPage, message: str) -> list[Any]:
    skipped = [gr.skip() for _ in page.outputs]
    skipped[page.outputs.index(page.problems)] = alert(message)
    return skipped


def _update(before: FormView, now: FormView, name: str) -> Any:
    """The update of one input, which leaves a value alone that is being typed."""
    old, new = before.rows[name], now.rows[name]
    was, settings = _appearance(before, old), _appearance(now, new)
    changed = {key: value for key, value in settings.items() if value != was[key]}
    if new.value != old.value and name not in now.typed:
        changed["value"] = new.value
    return gr.update(**changed) if changed else gr.skip()


def _appearance(view: FormView, row: Row) -> dict[str, Any]:
    info = f"✗ {row.error}" if row.error else row.help
    classes = ["row", "wrong"] if row.error else ["row"]
    settings: dict[str, Any] = {"visible": view.shows(row), "info": info, "elem_classes": classes}
    if row.kind == "choice":
        return settings | {"choices": list(row.choices)}
    return settings if row.kind == "switch" else settings | {"placeholder": row.placeholder}


def _input(view: FormView, row: Row) -> Input:
    common: dict[str, Any] = {
        "value": row.value,
        "label": row.label,
        "interactive": True,
        "elem_id": f"field-{row.field.replace('.', '-')}",
        **_appearance(view, row),
    }
    if row.kind == "choice":
        return gr.Dropdown(**common)
    if row.kind == "switch":
        return gr.Checkbox(**common)
    lines = {"text": 1, "lines": 3, "yaml": 2}[row.kind]
    return gr.Textbox(lines=lines, max_lines=1 if lines == 1 else 12, **common)


def _problems(checked: Checked, message: str) -> Markup:
    if not checked.errors:
        typed = f"{COMMAND_LINE}: "  # the page reads its inputs as overrides of the command line
        sentences = [*(text.removeprefix(typed) for text in checked.loaded.notes), *checked.warnings]
        advice = Markup().join(map(Markup('<p class="sentence">{}.</p>').format, sentences))
        status = note(message or checked.waiting or "Ready to start.")
        return Markup('{}<div class="slow">{}</div>').format(status, advice) if advice else status
    line = Markup("<li><b>{}</b> {}</li>")
    return blockers(Markup().join(line.format(name, text) for name, text in checked.errors.items()))


def _changes(checked: Checked) -> Markup:
    if not checked.changes:
        return Markup("<p>As in the preset.</p>")
    row = Markup("<tr><th scope='row'>{}</th><td>{}</td><td>{}</td></tr>")
    rows = Markup().join(row.format(name, shown(old), shown(new)) for name, (old, new) in checked.changes.items())
    return Markup("<table><tr>{}</tr>{}</table>").format(column_heads(("Changed", "preset", "now")), rows)


def _commands(checked: Checked, studio: Studio) -> Markup:
    blocks: Sequence[tuple[str, str]] = (
        ("Train without this page", form.headless_command(checked.draft)),
        ("Command that Start runs", form.torchrun_command(checked.config, studio.runs)),
    )
    block = Markup(
        "<details><summary>{}</summary><pre tabindex='0'>{}</pre><button class='copy'>Copy</button></details>"
    )
    return Markup().join(block.format(*named) for named in blocks)
