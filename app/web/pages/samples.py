"""The page Samples: a table of prompts by steps, and the first and last sample of one prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr
from markupsafe import Markup

from app.html import alert
from app.monitor import RunView, explained
from app.studio import Studio
from app.web.pages import parts
from app.web.pages.renew import SKIP, Lazy, Tick, choices
from app.web.served_files import FULL
from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.run.events import by_prompt
from trainer.run.report import spread

COLUMNS = 8


def build(studio: Studio, run: gr.Dropdown) -> Tick:
    """Lay out the page, inside a `gr.Blocks`."""
    matrix = gr.HTML(elem_id="matrix")
    with gr.Row():
        prompt = gr.Dropdown([], label="Prompt to compare", elem_id="slider-prompt")
        slider = gr.ImageSlider(label="First and last sample", interactive=False, elem_id="slider", type="filepath")
    return Tick(_shower(studio), [run, prompt], [matrix, prompt, slider], (prompt.input,))


def _shower(studio: Studio) -> Callable[[str, str | None], list[Any]]:
    def show(name: str, prompt: str | None) -> list[Any]:
        try:
            run = studio.run(name)
        except InputError:
            return [SKIP] * 3
        try:
            follower = studio.follower(run)
            view = follower.view()
        except (InputError, OSError) as error:
            return [alert(explained(error)), choices([], prompt, None), None]
        drawn = (name, len(view.samples))
        prompts = list(dict.fromkeys(sample.prompt for sample in view.samples))
        chosen = prompt if prompt in prompts else next(iter(prompts), None)
        return [
            Lazy(drawn, lambda: matrix(studio, view, follower.config)),
            choices(prompts, prompt, chosen),
            Lazy((drawn, chosen), lambda: pair(studio, view, chosen)),
        ]

    return show


def pair(studio: Studio, view: RunView, prompt: str | None) -> tuple[str, str] | None:
    """Return the first and last sample image of a prompt; None without two, or when one was deleted."""
    found = sorted((sample for sample in view.samples if sample.prompt == prompt), key=lambda sample: sample.step)
    if len(found) < 2 or found[0].is_text:
        return None
    try:
        first, last = (str(studio.thumbnails.of(view.path / sample.path, FULL)) for sample in (found[0], found[-1]))
    except InputError:
        return None
    return first, last


def matrix(studio: Studio, view: RunView, config: RunConfig) -> Markup:
    """Return the table of samples, at up to COLUMNS steps."""
    if not view.samples:
        return Markup("<p>No samples yet. Set sample.every and sample.prompts, or press Sample now.</p>")
    steps = spread(sorted({sample.step for sample in view.samples}), COLUMNS)
    rows = []
    for (_, prompt), samples in by_prompt(view.samples).items():
        row = [samples.get(step) for step in steps]
        cells = [parts.sample(studio, view.path, sample, config) if sample else Markup() for sample in row]
        rows.append((prompt, cells))
    return parts.matrix([f"step {step}" for step in steps], rows)
