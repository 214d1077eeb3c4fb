"""Requests to a live page: any method, path, header and body, from who has opened the page and from who has not."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from hypothesis import strategies as st

from tests.app.browser import Server, recorded, serving
from tests.fuzz.target import LIMIT_S, Target

METHODS = st.sampled_from(
    ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "get", "\x7f", "A" * 300]
)
PATHS = st.one_of(
    st.sampled_from(
        [
            "/", "/config", "/gradio_api/run/predict", "/gradio_api/upload", "/gradio_api/queue/join", "//", "/%00",
            "/gradio_api/file=/etc/passwd", "/gradio_api/file=..%2f..%2fetc/passwd", "/gradio_api/file=/dev/zero",
            "/gradio_api/heartbeat/x", "/gradio_api/call/predict", "/static/../launch.py", "/gradio_api/info", "*",
            "/gradio_api/proxy=http://127.0.0.1:1/", "/gradio_api/component_server", "/login", "/?token=x",
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
BODIES = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode()),
    st.tuples(st.integers(-1, 80), st.lists(st.one_of(st.none(), st.text(max_size=20), st.integers()), max_size=4)).map(
        lambda pair: json.dumps({"fn_index": pair[0], "data": pair[1], "session_hash": "fuzz"}).encode()
    ),
)
VALUES = st.tuples(METHODS, PATHS, HEADERS, BODIES)


@contextmanager
def _prepared(folder: Path) -> Iterator[Callable[[Any], None]]:
    runs = folder / "runs"
    runs.mkdir()
    recorded(runs, "one")
    with serving(runs) as server:

        def answer(value: Any) -> None:
            method, path, headers, body = value
            _send(server, method, path, headers, body)
            with httpx.Client(timeout=LIMIT_S) as client:
                assert client.get(server.url).status_code < 500
            assert server.process is not None and server.process.poll() is None, server.log
            assert "Traceback" not in server.log, server.log

        yield answer


def _send(server: Server, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
    """By hand, as a client library would refuse to. The answer, or the end of the connection, comes in time."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
    if "Host" not in headers:
        lines.append(f"Host: 127.0.0.1:{server.port}")
    if "Content-Length" not in headers:
        lines.append(f"Content-Length: {len(body)}")
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as connection:
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1", "replace") + body)
        connection.shutdown(socket.SHUT_WR)
        try:
            answered = connection.recv(65536)
        except ConnectionResetError:  # it does not read on after it has refused
            return
    assert not answered.startswith(b"HTTP/1.1 500"), answered


REQUESTS = Target("requests", VALUES, _prepared)
