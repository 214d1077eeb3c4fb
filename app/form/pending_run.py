"""A run that starts by itself once its captions are written and its model is downloaded.

It is kept in a file, so that it starts although its window is closed, and after a restart of the page.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from app.data.captioning import Captioning, folders_apart
from app.form.draft import Draft
from app.form.proposals import with_proposals
from trainer.config.models import captioners
from trainer.launcher.jobs.downloads import cached
from trainer.run.captioning import CaptionRequest
from trainer.system import files
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from app.studio import Studio

LOOKED_EVERY_S = 1.0
UNCERTAIN = "The page ended at that moment. If it is not in Runs, start it again."


@dataclass(frozen=True)
class Pending:
    """What is to be started.

    Attributes:
        id: Made by the window that asked, which asks again where an answer was lost.
        folder: Its images.
        preset: Name of the preset of its draft.
        values: {field: YAML value} of its draft.
        writer: The model that is to write captions first, after its own download; "" for none.
        job: Name of the captioning job that it waits for; "" for none.
        model: The model whose download it waits for; "" for none.
        problem: Why it was not started; "" while it waits.
        run: Name of the run that was started; "" until then.
        is_starting: Whether it is being started: a page that is killed then leaves no second start.
    """

    id: str
    folder: str
    preset: str
    values: dict[str, Any] = field(default_factory=dict)
    writer: str = ""
    job: str = ""
    model: str = ""
    problem: str = ""
    run: str = ""
    is_starting: bool = False

    @property
    def is_waiting(self) -> bool:
        return not self.problem and not self.run

    @property
    def is_uncertain(self) -> bool:
        """Whether it may have started."""
        return self.problem == UNCERTAIN


_PENDING = TypeAdapter(Pending)


class PendingRun:
    """The one run of a folder of runs that waits. Several pages may look after it at once; it starts once."""

    def __init__(self, studio: Studio, captioning: Captioning) -> None:
        self._studio = studio
        self._captioning = captioning
        self._file = studio.runs / "drafts" / "pending.json"

    def begin(self, wanted: Pending) -> Pending:
        """Start a run at once where it waits for nothing, else when it does not any more. A second time does nothing.

        What it waits for is begun: the downloads, and captions by its writer.

        Raises:
            InputError: It cannot be started, or another one waits.
        """
        with self._locked():
            known = self.state()
            if known is not None and known.id == wanted.id:
                return known
            if known is not None and known.is_waiting:
                raise InputError(f"{known.values.get('name', known.preset)} waits to be started; stop that first")
            for model in filter(None, (download_of(wanted.writer), wanted.model)):
                self._studio.model_downloads.ensure(model)
            try:
                now = self._advanced(wanted)
            except InputError:
                self._file.unlink(missing_ok=True)
                raise
            self._write(now)
        if now.is_waiting:
            self.attend()
        return now

    def state(self) -> Pending | None:
        """Return what waits, or what became of it; None where nothing was to be started."""
        try:
            return files.read_json(self._file, _PENDING)
        except FileNotFoundError:
            return None
        except InputError as error:  # the file is damaged: the next start replaces it
            return Pending("", "", "", problem=str(error))

    def forget(self, id: str) -> None:
        """Start it no more. Captions and the model go on to be written and downloaded.

        Args:
            id: That of the run which the window shows. Another one, which another window began since, stays; "" is that
                of a damaged file.
        """
        with self._locked():
            known = self.state()
            if known is not None and known.id == id:
                self._file.unlink(missing_ok=True)

    def attend(self) -> None:
        """Look after what waits on a thread of its own."""
        threading.Thread(target=self._attend, name="pending run", daemon=True).start()

    def _attend(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk may be freed meanwhile
                if not self._advance():
                    return
            time.sleep(LOOKED_EVERY_S)

    def _advance(self) -> bool:
        """Start it, if it waits for nothing any more. Returns whether it waits."""
        with self._locked():
            known = self.state()
            if known is None or not known.is_waiting:
                return False
            try:
                now = self._advanced(known)
            except InputError as error:
                now = replace(known, problem=str(error))
            if now != known:
                self._write(now)
            return now.is_waiting

    def _advanced(self, pending: Pending) -> Pending:
        """Do what can be done now: have the captions written, and start the run. Returns what has become of it.

        Raises:
            InputError: Captions or a model are not to be expected any more, or the run cannot be started.
        """
        if pending.is_starting:  # whoever had the lock was killed before it could note what came of it
            raise InputError(UNCERTAIN)
        if pending.writer and not self._is_on_its_way(download_of(pending.writer)):
            pending = replace(pending, writer="", job=self._captioned(pending))
        if pending.writer or self._is_captioning(pending.job) or self._is_on_its_way(pending.model):
            return pending
        checked, found = self._studio.check_with_images(self._draft(pending))
        if not found.is_complete:
            return pending
        # The prompts are of the captions that are there now.
        draft = with_proposals(checked, found)
        self._write(replace(pending, is_starting=True))
        return replace(pending, run=self._studio.start(draft).path.name)

    def _captioned(self, pending: Pending) -> str:
        """Start the job that writes captions. Returns its name; "" where every image has one."""
        data = self._studio.check(self._draft(pending)).config.data
        has_trigger = bool(data.trigger)
        request = CaptionRequest.checked({"folder": pending.folder, "model": pending.writer, "trigger": has_trigger})
        job = self._captioning.start(request, folders_apart(data))
        if job is None:
            return ""
        self._captioning.attend(job)
        return job.path.name

    def _is_captioning(self, job: str) -> bool:
        if not job:
            return False
        progress = self._captioning.follow(self._captioning.job(job))
        if not progress.is_running and progress.state != "finished":
            raise InputError(progress.error or "The captions were stopped before all were written.")
        return progress.is_running

    def _is_on_its_way(self, model: str) -> bool:
        if not model:
            return False
        state = self._studio.model_downloads.state(model)
        if state is None or (not state.is_running and state.state != "done"):
            raise InputError(state.message if state else f"{model}: its download is gone; start it again")
        return state.is_running

    def _draft(self, pending: Pending) -> Draft:
        return Draft(self._studio.preset(pending.preset), pending.values)

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        files.make_private(self._file.parent)
        return files.locked(self._file.with_suffix(".lock"))

    def _write(self, pending: Pending) -> None:
        files.replace(self._file, _PENDING.dump_json(pending))


def download_of(writer: str) -> str:
    """Return the model to download before it can write captions; "" for one that is here or not offered."""
    return writer if writer in captioners() and not cached(writer).is_complete else ""
