"""The page Runs: the table of all runs; tag, compare, clone or delete them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr
from markupsafe import Markup

from app import run_table
from app.html import alert, attempted
from app.monitor import Follower, explained
from app.run_table import MOST_COMPARED, Summary
from app.studio import Studio
from app.web import charts
from app.web.pages import parts
from app.web.pages.parts import QUIET, table
from app.web.pages.renew import Tick, choices
from trainer.config.errors import InputError


def build(studio: Studio) -> tuple[gr.Button, gr.Button, gr.Dropdown, Tick]:
    """Lay out the page, inside a `gr.Blocks`. Returns the buttons Watch and Clone, the chosen run, and the update."""
    listed = gr.HTML(elem_id="runs")
    with gr.Row():
        chosen = gr.Dropdown([], label="Run", elem_id="one-run", scale=3)
        tags = gr.Textbox(label="Tags, comma-separated", elem_id="tags", max_lines=1, scale=3)
        save = gr.Button("Save tags", elem_id="save-tags")
        watch = gr.Button("Watch", elem_id="watch")
        clone = gr.Button("Clone into the form", elem_id="clone")
        delete = gr.Button("Delete …", elem_id="delete")
    with gr.Row(visible=False, elem_id="delete-question") as question:
        warning = gr.HTML()
        yes = gr.Button("Delete permanently", variant="stop", elem_id="delete-yes")
        no = gr.Button("Cancel", elem_id="delete-no")
    message = gr.HTML(elem_id="runs-message")
    compared = gr.Dropdown([], label=f"Compare 2 to {MOST_COMPARED} runs", multiselect=True, elem_id="compare")
    curves = gr.HTML(
        charts.chart_json("Loss, smoothed", []),
        html_template=charts.TEMPLATE,
        css_template=charts.CSS,
        js_on_load=charts.SCRIPT,
        elem_id="compared-loss",
    )
    differences = gr.HTML(elem_id="differences")
    in_question = gr.State("")
    chosen.input(lambda name: _saved_tags(studio, name), chosen, tags, **QUIET)
    save.click(_attempt(studio, _save_tags), [chosen, tags], message, **QUIET)
    delete.click(_ask_to_delete(studio), chosen, [question, warning, in_question], **QUIET)
    yes.click(_attempt(studio, _delete), [in_question, tags], message, **QUIET).then(
        lambda: gr.update(visible=False), None, question, **QUIET
    )
    no.click(lambda: gr.update(visible=False), None, question, **QUIET)
    compared.input(_comparer(studio), compared, [curves, differences], **QUIET)
    return watch, clone, chosen, Tick(_shower(studio), [chosen, compared], [listed, chosen, compared])


def _shower(studio: Studio) -> Callable[[str | None, list[str]], list[Any]]:
    summaries = run_table.Summaries(studio)
    head = ("Run", "State", "Step", "Loss", "Started", "Model", "Adapter", "Tags")

    def show(chosen: str | None, compared: list[str]) -> list[Any]:
        found, problem = summaries.all(), run_table.tags_problem(studio.runs)
        names = [summary.name for summary in found]
        there = [name for name in compared if name in names]
        listing = table(head, map(_row, found)) if found else Markup("<p>No runs yet.</p>")
        listing = alert(problem) + listing if problem else listing
        return [listing, choices(names, chosen, None), choices(names, compared, there)]

    return show


def _row(summary: Summary) -> tuple[str, ...]:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.started)) if summary.started else ""
    loss = "" if summary.loss is None else f"{summary.loss:.4f}"
    steps = f"{summary.step} / {summary.num_steps}" if summary.num_steps else ""
    state = f"{summary.state}: {summary.problem}" if summary.problem else summary.state
    return (
        summary.name, state, steps, loss, started, summary.model, summary.adapter, ", ".join(summary.tags),
    )  # fmt: skip


def _saved_tags(studio: Studio, name: str) -> str:
    try:
        return ", ".join(run_table.read_tags(studio.runs).get(name, ()))
    except InputError:  # the table says so
        return ""


def _save_tags(studio: Studio, name: str, text: str) -> str:
    run_table.set_tags(studio.runs, studio.run(name).path.name, text)
    return f"Tags of {name} saved."


def _delete(studio: Studio, name: str, _: str) -> str:
    run_table.delete(studio.run(name))
    return f"{name} deleted."


def _attempt(studio: Studio, act: Callable[[Studio, str, str], str]) -> Callable[[str | None, str], Markup]:
    return lambda name, text: attempted(lambda: act(studio, name or "", text))


def _ask_to_delete(studio: Studio) -> Callable[[str | None], list[Any]]:
    def handle(name: str | None) -> list[Any]:
        try:
            run = studio.run(name)
        except InputError:  # no run is chosen, or it was deleted elsewhere
            return [gr.update(visible=False), "", ""]
        question = Markup("<p>{}: {:,.0f} MB with its checkpoints, samples and exports.</p>").format(
            run.path.name, run_table.size(run) / 1e6
        )
        return [gr.update(visible=True), question, run.path.name]

    return handle


def _comparer(studio: Studio) -> Callable[[list[str]], list[Any]]:
    def handle(names: list[str]) -> list[Any]:
        try:
            followers = [studio.follower(studio.run(name)) for name in names[:MOST_COMPARED]]
            for follower in followers:
                follower.view()
        except (InputError, OSError) as error:
            return [gr.skip(), alert(explained(error))]
        chart = charts.chart_json("Loss, smoothed", run_table.overlaid(followers))
        if len(followers) < 2:
            return [chart, Markup("<p>Choose at least two runs.</p>")]
        head = [follower.run.path.name for follower in followers]
        settings = table(
            ("Setting", *head), ((name, *values) for name, values in run_table.differing(followers).items())
        )
        return [chart, settings + _samples(studio, followers)]

    return handle


def _samples(studio: Studio, followers: Sequence[Follower]) -> Markup:
    views = [follower.view() for follower in followers]
    rows = []
    for prompt, samples in run_table.same_prompts(views).items():
        cells = [
            parts.sample(studio, view.path, sample, follower.config) if sample else Markup()
            for follower, view, sample in zip(followers, views, samples, strict=True)
        ]
        rows.append((prompt, cells))
    return parts.matrix([follower.run.path.name for follower in followers], rows) if rows else Markup()
