"""The page a run is made on: four steps of rows from the schema, what comes of them, and Start."""

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
from app.html import alert, attempted, note, plan_bar, waits_for
from app.plan_preview import HERE, PLACES, Preflight
from app.studio import Studio
from app.web.pages.parts import QUIET, WAITING_S, column_heads
from trainer.config.errors import InputError
from trainer.config.fields import shown
from trainer.config.load import COMMAND_LINE, dump_config
from trainer.plan.fixes import MOST
from trainer.run.folder import RunDir

Input = gr.Dropdown | gr.Checkbox | gr.Textbox
MOST_ANSWERS = 64
"""Of which is known what they showed. After more, or a restart, it is what was kept last."""


@dataclass(frozen=True)
class Seen:
    """What one browser shows: the draft, its rows by field, whether all settings are wanted, and the draft as YAML.

    preset: the name that is chosen.  typed: fields whose inputs show what was typed, which may be longer by the time an
    answer comes.  looks: how often files and images were to be read again.  place: GPUs that are planned for.
    """

    draft: Draft
    preset: str
    rows: Mapping[str, Row]
    wants_all: bool = False
    yaml: str = ""
    typed: frozenset[str] = frozenset()
    looks: float = 0
    place: str = HERE

    def shows(self, row: Row) -> bool:
        return row.is_visible and (self.wants_all or row.in_front or bool(row.error))


class Answers:
    """What browsers were sent, by tokens. built: what all show until the first answer, whose token is empty.

    Requests leave a browser before the answers to those before them have arrived, and answers overtake one another.
    So each brings the token of the answer it shows: what its inputs hold beside that was typed.
    """

    def __init__(self, built: Seen) -> None:
        self.built = built
        self._given: dict[str, Seen] = {}
        self._lock = threading.Lock()

    def give(self, seen: Seen) -> str:
        """The token of an answer."""
        token = secrets.token_hex(8)
        with self._lock:
            self._given[token] = seen
            for old in list(self._given)[:-MOST_ANSWERS]:
                del self._given[old]
        return token

    def of(self, token: str) -> Seen | None:
        """What the answer with this token shows."""
        return self._given.get(token) if token else self.built


@dataclass(frozen=True)
class PlanParts:
    """place: the GPUs that are planned for.  record: a button where the model must be recorded first.

    ways: buttons with what would make the run fit.  verify: one that has the plan compared with a trace.
    """

    place: gr.Dropdown
    bar: gr.HTML
    record: gr.Button
    ways: list[gr.Button]
    verify: gr.Button


@dataclass(frozen=True)
class TrainPage:
    """The components others listen to. token: of the answer that is shown.  answer: token of the one that is coming.

    waiting: looks again while images are read.  looks: one more has the files read again.  started: name of the run
    that was just started.
    """

    studio: Studio
    answers: Answers
    inputs: dict[str, Input]
    token: gr.Textbox
    answer: gr.Textbox
    waiting: gr.Timer
    preset: gr.Dropdown
    wants_all: gr.Checkbox
    looks: gr.Number
    plan: PlanParts
    problems: gr.HTML
    changes: gr.HTML
    commands: gr.HTML
    yaml: gr.Code
    start: gr.Button
    started: gr.Textbox

    @property
    def shown(self) -> list[Any]:
        """What every handler takes first: all that a browser shows, in the order of `_shown`."""
        return [self.token, self.preset, self.wants_all, self.looks, self.plan.place, *self.inputs.values()]

    @property
    def outputs(self) -> list[Any]:
        """What every look at the draft renews, in the order of `_renewed`."""
        texts = [self.problems, self.changes, self.commands, self.yaml, self.start]
        plan = [self.plan.bar, self.plan.record, self.plan.verify, *self.plan.ways]
        return [self.answer, self.waiting, self.preset, *texts, *plan, *self.inputs.values()]


def build(studio: Studio) -> TrainPage:
    """Lay out the page and connect it, inside a `gr.Blocks`."""
    seen = _kept(studio)
    rows = seen.rows
    with gr.Row(equal_height=True):
        preset = gr.Dropdown(list(studio.presets()), value=seen.preset, label="Preset", elem_id="preset")
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
            plan = PlanParts(
                gr.Dropdown(list(PLACES), value=HERE, label="Plan for", elem_id="plan-for"),
                gr.HTML(elem_id="plan"),
                gr.Button("Record this model: half a minute to a few", visible=False, size="sm", elem_id="record"),
                [gr.Button(visible=False, size="sm", elem_id=f"way-{number}") for number in range(MOST)],
                gr.Button("Verify exactly: a minute or more", visible=False, size="sm", elem_id="verify"),
            )
            outcome = gr.HTML(elem_id="outcome")  # in no answer to what is typed: a late one would wipe it away
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
    token, answer, looks = gr.Textbox(visible=False), gr.Textbox(visible=False), gr.Number(0, visible=False)
    waiting = gr.Timer(WAITING_S, active=False)
    review = (problems, changes, commands, yaml, start)
    page = TrainPage(
        studio, Answers(seen), inputs, token, answer, waiting, preset, wants_all, looks, plan, *review, started
    )
    inputs_of = [component.input for component in (preset, wants_all, plan.place, *inputs.values())]
    one_for_all = partial(gr.on, [*inputs_of, waiting.tick, looks.change], trigger_mode="always_last")  # in their order
    renews(page, one_for_all, looked(page), page.shown)
    renews(page, take.click, page_handler(page, _yaml_taken), [*page.shown, yaml])
    renews(page, keep.click, page_handler(page, _preset_kept), [*page.shown, name])
    renews(page, plan.record.click, page_handler(page, _recording_wanted), page.shown)
    renews(page, plan.verify.click, page_handler(page, _trace_wanted), page.shown)
    for number, way in enumerate(plan.ways):
        renews(page, way.click, page_handler(page, partial(_way_taken, number)), page.shown)
    start.click(lambda *sent: _started(page, *sent), page.shown, [started, outcome], trigger_mode="once", **QUIET)
    enqueue.click(lambda *sent: _queued(page, *sent), [*page.shown, gpus], outcome, **QUIET)
    return page


def renews(page: TrainPage, listen: Callable[..., Any], handler: Any, inputs: list[Any] | None) -> Any:
    """Renew the page by a handler whenever an event comes. Returns the listener that is told when all of it is shown.

    An answer is applied component by component: it counts as shown after the last.
    """
    applied = listen(handler, inputs, page.outputs, **QUIET)
    return applied.then(None, page.answer, page.token, js="token => token", **QUIET)


def page_handler(page: TrainPage, change: Any) -> Any:
    """A handler that changes the draft, keeps it, and renews what differs from what is shown."""
    count = len(page.shown)

    def handle(*sent: Any) -> list[Any]:
        try:
            answered = _answered(page, sent[0])
            shown = _shown(page, answered, *sent[1:count])
            after, said = change(page, shown, *sent[count:])
            if after.draft != answered.draft:
                said = _keep(page, after.draft) or said
            before = replace(shown, wants_all=answered.wants_all)  # as the rows: what is wanted now is not shown yet
            return _renewed(page, before, after, said, is_fresh=shown.looks != answered.looks)
        except (InputError, OSError) as error:
            return _refused(page, str(error))

    return handle


def opened(page: TrainPage) -> list[Any]:
    """What a browser is given that opens the page: of the inputs only those that changed since they were built.

    The answer may come after the first letters were typed.
    """
    kept = _kept(page.studio)
    return _renewed(page, page.answers.built, kept, page.studio.draft_trouble)


def looks_again(page: TrainPage, listen: Callable[..., Any]) -> None:
    """Read the files and images of the draft again whenever an event comes, after what was typed before.

    Not before the first answer is shown: that one has just read them, and a second one without a token would show the
    kept draft again, over a preset that was chosen meanwhile.
    """
    listen(None, [page.looks, page.token], page.looks, js="(looks, token) => looks + (token ? 1 : 0)", **QUIET)


def looked(page: TrainPage) -> Any:
    """The handler of whatever is typed or chosen, and of looks."""
    return page_handler(page, _as_shown)


def retried(page: TrainPage) -> Any:
    """A handler that shows a failed run as it was started, with what its error says to change."""
    return page_handler(page, _retry_wanted)


def cloned(page: TrainPage) -> Any:
    """A handler that shows a run as it was started, to start another."""
    return page_handler(page, _run_wanted)


def _shown(
    page: TrainPage, seen: Seen, preset: str, wants_all: bool, looks: float, place: str, *values: str | bool
) -> Seen:
    """What a browser shows that sends this: an answer, with the preset that was chosen and what was typed since."""
    draft, rows, typed, given = seen.draft, dict(seen.rows), set(), seen.rows
    if preset != seen.preset:
        draft = Draft(page.studio.preset(preset))
        given = _rows(form.check(draft))  # the answer may be shown in part
    for name, value in zip(page.inputs, values, strict=True):
        if rows[name].is_visible and value != rows[name].value:
            rows[name] = replace(rows[name], value=value)
            if value != given[name].value:
                draft = draft.typed(name, value)
                typed.add(name)
    return Seen(draft, preset, rows, wants_all, seen.yaml, frozenset(typed), looks, place)


def _draft(page: TrainPage, token: str, *sent: Any) -> Draft:
    """What a browser shows whose button was pressed."""
    return _shown(page, _answered(page, token), *sent).draft


def _answered(page: TrainPage, token: str) -> Seen:
    """What the answer with this token shows. Before the first it is what was built, and stands for the kept draft."""
    seen = page.answers.of(token)
    if seen is None:
        return _kept(page.studio)
    return seen if token else replace(seen, draft=page.studio.draft())


def _as_shown(page: TrainPage, shown: Seen) -> tuple[Seen, str]:
    return shown, ""


def _run_wanted(page: TrainPage, shown: Seen, name: str) -> tuple[Seen, str]:
    return _with(shown, Draft(page.studio.preset(name))), ""


def _retry_wanted(page: TrainPage, shown: Seen, name: str) -> tuple[Seen, str]:
    error = page.studio.follower(page.studio.run(name)).view().error
    retry = error.retry if error else ()
    draft = Draft(page.studio.preset(name))
    for field, _, value in (override.partition("=") for override in retry):
        draft = draft.typed(field, value)
    return _with(shown, draft), f"As {name} was, with {', '.join(retry)}."


def _recording_wanted(page: TrainPage, shown: Seen) -> tuple[Seen, str]:
    page.studio.preflights.record(form.check(shown.draft).config)
    return shown, ""


def _trace_wanted(page: TrainPage, shown: Seen) -> tuple[Seen, str]:
    page.studio.verify(form.check(shown.draft), shown.place)
    return shown, ""


def _way_taken(number: int, page: TrainPage, shown: Seen) -> tuple[Seen, str]:
    """One of the changes that make the run fit. They were offered for what is shown."""
    ways = page.studio.preflight(form.check(shown.draft), shown.place).ways
    draft = shown.draft
    for field, value in ways[number].changes.items() if number < len(ways) else ():
        draft = draft.typed(field, value if isinstance(value, bool) else str(value))
    return _with(shown, draft), f"Taken over: {ways[number]}." if number < len(ways) else ""


def _yaml_taken(page: TrainPage, shown: Seen, text: str) -> tuple[Seen, str]:
    return replace(_with(shown, page.studio.from_yaml(form.check(shown.draft), text)), yaml=text), ""


def _preset_kept(page: TrainPage, shown: Seen, name: str) -> tuple[Seen, str]:
    file = page.studio.save_preset(form.check(shown.draft), name)
    return _with(shown, Draft(file)), f"Saved as {file}"


def _keep(page: TrainPage, draft: Draft) -> str:
    """Keep what was typed for later. Returns what is in the way: it stays in the browser."""
    try:
        page.studio.keep_draft(draft)
    except OSError as error:
        return f"What you typed cannot be kept for later ({error.strerror}): free some space."
    return ""


def _with(shown: Seen, draft: Draft) -> Seen:
    """Another draft, whatever was typed."""
    return replace(shown, draft=draft, typed=frozenset())


def _kept(studio: Studio) -> Seen:
    """What a browser shows that was not told yet: the draft as it was kept."""
    checked = form.check(studio.draft())
    return Seen(checked.draft, studio.name_of(checked.draft.preset), _rows(checked), yaml=dump_config(checked.config))


def _rows(checked: Checked) -> dict[str, Row]:
    return {row.field: row for row in form.rows(checked)}


def _started(page: TrainPage, *sent: Any) -> tuple[Any, str]:
    try:
        run: RunDir = page.studio.start(_draft(page, *sent))
    except (InputError, OSError) as error:
        return gr.skip(), alert(str(error))
    return run.path.name, ""


def _queued(page: TrainPage, *sent: Any) -> str:
    *shown, gpus = sent

    def add() -> str:
        entry = page.studio.enqueue(_draft(page, *shown), gpus)
        return f"{entry.name} waits in the queue as number {entry.number}."

    return attempted(add)


def _renewed(page: TrainPage, before: Seen, after: Seen, said: str, is_fresh: bool = False) -> list[Any]:
    checked, chosen = page.studio.look(after.draft, is_fresh), page.studio.name_of(after.draft.preset)
    now = replace(after, preset=chosen, rows=_rows(checked), yaml=dump_config(checked.config))
    updates = [_update(before, now, name) for name in page.inputs]
    preset: dict[str, Any] = {"choices": list(dict.fromkeys([*page.studio.presets(), chosen]))}
    if chosen != before.preset:
        preset["value"] = chosen
    texts = [_problems(checked, said), _changes(checked), _commands(checked, page.studio)]
    yaml = now.yaml if now.yaml != after.yaml else gr.skip()
    preflight = page.studio.preflight(checked, now.place)
    waiting = gr.Timer(active=bool(checked.waiting) or preflight.is_waiting)
    start, plan = gr.update(interactive=checked.can_start), _planned(preflight)
    return [page.answers.give(now), waiting, gr.update(**preset), *texts, yaml, start, *plan, *updates]


def _planned(preflight: Preflight) -> list[Any]:
    """The bar, the buttons that record and verify, and one for each way to make the run fit."""
    ways = [f"Make it fit: {way}" for way in preflight.ways]
    buttons = [gr.update(value=text, visible=True) for text in ways]
    buttons += [gr.update(visible=False)] * (MOST - len(buttons))
    bar = plan_bar(preflight.plan, preflight.checked) if preflight.plan else Markup("<p>{}</p>").format(preflight.note)
    asking = [gr.update(visible=wanted) for wanted in (preflight.can_record, preflight.can_verify)]
    return [bar, *asking, *buttons]


def _refused(page: TrainPage, message: str) -> list[Any]:
    skipped = [gr.skip() for _ in page.outputs]
    skipped[page.outputs.index(page.problems)] = alert(message)
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
    if row.kind == "choice":
        return look | {"choices": list(row.choices)}
    return look if row.kind == "switch" else look | {"placeholder": row.own}


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


def _problems(checked: Checked, said: str) -> Markup:
    if not checked.errors:
        typed = f"{COMMAND_LINE}: "  # as which the inputs of the page are read
        sentences = [*(text.removeprefix(typed) for text in checked.loaded.notes), *checked.warnings]
        advice = Markup().join(map(Markup('<p class="sentence">{}.</p>').format, sentences))
        status = note(said or checked.waiting or "Ready to start.")
        return Markup('{}<div class="slow">{}</div>').format(status, advice) if advice else status
    line = Markup("<li><b>{}</b> {}</li>")
    return waits_for(Markup().join(line.format(name, text) for name, text in checked.errors.items()))


def _changes(checked: Checked) -> Markup:
    if not checked.changes:
        return Markup("<p>As in the preset.</p>")
    row = Markup("<tr><th scope='row'>{}</th><td>{}</td><td>{}</td></tr>")
    rows = Markup().join(row.format(name, shown(old), shown(new)) for name, (old, new) in checked.changes.items())
    return Markup("<table><tr>{}</tr>{}</table>").format(column_heads(("Changed", "preset", "now")), rows)


def _commands(checked: Checked, studio: Studio) -> Markup:
    blocks: Sequence[tuple[str, str]] = (
        ("Without this page", form.headless_command(checked.draft)),
        ("What Start executes", form.torchrun_command(checked.config, studio.runs)),
    )
    block = Markup(
        "<details><summary>{}</summary><pre tabindex='0'>{}</pre><button class='copy'>Copy</button></details>"
    )
    return Markup().join(block.format(*named) for named in blocks)
