"""Builds the page from its tabs and serves it."""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import, which reads it

import gradio as gr
import uvicorn
from fastapi import FastAPI
from markupsafe import escape

from app import html
from app.studio import Studio
from app.web import security, theme
from app.web.access import Access
from app.web.pages import dataset, doctor, export, queue, runs, samples, train, watch
from app.web.pages.parts import QUIET, VIEWER, VIEWER_SCRIPT
from app.web.pages.renew import Tick, choices, keep_renewing
from trainer.config.terminal import say

BUTTONS = {"stop": "Stop", "save": "Save now", "sample": "Sample now", "resume": "Resume"}
MOST_BROWSERS = 16
"""Browsers whose state is remembered, at 2 MB each. Any others are sent everything again; nothing is lost."""
TICK_S, SLOW_TICK_S = 1.5, 3.0
PLAIN_TEMPLATE = "${value}"
"""Template of `gr.HTML` components that show their value as it is; charts have other templates."""
QUEUE_POLL_S = 10.0
"""Poll interval of gradio's own queue, which no listener uses; by default it wakes a thousand times a second."""


def build(studio: Studio) -> gr.Blocks:
    """Build all tabs and connect them."""
    with gr.Blocks(title="ShardStudio", analytics_enabled=False) as blocks:
        with gr.Row(elem_id="top"):
            gr.HTML("<h1>ShardStudio</h1>")
            run = gr.Dropdown([], label="Run", elem_id="run-choice", scale=5)
            buttons = {
                name: gr.Button(label, elem_id=name, interactive=False, min_width=120)
                for name, label in BUTTONS.items()
            }
        if studio.unwritable:
            gr.HTML(html.alert(studio.unwritable), elem_id="unwritable")
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
        train.connect(trained, blocks.load, lambda: train.on_open(trained), None)
        events = [blocks.load, run.change]
        keep_renewing(TICK_S, [watch.tick(watched)], events)
        keep_renewing(SLOW_TICK_S, [_all_runs(studio, run), sampled, queued, runs_tick, exported], events)
        for chosen, listen in ((trained.started, trained.started.change), (listed, watch_it.click)):
            listen(lambda name: _watch(studio, name), chosen, [run, tabs], **QUIET)
        cloned = train.connect(trained, clone.click, train.on_clone(trained), [*trained.sent, listed])
        retried = train.connect(trained, watched.retry.click, train.on_retry(trained), [*trained.sent, run])
        for done in (cloned, retried):
            done.success(lambda: gr.Tabs(selected="train"), None, tabs, **QUIET)
        train.refresh_on(trained, train_tab.select)
        dataset_tab.select(read_images, number, cards, **QUIET)
        doctor_tab.select(lambda: doctor.checks(studio), None, checks, **QUIET)
    for component in blocks.blocks.values():
        if isinstance(component, gr.HTML) and component.html_template == PLAIN_TEMPLATE:
            component.postprocess = _escaped  # type: ignore[method-assign]
    return blocks  # type: ignore[no-any-return]


def _escaped(value: str | None) -> str | None:
    """Escape the value of an HTML component, unless it is Markup."""
    return None if value is None else str(escape(value))


def _watch(studio: Studio, name: str) -> list[Any]:
    """Choose a run and open the tab Monitor."""
    return [gr.update(choices=_names(studio), value=name), gr.Tabs(selected="monitor")]


def _names(studio: Studio) -> list[str]:
    return [run.path.name for run in studio.find_runs()]


def _all_runs(studio: Studio, run: gr.Dropdown) -> Tick:
    """Renew the choice of runs, which the queue, notebooks and the command line may also start."""

    def show(chosen: str | None) -> list[Any]:
        names = _names(studio)
        return [choices(names, chosen, next(iter(names), None))]

    return Tick(show, [run], [run])


def serve(runs: Path, access: Access) -> None:
    """Serve the page of the folder `runs` until Ctrl-C."""
    studio = Studio(runs)
    studio.prepare()
    studio.run_queue()
    token = secrets.token_urlsafe(32)
    blocks = build(studio)
    app = _mounted(blocks, studio)
    app.add_middleware(
        security.Guard,
        names=access.names,
        port=access.port,
        secret=_secret(studio),
        token=token,
        login=security.Login(*access.user) if access.user else None,
    )
    for line in access.addresses("" if access.user else f"/?token={token}"):
        say(line)
    # With --name, a proxy on this machine is trusted for the client's address and for whether it used https.
    config = uvicorn.Config(
        app,
        host=access.host,
        port=access.port,
        log_level="warning",
        server_header=False,
        proxy_headers=access.is_named,
        forwarded_allow_ips=["127.0.0.1", "::1"],
    )
    # In a daemon thread: uvicorn's own shutdown waits for every browser that shows the page.
    worker = threading.Thread(target=uvicorn.Server(config).run, name="page", daemon=True)
    worker.start()
    with suppress(KeyboardInterrupt):
        worker.join()


def _secret(studio: Studio) -> str:
    try:
        return security.kept_secret(studio.runs / "drafts" / "secret")
    except OSError:
        if not studio.unwritable:
            raise
        return secrets.token_urlsafe(32)  # not kept: after a restart, browsers must open the printed address again


def _mounted(blocks: gr.Blocks, studio: Studio) -> FastAPI:
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = QUEUE_POLL_S
    blocks.state_session_capacity = MOST_BROWSERS
    without_docs: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    return gr.mount_gradio_app(  # type: ignore[no-any-return]
        FastAPI(**without_docs),
        blocks,
        "/",
        app_kwargs=without_docs,
        allowed_paths=[str(studio.thumbnails.folder), str(studio.downloads.folder)],
        theme=theme.theme(),
        css=theme.CSS,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        footer_links=[],
        run_history=False,
        max_file_size="1mb",
        show_error=False,
    )
