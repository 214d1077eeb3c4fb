"""Captioning jobs for the page and the command line: choose images, start, follow, apply what was written, undo.

The ranks of a job write captions into its folder; only this module writes them next to the images, through the caption
editor and its log. Whoever follows a job applies what is not applied yet, so a page or a terminal may be closed.

See DECISIONS 195.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.data.captions import Captions, Card, Change, saved
from trainer.config.sections import DataConfig, half_character
from trainer.data.images.image_files import Watcher, scan, separate_folders
from trainer.data.images.image_members import is_member
from trainer.launcher.jobs.captioning import check_model, start
from trainer.run import process
from trainer.run.captioning import FOLDER, Applied, Asked, CaptionJob, CaptionRequest, Written, jobs
from trainer.run.events import ErrorEvent, EventReader, LineFollower, State, StatusEvent, WarningEvent
from trainer.system import files
from trainer.system.errors import InputError

RECENT = 20
"""Answers whose times give the rate."""
ATTENDED_EVERY_S = 1.0
STARTED = frozenset({"starting", "loading", "sampling"})
LOG = Path("drafts", "captions.jsonl")
"""The caption editor's log of changes, in the folder of runs."""


@dataclass(frozen=True)
class Progress:
    """How far a job is.

    Attributes:
        state: As of a run; `sampling` while captions are written.
        total: Images to be captioned.
        answered: Images that the model has looked at, with those that have a problem.
        written: Captions that are next to their images now.
        kept: Sentences about files that were changed meanwhile and are left as they are.
        problems: Sentences about images without a caption.
        rate: Images per second; 0 where it is not known yet.
        last: The newest caption.
        warnings: What the ranks said.
        error: Why the job failed, and what to do.
        exit_code: 2 where it failed by the user's mistake, else 1.
    """

    job: CaptionJob
    state: State
    total: int
    answered: int
    written: int
    kept: tuple[str, ...]
    problems: tuple[str, ...]
    rate: float
    last: Written | None
    warnings: tuple[str, ...]
    error: str
    exit_code: int

    @property
    def is_running(self) -> bool:
        return self.state in STARTED

    @property
    def left_s(self) -> float | None:
        """Seconds until the job is done; None where it is not known."""
        return (self.total - self.answered) / self.rate if self.rate else None


@dataclass
class _Followed:
    """The part of a job that was read so far."""

    images: Mapping[str, Asked]
    captions: LineFollower[Written]
    applied: LineFollower[Applied]
    written: dict[str, Written] = field(default_factory=dict)
    done: dict[str, Applied] = field(default_factory=dict)

    @classmethod
    def of(cls, job: CaptionJob) -> _Followed:
        return cls({image.name: image for image in job.images()}, job.captions(), job.applied())

    def read(self) -> list[Written]:
        """Read what is new. Returns the new answers."""
        new = [line for line in self.captions.read() if line.name in self.images and line.name not in self.written]
        self.written |= {line.name: line for line in new}
        self.done |= {line.name: line for line in self.applied.read()}
        return new


def folders_apart(data: DataConfig) -> frozenset[Path]:
    """Return the folders of the data whose images get no captions, as masks."""
    return separate_folders(data)


class Captioning:
    """The captioning jobs of a folder of runs. Several pages and commands may use it at once."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs.absolute()
        self._captions = Captions(self.runs / LOG)
        self._followed: dict[Path, _Followed] = {}
        self._lock = threading.Lock()

    def start(self, request: CaptionRequest, apart: Collection[Path] = ()) -> CaptionJob | None:
        """Start a job, or continue the newest one of the folder that asked the same and did not end. Returns at once.

        Args:
            request: What is captioned, and how. Nothing is started where a job that asked the same is running.
            apart: Folders inside that of the request whose images get no captions, as masks.

        Returns:
            The job; None where no image needs a caption.

        Raises:
            InputError: The model or the folder cannot be used, or another job of this folder, or of one in or around
                it, is running.
        """
        check_model(request.model_path)
        folder = os.path.abspath(Path(request.folder).expanduser())
        _require_folder(Path(folder))
        is_local = not request.is_demo and os.path.exists(request.model)
        request = replace(request, folder=folder, model=os.path.abspath(request.model) if is_local else request.model)
        root = self.runs / FOLDER
        files.make_private_if_new(self.runs)
        files.make_private(root)
        with files.locked(root / ".lock"):
            if (running := self._running_near(request)) is not None:
                return running
            # Captions of jobs that ended while no page was open; what they captioned is not asked again.
            self.apply_earlier(Path(request.folder))
            job = self._unfinished(request)
            if job is None:
                images = choose(request, self._earlier(request), apart)
                if not images:
                    return None
                job = CaptionJob.create(self.runs, request, images)
            elif job.request != request:
                job.change(request)
            start(job)
        return job

    def resume(self, job: CaptionJob) -> None:
        """Continue a job that was stopped or has failed. Returns at once.

        Raises:
            InputError: The model is gone, a job of this folder is running, or all captions were taken back.
        """
        if job.is_undone:
            raise InputError(f"{job.path.name}: its captions were taken back; start a new one")
        check_model(job.request.model_path)
        with files.locked(self.runs / FOLDER / ".lock"):
            if self._running_near(job.request) is None:
                start(job)

    def apply_earlier(self, folder: Path) -> None:
        """Write what earlier jobs of a folder wrote while no page and no command followed them."""
        for job in reversed([*self._of(folder)]):
            with self._lock:
                self._apply(job, self._read(job))

    def latest(self, folder: Path) -> CaptionJob | None:
        """Return the newest job of a folder."""
        return next(self._of(folder), None)

    def job(self, name: str) -> CaptionJob:
        """Return the job of this name. Raises InputError where there is none."""
        found = next((job for job in jobs(self.runs) if job.path.name == name), None)
        if found is None:
            raise InputError(f"{name[:200]!r}: no such captioning job; it may have been removed")
        return found

    def follow(self, job: CaptionJob) -> Progress:
        """Apply what was written since the last call, and return how far the job is.

        Raises:
            InputError: A caption cannot be written.
        """
        process.record_end(job.run)
        state = process.status(job.run)  # before the captions are read: a job that has ended has written them all
        with self._lock:
            followed = self._read(job)
            self._apply(job, followed)
        events = EventReader(job.run.events_file).read()
        errors = [event for event in events if isinstance(event, ErrorEvent)]
        warnings = [event.message for event in events if isinstance(event, WarningEvent)]
        answers = sorted(followed.written.values(), key=lambda written: written.time)
        captioned = [written for written in answers if written.caption]
        # The rate is by the latest answers since the model was loaded, which takes longer than many of them.
        loaded = [event.time for event in events if isinstance(event, StatusEvent) and event.state == "sampling"]
        latest = [answer for answer in answers[-RECENT:] if answer.time >= max(loaded, default=0.0)]
        seconds = latest[-1].time - latest[0].time if latest else 0.0
        return Progress(
            job,
            state,
            len(followed.images),
            len(answers),
            sum(not applied.kept for applied in followed.done.values()),
            tuple(applied.kept for applied in followed.done.values() if applied.kept),
            tuple(written.problem for written in answers if written.problem),
            (len(latest) - 1) / seconds if seconds > 0 else 0.0,
            captioned[-1] if captioned else None,
            tuple(dict.fromkeys(warnings)),
            _explained(errors[-1]) if errors and state == "failed" else "",
            errors[-1].exit_code if errors else 1,
        )

    def attend(self, job: CaptionJob) -> None:
        """Follow a job to its end on a thread of its own, so that captions are written while no window shows it."""
        threading.Thread(target=self._attend, args=(job,), name=f"captions of {job.path.name}", daemon=True).start()

    def attend_running(self) -> None:
        """Do the same for all jobs that are running, as those of a page before its restart."""
        for job in jobs(self.runs):
            if process.status(job.run) in STARTED:
                self.attend(job)

    def new_answers(self, job: CaptionJob, seen: int) -> list[Written]:
        """Return the answers after the first `seen` ones that `follow` has read."""
        with self._lock:
            followed = self._followed.get(job.path)
            return list(followed.written.values())[seen:] if followed else []

    def stop(self, job: CaptionJob) -> None:
        """Ask a job to end after the images that it looks at. Does nothing if it is not running."""
        if process.status(job.run) in STARTED:
            process.stop(job.run)

    def undo(self, job: CaptionJob) -> tuple[int, int]:
        """Take back all captions of a job.

        Returns:
            The number of captions that were restored, and of those that were changed since and are left.

        Raises:
            InputError: The job is running.
        """
        if process.status(job.run) in STARTED:
            raise InputError(f"{job.path.name}: is running; stop it first")
        # Also what is not applied yet: it is not to be applied later, nor by another process at this moment.
        with self._lock, files.locked(job.path / "apply.lock"):
            job.mark_undone()
            folder, followed = Path(job.request.folder), self._read(job)
            followed.read()
            changes = (
                Change(str(Card(folder / one.name, "").file), followed.images[one.name].before, one.caption, job.batch)
                for one in followed.done.values()
                if not one.kept and one.name in followed.images
            )
            return self._captions.undo_batch(job.batch, changes)

    def undo_latest(self, folder: Path) -> tuple[int, int]:
        """Take back all captions of the newest job of a folder that wrote some; the next call, of the one before it.

        Returns:
            As `undo`.

        Raises:
            InputError: The folder has no such job, or a job of it is running.
        """
        own = [*self._of(folder)]
        if not own:
            raise InputError(f"{folder}: no captioning job of this folder is in {self.runs}")
        if process.status(own[0].run) in STARTED:
            return self.undo(own[0])  # refuses it
        job = next(
            (job for job in own if not job.is_undone and any(line.caption for line in job.captions().read())), None
        )
        if job is None:
            raise InputError(f"{folder}: no captions of a model are left to take back")
        return self.undo(job)

    def _of(self, folder: Path) -> Iterator[CaptionJob]:
        """Yield the jobs of a folder, newest first."""
        real = os.path.realpath(folder)
        return (job for job in jobs(self.runs) if os.path.realpath(job.request.folder) == real)

    def _attend(self, job: CaptionJob) -> None:
        while True:
            try:
                is_running = self.follow(job).is_running
            except (InputError, OSError):  # said to whoever looks at the job; a full disk may be freed meanwhile
                is_running = process.alive(job.run)
            if not is_running:
                return
            time.sleep(ATTENDED_EVERY_S)

    def _read(self, job: CaptionJob) -> _Followed:
        if job.path not in self._followed:
            self._followed[job.path] = _Followed.of(job)
        return self._followed[job.path]

    def _apply(self, job: CaptionJob, followed: _Followed) -> None:
        with files.locked(job.path / "apply.lock"):
            followed.read()
            if job.is_undone:
                return
            new = [one for one in followed.written.values() if one.caption and one.name not in followed.done]
            folder = Path(job.request.folder)
            cards = [(Card(folder / one.name, ""), followed.images[one.name].before, one.caption) for one in new]
            if not cards:
                return
            kept = self._captions.fill(cards, job.batch)
            job.add_applied(Applied(one.name, one.caption, why) for one, why in zip(new, kept, strict=True))
            followed.read()

    def _running_near(self, request: CaptionRequest) -> CaptionJob | None:
        """Return the running job that asked the same. Raises InputError where another one of these images runs."""
        wanted = Path(os.path.realpath(request.folder))
        for job in jobs(self.runs):
            other = Path(os.path.realpath(job.request.folder))
            is_near = wanted.is_relative_to(other) or other.is_relative_to(wanted)
            if is_near and process.status(job.run) in STARTED:
                if job.request.asked == request.asked:
                    return job
                raise InputError(
                    f"{request.folder}: is being captioned already, by {job.path.name}; stop that first, on the screen "
                    "Data or by Ctrl-C in its command"
                )
        return None

    def _unfinished(self, request: CaptionRequest) -> CaptionJob | None:
        """Return the folder's newest job with answers, or one after it, if it asked the same and images are left."""
        for job in self._of(Path(request.folder)):
            followed = _Followed.of(job)
            followed.read()
            is_left = len(followed.written) < len(followed.images)
            if job.request.asked == request.asked and is_left and not job.is_undone:
                return job
            if followed.written:
                return None
        return None

    def _earlier(self, request: CaptionRequest) -> Mapping[Path, str]:
        """{caption file: text that a job wrote last}, as far as the request needs it."""
        found: dict[Path, str] = {}
        if request.overwrite != "model":
            return found
        for job in reversed([*jobs(self.runs)]):
            folder = Path(job.request.folder)
            for applied in job.applied().read():
                if not applied.kept:
                    found[Path(os.path.realpath(folder / applied.name)).with_suffix(".txt")] = applied.caption
        return found


def choose(request: CaptionRequest, earlier: Mapping[Path, str], apart: Collection[Path] = ()) -> list[Asked]:
    """Return the images of a folder that get a caption, by name.

    An image that shares its caption's file with one before it is left out, and so is one whose caption file cannot be
    read, and one whose caption stands in a table.

    Args:
        request: Its folder, and what is overwritten.
        earlier: {caption file: text that a model wrote}.
        apart: Folders inside it whose images are left out.

    Raises:
        InputError: It is not a folder, it holds no images, or only such inside of tables, or it cannot be written to.
    """
    folder = Path(request.folder)
    _require_folder(folder)
    found, others = _find(folder), _inside(folder, apart)
    chosen: dict[Path, Asked] = {}
    for image in found.images:
        file, name = image.with_suffix(".txt"), str(image.relative_to(folder))
        if file in chosen or half_character(name) or any(map(image.is_relative_to, others)):
            continue
        try:
            before = saved(image)
        except InputError:  # the scan of the data names it
            continue
        has_caption = bool(before) or bool(before is None and found.listed.get(image))
        is_models = bool(before) and earlier.get(Path(os.path.realpath(file))) == before
        if not has_caption or request.overwrite == "all" or (request.overwrite == "model" and is_models):
            chosen[file] = Asked(name, before)
    _require_writable(folder, {file.parent for file in chosen})
    return list(chosen.values())


def _inside(folder: Path, others: Iterable[Path]) -> list[Path]:
    """Return those folders that are inside of a folder, as paths below it."""
    real = Path(os.path.realpath(folder))
    found = (Path(os.path.realpath(other)) for other in others)
    return [folder / other.relative_to(real) for other in found if other != real and other.is_relative_to(real)]


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        kind = "not a folder" if folder.exists() else "no such folder"
        raise InputError(f"--caption {folder}: {kind}; name a folder of images, next to which captions are written")


def _require_writable(root: Path, folders: Iterable[Path]) -> None:
    for folder in sorted(folders):
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            raise InputError(
                f"--caption {root}: no captions can be written into {folder}; change its owner or permissions, or "
                "caption a copy"
            )


class _Found(Watcher):
    """The images of a folder, and the captions of its metadata.jsonl and tables."""

    def __init__(self) -> None:
        self.images: list[Path] = []
        self.listed_captions: dict[Path, str] = {}
        self.fixed: set[Path] = set()

    def reading(self, image: Path) -> None:
        self.images.append(image)

    def listed(self, captions: Mapping[Path, str], is_fixed: bool = False) -> None:
        self.listed_captions |= captions
        if is_fixed:
            self.fixed |= captions.keys()


@dataclass(frozen=True)
class _Images:
    images: tuple[Path, ...]
    listed: Mapping[Path, str]


def _find(folder: Path) -> _Images:
    found = _Found()
    data = DataConfig(path=str(folder), missing_caption="empty", bad_image="warn")
    try:
        scan(data, found)
    except InputError as error:
        if not found.images:  # bad captions and rows are for the scan of a run to name
            problem = str(error).replace("data.path: ", "").replace("images with captions", "images")
            raise InputError(f"--caption: {problem}") from error
    if found.images and all(map(is_member, found.images)):
        raise InputError(
            f"--caption {folder}: its images are inside of tables or archives, where no captions are written; unpack "
            "them into a folder"
        )
    images = (image for image in found.images if not is_member(image) and image not in found.fixed)
    return _Images(tuple(images), found.listed_captions)


def _explained(error: ErrorEvent) -> str:
    where = "" if error.rank is None or error.exit_code == 2 else f"rank {error.rank}: "
    return f"{where}{error.message}" + (f" (log: {error.log})" if error.log else "")
