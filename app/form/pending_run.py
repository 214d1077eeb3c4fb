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

from app.data.captioning import Captioning
from app.form.draft import Draft
from app.form.proposals import with_proposals
from trainer.system import files
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from app.studio import Studio

LOOKED_EVERY_S = 1.0


@dataclass(frozen=True)
class Pending:
    """What is to be started.

    Attributes:
        id: Made by the window that asked, which asks again where an answer was lost.
        folder: Its images.
        preset: Name of the preset of its draft.
        values: {field: YAML value} of its draft.
        job: Name of the captioning job that it waits for; "" for none.
        model: The model whose download it waits for; "" for none.
        problem: Why it was not started; "" while it waits.
        run: Name of the run that was started; "" until then.
    """

    id: str
    folder: str
    preset: str
    values: dict[str, Any] = field(default_factory=dict)
    job: str = ""
    model: str = ""
    problem: str = ""
    run: str = ""

    @property
    def is_waiting(self) -> bool:
        return not self.problem and not self.run


_PENDING = TypeAdapter(Pending)


class PendingRun:
    """The one run of a folder of runs that waits. Several pages may look after it at once; it starts once."""

    def __init__(self, studio: Studio, captioning: Captioning) -> None:
        self._studio = studio
        self._captioning = captioning
        self._file = studio.runs / "drafts" / "pending.json"

    def begin(self, wanted: Pending) -> Pending:
        """Start a run at once where it waits for nothing, else when it does not any more. A second time does nothing.

        Raises:
            InputError: It cannot be started, or another one waits.
        """
        with self._locked():
            known = self.state()
            if known is not None and known.id == wanted.id:
                return known
            if known is not None and known.is_waiting:
                raise InputError(f"{known.values.get('name', known.preset)} waits to be started; stop that first")
            now = wanted if self._waits_for(wanted) else self._started(wanted)
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

    def forget(self) -> None:
        """Start it no more. Captions and the model go on to be written and downloaded."""
        with self._locked():
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
                if self._waits_for(known):
                    return True
                known = self._started(known)
            except InputError as error:
                known = replace(known, problem=str(error))
            self._write(known)
            return False

    def _waits_for(self, pending: Pending) -> bool:
        """Raises InputError where captions or the model are not to be expected any more."""
        if pending.job:
            progress = self._captioning.follow(self._captioning.job(pending.job))
            if progress.is_running:
                return True
            if progress.state != "finished":
                raise InputError(progress.error or "The captions were stopped before all were written.")
        if pending.model:
            state = self._studio.model_downloads.state(pending.model)
            if state is not None and state.is_running:
                return True
            if state is None or state.state != "done":
                raise InputError(state.message if state else f"{pending.model}: its download is gone; start it again")
        return not self._studio.check_with_images(self._draft(pending))[1].is_complete

    def _started(self, pending: Pending) -> Pending:
        """Start the run, with prompts of the captions that are there now."""
        draft = with_proposals(*self._studio.check_with_images(self._draft(pending)))
        return replace(pending, run=self._studio.start(draft).path.name)

    def _draft(self, pending: Pending) -> Draft:
        return Draft(self._studio.preset(pending.preset), pending.values)

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        files.make_private(self._file.parent)
        return files.locked(self._file.with_suffix(".lock"))

    def _write(self, pending: Pending) -> None:
        files.replace(self._file, _PENDING.dump_json(pending))
