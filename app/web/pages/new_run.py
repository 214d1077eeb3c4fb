"""The screen New run: the draft as cards of fields, what this machine makes of it, and Start.

The server keeps the draft; a window sends what was typed and shows the answer. So several windows show one draft, and a
restart of either side loses nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from app.data.thumbnails import FULL
from app.form import draft as form
from app.form import fit_answers, form_answers, model_answers
from app.form.draft import Draft
from app.form.fit_preview import Allowed
from app.form.plan_preview import TARGETS, THIS_MACHINE
from app.form.planned_steps import planned_steps
from app.studio import Studio
from app.web.answers import Calls
from app.web.served_files import address
from trainer.config import families
from trainer.config.fields import label
from trainer.config.foreign.imported import UnknownModel, imported, missing_words
from trainer.config.load import ConfigError
from trainer.launcher.remedy import with_remedy
from trainer.system.errors import InputError
from trainer.system.installation import PRESETS

NUM_THUMBNAILS = 8


def calls(studio: Studio) -> Calls:
    """Return the functions of the screen's script. Most return the state of the form, as `_state` describes it."""
    changing: list[Callable[..., Any]] = [state, edit, preset, restore, reset, fix, apply_yaml, save_preset, read_again]
    changing.append(import_config)
    others: list[Callable[..., Any]] = [record, verify, start, enqueue, copy, retry, models, browse, glance, thumbnails]
    others += [download, pause, step, fit, take, undo]
    return {f"new_{function.__name__}": partial(function, studio) for function in (*changing, *others)}


def state(studio: Studio, known: str = "", typing: bool = False, target: str = THIS_MACHINE) -> dict[str, Any] | None:
    """Return the state of the form, or None for a window that shows it already.

    Args:
        known: `key` of what it shows.
        typing: As for `edit`.
    """
    if typing:
        studio.half_typed.typing({})
    answer = _state(studio, target, is_typing=typing)
    return None if answer["key"] == known else answer


def edit(
    studio: Studio, edits: dict[str, str | bool], typing: bool = False, target: str = THIS_MACHINE
) -> dict[str, Any]:
    """Change fields. typing: a path is still being typed, whose folder is not read yet."""
    unknown = [name for name in edits if name not in form_answers.FIELDS]
    if unknown:  # a window that an older or a newer version drew
        raise InputError(f"{', '.join(unknown)}: not a setting of this version; reload the page")

    paths = {name: str(value).strip() for name, value in edits.items() if form_answers.FIELDS[name]["path"]}
    studio.half_typed.leave(paths)
    if typing:
        studio.half_typed.typing(paths)
    gone = studio.change_images(lambda draft: form.edited(draft, edits), typing)
    return _state(studio, target, is_typing=typing) | {"left_images": left_with_images(gone)}


def left_with_images(gone: dict[str, str]) -> dict[str, Any]:
    """Return the companions of former images that were left behind: labels, and the edits that bring them back."""
    return {"labels": [label(name) for name in gone], "edits": gone}


def preset(studio: Studio, name: str, is_forced: bool = False, target: str = THIS_MACHINE) -> dict[str, Any]:
    """Choose another preset.

    Edits of data, name and prompts are carried along. Where the preset does not take one of them, nothing is changed
    and the answer is `{"refused": {label: reason}}`, unless `is_forced`.
    """
    file = studio.preset(name)
    switches: list[tuple[Draft, form.Switch]] = []

    def change(draft: Draft) -> Draft:
        found = form.switched(draft, file)
        switches.append((draft, found))
        return draft if found.refused and not is_forced else found.draft

    studio.change_draft(change)
    before, found = switches[0]
    if found.refused and not is_forced:
        return {"refused": {label(field): reason for field, reason in found.refused.items()}}
    left = [*found.left, *found.refused]
    undo = studio.undo(before)
    return _state(studio, target) | {"left": [label(field) for field in left], "undo": undo}


def restore(
    studio: Studio, preset: str, values: dict[str, Any], is_whole: bool = False, target: str = THIS_MACHINE
) -> dict[str, Any]:
    """Bring a former draft back, with what was typed since into fields that a change of the preset keeps; as a whole
    without that."""
    file = studio.preset(preset)
    known = {field: value for field, value in values.items() if field in form_answers.FIELDS}
    studio.change_draft(
        lambda draft: Draft(file, known | ({} if is_whole else dict(form.switched(draft, file).draft.values)))
    )
    return _state(studio, target)


def reset(studio: Studio, target: str = THIS_MACHINE) -> dict[str, Any]:
    """Drop every edit: the form is as in its preset."""
    studio.change_draft(lambda draft: Draft(draft.preset))
    return _state(studio, target)


def fix(studio: Studio, changes: dict[str, Any], target: str = THIS_MACHINE) -> dict[str, Any]:
    """Apply one of the changes that the plan offers."""
    edits = {name: value if isinstance(value, bool) else str(value) for name, value in changes.items()}
    return edit(studio, edits, target=target)


def apply_yaml(studio: Studio, text: str, target: str = THIS_MACHINE) -> dict[str, Any]:
    """Take a whole config. Returns `{"wrong": [{line, text}]}` for one that is not valid."""
    try:
        draft = studio.from_yaml(form.check(studio.draft()), text)
    except ConfigError as error:
        return {"wrong": form_answers.by_line(str(error))}
    studio.save_draft(draft)
    return _state(studio, target)


def import_config(studio: Studio, files: dict[str, str], target: str = THIS_MACHINE) -> dict[str, Any]:
    """Take a config of another trainer. `imported` of the answer says what was taken, changed and left out, and `undo`
    is what `restore` takes.

    Args:
        files: {name: text} of the config and of further files that it names.
    """
    before = studio.draft()
    config = form.check(before).config
    kept: list[str] = []
    try:
        found = imported(files, Path.cwd())
    except UnknownModel:  # the form's model stays
        fields = {name: getattr(config.model, name) for name in ("family", "path", "base")}
        kept = [f"model.{name}={json.dumps(value)}" for name, value in fields.items() if value]
        found = imported(files, Path.cwd(), kept)
    if config.data.path and not found.names_folders:
        found = imported(files, Path.cwd(), [*kept, f"data.path={json.dumps(config.data.path)}"])
    file = studio.presets().get(found.preset, before.preset)
    studio.save_draft(studio.from_yaml(form.check(Draft(file)), found.text))
    undo = studio.undo(before)
    return _state(studio, target) | {"imported": {"tool": found.tool, "lists": found.lists()}, "undo": undo}


def save_preset(studio: Studio, name: str, target: str = THIS_MACHINE) -> dict[str, Any]:
    """Save the form as a preset and go on with that. Values that are wrong stay typed; the preset has them not."""
    checked = form.check(studio.draft())
    file = studio.save_preset(checked, name)
    wrong = {field: value for field, value in checked.draft.values.items() if field in checked.errors}
    studio.save_draft(Draft(file, wrong))
    return _state(studio, target) | {"saved": str(file)}


def record(studio: Studio, target: str = THIS_MACHINE) -> dict[str, Any]:
    """Work out the memory of a combination that has no table yet."""
    studio.plan_previews.record(form.check(studio.draft()).config)
    return _state(studio, target)


def verify(studio: Studio, target: str = THIS_MACHINE) -> dict[str, Any]:
    """Compare the plan with a trace of the whole model."""
    studio.verify_plan(form.check(studio.draft()), target)
    return _state(studio, target)


def step(studio: Studio, target: str = THIS_MACHINE) -> dict[str, Any] | None:
    """Return the memory over a training step of the form's run; None while it has no plan."""
    cfg = form.check(studio.draft()).config
    found = studio.plan_previews.outline(cfg, target, studio.gpus())
    return form_answers.step(*found, cfg) if found else None


def fit(studio: Studio, allow: list[Allowed], key: str = "", target: str = THIS_MACHINE) -> dict[str, Any]:
    """Return the fastest settings of the form's run that fit, or that the search is running.

    Args:
        allow: What may change although it changes the result.
        key: `made_for` of the search, as its first answer has it. "" starts one.
        target: The GPUs to fit.
    """
    draft = studio.draft()
    question, why_not = studio.fit_question(draft, target)
    if key and (why_not or question is None or question.key != key):
        return fit_answers.changed(key)
    if why_not or question is None:
        raise InputError(why_not or "There are no GPUs to fit: choose some above.")
    found = studio.fits.found(key, allow) if key else studio.fits.search(question, allow)
    if found is None:
        return fit_answers.searching(question)
    is_typing = studio.half_typed.holds(draft.values)
    steps = list(question.cfg.stage_steps) if is_typing else planned_steps(studio.scans, question.cfg)
    return fit_answers.result(question, found, steps[0])


def take(studio: Studio, key: str, number: int, allow: list[Allowed], target: str = THIS_MACHINE) -> dict[str, Any]:
    """Apply all changes of settings that fit, as one edit. `undo` of the answer is what the function `undo` takes.

    Args:
        key: `made_for` of the answer that offered them.
        number: Which of them, from 0.
        allow: As for `fit`.
        target: As for `fit`.

    Raises:
        InputError: The form was changed after the search.
    """

    former: dict[str, Any] = {}

    def change(draft: Draft) -> Draft:
        question, why_not = studio.fit_question(draft, target)
        if why_not or question is None or question.key != key:
            raise InputError("The form or the GPUs were changed after this search: search again.")
        found = studio.fits.known(key, allow)
        if found is None or not 0 <= number < len(found.proposals):
            raise InputError("The page has forgotten this search: search again.")
        taken = {field: form.as_typed(field, now) for field, (_, now) in found.proposals[number].changes.items()}
        # A field that was as in the preset has no former value, and `undo` gives it back to the preset.
        before = {field: form.as_typed(field, draft.values[field]) for field in taken if field in draft.values}
        former.update(preset=studio.name_of(draft.preset), taken=taken, before=before)
        for field, value in taken.items():
            draft = draft.typed(field, value)
        return draft

    studio.change_draft(change)
    return _state(studio, target) | {"undo": former}


def undo(
    studio: Studio,
    preset: str,
    taken: dict[str, str | bool],
    before: dict[str, str | bool],
    target: str = THIS_MACHINE,
) -> dict[str, Any]:
    """Undo `take`, except for fields that were changed after it: their labels are `left` of the answer.

    Args:
        preset: The preset then.
        taken: {field: value that was taken}, as typed.
        before: {field: former value}, as typed; without fields that were as in the preset.

    Raises:
        InputError: Another preset was chosen after it.
    """
    left: list[str] = []

    def change(draft: Draft) -> Draft:
        if studio.name_of(draft.preset) != preset:
            raise InputError("Another preset was chosen after that: nothing was undone.")
        values = draft.values
        left.extend(name for name in taken if name not in values or form.as_typed(name, values[name]) != taken[name])
        returned = [name for name in taken if name not in left]
        draft = Draft(draft.preset, {name: value for name, value in values.items() if name not in returned})
        for name in returned:
            if name in before:
                draft = draft.typed(name, before[name])
        return draft

    studio.change_draft(change)
    return _state(studio, target) | {"left": [label(name) for name in left]}


def read_again(studio: Studio, target: str = THIS_MACHINE) -> dict[str, Any]:
    """Read the images again."""
    return _state(studio, target, is_fresh=True)


def start(studio: Studio) -> str:
    """Start the run and return its name. Raises InputError with what prevents it."""
    return studio.start(studio.draft()).path.name


def enqueue(studio: Studio, gpus: list[int]) -> str:
    """Add the run to the queue and return a sentence. gpus: nvidia-smi's indices; none for all."""
    entry = studio.enqueue(studio.draft(), ",".join(map(str, gpus)))
    return f"{entry.name} waits in the queue as number {entry.number}."


def copy(studio: Studio, run: str) -> None:
    """Bring the config of a run into the form; of a rehearsal, that of the real run. Raises InputError if damaged."""
    studio.save_draft(form.check(Draft(studio.run(run).settings_file)).draft)


def retry(studio: Studio, run: str) -> str:
    """Bring the config of a failed run into the form, with the changes that its error suggests. Returns a sentence."""
    error = studio.follower(studio.run(run)).view().error
    changes = with_remedy(studio.run(run), error, studio.gpus()).retry if error else ()
    studio.save_draft(form.from_overrides(studio.run(run).config_file, changes))
    return f"The settings of {run}, with {', '.join(changes)}." if changes else f"The settings of {run}."


def models(studio: Studio) -> list[dict[str, Any]]:
    """Return the base models, each with its presets."""
    return model_answers.models(studio.model_choices(), _image(studio))


def _image(studio: Studio) -> str:
    """The address of one of the images that the demo model was made for."""
    image = next(iter(sorted((PRESETS / "quickstart").glob("*.png"))), None)
    try:
        return address(studio.thumbnails.of(image, FULL)) if image else ""
    except InputError:  # nothing can be written
        return ""


def download(studio: Studio, model: str, target: str = THIS_MACHINE) -> dict[str, Any]:
    """Start the download of a model, or continue it. Another window may have done so just before."""
    studio.model_downloads.ensure(model)
    return _state(studio, target)


def pause(studio: Studio, model: str, target: str = THIS_MACHINE) -> dict[str, Any]:
    """Pause the download of a model."""
    studio.model_downloads.pause(model)
    return _state(studio, target)


def browse(studio: Studio, path: str = "") -> dict[str, Any]:
    """Return what is in a folder below the allowed roots."""
    found = studio.picker.listing(path)
    return vars(found) | {"roots": [str(root) for root in studio.picker.roots], "recent": studio.recent.all()}


def glance(studio: Studio, path: str) -> dict[str, Any]:
    """Return how many images are directly in a folder that is being typed, or what is wrong with it."""
    return form_answers.glance(path)


def thumbnails(studio: Studio) -> list[dict[str, str]]:
    """Return some images of the draft's folder."""
    draft = studio.draft()
    if studio.half_typed.holds(draft.values):
        return []
    found = studio.scans.of(form.check(draft).config)
    shown = []
    for image in found.images[:NUM_THUMBNAILS]:
        try:
            small, full = studio.thumbnails.of(image), studio.thumbnails.of(image, FULL)
        except InputError:  # the problems of the data name it
            continue
        shown.append({"src": address(small), "full": address(full), "name": image.name})
    return shown


def facts() -> dict[str, Any]:
    """Return what the script needs once: every field, the groups and the methods."""
    return {
        "fields": form_answers.FIELDS,
        "groups": form_answers.GROUPS,
        "methods": form_answers.METHODS,
        "this_machine": THIS_MACHINE,
        "targets": TARGETS,
        "missing_words": missing_words(),
    }


def _state(studio: Studio, target: str, is_fresh: bool = False, is_typing: bool = False) -> dict[str, Any]:
    """The form as a window shows it; `key` changes when anything of it does."""
    draft = studio.draft()
    is_typing = is_typing or studio.half_typed.holds(draft.values)
    checked = studio.check(draft, is_fresh, is_typing)
    preview = studio.plan(checked, target)
    config = checked.config
    # While somebody types, nothing waits for files to be counted.
    steps = list(config.stage_steps) if is_typing else planned_steps(studio.scans, config)
    whole = studio.planned_seconds(checked, target, steps)
    warnings = [*form_answers.notes(checked), *checked.warnings]
    found = None if is_typing else form_answers.data(studio, checked)
    downloads = studio.model_downloads.all()
    # A scan that is not complete would be waited for a second time.
    offered = form_answers.proposals(checked, studio.scans.of(config)) if found and found["is_complete"] else []
    answer = {
        "preset": studio.name_of(draft.preset),
        "problem": studio.draft_problem,
        "is_text": families.trains_on(checked.config) == "text",
        "rows": form_answers.rows(checked),
        "errors": form_answers.errors(checked, downloads),
        "ready": checked.can_start,
        "looked_at": form_answers.looked_at(found, studio.gpus()),
        "waiting": checked.waiting,
        "warnings": warnings,
        "remedies": form_answers.remedies(
            [*checked.errors.values(), *warnings, *(found["problems"] + found["warnings"] if found else [])]
        ),
        "changes": form_answers.changes(checked),
        "plan": form_answers.plan(preview, checked.config, studio.gpus(), steps, whole),
        "fit": fit_answers.offer(*studio.fit_question(draft, target), target),
        "earlier": form_answers.earlier(studio, checked.config, steps) if target == THIS_MACHINE else None,
        "data": found,
        "proposals": offered,
        "kept_words": form_answers.kept_words(checked, offered),
        "downloads": {model: vars(found) for model, found in downloads.items()},
        "disk": form_answers.disk(preview, checked.config, studio.runs),
        "gpus": [{"index": gpu.index, "name": gpu.name} for gpu in studio.gpus()],
        "recent": studio.recent.all(),
        **form_answers.config_text(checked),
        "commands": [
            ["Train without this page", form.headless_command(draft)],
            ["Command that Start runs", form.torchrun_command(checked.config, studio.runs)],
        ],
    }
    return answer | {"key": hashlib.sha256(json.dumps(answer).encode()).hexdigest()[:16]}
