"""The panel "Caption with a model" of the screen Data: captions of the draft's images by a vision-language model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from app.data import dataset
from app.data.captioning import Captioning, Progress, folders_apart
from app.form import draft as form
from app.studio import Studio
from app.web.answers import Calls
from app.web.pages.data import ANOTHER_FOLDER
from trainer.config.models import PublishedModel, captioners
from trainer.config.sections import DataConfig
from trainer.launcher.jobs.downloads import cached
from trainer.run.captioning import CaptionJob, CaptionRequest
from trainer.system.errors import InputError

MOST_SENTENCES = 20
"""Sentences about images without a caption that are sent."""


def calls(studio: Studio) -> Calls:
    """Return the functions of the panel's script."""
    captioning = Captioning(studio.runs)
    captioning.attend_running()
    functions: list[Callable[..., Any]] = [state, start, resume, stop, undo]
    models: list[Callable[..., Any]] = [download, pause]
    return {f"captioning_{function.__name__}": partial(function, studio, captioning) for function in functions} | {
        f"captioning_{function.__name__}": partial(function, studio) for function in models
    }


def state(studio: Studio, captioning: Captioning, folder: str = "") -> dict[str, Any]:
    """Return the newest job of one of the draft's folders, after its captions were written.

    Args:
        folder: The folder; its first one where the draft does not have it.
    """
    folders = _folders(_data(studio))
    if not folders:
        return {"folders": [], "folder": "", "job": None, "models": []}
    chosen = folder if folder in folders else folders[0]
    job = captioning.latest(Path(chosen))
    return {
        "folders": folders,
        "folder": chosen,
        "job": None if job is None else _described(captioning.follow(job)),
        "num_gpus": len(studio.gpus()),
        "models": [_offered(studio, model) for model in captioners().values()],
    }


def download(studio: Studio, model: str) -> None:
    """Start the download of a model that writes captions, or continue it; another window may have done so before."""
    studio.model_downloads.ensure(model)


def pause(studio: Studio, model: str) -> None:
    """Pause the download of a model."""
    studio.model_downloads.pause(model)


def start(studio: Studio, captioning: Captioning, folder: str, values: dict[str, Any]) -> str:
    """Start a job, or continue one that asked the same. Returns its name; "" where every image has a caption."""
    data = _data(studio)
    if folder not in _folders(data):
        raise InputError(f"{ANOTHER_FOLDER} started")
    job = captioning.start(CaptionRequest.checked({**values, "folder": folder}), folders_apart(data))
    if job is None:
        return ""
    captioning.attend(job)
    return job.path.name


def resume(studio: Studio, captioning: Captioning, job: str, folder: str) -> None:
    """Continue a job that was stopped or has failed. folder: That of the job, which the window shows."""
    found = _shown(studio, captioning, job, folder)
    captioning.resume(found)
    captioning.attend(found)


def stop(studio: Studio, captioning: Captioning, job: str, folder: str) -> None:
    """End a job after the images that it looks at. folder: As for `resume`."""
    captioning.stop(_shown(studio, captioning, job, folder))


def undo(studio: Studio, captioning: Captioning, job: str, folder: str) -> list[int]:
    """Take back all captions of a job. Returns the number of restored captions, and of those that were left.

    Args:
        folder: As for `resume`.
    """
    return list(captioning.undo(_shown(studio, captioning, job, folder)))


def _shown(studio: Studio, captioning: Captioning, job: str, folder: str) -> CaptionJob:
    """The job of this name. Raises InputError where it or the draft has another folder than the window shows."""
    found = captioning.job(job)
    is_of = os.path.realpath(found.request.folder) == os.path.realpath(folder)
    if not is_of or folder not in _folders(_data(studio)):
        raise InputError(f"{ANOTHER_FOLDER} changed")
    return found


def _offered(studio: Studio, model: PublishedModel) -> dict[str, Any]:
    found = studio.model_downloads.state(model.id)
    return {
        "id": model.id,
        "name": model.name,
        "bytes": model.num_bytes,
        "licence": model.licence,
        "licence_note": model.licence_note,
        "page": model.page,
        "is_here": cached(model.id).is_complete,
        "download": None if found is None else asdict(found),
    }


def _data(studio: Studio) -> DataConfig:
    return form.check(studio.draft()).config.data


def _folders(data: DataConfig) -> list[str]:
    return [str(folder) for folder in dataset.folders(data) if folder.is_dir()]


def _described(progress: Progress) -> dict[str, Any]:
    job: CaptionJob = progress.job
    last, folder = progress.last, Path(job.request.folder)
    return {
        "name": job.path.name,
        "request": asdict(job.request),
        "state": progress.state,
        "is_running": progress.is_running,
        "is_stopping": job.run.requested("stop"),
        "is_undone": job.is_undone,
        "total": progress.total,
        "answered": progress.answered,
        "written": progress.written,
        "kept": [sentence.replace(f"{folder}/", "") for sentence in progress.kept[:MOST_SENTENCES]],
        "num_kept": len(progress.kept),
        "problems": [sentence.replace(f"{folder}/", "") for sentence in progress.problems[:MOST_SENTENCES]],
        "num_problems": len(progress.problems),
        "rate": progress.rate,
        "left_s": progress.left_s,
        "last": None if last is None else {"image": str(folder / last.name), "name": last.name, "text": last.caption},
        "warnings": list(progress.warnings),
        "error": progress.error,
    }
