"""Captions by a model in a notebook: the same jobs as those of the page and of `launch.py --caption`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from app.caption_command import lines
from app.data.captioning import Captioning
from app.notebook.lessons import Table
from trainer.run import process
from trainer.run.captioning import CaptionRequest
from trainer.system.errors import InputError
from trainer.system.terminal import say

POLL_S = 0.2


async def caption(folder: str | Path, model: str | Path, runs: Path, **options: object) -> Table:
    """Caption as `app.notebook.caption` says."""
    request = CaptionRequest.checked({"folder": str(folder), "model": str(model), **options})
    captioning = Captioning(runs)
    job = captioning.start(request)
    if job is None:
        say(f"{folder}: every image has a caption")
        return Table(["image", "caption"], [])
    seen = 0
    while True:
        progress = captioning.follow(job)
        for line in lines(progress, captioning, seen):
            say(line)
        seen = progress.answered
        if not progress.is_running and not process.alive(job.run):
            break
        await asyncio.sleep(POLL_S)
    if progress.state == "failed":
        raise InputError(progress.error)
    written = captioning.new_answers(job, 0)
    return Table(["image", "caption"], [[one.name, one.caption] for one in written if one.caption])


def undo(folder: str | Path, runs: Path) -> int:
    """Take back the captions that the newest job of a folder wrote, and return how many.

    Raises:
        InputError: No captions of a model are left, or a job of the folder is running.
    """
    return Captioning(runs).undo_latest(Path(folder))[0]
