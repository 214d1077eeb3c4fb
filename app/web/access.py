"""Where the page listens, under which names, and who may open it: checked before gradio, which loads for seconds."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.web import security
from trainer.system.errors import InputError
from trainer.system.terminal import say

PASSWORD_VARIABLE = "SHARDSTUDIO_AUTH"


@dataclass(frozen=True)
class Access:
    """The address of the page, and who may open it.

    Attributes:
        host, port: What the page listens on.
        names: Names under which other machines reach it.
        is_named: Whether some of them were given by the user.
        user: User and password; None for a page that is opened with the token in its address.
    """

    host: str
    port: int
    names: tuple[security.Name, ...]
    is_named: bool
    user: tuple[str, str] | None

    @classmethod
    def checked(cls, host: str, port: int, names: Sequence[str], auth: str | None, auth_file: Path | None) -> Access:
        """Check what the user asked for.

        Args:
            host, port: What the page shall listen on.
            names: HOST or HOST:PORT under which other machines reach the page.
            auth: USER:PASS.
            auth_file: File with one line USER:PASS.

        Raises:
            InputError: The port is taken, a name or password is invalid, or others could reach the page without a
                password.
        """
        user = _user(host, auth, auth_file)
        known = [security.parsed_name(name) for name in names]
        if host not in security.LOCAL:
            known += [replace(name, port=str(port)) for name in security.own_names(host)]
        _require_free(host, port)
        return cls(host, port, tuple(known), bool(names), user)

    @property
    def uploads_closed(self) -> str:
        """Why the page takes no images, "" where it does: other machines may reach it without a password."""
        return security.UPLOADS_CLOSED if self.is_named and self.user is None else ""

    def addresses(self, path: str) -> Iterator[str]:
        """Yield the addresses of the page, and advice. path: path and token that open it."""
        if self.host in security.LOCAL:
            yield f"http://{security.literal(self.host)}:{self.port}{path}"
        for name in self.names:
            if self.host in security.LOCAL:
                yield f"https://{name}{path}"
            else:
                yield f"http://{name}{path}" if name.port else f"http://{name}:{self.port}{path}"
        if self.host not in security.LOCAL:
            yield "The password crosses the network in clear text; app/web/proxy/ has examples of a TLS proxy."
            if not self.is_named:
                yield "To reach the page by another name, add --name HOST[:PORT]."


def _user(host: str, auth: str | None, auth_file: Path | None) -> tuple[str, str] | None:
    """User and password; None for a page that is opened with the token in its address."""
    given = os.environ.pop(PASSWORD_VARIABLE, None)  # child processes must not inherit it
    if auth_file is not None:
        return security.read_password(auth_file)
    if auth is not None:
        say(f"--auth: every user of this machine can read it; use --auth-file FILE or {PASSWORD_VARIABLE}")
        return security.password(auth, "--auth")
    if given is not None:
        return security.password(given, PASSWORD_VARIABLE)
    if host not in security.LOCAL:
        raise InputError(
            f"--host {host}: others could start runs here; add --auth-file FILE with one line USER:PASS, "
            f"or set {PASSWORD_VARIABLE}"
        )
    return None


def _require_free(host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(f"--host {host}: not an address of this machine ({error.strerror}); name another") from error
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise InputError(f"--port {port}: cannot be used on {host} ({error.strerror}); name another") from error
