"""The page a run is watched on: what it does, its curves, its ranks, its newest samples, its log, and its buttons."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import gradio as gr

from app import charts, monitor
from app.monitor import SILENT_S, Follower, Level, RunView
from app.pages.parts import QUIET, alert, attempted, picture, sample_text
from app.pages.ticks import SKIP, Made, Tick, choices
from app.studio import Studio
from trainer import launch
from trainer.config import InputError
from trainer.events import StepEvent
from trainer.gpus import Gpu
from trainer.headless import sentence
from trainer.rundir import Request, RunDir

GIB = 2**30
NUM_EVENTS = 40
NUM_SAMPLES = 12
ANSWERS = {
    "stop": "Stopping after this step, with a checkpoint.",
    "save": "A checkpoint follows after this step.",
    "sample": "Samples follow after this step.",
    "resume": "Continuing from the newest checkpoint.",
}
"""{request: what is said when it was made}"""


@dataclass(frozen=True)
class WatchPage:
    studio: Studio
    run: gr.Dropdown
    figures: gr.HTML
    retry: gr.Button
    ranks: gr.HTML
    charts: dict[str, gr.HTML]
    samples: gr.HTML
    log: gr.HTML
    events: gr.HTML
    axis: gr.Radio
    is_log: gr.Checkbox
    source: gr.Dropdown
    level: gr.Radio
    buttons: dict[str, gr.Button]

    @property
    def inputs(self) -> list[Any]:
        return [self.run, self.axis, self.is_log, self.source, self.level]

    @property
    def outputs(self) -> list[Any]:
        parts = [self.figures, self.retry, self.ranks, self.samples, self.log, self.events, self.source]
        return [*parts, *self.buttons.values(), *self.charts.values()]


def build(studio: Studio, run: gr.Dropdown, buttons: dict[str, gr.Button]) -> WatchPage:
    """Lay out the page, inside a `gr.Blocks`. run, buttons: stand above all pages."""
    said = gr.HTML(elem_id="said")
    figures = gr.HTML(elem_id="figures")
    retry = gr.Button("", visible=False, elem_id="retry")
    with gr.Row():
        axis = gr.Radio(["step", "time"], value="step", label="X axis", elem_id="axis")
        is_log = gr.Checkbox(False, label="Loss on a logarithmic scale", elem_id="log-scale")
    with gr.Row():
        with gr.Column(scale=3):
            drawn = {title: _chart(title) for title in monitor.CHARTS}
        with gr.Column(scale=2):
            ranks = gr.HTML(elem_id="ranks")
            samples = gr.HTML(elem_id="newest")
            events = gr.HTML(elem_id="events")
    with gr.Row():
        source = gr.Dropdown(["torchrun"], value="torchrun", label="Log of", elem_id="log-of")
        level = gr.Radio(list(monitor.LEVELS), value="all", label="Lines", elem_id="log-level")
    log = gr.HTML(elem_id="log", autoscroll=True, max_height=320)
    page = WatchPage(
        studio, run, figures, retry, ranks, drawn, samples, log, events, axis, is_log, source, level, buttons
    )
    for name, button in buttons.items():
        button.click(_asker(studio, name), run, said, **QUIET)
    return page


def tick(page: WatchPage) -> Tick:
    """What is shown of the chosen run."""

    def handle(name: str, axis: str, is_log: bool, source: str, level: str) -> list[Any]:
        if not name:
            return [SKIP] * len(page.outputs)
        try:
            run = page.studio.run(name)
        except InputError as error:
            return [alert(str(error)), *[SKIP] * (len(page.outputs) - 1)]
        return _shown(page, run, axis, is_log, source, level)

    options = (page.axis, page.is_log, page.source, page.level)
    return Tick(handle, page.inputs, page.outputs, tuple(option.input for option in options))


def _shown(page: WatchPage, run: RunDir, axis: str, is_log: bool, source: str, level: str) -> list[Any]:
    follower = page.studio.follower(run)
    view = follower.view()
    files = monitor.log_files(run)
    log = monitor.log_tail(files[source], cast(Level, level)) if source in files and files[source].exists() else ""
    drawn = (run.path.name, view.curves, axis, is_log)
    chosen: monitor.Axis = "time" if axis == "time" else "step"
    word = "minute" if axis == "time" else "step"

    def chart(title: str) -> str:
        return charts.chart_json(title, follower.lines(title, chosen), word, is_log and title == "Loss")

    return [
        figures(view),
        _retry(view),
        ranks(view, page.studio.gpus()),
        _newest(page.studio, follower, view),
        f"<pre>{html.escape(log)}</pre>",
        _events(follower),
        choices(list(files) or ["torchrun"], source, "torchrun"),
        *(gr.update(interactive=can) for can in _allowed(view, page.buttons)),
        *(Made(drawn, partial(chart, title)) for title in page.charts),
    ]


def figures(view: RunView) -> str:
    """The state in a sentence, the progress, and the figures of the last steps."""
    share = 100 * view.step / view.num_steps
    facts = [("step", f"{view.step} / {view.num_steps}"), ("images/s", f"{view.images_per_second:.2f}")]
    if view.loss is not None:
        facts.insert(1, ("loss", f"{view.loss:.4f}"))
    facts += [(f"s {part}", f"{seconds:.3f}") for part, seconds in view.seconds.items()]
    cells = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{fact}</dd></div>" for name, fact in facts)
    return (
        f'<div id="run" class="{_mood(view)}" data-state="{view.state}" data-step="{view.step}">'
        f'<p role="status" aria-live="polite" class="sentence">{html.escape(view.sentence)}</p>{_error(view)}'
        f'<div class="progress" role="progressbar" aria-label="steps" aria-valuenow="{view.step}" aria-valuemin="0" '
        f'aria-valuemax="{view.num_steps}"><i style="width:{share:.1f}%"></i></div><dl>{cells}</dl></div>'
    )


def ranks(view: RunView, gpus: Sequence[Gpu] = ()) -> str:
    """A bar per rank: allocated, reserved and peak against the limit, and when it last spoke. Below them the GPUs."""
    rows = []
    for rank in view.ranks:
        limit = max(rank.limit, 1)
        bars = "".join(
            f'<i class="{name}" style="width:{min(100.0, 100 * value / limit):.1f}%"></i>'
            for name, value in (("peak", rank.peak), ("reserved", rank.reserved), ("allocated", rank.allocated))
        )
        heard = f"{rank.age_s:.0f} s ago" if view.is_running else "ended"
        late = " late" if view.is_running and rank.age_s > SILENT_S else ""
        rows.append(
            f'<li class="rank{late}" data-rank="{rank.rank}"><span>rank {rank.rank}</span><div class="bar">{bars}</div>'
            f"<span>{rank.allocated / GIB:.2f} allocated, {rank.reserved / GIB:.2f} reserved, {rank.peak / GIB:.2f} "
            f"peak of {rank.limit / GIB:.1f} GiB</span><span>step {rank.step}, {rank.phase}, "
            f"{heard}</span></li>"
        )
    imbalance = f"<p>Largest peak to the mean: {view.imbalance:.2f}</p>" if len(view.ranks) > 1 else ""
    cards = "".join(f"<li>{html.escape(gpu_line(gpu))}</li>" for gpu in gpus)
    machine = f'<h2>GPUs</h2><ul class="ranks">{cards}</ul>' if cards else ""
    return f'<h2>Memory per rank</h2><ul class="ranks">{"".join(rows)}</ul>{imbalance}{machine}'


def gpu_line(gpu: Gpu) -> str:
    """What a GPU does, in words. What the driver does not tell is left out."""
    told = [f"{gpu.memory_used / 1024:.1f} of {gpu.memory / 1024:.1f} GiB used"]
    told += [f"{gpu.busy} % busy"] * (gpu.busy >= 0) + [f"{gpu.celsius} °C"] * (gpu.celsius >= 0)
    return f"{gpu.index} {gpu.name}: {', '.join(told)}"


def _chart(title: str) -> gr.HTML:
    name = title.lower().replace(" ", "-")
    return gr.HTML(
        charts.chart_json(title, []),
        html_template=charts.TEMPLATE,
        css_template=charts.CSS,
        js_on_load=charts.SCRIPT,
        elem_id=f"chart-{name}",
    )


def _retry(view: RunView) -> Any:
    error = view.error if view.state == "failed" else None
    label = f"Into the form, with {', '.join(error.retry)}" if error and error.retry else ""
    return gr.update(value=label, visible=bool(label))


def _asker(studio: Studio, name: str) -> Callable[[str], str]:
    def ask(run_name: str) -> str:
        run = studio.run(run_name)
        if name == "resume":
            studio.resume(run)
        elif name == "stop":
            launch.stop(run)
        else:
            run.request(cast(Request, name))
        return ANSWERS[name]

    return lambda run_name: attempted(lambda: ask(run_name))


def _allowed(view: RunView, buttons: Sequence[str] | dict[str, gr.Button]) -> list[bool]:
    return [not view.is_alive if name == "resume" else view.is_running for name in buttons]


def _mood(view: RunView) -> str:
    if view.state == "failed":
        return "bad"
    return "slow" if view.is_stuck else "good"


def _error(view: RunView) -> str:
    if view.error is None or view.state != "failed":
        return ""
    remedy = f"<p>What to do: {html.escape(view.error.remedy)}</p>" if view.error.remedy else ""
    log = f"<p>Log: {html.escape(str(view.path / view.error.log))}</p>" if view.error.log else ""
    return f'<div role="alert" class="alert">{remedy}{log}</div>'


def _newest(studio: Studio, follower: Follower, view: RunView) -> str:
    newest = sorted(view.samples, key=lambda sample: (-sample.step, sample.index))[:NUM_SAMPLES]
    figures = [
        f"<figure>{picture(studio, view.path / sample.path, sample_text(sample, follower.config))}"
        f"<figcaption>{html.escape(sample.prompt)}, step {sample.step}</figcaption></figure>"
        for sample in newest
    ]
    return f'<h2>Newest samples</h2><div class="newest">{"".join(figures)}</div>' if figures else ""


def _events(follower: Follower) -> str:
    told = [event for event in follower.told() if not isinstance(event, StepEvent)][-NUM_EVENTS:]
    lines = "".join(f"<li>{html.escape(sentence(event))}</li>" for event in reversed(told))
    return f"<h2>Events</h2><ul class='events' tabindex='0' aria-label='Events'>{lines}</ul>"
