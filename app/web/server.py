"""Builds the page from its tabs and serves it. See DECISIONS 117."""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.system.imports import quick_imports

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import, which reads it
with quick_imports():
    if "pyarrow" not in sys.modules:  # gradio imports pandas, which imports it if it can: 34 MB that are never used
        sys.modules["pyarrow"] = None  # type: ignore[assignment]
        import gradio  # noqa: F401

        del sys.modules["pyarrow"]

import gradio as gr
import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from app.glossary import GLOSSARY
from app.studio import Studio
from app.web import answers, routes, scripts, security, theme
from app.web.access import Access
from app.web.pages import new_run, rehearsal, run, upload
from app.web.panels import PANELS
from trainer.system.terminal import say

MOST_BROWSERS = 16
"""Browsers whose state is remembered, at 2 MB each. Any others are sent everything again; nothing is lost."""
M_ARENA_MAX = -8
"""The option of glibc's mallopt (malloc.h): the most areas that its threads share."""
QUEUE_POLL_S = 10.0
"""Poll interval of gradio's own queue, which no listener uses; by default it wakes a thousand times a second."""


def build() -> gr.Blocks:
    """Return the page: one empty element, in which the scripts draw the screens. They call functions of `pages/`."""
    with gr.Blocks(title="ShardStudio", analytics_enabled=False) as blocks:
        gr.Column(elem_id="place")
    return blocks  # type: ignore[no-any-return]


def facts(studio: Studio) -> dict[str, Any]:
    """Return what the scripts are told once, in the page itself."""
    return {
        "glossary": GLOSSARY,
        "unwritable": studio.unwritable,
        "form": new_run.facts(),
        "rehearsal": rehearsal.facts(),
        "run": run.facts(),
        "upload": upload.facts(),
    }


def serve(folder: Path, access: Access) -> None:
    """Serve the page of a folder of runs until Ctrl-C."""
    # glibc gives each thread of those that answer memory of its own, and keeps what they free: 8 MB of the page.
    with suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
    studio = Studio(folder)
    studio.prepare()
    studio.run_queue()
    studio.uploads.closed = access.uploads_closed
    token = secrets.token_urlsafe(32)
    app = _mounted(build(), studio)
    app.add_middleware(
        security.Guard,
        names=access.names,
        port=access.port,
        secret=_secret(studio),
        token=token,
        login=security.Login(*access.user) if access.user else None,
        uploads_closed=access.uploads_closed,
        page_end=scripts.page_end(facts(studio)),
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


def _refused(request: Request, error: Exception) -> Response:
    return PlainTextResponse("The page takes no such request.\n", 422)


def _mounted(blocks: gr.Blocks, studio: Studio) -> FastAPI:
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = QUEUE_POLL_S
    blocks.state_session_capacity = MOST_BROWSERS
    options: dict[str, Any] = {
        **{"docs_url": None, "redoc_url": None, "openapi_url": None},
        # FastAPI's own answer contains the request's body, and raises an error if the body is not text.
        "exception_handlers": {RequestValidationError: _refused},
    }
    app = FastAPI(**options)
    routes.add(app, studio)
    answers.add(app, (panel.calls(studio) for panel in PANELS))
    scripts.add(app)
    return gr.mount_gradio_app(  # type: ignore[no-any-return]
        app,
        blocks,
        "/",
        app_kwargs=options,
        allowed_paths=[str(studio.thumbnails.folder), str(studio.downloads.folder)],
        theme=theme.theme(),
        css=theme.css() + scripts.style(),
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        footer_links=[],
        run_history=False,
        max_file_size="1mb",
        show_error=False,
    )
