"""A live view of a run as widgets of a notebook, updated by a thread, and replaced by static HTML when the run ends.

See DECISIONS 123.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import ipywidgets as widgets
from IPython.display import DisplayHandle, display
from markupsafe import Markup

from app.data.thumbnails import Thumbnails
from app.notebook import panels
from app.notebook.panels import TEMPLATES
from app.runs.monitor import Follower, RunView
from trainer.run.drawings import MOST_REFERENCES
from trainer.run.events import ENDS, SampleEvent, WarningEvent
from trainer.run.folder import Request, RunDir
from trainer.system.errors import InputError
from trainer.view import svg
from trainer.view.chart import Chart

POLL_S = 0.5
BUTTONS: Mapping[Request, tuple[str, str]] = {
    "stop": ("Stop", "End after this step, with a checkpoint"),
    "save": ("Save a checkpoint", "Write a checkpoint after this step, and go on"),
    "sample": ("Sample now", "Generate samples after this step, and go on"),
}
"""{request: label and tooltip of its button}"""
NUM_SAMPLES = 8
NUM_WARNINGS = 5
REFERENCE_SIDE = 48
SIDE = 96
"""Longer side of a sample in pixels; small, because samples are saved in the notebook's file."""


class Dashboard:
    """A live view of one run: status, loss, memory per rank, newest samples, and buttons to stop, save and sample.

    It is shown below every cell that ends with it.
    """

    def __init__(self, run: RunDir, known_as: str) -> None:
        """Create the view. `known_as` is the argument by which `notebook.attach` finds the run."""
        self.run = run
        self._known_as = known_as
        self._follower = Follower(run)
        self._thumbnails = Thumbnails(run.path.parent / "thumbnails")
        self._lock = threading.Lock()
        self._shown: list[tuple[DisplayHandle, DisplayHandle]] = []
        self._is_followed = self._is_over = False
        self._sentence = ""
        self._curves: tuple[int, ...] = (-1, -1)
        self._samples: tuple[SampleEvent, ...] = ()
        self._content: dict[widgets.HTML, Markup] = {}

        self.buttons = {what: self._button(what) for what in BUTTONS}
        self.message, self.status, self.loss, self.ranks = (widgets.HTML() for _ in range(4))
        self.samples, self.warnings, self.problem = (widgets.HTML() for _ in range(3))
        sides = widgets.HBox([self.loss, self.ranks]).add_class("sides")
        row = widgets.HBox([*self.buttons.values(), self.message])
        parts = [row, self.problem, self.status, sides, self.samples, self.warnings]
        style = widgets.HTML(TEMPLATES.part("panels.html", "style", "dashboard.css"), layout={"display": "none"})
        self.widget = widgets.VBox([style, widgets.VBox(parts).add_class("dashboard")]).add_class("shardstudio")

    def _button(self, what: Request) -> widgets.Button:
        label, hint = BUTTONS[what]
        button = widgets.Button(description=label, tooltip=hint, disabled=True, layout={"width": "auto"})
        button.on_click(lambda _: self._request(what))
        return button

    def _request(self, what: Request) -> None:
        self.message.value = panels.attempted(partial(panels.request, self.run, what))

    def live(self) -> widgets.VBox:
        """Return the view as a widget, for use inside other widgets. It follows the run until that ends."""
        with self._lock:
            if not self._is_followed:
                self._is_followed = True
                self._is_over = self._update()
                if not self._is_over:
                    threading.Thread(target=self._follow, name=f"dashboard {self.run.path.name}", daemon=True).start()
        return self.widget

    def _ipython_display_(self) -> None:
        widget = self.live()
        with self._lock:
            if self._is_over:
                display(self._static_output(), raw=True)
                return
            words = "The run goes on: await notebook.ended(run) waits for it, and its last state then stands here."
            live = display(panels.live(widget, words), raw=True, display_id=True)
            self._shown.append((live, display(self._attach_hint(), raw=True, display_id=True)))

    def _follow(self) -> None:
        is_over = False
        while not is_over:
            time.sleep(POLL_S)
            is_over = self._update()
        with self._lock:
            self._is_over = True
            for live, kept in self._shown:
                kept.update(self._static_output(), raw=True)
                live.update({"text/html": ""}, raw=True)
            self._shown.clear()

    def _update(self) -> bool:
        """Show what is new. Returns whether the run has ended and everything is shown."""
        try:
            view = self._follower.view()
            is_over = view.state in ENDS and not view.is_alive
            # Its last events may have been written after the read and before the check of its process.
            self._show(self._follower.view() if is_over else view)
        except (InputError, OSError) as error:
            self.problem.value = panels.alert(str(error))
            return False
        self.problem.value = ""
        return is_over

    def _show(self, view: RunView) -> None:
        """Update the widgets; a widget sends its value to the browser only when it changes."""
        self._sentence = view.sentence
        self._fill(self.status, panels.status(view))
        self._fill(self.ranks, panels.ranks(view))
        if view.curves != self._curves:
            self._fill(self.loss, svg.draw(Chart("Loss", self._follower.lines("Loss"))))
            self._curves = view.curves
        if view.samples != self._samples:
            newest = sorted(view.samples, key=lambda sample: (-sample.step, sample.index))[:NUM_SAMPLES]
            self._fill(self.samples, panels.newest(map(self._with_pictures, newest)))
            self._samples = view.samples
        warnings = [event for event in self._follower.events() if isinstance(event, WarningEvent)]
        lines = dict.fromkeys(f"Warning, step {event.step}: {event.message}" for event in reversed(warnings))
        self._fill(self.warnings, TEMPLATES.part("panels.html", "items", list(lines)[:NUM_WARNINGS]))
        for button in self.buttons.values():
            button.disabled = not view.is_running

    def _fill(self, place: widgets.HTML, content: Markup) -> None:
        self._content[place] = content
        place.value = content

    def _with_pictures(self, sample: SampleEvent) -> tuple[SampleEvent, str, str, list[str]]:
        """Return (sample, its picture as base64, why it cannot be shown, its references as base64); "" for none."""
        references, problem = [], ""
        for path in sample.references[:MOST_REFERENCES]:
            with suppress(InputError, OSError, ValueError):  # a stranger's event names any file
                references.append(self._small(self.run.own_file(path), REFERENCE_SIDE))
        picture = ""
        if sample.picture:
            try:
                picture = self._small(self.run.path / sample.picture, SIDE)
            except InputError as error:
                problem = str(error)
        return sample, picture, problem, references

    def _small(self, file: Path, side: int) -> str:
        """Return an image of at most this side as base64. Raises InputError if it cannot be shown."""
        return base64.b64encode(self._thumbnails.of(file, side).read_bytes()).decode()

    def _static_output(self) -> dict[str, str]:
        """Everything that is shown, as an output that works without a kernel."""
        places = (self.status, self.loss, self.ranks, self.samples, self.warnings)
        parts = [self._content.get(place, Markup()) for place in places]
        page = panels.styled(TEMPLATES.part("panels.html", "dashboard", *parts), "dashboard.css")
        return {"text/html": page, "text/plain": f"Run {self.run.title}: {self._sentence}"}

    def _attach_hint(self) -> dict[str, str]:
        name, code = self.run.title, f"notebook.dashboard(notebook.attach({self._known_as!r}))"
        words = "After a restart of the kernel"
        return {
            "text/html": TEMPLATES.part("panels.html", "attach_hint", name, words, code),
            "text/plain": f"Run {name}. {words}: {code}",
        }
