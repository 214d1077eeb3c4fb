"""`launch.py --caption`: caption a folder's images with a model, show the progress, say what was written."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from app.data.captioning import Captioning, Progress
from trainer.launcher.commands import EXIT_CODES, POLL_S, StopRequests
from trainer.run import process
from trainer.run.captioning import CaptionJob, CaptionRequest
from trainer.system.errors import InputError
from trainer.system.terminal import complain, say, shortened

MOST_SHOWN = 5
"""Sentences about images without a caption that are shown at the end."""
MOST_LETTERS = 100
"""Letters of a caption in a line of progress."""


def caption(request: CaptionRequest, runs: Path) -> int:
    """Caption images and follow the job to its end. Ctrl-C stops it; the same command continues it.

    Returns:
        The exit code: 0 done, 1 failed, 2 failed by the user's mistake, 130 stopped.

    Raises:
        InputError: The job cannot be started.
    """
    captioning = Captioning(runs)
    job = captioning.start(request)
    if job is None:
        words = {"missing": "--overwrite model or all", "model": "--overwrite all"}.get(request.overwrite, "")
        say(f"{request.folder}: every image has a caption" + (f"; {words} writes them anew" if words else ""))
        return 0
    say(f"captions by {request.model}, job {job.path}")
    try:
        progress = _follow(captioning, job)
    except (InputError, OSError) as error:  # captions cannot be written: the model need not go on
        captioning.stop(job)
        raise InputError(f"{error}. The job was stopped; the same command continues it") from error
    return _conclude(progress, request)


def undo(folder: Path, runs: Path) -> int:
    """Take back all captions of the newest job of a folder. Returns 0.

    Raises:
        InputError: The folder has no job, or the job is running.
    """
    restored, kept = Captioning(runs).undo_latest(folder)
    say(f"{restored} captions taken back" + (f"; {kept} were changed since and are left as they are" if kept else ""))
    return 0


def _follow(captioning: Captioning, job: CaptionJob) -> Progress:
    seen, state = 0, ""
    with StopRequests() as stops:
        while True:
            progress = captioning.follow(job)
            for line in lines(progress, captioning, seen):
                say(line)
            seen = progress.answered
            if progress.state != state and progress.state == "loading":
                say("loading the model")
            state = progress.state
            if not progress.is_running and not process.alive(job.run):
                return progress
            if stops.count >= 2:
                process.terminate(job.run)
            elif stops.count == 1 and not stops.is_handled:
                stops.is_handled = True
                captioning.stop(job)
                say("stopping after this image; Ctrl-C again ends it at once")
            time.sleep(POLL_S)


def lines(progress: Progress, captioning: Captioning, seen: int) -> Iterator[str]:
    """Yield a line for each new answer: `12/40  harbour.jpg  a photo of ...  (30 s left)`."""
    new = captioning.new_answers(progress.job, seen)
    for number, written in enumerate(new, seen + 1):
        text = shortened(written.caption, MOST_LETTERS) if written.caption else f"no caption: {written.problem}"
        name = written.name.replace("\n", "\\n")
        left = progress.left_s if number == progress.answered and number < progress.total else None
        yield f"{number}/{progress.total}  {name}  {text}" + (f"  ({left:.0f} s left)" if left else "")


def _conclude(progress: Progress, request: CaptionRequest) -> int:
    for warning in progress.warnings:
        complain(f"warning: {warning}")
    _complain_of(progress.problems, "got no caption")
    _complain_of(progress.kept, "changed meanwhile")
    if progress.state == "failed":
        complain(f"error: {progress.error}")
    back = f"; --caption {shlex.quote(request.folder)} --undo takes them back" if progress.written else ""
    say(f"{progress.written} captions written{back}")
    if progress.state in ("stopped", "failed") and progress.answered:
        complain(f"{progress.state} at {progress.answered} of {progress.total} images; the same command continues")
    if progress.state == "failed":
        return progress.exit_code
    return EXIT_CODES[progress.state]


def _complain_of(sentences: Sequence[str], what: str) -> None:
    if sentences:
        more = [f"and {len(sentences) - MOST_SHOWN} more"] if len(sentences) > MOST_SHOWN else []
        complain("\n".join([f"{len(sentences)} {what}:", *sentences[:MOST_SHOWN], *more]))
