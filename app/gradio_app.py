"""The page: everything put together, and served on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import, which reads it

import gradio as gr

from app import security, theme
from app.pages import dataset, doctor, export, queue, runs, samples, train, watch
from app.pages.parts import QUIET, VIEWER, VIEWER_SCRIPT, Tick, together
from app.studio import Studio
from trainer.config import InputError

BUTTONS = {"stop": "Stop", "save": "Save now", "sample": "Sample now", "resume": "Resume"}
MOST_BROWSERS = 16
"""Browsers of which is known what they show, at 2 MB each. One more is sent everything again, nothing is lost."""
TICK_S, SLOW_TICK_S = 1.5, 3.0


def build(studio: Studio) -> gr.Blocks:
    """All pages, connected."""
    with gr.Blocks(title="ShardStudio", analytics_enabled=False) as blocks:
        with gr.Row(elem_id="top"):
            gr.HTML("<h1>ShardStudio</h1>")
            run = gr.Dropdown([], label="Run", elem_id="run-choice", scale=5)
            buttons = {
                name: gr.Button(label, elem_id=name, interactive=False, min_width=120)
                for name, label in BUTTONS.items()
            }
        gr.HTML(VIEWER, js_on_load=VIEWER_SCRIPT)
        with gr.Tabs(elem_id="pages") as tabs:
            with gr.Tab("Train", id="train") as train_tab:
                trained = train.build(studio)
            with gr.Tab("Monitor", id="monitor", render_children=True):
                watched = watch.build(studio, run, buttons)
            with gr.Tab("Samples", id="samples", render_children=True):
                sampled = samples.build(studio, run)
            with gr.Tab("Dataset", id="dataset", render_children=True) as dataset_tab:
                read_images, number, cards = dataset.build(studio)
            with gr.Tab("Queue", id="queue", render_children=True):
                queued = queue.build(studio)
            with gr.Tab("Runs", id="runs", render_children=True):
                watch_it, clone, listed, runs_tick = runs.build(studio)
            with gr.Tab("Export", id="export", render_children=True):
                exported = export.build(studio, run)
            with gr.Tab("Doctor", id="doctor", render_children=True) as doctor_tab:
                checks = doctor.build(studio)
        ticked = watch.tick(watched)
        known = gr.State(())
        new_runs = Tick(_new_runs(studio), [run, known], [run, known])
        others = together((sampled, queued, runs_tick, exported, new_runs))
        for seconds, tick in ((TICK_S, ticked), (SLOW_TICK_S, others)):
            gr.Timer(seconds).tick(tick.handle, tick.inputs, tick.outputs, trigger_mode="once", **QUIET)
        train.renews(trained, blocks.load, lambda: train.opened(trained), None)
        blocks.load(lambda: _runs(studio, None), None, run, **QUIET)
        started = trained.started.change(
            lambda name: (_runs(studio, name), gr.Tabs(selected="monitor")), trained.started, [run, tabs], **QUIET
        )
        watch_it.click(
            lambda name: (_runs(studio, name), gr.Tabs(selected="monitor")), listed, [run, tabs], **QUIET
        ).then(ticked.handle, ticked.inputs, ticked.outputs, **QUIET)
        started.then(ticked.handle, ticked.inputs, ticked.outputs, **QUIET)
        run.input(ticked.handle, ticked.inputs, ticked.outputs, **QUIET)
        cloned = train.renews(trained, clone.click, train.cloned(trained), [*trained.shown, listed])
        retried = train.renews(trained, watched.retry.click, train.retried(trained), [*trained.shown, run])
        for done in (cloned, retried):
            done.success(lambda: gr.Tabs(selected="train"), None, tabs, **QUIET)
        train.renews(trained, train_tab.select, train.looked_again(trained), trained.shown)
        dataset_tab.select(read_images, number, cards, **QUIET)
        doctor_tab.select(lambda: doctor.checks(studio), None, checks, **QUIET)
    return blocks  # type: ignore[no-any-return]


def _runs(studio: Studio, chosen: str | None) -> Any:
    names = [run.path.name for run in studio.runs_found()]
    return gr.update(choices=names, value=chosen or next(iter(names), None))


def _new_runs(studio: Studio) -> Callable[[str | None, Sequence[str]], list[Any]]:
    """Tells a browser of runs that were started elsewhere: by the queue, a notebook or the command line."""

    def renew(chosen: str | None, known: Sequence[str]) -> list[Any]:
        names = tuple(run.path.name for run in studio.runs_found())
        return [gr.skip(), gr.skip()] if set(names) == set(known) else [_runs(studio, chosen), names]

    return renew


def serve(runs: Path, host: str, port: int, auth: str | None) -> None:
    """Serve the page until Ctrl-C. Raises InputError when the port is taken, or others could reach it without auth."""
    user = security.require_password(host, auth)
    _require_free(host, port)
    studio = Studio(runs)
    studio.keep_queue_going()
    hosts = [*security.LOCAL, *([] if host in security.LOCAL else [host])]
    blocks = build(studio)
    print(f"http://{host}:{port}", flush=True)
    blocks.launch(
        server_name=host,
        server_port=port,
        auth=security.Login(*user) if user else None,
        allowed_paths=[str(studio.thumbnails.folder), str(studio.downloads.folder)],
        app_kwargs={
            "middleware": security.middleware(hosts, port, security.kept_secret(studio.runs / "drafts" / "secret")),
            "docs_url": None,
            "redoc_url": None,
            "openapi_url": None,
        },
        theme=theme.theme(),
        css=theme.CSS,
        share=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        footer_links=[],
        run_history=False,
        state_session_capacity=MOST_BROWSERS,
        max_file_size="1mb",
        quiet=True,
        show_error=False,
    )


def _require_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(f"--port {port}: cannot be used on {host} ({error.strerror}); name another") from error
