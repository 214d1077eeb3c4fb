"""Requests to a live page: any method, path, header and body, from who has opened the page and from who has not."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from hypothesis import strategies as st

from tests.app.browser import PATIENCE_S, ROOT, Server, recorded, serving
from tests.fuzz.target import LIMIT_S, MOST_MEMORY, SCALE, Target, peak_of

AS_JSON = {"content-type": "application/json"}
METHODS = st.sampled_from(
    ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "get", "\x7f", "A" * 300]
)
PATHS = st.one_of(
    st.sampled_from(
        [
            "/", "/config", "/gradio_api/run/predict", "/gradio_api/upload", "/gradio_api/queue/join", "//", "/%00",
            "/gradio_api/file=/etc/passwd", "/gradio_api/file=..%2f..%2fetc/passwd", "/gradio_api/file=/dev/zero",
            "/gradio_api/heartbeat/x", "/gradio_api/call/predict", "/static/../launch.py", "/gradio_api/info", "*",
            "/gradio_api/proxy=http://127.0.0.1:1/", "/gradio_api/component_server", "/calls/live",
            "/scripts/x/core.js", "/login", "/?token=x",
            "/" + "a" * 9000,
        ]
    ),
    st.text(st.characters(codec="ascii", exclude_characters=" \r\n"), max_size=40).map("/{}".format),
)  # fmt: skip
HEADERS = st.dictionaries(
    st.sampled_from(
        ["Host", "Origin", "Cookie", "Content-Length", "Transfer-Encoding", "Sec-Fetch-Site", "X-Forwarded-For",
         "X-Forwarded-Proto", "Content-Type", "Authorization", "Expect", "Upgrade", "Accept-Encoding", "Range"]
    ),
    st.one_of(
        st.sampled_from(
            ["", "x", "null", "-1", "9" * 20, "chunked", "evil.example", "bytes=0-", "websocket", "application/json",
             "multipart/form-data; boundary=x", "127.0.0.1", "a" * 9000, "100-continue"]
        ),
        st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=20),
    ),
    max_size=4,
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.sampled_from(
    ["name", "known", "run", "path", "target", "names", "show", "search", "page", "token", "log"]
)
BODIES = st.one_of(st.binary(max_size=200), JSON.map(lambda value: json.dumps(value).encode()))
READING = (
    *("live", "new_state", "new_glance", "new_browse", "new_thumbnails", "runs_list", "runs_images", "compare_show"),
    *(
        "run_view",
        "samples_list",
        "samples_images",
        "files_list",
        "queue_state",
        "data_view",
        "upload_state",
        "look_state",
        "mask_load",
        "mask_former",
        "mask_overlay",
    ),
    "machine_gpus",
    "machine_notice_fields",
)
"""Functions of the page's scripts that start, delete and write nothing."""
VALUES = st.one_of(
    st.tuples(METHODS, PATHS, HEADERS, BODIES, st.booleans()),
    st.tuples(SCALE, JSON | st.dictionaries(ARGUMENTS, JSON, max_size=4)),
)
"""A request, and whether it is one of who has opened the page; or a function of the page and what it is given."""


@contextmanager
def _prepared(folder: Path) -> Iterator[Callable[[Any], None]]:
    runs = folder / "runs"
    runs.mkdir()
    recorded(runs, "one")
    code = folder / "code"  # a caption that is written must not be one of the pictures we ship
    for part in ("app", "trainer", "presets"):
        shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns("__pycache__"))
    program = Path(shutil.copy(ROOT / "launch.py", code))
    here = {"PYTHONPATH": str(code)}
    with (
        serving(runs, program=program, environment=here) as server,
        httpx.Client(base_url=server.origin, timeout=PATIENCE_S) as user,
    ):
        user.get(server.url)
        cookie = "; ".join(f"{name}={value}" for name, value in user.cookies.items())

        def answer(value: Any) -> None:
            if len(value) == 2:
                where, data = value
                name = READING[int(where * len(READING))]
                asked = user.post(f"/calls/{name}", content=json.dumps(data), headers=AS_JSON)
                assert asked.status_code == 200, (name, asked.text)
                assert "a fault of ShardStudio" not in asked.text, (name, data, asked.text)
            else:
                *request, is_opened = value
                before = len(server.log)
                answered = _answered(server, *request, cookie if is_opened else "")
                assert is_opened or not answered.startswith(b"HTTP/1.1 5"), answered
                assert is_opened or "Traceback" not in server.log[before:], server.log[before:]
            assert user.get("/gradio_api/heartbeat-none").status_code < 500
            assert server.process is not None and server.process.poll() is None, server.log
            took = peak_of(server.process.pid)
            assert took <= MOST_MEMORY, f"the page took {took / 2**20:.0f} MiB"

        yield answer


def _answered(server: Server, method: str, path: str, headers: dict[str, str], body: bytes, cookie: str) -> bytes:
    """The beginning of the answer to a request that client libraries refuse to send; empty where none came."""
    given = {"Host": f"127.0.0.1:{server.port}", "Content-Length": str(len(body)), "Connection": "close"}
    given |= headers | ({"Cookie": cookie} if cookie else {})
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in given.items()), "", ""]
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1", "replace") + body)
        connection.shutdown(socket.SHUT_WR)
        try:
            return connection.recv(65536)
        except ConnectionResetError:  # it does not read on after it has refused
            return b""


REQUESTS = Target("requests", VALUES, _prepared)
