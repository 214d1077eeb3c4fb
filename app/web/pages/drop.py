"""The screen Drop and name: images and one word for them become a run whose settings are all proposed.

What is proposed goes into the draft that New run shows, so that each screen shows what was changed on the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from app.data import dataset
from app.data.captioning import Captioning
from app.data.scans import ScanResult
from app.form import draft as form
from app.form import proposals
from app.form.draft import Checked, Draft
from app.form.pending_run import Pending, PendingRun, download_of
from app.studio import Studio
from app.web.answers import Calls
from app.web.pages import new_run
from app.web.pages.data import ANOTHER_FOLDER
from trainer.config import families
from trainer.config.fields import label
from trainer.config.models import published_models
from trainer.config.schema import RunConfig
from trainer.config.titles import model_title
from trainer.launcher import preflight
from trainer.run.captioning import CaptionJob
from trainer.system.errors import InputError

MOST_MADE = 64
"""Folders whose window is remembered, so that one that asks again after a lost answer gets no second folder."""
FORM = ("preset", "plan", "earlier", "disk", "waiting", "warnings")
"""Answers of the form that the screen shows."""
MOST_SAID = 20
"""Warnings of the images that are sent."""


def calls(studio: Studio) -> Calls:
    """Return the functions of the screen's script."""
    captioning = Captioning(studio.runs)
    pending = PendingRun(studio, captioning)
    pending.attend()
    made = Made({}, threading.Lock())
    functions: list[Callable[..., Any]] = [state, start]
    changing: list[Callable[..., Any]] = [edit, preset]
    return {
        **{f"drop_{function.__name__}": partial(function, studio, captioning, pending) for function in functions},
        **{f"drop_{function.__name__}": partial(function, studio) for function in changing},
        "drop_make": partial(make, studio, made),
        "drop_models": partial(models, studio),
        "drop_forget": pending.forget,
        "drop_is_home": lambda: not studio.find_runs(),
    }


@dataclass(frozen=True)
class Made:
    """What was answered to the windows that asked for a folder last, by their ids."""

    answers: dict[str, dict[str, Any]]
    lock: threading.Lock


def make(studio: Studio, made: Made, id: str, word: str) -> dict[str, Any]:
    """Make a folder for images, and begin a draft of it.

    Args:
        id: Made by the window; the same one gets the same folder.
        word: What the images show.

    Returns:
        {"folder"}, and as `undo` what `new_restore` takes to bring the former draft back.
    """
    with made.lock:
        if id in made.answers:
            return made.answers[id]
        former = studio.draft()
        folder = make_folder(studio, word)
        made.answers[id] = {"folder": folder, "undo": studio.undo(former) if former.values else None}
        for old in list(made.answers)[:-MOST_MADE]:
            del made.answers[old]
        return made.answers[id]


def make_folder(studio: Studio, word: str) -> str:
    """Make a folder for images that are called by a word, and begin a draft of it. Returns the folder.

    Raises:
        InputError: Nothing can be called by the word, or no folder can be made.
    """
    if closed := studio.uploads.closed or studio.unwritable:
        raise InputError(closed)
    values = proposals.named(word)
    folder = str(studio.uploads.folders.make_new(values["data.trigger"].replace("/", "-")))
    # An image that the writer of captions cannot describe is trained with the word alone.
    values |= {"data.path": folder, "data.missing_caption": "empty"}
    fits = proposals.fitting(studio.model_choices())
    preset = studio.preset(fits.name) if fits else studio.draft().preset
    studio.half_typed.leave(["data.path"])
    studio.save_draft(form.edited(Draft(preset), values))
    return folder


def state(
    studio: Studio, captioning: Captioning, pending: PendingRun, folder: str = "", known: str = ""
) -> dict[str, Any] | None:
    """Return what the screen shows, or None for a window that shows it already.

    Args:
        folder: That of the window's address. There are `lines` only where the draft has it.
        known: `key` of what it shows.
    """
    checked, found = studio.check_with_images(studio.draft())
    waiting, shown = pending.state(), _folder(checked.config)
    answer = {
        "folder": shown,
        "folder_is_own": "data.path" in checked.draft.values and families.trains_on(checked.config) == "images",
        "lines": _lines(studio, captioning, checked, found) if folder and folder == shown else None,
        "pending": _waiting(studio, captioning, waiting) if waiting else None,
    }
    key = hashlib.sha256(json.dumps(answer).encode()).hexdigest()[:16]
    return None if key == known else answer | {"key": key}


def _lines(studio: Studio, captioning: Captioning, checked: Checked, found: ScanResult) -> dict[str, Any]:
    whole = new_run.state(studio) or {}
    rows = {name: whole["rows"][name]["value"] for name in ("name", "data.trigger", "sample.prompts")}
    offered = proposals.completed(checked, found) if found.is_complete else {}
    return {
        "rows": rows | {name: value for name, value in offered.items() if name in rows},
        "offered": offered,
        "num_gpus": 0 if checked.config.parallel.device == "cpu" else checked.config.parallel.world_size,
        "errors": [error for error in whole["errors"] if error["field"] != "model.path" or not _download(checked)],
        "captions": _captions(studio, captioning, checked.config, found),
        "images": {
            "is_complete": found.is_complete,
            "count": len(found.images),
            "held_out": len(found.held_out),
            "warnings": list(found.warnings[:MOST_SAID]),
        },
        "looks": _looks(studio, checked.config, found),
        "note": proposals.model_note(studio.model_choices(), studio.name_of(checked.draft.preset)),
        **{name: whole[name] for name in FORM},
    }


def models(studio: Studio) -> list[dict[str, Any]]:
    """Return the models to choose from, each with its presets as [name, words]."""
    return [
        {
            "name": (name := model_title(choice.path, choice.family)),
            "presets": [
                [one.name, f"{name}: {', '.join(filter(None, (one.title, one.needs, one.verdict)))}"]
                for one in choice.presets
            ],
        }
        for choice in proposals.of_images(studio.model_choices())
    ]


def edit(studio: Studio, folder: str, edits: dict[str, str | bool]) -> None:
    """Change fields of the draft. folder: As for `start`; another window's pictures get nothing that was typed here."""
    _require_shown(form.check(studio.draft()).config, folder, "changed")
    new_run.edit(studio, edits)


def preset(studio: Studio, folder: str, chosen: str) -> list[str]:
    """Choose another preset. folder: As for `start`. Returns the labels of what it does not take."""
    _require_shown(form.check(studio.draft()).config, folder, "changed")
    left: list[str] = new_run.preset(studio, chosen, is_forced=True)["left"]
    return left


def start(
    studio: Studio, captioning: Captioning, pending: PendingRun, id: str, folder: str, writer: str = ""
) -> dict[str, Any]:
    """Start the run of the draft, after its captions are written and its model is downloaded.

    Args:
        id: As for `make`.
        folder: Of the images that the window shows.
        writer: The model that writes captions where there are none; "" for none.

    Raises:
        InputError: Something else keeps the run from starting.
    """
    draft = studio.draft()
    checked, _ = studio.check_with_images(draft)
    _require_shown(checked.config, folder, "started")
    if checked.waiting:
        raise InputError(checked.waiting)
    model = _download(checked)
    wrong = {name: text for name, text in checked.errors.items() if name != "model.path" or not model}
    for name, text in wrong.items():
        raise InputError(f"{label(name)}: {text}" if name else text)
    wanted = Pending(id, folder, studio.name_of(draft.preset), dict(draft.values), writer, model=model)
    return _waiting(studio, captioning, pending.begin(wanted))


def _folder(config: RunConfig) -> str:
    return next((str(folder) for folder in dataset.folders(config.data)), "")


def _require_shown(config: RunConfig, folder: str, done: str) -> None:
    """Raise InputError where another window has chosen other pictures. done: What is not done then."""
    if _folder(config) != folder:
        raise InputError(f"{ANOTHER_FOLDER} {done}")


def _download(checked: Checked) -> str:
    """The model of the draft where it is published and has to be downloaded, else ""."""
    model = checked.config.model
    known = published_models().get(model.path)
    return "" if known is None or known.is_built_in or preflight.has_model(model) else model.path


def _captions(studio: Studio, captioning: Captioning, config: RunConfig, found: ScanResult) -> dict[str, Any]:
    """How many images of the folder have no caption, who can write some, and the job that does."""
    missing = num_uncaptioned(found, _folder(config))
    return {
        "missing": missing,
        "writers": [vars(writer) for writer in proposals.writers(studio.runs)] if missing != 0 else [],
        "job": _progress(captioning, captioning.latest(Path(_folder(config)))),
    }


def num_uncaptioned(found: ScanResult, folder: str) -> int | None:
    """Return how many images of a folder have no caption; None where they are too many to look at."""
    if len(found.images) > dataset.MOST_COUNTED:
        return None
    own = (image for image in found.images if image.is_relative_to(folder))  # captions are written there
    return sum(not item.caption and not item.is_fixed for item in dataset.items(own, found))


def _progress(captioning: Captioning, job: CaptionJob | None) -> dict[str, Any] | None:
    """How far a job is; None for one that is not running."""
    found = captioning.follow(job) if job else None
    if found is None or not found.is_running:
        return None
    return {"answered": found.answered, "total": found.total, "left_s": found.left_s}


def _looks(studio: Studio, config: RunConfig, found: ScanResult) -> dict[str, int]:
    """Numbers of images to look at; the look begins by itself when the images are read."""
    result = studio.looks.of(config)
    if found.is_complete and found.images and (result is None or result.images != found.images):
        with contextlib.suppress(InputError):  # the cache leads elsewhere: the start says so
            studio.looks.start(config, found)
        return {}
    if result is None or result.is_running:
        return {}
    leaks = sum(group.leaks for group in result.groups)
    copies = sum(len(group.images) for group in result.groups)
    return {"copies": copies, "leaks": leaks, "blurred": len(result.blurred), "flat": len(result.flat)}


def _waiting(studio: Studio, captioning: Captioning, pending: Pending) -> dict[str, Any]:
    """What becomes of a run, and how far that is what it waits for."""
    job = captioning.job(pending.job) if pending.job and pending.is_waiting else None
    return {
        **{name: getattr(pending, name) for name in ("id", "folder", "problem", "run", "is_waiting", "is_uncertain")},
        "name": pending.values.get("name", pending.preset),
        "job": _progress(captioning, job),
        "captioner": _download_left(studio, download_of(pending.writer)) if pending.is_waiting else None,
        "download": _download_left(studio, pending.model) if pending.is_waiting else None,
    }


def _download_left(studio: Studio, model: str) -> list[int] | None:
    """How many bytes of a model are here, of how many; None for one that is not waited for."""
    state = studio.model_downloads.state(model) if model else None
    return [state.num_bytes, state.total_bytes] if state and state.state != "done" else None
