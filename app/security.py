"""Who may talk to the page: this machine by default, others only with a password, and never another site's script."""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer.config import InputError

LOCAL = ("127.0.0.1", "localhost")
MAX_BODY_BYTES = 4 * 2**20
ATTEMPTS, WITHIN_S = 5, 60.0
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"SAMEORIGIN"),
)


def require_password(host: str, auth: str | None) -> tuple[str, str] | None:
    """The user and the password of `--auth USER:PASS`. Raises InputError for another host without one."""
    if auth is None:
        if host not in LOCAL:
            raise InputError(f"--host {host}: others could start runs here; add --auth USER:PASS")
        return None
    user, colon, password = auth.partition(":")
    if not (user and colon and len(password) >= 8):
        raise InputError("--auth: needs USER:PASS with a password of 8 characters or more")
    return user, password


def kept_secret(file: Path) -> str:
    """The secret of this folder's pages, readable by its owner only; a page that is started again keeps it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="ascii") as content:
        fcntl.flock(content, fcntl.LOCK_EX)  # another page of the folder may be starting
        secret = content.read()
        if not secret:
            secret = secrets.token_urlsafe(32)
            content.write(secret)
    return secret


def middleware(hosts: Sequence[str], port: int, secret: str) -> list[Middleware]:
    """What every request passes. hosts: names this page is reached by.  secret: of the cookie the page gives."""
    origins = frozenset(f"{scheme}://{host}:{port}" for scheme in ("http", "https") for host in hosts)
    cookie = f"shardstudio-{port}={secret}"  # browsers send cookies to every port of a host
    return [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
        Middleware(Guard, origins=origins, cookie=cookie),
    ]


class Guard:
    """Refuses what another site sends, what did not open the page before, files, and bodies that are too large.

    cookie: name=value, given to whoever opens the page.
    """

    def __init__(self, app: ASGIApp, origins: frozenset[str], cookie: str) -> None:
        self._app = app
        self._origins = origins
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = self._refusal(scope["method"], scope["path"], headers)
        if refusal:
            await refusal(scope, receive, send)
            return

        given = [(b"set-cookie", f"{self._cookie}; HttpOnly; SameSite=Strict; Path=/".encode())]
        given = given if scope["path"] == "/" else []

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS, *given]}
            await send(message)

        await self._app(scope, receive, send_marked)

    def _refusal(self, method: str, path: str, headers: dict[bytes, bytes]) -> PlainTextResponse | None:
        if method in ("GET", "HEAD", "OPTIONS"):
            return None
        origin = headers.get(b"origin", b"").decode("latin-1")
        if (origin and origin not in self._origins) or headers.get(b"sec-fetch-site") == b"cross-site":
            return PlainTextResponse("this page takes no requests from other sites", 403)
        cookies = headers.get(b"cookie", b"").decode("latin-1").split("; ")
        if not any(hmac.compare_digest(cookie.encode(), self._cookie.encode()) for cookie in cookies):
            return PlainTextResponse("open the page first", 403)
        if path.endswith("/upload"):
            return PlainTextResponse("this page takes no files", 403)
        if not headers.get(b"content-length", b"").isdigit():  # in pieces of unknown number
            return PlainTextResponse("say how long it is", 411)
        if int(headers[b"content-length"]) > MAX_BODY_BYTES:
            return PlainTextResponse("too large", 413)
        return None


class Login:
    """Checks user and password in constant time, and lets nobody guess quickly."""

    def __init__(self, user: str, password: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._expected = f"{user}:{password}".encode()
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=ATTEMPTS)
        self._lock = threading.Lock()

    def __call__(self, user: str, password: str) -> bool:
        with self._lock:
            now = self._clock()
            if len(self._failures) == ATTEMPTS and now - self._failures[0] < WITHIN_S:
                return False
            is_right = hmac.compare_digest(f"{user}:{password}".encode(), self._expected)
            if not is_right:
                self._failures.append(now)
            return is_right
