"""Notices of the end of a run, by a webhook, a command and mail. The process that outlives the ranks sends them.

Whoever knows the address of a webhook can write to it, so addresses are in one private file of the user. They never
reach a config, a run folder, a log or an error: sentences name the way and what happened, and nothing that was set.
See DECISIONS 225.
"""

from __future__ import annotations

import errno
import http.client
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pydantic import TypeAdapter, ValidationError, field_validator

from trainer.config.sections import Section, option
from trainer.run.events import (
    ENDS,
    ErrorEvent,
    EventReader,
    LossyWriter,
    SampleEvent,
    State,
    StepEvent,
    WarningEvent,
    last_state,
    newest_picture,
    since_start,
)
from trainer.run.failure import diagnose
from trainer.run.folder import RunDir, is_run
from trainer.run.process import Launch
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.installation import notices_file
from trainer.system.terminal import printable, shortened

TIMEOUT_S = 10.0
"""How long the end of a run waits for its notices, all together."""
WAY_S = 9.0
"""How long one server or program may take: less, so that a sentence can say which was too slow."""
MOST_REASON = 500
"""Characters of the reason of a failure: Discord takes 2,000 in all."""
MOST_PICTURE_BYTES = 8 * files.MIB
"""Larger samples are left out: Discord takes 10 MB, ntfy 15."""
PNG = b"\x89PNG\r\n\x1a\n"
MAIL_ADDRESS = re.compile(r"[^\s@<>()\[\]\\,;:\"-][^\s@<>()\[\]\\,;:\"]*@[^\s@<>()\[\]\\,;:\"]+")
SENDMAIL_FOLDERS = ("/usr/sbin", "/usr/lib")
"""Where sendmail is that is not on a user's PATH."""
HOSTS = {"hooks.slack.com": "slack", "discord.com": "discord", "discordapp.com": "discord", "ntfy.sh": "ntfy"}
ENDED: Mapping[State, str] = {"finished": "has finished", "failed": "has failed", "stopped": "was stopped"}
Way = Literal["webhook", "command", "mail"]


class Notices(Section):
    """Where notices go: `notices.json` in the user's own config folder."""

    webhook: str = option("", title="Webhook")
    """Address to post to: an incoming webhook of Slack or Discord, the topic of an ntfy server, or any address that
    takes JSON. Whoever knows it can write there."""
    format: Literal["auto", "slack", "discord", "ntfy", "json"] = option("auto", title="Format of the webhook")
    """auto: by the address, and plain JSON where it is not known."""
    command: tuple[str, ...] = option((), title="Command")
    """Program with its arguments, started without a shell. It finds the facts in the variables SHARDSTUDIO_RUN, _STATE,
    _REASON, _STEP, _LOSS, _SAMPLE, _LINK and _FOLDER, and may take nine seconds."""
    mail: str = option("", title="Mail to")
    """Address that gets a mail by this machine's sendmail."""
    page: str = option("", title="Address of this page")
    """Links in notices begin with it. Empty: notices have no link."""
    sample: bool = option(True, title="With the newest sample")
    """Send the newest sample as a picture to Discord, to ntfy and by mail."""

    @field_validator("webhook", "page")
    @classmethod
    def _is_address(cls, text: str) -> str:
        if text and not is_address(text):
            raise ValueError(
                "is not an address that begins with https:// or http://, without spaces, user name or password"
            )
        return text

    @field_validator("mail")
    @classmethod
    def _is_mail(cls, text: str) -> str:
        if text and not (text.isascii() and MAIL_ADDRESS.fullmatch(text)):
            raise ValueError("is not the mail address of one person, such as ada@example.org")
        return text

    @field_validator("command")
    @classmethod
    def _is_command(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        if words and (not words[0] or any("\0" in word for word in words)):
            raise ValueError("begins with an empty word, or has a null character; begin with the program's name")
        return words

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways that are set."""
        return tuple(way for way in WAYS if getattr(self, way))


def is_address(text: str) -> bool:
    """Whether a text is an http address that can be sent to."""
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises for one that is not a port
        host = (parts.hostname or "").encode("idna")
    except ValueError:
        return False
    is_plain = text.isascii() and text.isprintable() and " " not in text and "@" not in parts.netloc
    return is_plain and parts.scheme in ("http", "https") and bool(host)


_NOTICES = TypeAdapter(Notices)


def read() -> Notices:
    """Read the user's file, and close it to others. Without one, nothing is sent.

    Raises:
        InputError: It is damaged, or others can read it and that cannot be changed. The message holds no value of it.
    """
    file = notices_file()
    if file is None:
        return Notices()
    try:
        if file.stat().st_mode & 0o077:
            file.chmod(0o600)
        return files.read_json(file, _NOTICES)
    except FileNotFoundError:
        return Notices()
    except InputError:  # its sentence would name what stands in the file
        raise InputError(f"{file}: damaged, or not of this version; remove it, and fill in the page Machine") from None
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read, or closed to others ({error.strerror}); chmod 600 it, or remove it"
        ) from error


def checked(values: Mapping[str, Any]) -> Notices:
    """Return notices with these values, as a form sends them: the command is one line.

    Raises:
        InputError: A value is wrong. The message names the field, not the value.
    """
    try:
        words = tuple(shlex.split(str(values.get("command", ""))))
    except ValueError as error:
        raise InputError("Command: a quotation mark is not closed; close it") from error
    try:
        return Notices.model_validate({**values, "command": words})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = Notices.model_fields.get(str(first["loc"][0]))
        name = field.title if field else "notices"
        raise InputError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from None


def save(notices: Notices) -> None:
    """Replace the user's file, which only the user can read. Raises InputError where it cannot be written."""
    file = notices_file()
    if file is None:
        raise InputError("this user has no home folder for notices.json; set XDG_CONFIG_HOME to a folder")
    try:
        files.make_own(file.parent)
        files.replace(file, notices.model_dump_json(indent=1) + "\n", 0o600)
    except OSError as error:
        raise InputError(
            f"{file}: cannot be written ({error.strerror}); free some space, or make its folder writable"
        ) from error


@dataclass(frozen=True)
class Notice:
    """What is sent.

    Attributes:
        run: Name of the run folder; "" for a test without a run.
        reason: Why it failed, or what else is to be said; one line.
        step: Optimizer steps finished.
        loss: Loss of the last step; None before the first.
        sample: The newest sample's picture; None without one.
        link: Address of the run's page; "" if the page's is not known.
        folder: The run folder.
    """

    run: str
    state: State
    reason: str = ""
    step: int = 0
    loss: float | None = None
    sample: Path | None = None
    link: str = ""
    folder: Path = Path()

    @property
    def title(self) -> str:
        """How the run ended, in a few words."""
        name = printable(RunDir(self.folder).title or self.run)
        return f"{name} {ENDED[self.state]}" if self.run else "A test from ShardStudio"

    @property
    def text(self) -> str:
        """The rest, in lines."""
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"  # "nan" where it is not finite
        return "\n".join(filter(None, [f"Step {self.step:,}{loss}" if self.step else "", self.reason]))

    def picture(self) -> bytes:
        """The newest sample as a PNG; empty where there is none, or where it is too large."""
        with suppress(OSError, InputError):
            content = files.read(self.sample, MOST_PICTURE_BYTES) if self.sample else b""
            return content if content.startswith(PNG) else b""
        return b""

    def facts(self) -> dict[str, Any]:
        """What a program reads."""
        sample = str(self.sample.relative_to(self.folder)) if self.sample else ""
        loss = self.loss if self.loss is None or math.isfinite(self.loss) else None
        return {
            "title": self.title,
            "run": self.run,
            "state": self.state,
            "reason": self.reason,
            "step": self.step,
            "loss": loss,
            "sample": sample,
            "link": self.link,
        }


def notice_of(run: RunDir, notices: Notices) -> Notice:
    """Return the notice of a run whose ranks have ended.

    Raises:
        InputError, OSError: Its events cannot be read.
    """
    events = EventReader(run.events_file).read()
    latest = since_start(events)
    state, reason = last_state(latest), ""
    if state not in ENDS or state == "failed":  # killed ranks write no end
        errors = [event for event in latest if isinstance(event, ErrorEvent)]
        state, reason = "failed", (errors[-1] if errors else diagnose(run, latest)).message
    steps = [event for event in events if isinstance(event, StepEvent)]
    picture = newest_picture(event for event in events if isinstance(event, SampleEvent))
    sample = run.own_file(picture) if picture and notices.sample else None
    return Notice(
        run.path.name,
        state,
        shortened(printable(" ".join(reason.split())), MOST_REASON),
        max((event.step for event in latest), default=0),
        steps[-1].loss if steps else None,
        sample if sample and sample.is_file() else None,
        f"{notices.page.rstrip('/')}/#/runs/{run.path.name}" if notices.page else "",
        run.path.resolve(),
    )


def example(runs: Path, notices: Notices) -> Notice:
    """Return what a test sends: the notice of the newest run that has ended, or else a sentence."""
    with suppress(InputError, OSError):
        ended = [run for run in map(RunDir, runs.iterdir()) if is_run(run.path) and run.report.exists()]
        newest = max(ended, key=lambda run: run.report.stat().st_mtime, default=None)
        if newest is not None:
            newest.guard()
            with newest.boundary():
                return notice_of(newest, notices)
    return Notice("", "finished", "Notices of your runs will come this way.", link=notices.page)


def tell(folder: str) -> None:
    """Send the notices of a run, from the process that leads it: that of `launch.json`, so that of several nodes the
    first one tells, and not torchrun below a supervisor. A rehearsal is over before anybody has left.

    Raises nothing that a notice can cause: whatever is not sent is one warning in the run's events.

    Args:
        folder: The run folder.
    """
    run, step = RunDir(Path(folder)), 0
    try:
        with run.boundary():
            launch = Launch.read(run)
            if launch is None or not launch.is_here or launch.pid != os.getpid() or run.is_rehearsal:
                return
            notices = read()
            notice = notice_of(run, notices)
        step, problems = notice.step, send(notices, notice, notices.ways)
    except (InputError, OSError) as error:
        problems = [str(error)]
    if problems:
        with suppress(OSError, InputError):
            LossyWriter(run.events_file).write(
                WarningEvent(step=step, message=f"a notice of the end was not sent: {'; '.join(problems)}")
            )


def send(notices: Notices, notice: Notice, ways: Sequence[Way]) -> list[str]:
    """Send a notice in these ways at the same time. Returns within TIMEOUT_S, with a sentence for each that failed."""
    problems: dict[Way, str] = dict.fromkeys(ways, f"gave no answer within {TIMEOUT_S:g} s; check what it waits for")
    deadline = time.monotonic() + TIMEOUT_S

    def attempt(way: Way) -> None:
        try:
            problems[way] = WAYS[way](notices, notice)
        except Exception as error:  # noqa: BLE001 - of whatever kind, it is one warning and no more
            problems[way] = f"could not be made ({type(error).__name__}); try it on the page Machine"

    # Daemons: a server that sends a byte now and then does not hold this process.
    threads = [threading.Thread(target=attempt, args=(way,), name=way, daemon=True) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [f"{way}: {problem}" for way, problem in problems.items() if problem]


def _send_webhook(notices: Notices, notice: Notice) -> str:
    request = webhook_request(notices, notice)
    try:
        with build_opener(_NoRedirects).open(request, timeout=WAY_S):
            return ""
    except HTTPError as error:
        error.close()
        return _refusal(error.code)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _unreachable(error.reason if isinstance(error, URLError) else error)


class _NoRedirects(HTTPRedirectHandler):
    """A redirect is an error: it may lead to a service of the private network that trusts whoever is in it."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def _refusal(code: int) -> str:
    if 300 <= code < 400:
        return f"answered {code}, a redirect, which is not followed; set the address that answers itself"
    if code >= 500:
        return f"answered {code}, an error of the server; try again later"
    return f"answered {code}; make a new webhook there and set its address, or choose another format"


def _unreachable(error: object) -> str:
    match error:
        case TimeoutError():
            return f"gave no answer within {WAY_S:g} s; check the address"
        case socket.gaierror():
            return "the name of its server is not known here; check the address and this machine's network"
        case ssl.SSLError():
            return "its certificate is not accepted here; check the address, or have the certificate renewed"
        case OSError(errno=int(number)) if number in errno.errorcode:
            return f"cannot be reached ({os.strerror(number)}); check the address"
    return "did not answer as a web server does; check the address"


def webhook_request(notices: Notices, notice: Notice) -> Request:
    """Return the request of a webhook in its format."""
    address, picture = notices.webhook, notice.picture()
    kind = notices.format
    if kind == "auto":
        host = urlsplit(address).hostname or ""
        kind = HOSTS.get(host, "json")  # type: ignore[assignment]
    if kind == "ntfy":
        return _ntfy_request(address, notice, picture)
    headers = {"User-Agent": "ShardStudio", "Content-Type": "application/json"}  # Discord refuses urllib's own name
    lines = [notice.text, notice.link]
    if kind == "slack":
        text = "\n".join(filter(None, [f"*{notice.title}*", *lines]))
        body: dict[str, Any] = {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
    elif kind == "discord":
        # Nobody is called by an @everyone in the name of a run.
        text = "\n".join(filter(None, [f"**{notice.title}**", *lines]))
        body = {"content": text[:2000], "allowed_mentions": {"parse": []}}
        if picture:
            boundary = os.urandom(16).hex()
            headers["Content-Type"] = f"multipart/form-data; boundary={boundary}"
            begin = f'--{boundary}\r\nContent-Disposition: form-data; name="payload_json"\r\n'
            begin += f"Content-Type: application/json\r\n\r\n{json.dumps(body)}\r\n--{boundary}\r\n"
            begin += 'Content-Disposition: form-data; name="files[0]"; filename="sample.png"\r\n'
            begin += "Content-Type: image/png\r\n\r\n"
            return Request(address, begin.encode() + picture + f"\r\n--{boundary}--\r\n".encode(), headers)
    else:
        body = notice.facts()
    return Request(address, json.dumps(body).encode(), headers)


def _ntfy_request(address: str, notice: Notice, picture: bytes) -> Request:
    """Text in the address, which ntfy reads as UTF-8: headers take Latin-1 only, and the body is the picture."""
    words = {"title": notice.title, "message": notice.text, "click": notice.link}
    words |= {"priority": "high"} if notice.state == "failed" else {}
    words |= {"filename": "sample.png"} if picture else {}
    parts = urlsplit(address)
    query = "&".join(filter(None, [parts.query, urlencode({key: word for key, word in words.items() if word})]))
    headers = {"User-Agent": "ShardStudio", "Content-Type": "image/png" if picture else "text/plain"}
    return Request(urlunsplit(parts._replace(query=query)), picture, headers, method="POST")


def _run_command(notices: Notices, notice: Notice) -> str:
    words = {**notice.facts(), "folder": notice.folder, "sample": notice.sample or ""}
    facts = {f"SHARDSTUDIO_{name.upper()}": "" if word is None else str(word) for name, word in words.items()}
    return _run(notices.command, b"", facts)


def _send_mail(notices: Notices, notice: Notice) -> str:
    sendmail = shutil.which("sendmail") or shutil.which("sendmail", path=os.pathsep.join(SENDMAIL_FOLDERS))
    if sendmail is None:
        return "this machine has no sendmail; install one, such as msmtp-mta, or use a webhook"
    message = EmailMessage()
    message["To"], message["Subject"] = notices.mail, notice.title
    message.set_content("\n\n".join(filter(None, [notice.text, notice.link])) + "\n")
    if picture := notice.picture():
        message.add_attachment(picture, maintype="image", subtype="png", filename="sample.png")
    # The recipient is read from the mail (-t): everyone on the machine sees the arguments of a process.
    return _run([sendmail, "-i", "-t"], bytes(message), {})


def _run(argv: Sequence[str], given: bytes, facts: Mapping[str, str]) -> str:
    """Run a program to its end, or kill it and what it started. Returns what went wrong.

    Args:
        argv: Its command.
        given: Its input.
        facts: Variables in addition to those of this process.
    """
    environment = {**os.environ, **facts}
    nothing = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
        )
    except OSError as error:
        return f"cannot be started ({error.strerror}); give the program with its whole path"
    try:
        process.communicate(given, timeout=WAY_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"was ended after {WAY_S:g} s; let it do in the background what takes longer"
    code = process.returncode
    return f"ended with exit code {code}; run it in a terminal to see why" if code else ""


WAYS: Mapping[Way, Callable[[Notices, Notice], str]] = {
    "webhook": _send_webhook,
    "command": _run_command,
    "mail": _send_mail,
}
"""{field: how it is sent}. Each returns what went wrong, or ""."""
