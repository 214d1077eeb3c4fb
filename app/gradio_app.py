"""The page: everything put together, and served on this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import, which reads it

import gradio as gr

from app import security, theme
from app.pages import dataset, doctor, export, queue, runs, samples, train, watch
from app.pages.parts import QUIET, VIEWER, VIEWER_SCRIPT
from app.pages.ticks import Tick, choices, keep_renewing
from app.studio import Studio
from trainer.config import InputError
from trainer.terminal import say

BUTTONS = {"stop": "Stop", "save": "Save now", "sample": "Sample now", "resume": "Resume"}
MOST_BROWSERS = 16
"""Browsers of which is known what they show, at 2 MB each. One more is sent everything again, nothing is lost."""
TICK_S, SLOW_TICK_S = 1.5, 3.0
QUEUE_POLL_S = 10.0
"""Between two looks into gradio's own queue, which no listener uses: a thousand a second wake the page for nothing."""


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
        train.renews(trained, blocks.load, lambda: train.opened(trained), None)
        events = [blocks.load, run.change]
        keep_renewing(TICK_S, [watch.tick(watched)], events)
        keep_renewing(SLOW_TICK_S, [_all_runs(studio, run), sampled, queued, runs_tick, exported], events)
        for chosen, listen in ((trained.started, trained.started.change), (listed, watch_it.click)):
            listen(lambda name: _watch(studio, name), chosen, [run, tabs], **QUIET)
        cloned = train.renews(trained, clone.click, train.cloned(trained), [*trained.shown, listed])
        retried = train.renews(trained, watched.retry.click, train.retried(trained), [*trained.shown, run])
        for done in (cloned, retried):
            done.success(lambda: gr.Tabs(selected="train"), None, tabs, **QUIET)
        train.looks_again(trained, train_tab.select)
        dataset_tab.select(read_images, number, cards, **QUIET)
        doctor_tab.select(lambda: doctor.checks(studio), None, checks, **QUIET)
    return blocks  # type: ignore[no-any-return]


def _watch(studio: Studio, name: str) -> list[Any]:
    """The run chosen, and its page opened."""
    return [gr.update(choices=_names(studio), value=name), gr.Tabs(selected="monitor")]


def _names(studio: Studio) -> list[str]:
    return [run.path.name for run in studio.runs_found()]


def _all_runs(studio: Studio, run: gr.Dropdown) -> Tick:
    """All runs to choose from, also those that were started elsewhere: by the queue, a notebook or the command line."""

    def show(chosen: str | None) -> list[Any]:
        names = _names(studio)
        return [choices(names, chosen, next(iter(names), None))]

    return Tick(show, [run], [run])


def serve(runs: Path, host: str, port: int, auth: str | None) -> None:
    """Serve the page until Ctrl-C. Raises InputError when the port is taken, or others could reach it without auth."""
    user = security.require_password(host, auth)
    _require_free(host, port)
    studio = Studio(runs)
    studio.keep_queue_going()
    hosts = [*security.LOCAL, *([] if host in security.LOCAL else [host])]
    blocks = build(studio)
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = QUEUE_POLL_S
    say(f"http://{host}:{port}")
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
