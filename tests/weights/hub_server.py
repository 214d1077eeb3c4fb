"""A hub on localhost: the part of the Hugging Face hub's protocol that a download needs, with what can go wrong."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 2**16


@dataclass
class Hub:
    """What the server holds, how it behaves, and what it was asked for.

    Attributes:
        model_id: The one model.
        files: {path: content}. A .safetensors file is in LFS, as on the hub.
        is_gated: Whether files need a token; `token` is one whose owner accepted the licence.
        hold_after: Bytes of LFS files that are sent before everything stands still until `released` is set.
        sizes: {path: size in the listing}, where it differs from the content's.
        checksums: {path: checksum in the listing}, where it differs from the content's.
        commit: The commit that it names.
        bytes_sent: Of LFS files.
        ranges: The Range header of each request for an LFS file.
        paths: What was asked for.
        is_down: Whether every answer is an error.
        ignores_ranges: Whether a file is sent from its beginning, whatever is asked for.
        breaks_after: Bytes of LFS files after which the connection ends, once.
        tokens: Authorization headers that came, and those that came to the host of the LFS files.
    """

    model_id: str
    files: Mapping[str, bytes]
    is_gated: bool = False
    token: str = "hf_accepted"
    hold_after: int | None = None
    released: threading.Event = field(default_factory=threading.Event)
    sizes: Mapping[str, int] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    commit: str = COMMIT
    bytes_sent: int = 0
    ranges: list[str | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    tokens_of_cdn: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    is_down: bool = False
    ignores_ranges: bool = False
    breaks_after: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def entry(self, path: str) -> dict[str, object]:
        """The file in the listing of the repository."""
        size = self.sizes.get(path, len(self.files[path]))
        entry: dict[str, object] = {"type": "file", "path": path, "size": size, "oid": oid(self.files[path])}
        if is_lfs(path):
            entry["lfs"] = {"oid": self.checksums.get(path, sha256(self.files[path])), "size": size, "pointerSize": 134}
        return entry


class HubServer(ThreadingHTTPServer):
    """`with HubServer(hub) as server:` serves until the end of the block. url: for HF_ENDPOINT."""

    daemon_threads = True

    def __init__(self, hub: Any, port: int = 0, handler: type[Handler] | None = None) -> None:
        super().__init__(("127.0.0.1", port), handler or Handler)
        self.hub = hub
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.cdn = f"http://localhost:{self.server_port}"  # another host, as the hub's own

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.hub.released.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is what the tests are about."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server.hub
        path = urlsplit(self.path).path
        hub.paths.append(path)
        if token := self.headers.get("Authorization"):
            (hub.tokens_of_cdn if path.startswith("/cdn/") else hub.tokens).append(token)
        api, files = f"/api/models/{hub.model_id}", f"/{hub.model_id}/resolve/"
        if hub.is_down:
            self._answer(503, b"")
        elif path == f"{api}/revision/main":
            self._json({"id": hub.model_id, "sha": hub.commit, "siblings": [{"rfilename": name} for name in hub.files]})
        elif path == f"{api}/tree/{hub.commit}":
            self._json([hub.entry(name) for name in hub.files])
        elif path.startswith(files):
            self._resolve(path.removeprefix(files).partition("/")[2])
        elif path.startswith("/cdn/"):
            self._send_large(path.removeprefix("/cdn/"))
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _resolve(self, name: str) -> None:
        hub = self.server.hub
        if hub.is_gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._answer(403 if self.headers.get("Authorization") else 401, b"", {"X-Error-Code": "GatedRepo"})
        elif is_lfs(name):
            content = hub.files[name]
            linked = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
            self._answer(302, b"", {"X-Repo-Commit": hub.commit, "Location": f"{self.server.cdn}/cdn/{name}", **linked})
        else:
            content = hub.files[name]
            self._answer(200, content, {"X-Repo-Commit": hub.commit, "ETag": f'"{oid(content)}"'})

    def _send_large(self, name: str) -> None:
        hub, content = self.server.hub, self.server.hub.files[name]
        asked = self.headers.get("Range")
        hub.ranges.append(asked)
        asked = None if hub.ignores_ranges else asked
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        for at in range(start, len(content), PIECE):
            if hub.hold_after is not None and hub.bytes_sent >= hub.hold_after:
                hub.released.wait(60)
            if hub.breaks_after is not None and hub.bytes_sent >= hub.breaks_after:
                hub.breaks_after = None
                self.close_connection = True
                return
            self.wfile.write(content[at : at + PIECE])
            with hub.lock:
                hub.bytes_sent += len(content[at : at + PIECE])

    def _json(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _answer(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def is_lfs(path: str) -> bool:
    return path.endswith(".safetensors")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def oid(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
