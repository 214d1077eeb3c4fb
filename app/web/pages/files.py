"""The files of a run: its exports and checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from app.runs import exports
from app.studio import Studio
from app.web.answers import Calls
from app.web.served_files import address
from trainer.config.families import trains_on
from trainer.config.schema import RunConfig
from trainer.run import manifest
from trainer.run.folder import RunDir
from trainer.system.errors import InputError


def calls(studio: Studio) -> Calls:
    """Return the functions of the script of the tab Files."""

    def files_list(name: str) -> dict[str, Any]:
        run = studio.run(name)
        follower = studio.follower(run)
        view, exporting = follower.view(), studio.exporting(run)
        is_exporting = exporting is not None
        export = follower.config.export
        # The draft of an export at work looks like one that was left behind.
        is_busy = is_exporting or view.is_running
        return {
            "folder": str(run.path),
            "choices": exports.choices(follower.config),
            "usual": {"what": follower.config.export_what, "format": export.format, "dtype": export.dtype},
            "export": _state(studio, run),
            "step": manifest.newest_step(run.checkpoints),
            "is_text": trains_on(follower.config) == "text",
            "branch": None if follower.config.stages else _settings(follower.config, view.num_steps),
            "files": [asdict(file) for file in exports.listed(run, view, is_exporting)],
            "unfinished": [
                {**asdict(one), "is_writing": is_busy or one.is_recent} for one in exports.unfinished(run, view)
            ],
            "checkpoints": [asdict(one) for one in exports.checkpoints(run, view.is_alive, exporting)],
        }

    def files_export(name: str, what: str, format: str, dtype: str, step: int | None = None) -> dict[str, Any]:
        run = studio.run(name)
        studio.export(run, what, format, dtype, step or "newest")
        return _state(studio, run)

    def files_checksum(name: str, file: str) -> str:
        run = studio.run(name)
        return exports.checksum(exports.file_of(run, studio.follower(run).view(), file))

    def files_offer(name: str, file: str) -> str:
        run = studio.run(name)
        found = exports.file_of(run, studio.follower(run).view(), file)
        return address(studio.downloads.offer(found))

    def files_delete_checkpoint(name: str, checkpoint: str) -> None:
        run = studio.run(name)
        exports.delete_checkpoint(run, checkpoint, studio.exporting(run))

    return {
        "files_list": files_list,
        "files_export": files_export,
        "files_checksum": files_checksum,
        "files_offer": files_offer,
        "files_delete_checkpoint": files_delete_checkpoint,
    }


def _settings(config: RunConfig, num_steps: int | None) -> dict[str, Any]:
    """Return what a run that goes on from a checkpoint may do otherwise, as it is now."""
    return {"lr": config.optim.lr, "steps": config.train.steps or num_steps}


def _state(studio: Studio, run: RunDir) -> dict[str, Any]:
    """Return the state of the export that was started from here: a sentence, and whether it goes on or failed."""
    try:
        return {"text": studio.export_state(run), "is_going": studio.exporting(run) is not None, "is_failed": False}
    except InputError as error:
        return {"text": str(error), "is_going": False, "is_failed": True}
