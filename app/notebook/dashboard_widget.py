"""A live view of a run as widgets of a notebook, updated by a thread, and replaced by static HTML when the run ends.

See DECISIONS 123.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Mapping
from functools import partial

import ipywidgets as widgets
from IPython.display import DisplayHandle, display
from markupsafe import Markup

from app.data.thumbnails import Thumbnails
from app.runs import html
from app.runs.monitor import Follower, RunView
from trainer.run.events import ENDS, SampleEvent, WarningEvent
from trainer.run.folder import Request, RunDir
from trainer.system.errors import InputError
from trainer.view.charts import chart

POLL_S = 0.5
BUTTONS: Mapping[Request, tuple[str, str]] = {
    "stop": ("Stop", "End after this step, with a checkpoint"),
    "save": ("Save a checkpoint", "Write a checkpoint after this step, and go on"),
    "sample": ("Sample now", "Generate samples after this step, and go on"),
}
"""{request: label and tooltip of its button}"""
NUM_SAMPLES = 8
NUM_WARNINGS = 5
SIDE = 96
"""Longer side of a sample in pixels; small, because samples are saved in the notebook's file."""

STYLE = """
.shardstudio .dashboard { font-size: var(--jp-ui-font-size1, 13px); line-height: 1.5; overflow: visible;
  overflow-wrap: anywhere; }
.shardstudio .dashboard .widget-html-content { font-size: inherit; line-height: inherit; }
.shardstudio .dashboard p { margin: 0 0 .25rem; }
.shardstudio .dashboard h2 { font-size: 1rem; font-weight: 600; margin: .75rem 0 .25rem; }
.shardstudio .dashboard dt { float: none; width: auto; font-weight: normal; white-space: nowrap; }
.shardstudio .dashboard dd { white-space: nowrap; }
.shardstudio .sides { display: flex; flex-flow: row wrap; gap: 0 1.5rem; overflow: visible; }
.shardstudio .sides > :first-child { flex: 3 1 24rem; max-width: 40rem; min-width: 0; }
.shardstudio .sides > :last-child { flex: 2 1 16rem; min-width: 0; }
.shardstudio .dashboard ul { font-size: inherit; }
.shardstudio .newest { grid-template-columns: repeat(auto-fill, 84px); gap: .5rem .75rem; }
"""


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
        self._curves = (-1, -1)
        self._samples: tuple[SampleEvent, ...] = ()
        self._content: dict[widgets.HTML, Markup] = {}

        self.buttons = {what: self._button(what) for what in BUTTONS}
        self.message, self.status, self.loss, self.ranks = (widgets.HTML() for _ in range(4))
        self.samples, self.warnings, self.problem = (widgets.HTML() for _ in range(3))
        sides = widgets.HBox([self.loss, self.ranks]).add_class("sides")
        row = widgets.HBox([*self.buttons.values(), self.message])
        parts = [row, self.problem, self.status, sides, self.samples, self.warnings]
        look = Markup("<style>{}{}</style>").format(Markup(html.IN_NOTEBOOK), Markup(STYLE))
        style = widgets.HTML(look, layout={"display": "none"})
        self.widget = widgets.VBox([style, widgets.VBox(parts).add_class("dashboard")]).add_class("shardstudio")

    def _button(self, what: Request) -> widgets.Button:
        label, hint = BUTTONS[what]
        button = widgets.Button(description=label, tooltip=hint, disabled=True, layout={"width": "auto"})
        button.on_click(lambda _: self._request(what))
        return button

    def _request(self, what: Request) -> None:
        self.message.value = html.attempted(partial(html.request, self.run, what))

    def _ipython_display_(self) -> None:
        with self._lock:
            if not self._is_followed:
                self._is_followed = True
                self._is_over = self._update()
                if not self._is_over:
                    threading.Thread(target=self._follow, name=f"dashboard {self.run.path.name}", daemon=True).start()
            if self._is_over:
                display(self._static_output(), raw=True)
                return
            live = display(self.widget, display_id=True)
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
            self.problem.value = html.alert(str(error))
            return False
        self.problem.value = ""
        return is_over

    def _show(self, view: RunView) -> None:
        """Update the widgets; a widget sends its value to the browser only when it changes."""
        self._sentence = view.sentence
        name = Markup("<p>Run <b>{}</b></p>").format(view.path.name)
        self._fill(self.status, name + html.status(view))
        self._fill(self.ranks, html.ranks(view) if view.ranks else Markup())
        if view.curves != self._curves:
            self._fill(self.loss, chart("Loss", self._follower.lines("Loss")))
            self._curves = view.curves
        if view.samples != self._samples:
            self._fill(self.samples, self._newest(view))
            self._samples = view.samples
        self._fill(self.warnings, self._warnings())
        for button in self.buttons.values():
            button.disabled = not view.is_running

    def _fill(self, place: widgets.HTML, content: Markup) -> None:
        self._content[place] = content
        place.value = content

    def _newest(self, view: RunView) -> Markup:
        newest = sorted(view.samples, key=lambda sample: (-sample.step, sample.index))[:NUM_SAMPLES]
        return html.newest(html.figure(self._small(sample), sample) for sample in newest)

    def _small(self, sample: SampleEvent) -> Markup:
        if sample.kind.is_text:
            return html.text_sample(sample)
        if not sample.picture:
            return Markup("<span>{}</span>").format(sample.path)
        try:
            small = self._thumbnails.of(self.run.path / sample.picture, SIDE)
        except InputError as error:
            return html.missing(str(error))
        data = base64.b64encode(small.read_bytes()).decode()
        return Markup('<img alt="{}" src="data:image/webp;base64,{}">').format(sample.prompt, data)

    def _warnings(self) -> Markup:
        warnings = [event for event in self._follower.events() if isinstance(event, WarningEvent)]
        lines = dict.fromkeys(f"Warning, step {event.step}: {event.message}" for event in reversed(warnings))
        items = Markup().join(map(Markup("<li>{}</li>").format, list(lines)[:NUM_WARNINGS]))
        return Markup("<ul>{}</ul>").format(items) if items else Markup()

    def _static_output(self) -> dict[str, str]:
        """Everything that is shown, as an output that works without a kernel."""
        page = html.in_notebook(
            Markup(
                '<style>{}</style><div class="dashboard">{}'
                '<div class="sides"><div>{}</div><div>{}</div></div>{}{}</div>'
            ).format(
                Markup(STYLE),
                *(
                    self._content.get(place, "")
                    for place in (self.status, self.loss, self.ranks, self.samples, self.warnings)
                ),
            )
        )
        return {"text/html": page, "text/plain": f"Run {self.run.path.name}: {self._sentence}"}

    def _attach_hint(self) -> dict[str, str]:
        name, code = self.run.path.name, f"notebook.dashboard(notebook.attach({self._known_as!r}))"
        words = "After a restart of the kernel"
        return {
            "text/html": Markup("<small>Run <b>{}</b>. {}: <code>{}</code></small>").format(name, words, code),
            "text/plain": f"Run {name}. {words}: {code}",
        }
