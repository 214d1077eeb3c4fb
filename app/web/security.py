"""Access control of the page: a token in the printed address or a password, and no requests from other sites.

Every request passes `Guard` before gradio sees it. A request needs a cookie, which the printed token or the password
gives. See DECISIONS 131, 132, 133.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.data.upload.uploads import ID, MOST_CHUNK
from trainer.system import files
from trainer.system.errors import InputError
from trainer.view.render import Templates

LOCAL = ("127.0.0.1", "localhost", "::1")
ALL_ADDRESSES = ("0.0.0.0", "::")
MAX_BODY_BYTES = 4 * 2**20
MAX_LOGIN_BYTES = 4096
CHUNK = re.compile(f"/uploads/{ID.pattern}")
"""The address that takes a chunk of an image: see `upload_routes`."""
UPLOADS_CLOSED = (
    "Uploads are off: this page has a name for other machines (--name) and no password; start it with --auth-file "
    "FILE, or without --name, or copy the images into a folder of this machine yourself."
)
ATTEMPTS, WITHIN_S = 5, 60.0
MOST_CLIENTS = 1024
"""Addresses whose wrong passwords are counted, the most recent ones."""
LEAST_PASSWORD = 8
NAME = re.compile(r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{1,5}))?")
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "x-frame-options": "SAMEORIGIN",
    # Only the page itself may run scripts: files are viewed, and other responses are data.
    "content-security-policy": "default-src 'none'; img-src 'self'; style-src 'unsafe-inline'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'self'",
}
# gradio sets styles of elements (unsafe-inline) and has a <base> of its own. It makes functions of texts (unsafe-eval)
# only for gr.HTML and for `js=` of events: the page has neither. Handlers in markup, `javascript:`, texts that become
# functions and scripts without a known hash never run.
PAGE_POLICY = (
    "default-src 'self'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-src 'none'; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)
INLINE_SCRIPT = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL)
CLOSED = "Open this page with the address that ShardStudio printed in the terminal it was started in."
DOOR = Templates(Path(__file__).with_name("templates"))


def password(auth: str, source: str) -> tuple[str, str]:
    """Parse `USER:PASS`. Raises InputError, naming `source`, when it has another form or the password is too short."""
    user, colon, password = auth.partition(":")
    if not (user and colon and len(password) >= LEAST_PASSWORD):
        raise InputError(f"{source}: needs USER:PASS with a password of {LEAST_PASSWORD} characters or more")
    return user, password


def read_password(file: Path) -> tuple[str, str]:
    """Read user and password from a file with one line. Raises InputError when others may read the file."""
    source = f"--auth-file {file}"
    try:
        with files.opened(file) as stream:
            mode = os.fstat(stream.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise InputError(f"{source}: others may read it (mode {mode:04o}); run chmod 600 {file}")
            lines = stream.read(MAX_LOGIN_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{source}: cannot be read ({error}); name a file with one line USER:PASS") from error
    if len(lines) != 1:
        raise InputError(f"{source}: has {len(lines)} lines; write one line USER:PASS")
    return password(lines[0], source)


def kept_secret(file: Path) -> str:
    """Return the secret of this folder's pages, readable by its owner only, so that cookies outlive a restart.

    Raises OSError where nothing can be written.
    """
    files.make_private(file.parent)
    with files.locked(file):  # another page of the folder may be starting
        secret = files.read(file).decode("ascii", "replace")
        if not secret:
            secret = secrets.token_urlsafe(32)
            files.replace(file, secret)
    return secret


@dataclass(frozen=True)
class Name:
    """A name under which the page is reached. An empty port stands for 80, 443 and the page's own."""

    host: str
    port: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


def parsed_name(text: str) -> Name:
    """Parse `HOST` or `HOST:PORT`. Raises InputError."""
    found = NAME.fullmatch(text)
    if found is None or int(found["port"] or 1) not in range(1, 65536):
        raise InputError(f"--name {text}: needs HOST or HOST:PORT, as in --name studio.example:8443, without https://")
    return Name(found["host"].lower(), found["port"] or "")


def own_names(host: str) -> list[Name]:
    """Return the names of this machine, for a page that listens on the address `host`."""
    if host not in ALL_ADDRESSES:
        addresses = [host]
    else:
        kind = socket.AF_INET if host == "0.0.0.0" else socket.AF_INET6
        found = [address for card in psutil.net_if_addrs().values() for address in card if address.family == kind]
        addresses = [address.address for address in found if "%" not in address.address]
    return [Name(socket.gethostname().lower()), *(Name(literal(address)) for address in addresses)]


def literal(host: str) -> str:
    """Return a host as written in a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host.lower()


class Login:
    """Checks user and password in constant time, and limits the guesses of each address separately."""

    def __init__(self, user: str, password: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.expected = f"{user}:{password}"
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def is_locked(self, client: str) -> bool:
        """Whether an address has failed ATTEMPTS times within WITHIN_S."""
        with self._lock:
            failures = self._failures.get(_neighbourhood(client))
            return failures is not None and len(failures) == ATTEMPTS and self._clock() - failures[0] < WITHIN_S

    def __call__(self, client: str, user: str, password: str) -> bool:
        """Whether user and password are right. `client` is the address of the browser."""
        if self.is_locked(client):
            return False
        if hmac.compare_digest(f"{user}:{password}".encode(), self.expected.encode()):
            return True
        with self._lock:
            client = _neighbourhood(client)
            self._failures.setdefault(client, deque(maxlen=ATTEMPTS)).append(self._clock())
            self._failures.move_to_end(client)
            while len(self._failures) > MOST_CLIENTS:
                self._failures.popitem(last=False)
        return False


def _neighbourhood(client: str) -> str:
    """The unit whose guesses are counted: an IPv4 address, or an IPv6 /64 network, which one household may own."""
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:  # a socket without an address
        return client
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
    return str(address)


class Guard:
    """Refuses requests without the cookie, from other sites or to unknown names, and too large bodies.

    Files are taken by the address `CHUNK` alone, and by gradio's own addresses never.
    """

    def __init__(
        self,
        app: ASGIApp,
        names: Iterable[Name],
        port: int,
        secret: str,
        token: str,
        login: Login | None = None,
        uploads_closed: str = "",
        page_end: str = "",
    ) -> None:
        """Wrap `app`.

        Args:
            names: Names under which the page is reached, in addition to the local ones.
            port: Port of the page.
            secret: Key of the cookie.
            token: Token in the printed address, used when `login` is None.
            login: Check of user and password.
            uploads_closed: Why no images are taken; "" where they are.
            page_end: Markup that is added at the end of the page.
        """
        self._app = app
        self._page_end = page_end.encode()
        self._uploads_closed = uploads_closed
        known = tuple(names)
        self._hosts = frozenset([*map(literal, LOCAL), *(name.host for name in known)])
        # For a proxy that does not send the browser's own Host: what the user named, and no port of it that is not.
        self._origins = frozenset(
            f"{scheme}://{given}"
            for name in known
            for given in ([str(name)] if name.port else [name.host, f"{name.host}:{port}"])
            for scheme in ("http", "https")
        )
        # A new password invalidates the cookies of the old one.
        given = hmac.new(secret.encode(), login.expected.encode() if login else b"", hashlib.sha256).hexdigest()
        self._cookie = f"shardstudio-{port}={given}"  # browsers send cookies to every port of a host
        self._token = token
        self._login = login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":  # gradio uses plain requests only
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._answer(scope, receive, _Marked(send, HEADERS).send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer = self._refused_as_foreign(request) or await self._opened(request) or self._refused(request)
        if answer is not None:
            await answer(scope, receive, send)
        elif (scope["method"], scope["path"]) == ("GET", "/"):
            uncompressed = [header for header in scope["headers"] if header[0] != b"accept-encoding"]
            await self._app({**scope, "headers": uncompressed}, receive, _Page(send, self._page_end).send)
        else:
            await self._app(scope, receive, send)

    def _refused_as_foreign(self, request: Request) -> Response | None:
        """Refuse requests of other sites' scripts, and names that somebody else gave this machine (DNS rebinding)."""
        host = request.headers.get("host", "")
        try:
            name = literal(urlsplit(f"//{host}").hostname or "")
        except ValueError:
            name = ""
        if name not in self._hosts:
            return PlainTextResponse(
                f"{host!r} is not a name of this page: start it with --name {name or 'HOST'}, or use its address.\n",
                400,
            )
        origin = request.headers.get("origin", "")
        # Scheme, host and port: browsers send the cookie to every port of a host, so another page of this machine could
        # send it. By https where a proxy says nothing of it, too. Links send no origin.
        is_own = origin in self._origins or origin in (f"{request.url.scheme}://{host}", f"https://{host}")
        is_linked = request.method in ("GET", "HEAD")
        site = request.headers.get("sec-fetch-site", "same-origin")
        if (origin and not is_own) or (not is_linked and site not in ("same-origin", "none")):
            return PlainTextResponse("this page accepts no requests from other sites", 403)
        return None

    async def _opened(self, request: Request) -> Response | None:
        """Answer a right token or password with the cookie and a redirect to the page's plain address."""
        given = request.query_params.get("token", "")
        if self._login is None:
            is_right = request.url.path == "/" and hmac.compare_digest(given.encode(), self._token.encode())
            return self._let_in(request) if is_right else None
        if (request.method, request.url.path) != ("POST", "/login"):
            return None
        client = request.client.host if request.client else ""
        if self._login.is_locked(client):
            sentence = f"Wrong {ATTEMPTS} times from this address; wait {WITHIN_S:.0f} seconds."
            return _document(429, sentence, has_login=True, role="alert")
        user, word = await _credentials(request)
        if self._login(client, user, word):
            return self._let_in(request)
        return _document(401, "User or password is wrong.", has_login=True, role="alert")

    def _let_in(self, request: Request) -> Response:
        answer = RedirectResponse("/", 303, {"cache-control": "no-store"})
        secure = "; Secure" if request.url.scheme == "https" else ""
        answer.headers.append("set-cookie", f"{self._cookie}; HttpOnly; SameSite=Strict; Path=/{secure}")
        return answer

    def _refused(self, request: Request) -> Response | None:
        cookies = request.headers.get("cookie", "").split("; ")
        if not any(hmac.compare_digest(cookie.encode(), self._cookie.encode()) for cookie in cookies):
            return self._closed(request)
        if request.method in ("GET", "HEAD", "OPTIONS"):
            return None
        if request.url.path.endswith("/upload"):
            return PlainTextResponse("this page accepts no uploads", 403)
        length = request.headers.get("content-length", "")
        if not length.isdigit():  # chunked
            return PlainTextResponse("Content-Length is required", 411)
        is_chunk = request.method == "PUT" and CHUNK.fullmatch(request.scope["path"]) is not None  # decoded
        if is_chunk and self._uploads_closed:
            return PlainTextResponse(self._uploads_closed, 403)
        if int(length) > (MOST_CHUNK if is_chunk else MAX_BODY_BYTES):
            return PlainTextResponse("too large", 413)
        return None

    def _closed(self, request: Request) -> Response:
        if request.url.path != "/" or request.method != "GET":
            return PlainTextResponse(CLOSED if self._login is None else "Log in first.", 401)
        # Browsers withhold the cookie when another site's link opened the page, and send it when the page reloads.
        is_linked = request.headers.get("sec-fetch-site") == "cross-site"
        sentence = "Log in to use this page." if self._login else CLOSED
        return _document(401, sentence, has_login=self._login is not None, is_linked=is_linked)


def _document(
    status: int, sentence: str, *, has_login: bool, role: str = "status", is_linked: bool = False
) -> Response:
    """Return a page with a sentence and, with `has_login`, a form to log in. A linked one loads itself once more."""
    page = DOOR.page("door.html", sentence=sentence, has_login=has_login, role=role, is_linked=is_linked)
    return HTMLResponse(page, status, {"cache-control": "no-store"})


async def _credentials(request: Request) -> tuple[str, str]:
    """User and password of the form; empty where the form has none."""
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_LOGIN_BYTES:
                return "", ""
    except ClientDisconnect:
        return "", ""
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return fields.get("username", [""])[0], fields.get("password", [""])[0]


class _Marked:
    """Adds headers to a response that it does not set itself."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self._headers = headers

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in self._headers.items():
                headers.setdefault(name, value)
        await self._send(message)


class _Page:
    """Sends the page itself once it is complete, with our scripts and a policy that lists the hashes of inline ones."""

    def __init__(self, send: Send, end: bytes) -> None:
        self._send = send
        self._end = end
        self._start: Message = {}
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        before, tag, after = self._body.rpartition(b"</body>")
        self._body = before + self._end + tag + after
        digests = (hashlib.sha256(script).digest() for script in INLINE_SCRIPT.findall(self._body))
        hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
        headers = MutableHeaders(scope=self._start)
        headers["content-security-policy"] = PAGE_POLICY.format(scripts=hashes)
        headers["content-length"] = str(len(self._body))
        # A browser that goes back or opens its tabs again would show that of an earlier version, with its kept scripts.
        headers["cache-control"] = "no-store"
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": self._body})
