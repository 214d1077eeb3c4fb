"""The buttons of a form in a notebook that start something: Start, Add to queue and Rehearse, and the run they show."""

from __future__ import annotations

import functools
import shlex
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from app.data.trained import Trained
from app.notebook import panels
from app.notebook.dashboard_widget import Dashboard
from app.notebook.form_parts import BUTTON, CHOICE, SHOWN, Notice, box, html, shown_if
from app.notebook.lessons import data_url
from app.notebook.panels import TEMPLATES
from app.runs import queue_rows
from app.runs.monitor import explained
from app.runs.rehearsals import SHOWS, Rehearsal, captions_of
from app.studio import Studio
from app.web.pages import new_run, rehearsal
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.system.installation import program

NUM_PICTURES, SIDE = 6, 160
"""Images of a rehearsal that are shown, and their longer side in pixels: the notebook's file has them."""


class Starter:
    """The buttons, and what they started.

    Attributes:
        start: The button Start.
        enqueue: The button Add to queue.
        rehearse: The button Rehearse.
        gpus: The GPUs of a queued run; none for all.
        run: The run that Start has started last.
        shown: The run that is shown: that one, or a rehearsal.
    """

    def __init__(
        self, studio: Studio, lock: AbstractContextManager[Any], said: Notice, started: Callable[[], None]
    ) -> None:
        """Create the buttons. said: says what was refused or done.  started: called when another run is shown."""
        self._studio, self._lock, self._said, self._started = studio, lock, said, started
        self.run: RunDir | None = None
        self.shown: RunDir | None = None
        self.start = widgets.Button(description="Start", button_style="primary", layout=SHOWN)
        self.enqueue, self.rehearse = (
            widgets.Button(description=words, layout=SHOWN, style=BUTTON) for words in ("Add to queue", "Rehearse")
        )
        self.start.add_class("shardstudio-go").on_click(lambda _: self._press(self._start))
        self.enqueue.on_click(lambda _: self._press(self._enqueue))
        self.rehearse.on_click(lambda _: self._press(self._rehearse))
        self.gpus = widgets.SelectMultiple(
            description="GPUs of a queued run; none for all", rows=4, layout=SHOWN, style=CHOICE
        )
        self._gpus, self._buttons = box(self.gpus, name="field"), widgets.HBox(layout=SHOWN)
        self._help = html(TEMPLATES.part("form.html", "note", "", rehearsal.HELP))
        self.board = box()
        self.others = box(self._gpus, self._buttons.add_class("shardstudio-buttons"), self._help)

    def show(self, state: Mapping[str, Any]) -> None:
        """Show what can be started in a state of the form."""
        self.start.disabled = self.enqueue.disabled = not state["ready"]
        buttons = [self.enqueue] if state["is_text"] else [self.enqueue, self.rehearse]
        self._buttons.children, self._help.layout = buttons, shown_if(not state["is_text"])
        options = tuple((f"{gpu['index']}: {gpu['name']}", gpu["index"]) for gpu in state["gpus"])
        if self.gpus.options != options:
            self.gpus.options = options
        self._gpus.layout = shown_if(len(options) > 1)

    def _press(self, act: Callable[[], None]) -> None:
        with self._lock:
            try:
                act()
            except (InputError, OSError) as error:
                self._said.show(panels.alert(explained(error)))

    def _start(self) -> None:
        self.run = self._studio.run(new_run.start(self._studio))
        self._show(self.run)

    def _enqueue(self) -> None:
        sentence = new_run.enqueue(self._studio, list(self.gpus.value))
        _start_queued(self._studio.runs)
        sentence = f"{sentence} {queue_rows.next_start(self._studio.queue)}"
        self._said.show(TEMPLATES.part("panels.html", "note", sentence))

    def _rehearse(self) -> None:
        run, words = self._studio.run(rehearsal.begin(self._studio)), html()
        found = Rehearsal.of(run)
        film = f"{program()} --film {shlex.quote(str(run.path))}"
        fill = partial(TEMPLATES.part, "form.html", "rehearsed", found, SHOWS, film)
        words.value = fill([])
        self._show(run, words)

        def draw() -> None:
            with suppress(InputError, OSError):  # moved meanwhile: the run itself says so
                words.value = fill([self._drawn(found, pair) for pair in found.pictures()[:NUM_PICTURES]])

        threading.Thread(target=draw, name="rehearsal", daemon=True).start()  # large pictures take a second each

    def _drawn(self, found: Rehearsal, pair: tuple[Trained, Trained]) -> tuple[str, str, list[str]]:
        """(address of an image as the real run trains it, its name, its captions)"""
        real, _ = pair
        return data_url(self._studio.thumbnails.drawn(found.draw(pair)[0]), SIDE), real.path.name, captions_of(real)

    def _show(self, run: RunDir, *above: widgets.Widget) -> None:
        self._said.show()
        self.shown = run
        self.board.children = [*above, Dashboard(run, str(run.path)).live()]
        self._started()


@functools.cache
def _start_queued(runs: Path) -> threading.Thread:
    """Start the queue's runs from this kernel, as a page does, unless another process already does."""
    return Studio(runs).run_queue()
