"""The page Monitor: status, curves, memory per rank, newest samples, log and events of a run, and its buttons."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import gradio as gr
from markupsafe import Markup

from app import html, monitor
from app.html import alert, attempted
from app.monitor import Follower, Level, RunView
from app.studio import Studio
from app.web import charts
from app.web.pages import parts
from app.web.pages.parts import QUIET
from app.web.pages.renew import SKIP, Lazy, Tick, choices
from trainer.config.errors import InputError
from trainer.launcher.console import sentence
from trainer.run.events import StepEvent
from trainer.run.folder import Request, RunDir

NUM_EVENTS = 40
NUM_SAMPLES = 12


@dataclass(frozen=True)
class WatchPage:
    studio: Studio
    run: gr.Dropdown
    status: gr.HTML
    retry: gr.Button
    ranks: gr.HTML
    charts: dict[str, gr.HTML]
    samples: gr.HTML
    log: gr.HTML
    events: gr.HTML
    source: gr.Dropdown
    level: gr.Radio
    buttons: dict[str, gr.Button]

    @property
    def inputs(self) -> list[Any]:
        return [self.run, self.source, self.level]

    @property
    def outputs(self) -> list[Any]:
        parts = [self.status, self.retry, self.ranks, self.samples, self.log, self.events, self.source]
        return [*parts, *self.buttons.values(), *self.charts.values()]


def build(studio: Studio, run: gr.Dropdown, buttons: dict[str, gr.Button]) -> WatchPage:
    """Lay out the page, inside a `gr.Blocks`. `run` and `buttons` are the components above all pages."""
    message = gr.HTML(elem_id="message")
    status = gr.HTML(elem_id="status")
    retry = gr.Button("", visible=False, elem_id="retry")
    with gr.Row():
        with gr.Column(scale=3):
            drawn = {title: _chart(title) for title in monitor.CHARTS}
        with gr.Column(scale=2):
            ranks = gr.HTML(elem_id="ranks")
            samples = gr.HTML(elem_id="newest")
            events = gr.HTML(elem_id="events")
    with gr.Row():
        source = gr.Dropdown(["torchrun"], value="torchrun", label="Log source", elem_id="log-of")
        level = gr.Radio(list(monitor.LEVELS), value="all", label="Log level", elem_id="log-level")
    log = gr.HTML(elem_id="log", autoscroll=True, max_height=320)
    page = WatchPage(studio, run, status, retry, ranks, drawn, samples, log, events, source, level, buttons)
    for name, button in buttons.items():
        button.click(_requester(studio, name), run, message, **QUIET)
    return page


def tick(page: WatchPage) -> Tick:
    """Return the periodic update of the chosen run."""

    def handle(name: str, source: str, level: str) -> list[Any]:
        if not name:
            return [SKIP] * len(page.outputs)
        try:
            return _contents(page, page.studio.run(name), source, level)
        except (InputError, OSError) as error:
            return [alert(monitor.explained(error)), *[SKIP] * (len(page.outputs) - 1)]

    options = (page.source, page.level)
    return Tick(handle, page.inputs, page.outputs, tuple(option.input for option in options))


def _contents(page: WatchPage, run: RunDir, source: str, level: str) -> list[Any]:
    follower = page.studio.follower(run)
    view = follower.view()
    files = monitor.log_files(run)
    is_there = source in files and os.path.lexists(files[source])
    log = monitor.log_tail(files[source], cast(Level, level)) if is_there else ""
    drawn = (run.path.name, view.curves)

    def chart(title: str) -> str:
        return charts.chart_json(title, follower.lines(title), is_small=title != "Loss", source=run.path.name)

    return [
        html.status(view, "run") + "".join(map(alert, view.problems)),
        _retry(view),
        html.ranks(view, page.studio.gpus()),
        _newest(page.studio, follower, view),
        Markup("<pre>{}</pre>").format(log),
        _events(follower),
        choices(list(files) or ["torchrun"], source, "torchrun"),
        *(gr.update(interactive=not view.is_alive if name == "resume" else view.is_running) for name in page.buttons),
        *(Lazy(drawn, partial(chart, title)) for title in page.charts),
    ]


def _chart(title: str) -> gr.HTML:
    name = title.lower().replace(" ", "-")
    return gr.HTML(
        charts.chart_json(title, [], is_small=title != "Loss"),
        html_template=charts.TEMPLATE,
        css_template=charts.CSS,
        js_on_load=charts.SCRIPT,
        elem_id=f"chart-{name}",
    )


def _retry(view: RunView) -> Any:
    error = view.error if view.state == "failed" else None
    label = f"Open in the form with {', '.join(error.retry)}" if error and error.retry else ""
    return gr.update(value=label, visible=bool(label))


def _requester(studio: Studio, name: str) -> Callable[[str], Markup]:
    def request(run_name: str) -> str:
        run = studio.run(run_name)
        if name != "resume":
            return html.request(run, cast(Request, name))
        studio.resume(run)
        return "Continuing from the newest checkpoint."

    return lambda run_name: attempted(lambda: request(run_name))


def _newest(studio: Studio, follower: Follower, view: RunView) -> Markup:
    newest = sorted(view.samples, key=lambda sample: (-sample.step, sample.index))[:NUM_SAMPLES]
    figures = [html.figure(parts.sample(studio, view.path, sample, follower.config), sample) for sample in newest]
    return html.newest(figures) if figures else Markup()


def _events(follower: Follower) -> Markup:
    events = [event for event in follower.events() if not isinstance(event, StepEvent)][-NUM_EVENTS:]
    lines = parts.listed(sentence(event) for event in reversed(events))
    return Markup("<h2>Events</h2><ul class='events' tabindex='0' aria-label='Events'>{}</ul>").format(lines)
