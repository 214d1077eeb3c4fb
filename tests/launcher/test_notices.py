"""Notices of the end of a run: servers on loopback, real programs, and runs that end in each way."""

from __future__ import annotations

import email
import email.policy
import http.server
import json
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest
from PIL import Image

from tests.commands import Started, launch_py
from tests.runs import run_config, step_event, write
from trainer.launcher import agent, notices, torchrun
from trainer.launcher.notices import PNG, Notice, Notices
from trainer.run import process
from trainer.run.events import ErrorEvent, EventReader, SampleEvent, StatusEvent, StepEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.run.process import Launch
from trainer.system.errors import InputError

SECRET = "c0ffee"
"""In every address of these tests, and in nothing that may be shown."""
QUICKSTART = Path(__file__).parents[2] / "presets" / "quickstart.yaml"


@dataclass
class Got:
    """A request that reached a server."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Hook:
    """A server on loopback that keeps what it is sent. behave: answers a request in its own way."""

    behave: Callable[[http.server.BaseHTTPRequestHandler], None] | None = None
    got: list[Got] = field(default_factory=list)
    url: str = ""


@contextmanager
def hooked(behave: Callable[[http.server.BaseHTTPRequestHandler], None] | None = None) -> Iterator[Hook]:
    hook = Hook(behave)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hook.got.append(Got(self.path, dict(self.headers), body))
            if hook.behave:
                hook.behave(self)
            else:
                self.send_response(204)
                self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hook.url = f"http://127.0.0.1:{server.server_port}/{SECRET}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hook
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's config folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "shardstudio"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "WAY_S", 0.3)
    monkeypatch.setattr(notices, "TIMEOUT_S", 0.6)


def trained(folder: Path, *end: Any) -> RunDir:
    """The folder of a run that trained 3 steps with two samples, and how it ended."""
    run = RunDir.create(folder, run_config(folder / "pictures"), at=folder / "fox-20261130-120000-abcd")
    events: list[Any] = [StatusEvent(state="starting"), *(step_event(step, loss=1 / step) for step in (1, 2, 3))]
    for index in (1, 0):
        file = run.samples / f"step-000003-{index}.png"
        Image.new("RGB", (8, 8), (90 * index, 0, 0)).save(file)
        events.append(SampleEvent(step=3, prompt="a fox", index=index, path=f"samples/{file.name}"))
    write(run, *events, *end)
    return run


def notice(folder: Path) -> Notice:
    run = trained(folder, ErrorEvent(message="a <b> & it\n broke"), StatusEvent(state="failed", step=3))
    return notices.notice_of(run, Notices(page="https://studio.example/"))


LINK = "https://studio.example/#/runs/fox-20261130-120000-abcd"
TEXT = "Step 3, loss 0.3333\na <b> & it broke"


def test_slack_is_sent_text_in_which_nothing_is_markup(tmp_path: Path):
    with hooked() as hook:
        assert notices.send(Notices(webhook=hook.url, format="slack"), notice(tmp_path), ["webhook"]) == []
    assert json.loads(hook.got[0].body) == {
        "text": f"*fox has failed*\nStep 3, loss 0.3333\na &lt;b&gt; &amp; it broke\n{LINK}"
    }
    assert hook.got[0].path == f"/{SECRET}"


def test_discord_is_sent_the_newest_sample_and_calls_nobody(tmp_path: Path):
    with hooked() as hook:
        assert notices.send(Notices(webhook=hook.url, format="discord"), notice(tmp_path), ["webhook"]) == []
    head = f"Content-Type: {hook.got[0].headers['Content-Type']}\n\n".encode()
    told, picture = email.message_from_bytes(head + hook.got[0].body, policy=email.policy.HTTP).iter_parts()
    assert json.loads(told.get_content()) == {
        "content": f"**fox has failed**\n{TEXT}\n{LINK}",
        "allowed_mentions": {"parse": []},
    }
    assert picture.get_filename() == "sample.png"
    assert picture.get_content() == (tmp_path / "fox-20261130-120000-abcd/samples/step-000003-0.png").read_bytes()


def test_ntfy_is_sent_the_picture_with_the_words_in_the_address(tmp_path: Path):
    with hooked() as hook:
        where = Notices(webhook=f"{hook.url}?auth=x", format="ntfy")
        assert notices.send(where, notice(tmp_path), ["webhook"]) == []
    assert parse_qs(urlsplit(hook.got[0].path).query) == {
        "auth": ["x"],
        "title": ["fox has failed"],
        "message": [TEXT],
        "click": [LINK],
        "priority": ["high"],
        "filename": ["sample.png"],
    }
    assert hook.got[0].body.startswith(PNG)


def test_any_other_address_is_sent_the_facts(tmp_path: Path):
    with hooked() as hook:
        assert notices.send(Notices(webhook=hook.url), notice(tmp_path), ["webhook"]) == []
    assert json.loads(hook.got[0].body) == {
        "title": "fox has failed",
        "run": "fox-20261130-120000-abcd",
        "state": "failed",
        "reason": "a <b> & it broke",
        "step": 3,
        "loss": pytest.approx(1 / 3),
        "sample": "samples/step-000003-0.png",
        "link": LINK,
    }


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("https://hooks.slack.com/services/T/B/x", "slack"),
        ("https://discord.com/api/webhooks/1/x", "discord"),
        ("https://ntfy.sh/topic", "ntfy"),
        ("https://example.org/hook", "json"),
    ],
)
def test_the_format_is_known_by_the_address(tmp_path: Path, address: str, kind: Any):
    found, named = (
        notices.webhook_request(Notices(webhook=address, format=form), Notice("fox", "finished"))
        for form in ("auto", kind)
    )
    assert (found.data, found.full_url) == (named.data, named.full_url)


def test_a_sample_that_is_no_picture_or_is_not_wanted_stays_here(tmp_path: Path):
    run = trained(tmp_path, StatusEvent(state="finished", step=3))
    assert notices.notice_of(run, Notices(sample=False)).sample is None
    (run.samples / "step-000003-0.png").write_text("not a picture")
    assert notices.notice_of(run, Notices()).picture() == b""
    write(run, SampleEvent(step=4, prompt="", index=0, path="../../outside.png"))
    with pytest.raises(InputError, match="not a file of fox"):
        notices.notice_of(run, Notices())


def hangs(handler: http.server.BaseHTTPRequestHandler) -> None:
    time.sleep(1)


def drips(handler: http.server.BaseHTTPRequestHandler) -> None:
    """One byte now and then, so that no read of the client takes long."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    for _ in range(12):
        time.sleep(0.1)
        try:
            handler.wfile.write(b"x")
        except OSError:
            return


def answers(code: int, **headers: str) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


@pytest.mark.parametrize(
    ("behave", "sentence"),
    [
        (hangs, "webhook: gave no answer within 0.3 s; check the address"),
        (drips, "webhook: gave no answer within 0.6 s; check what it waits for"),
        (answers(500), "webhook: answered 500, an error of the server; try again later"),
        (
            answers(404),
            "webhook: answered 404; make a new webhook there and set its address, or choose another format",
        ),
        (
            lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n"),
            "webhook: did not answer as a web server does; check the address",
        ),
    ],
    ids=["hangs", "drips", "500", "404", "ssh"],
)
def test_a_webhook_that_does_not_take_it_is_said_in_seconds(tmp_path: Path, hasty: None, behave: Any, sentence: str):
    with hooked(behave) as hook:
        began = time.monotonic()
        assert notices.send(Notices(webhook=hook.url), notice(tmp_path), ["webhook"]) == [sentence]
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_to_a_private_address_is_not_followed(tmp_path: Path, code: int):
    with hooked() as private, hooked(answers(code, Location=private.url)) as hook:
        said = notices.send(Notices(webhook=hook.url), notice(tmp_path), ["webhook"])
    assert said == [f"webhook: answered {code}, a redirect, which is not followed; set the address that answers itself"]
    assert len(hook.got) == 1 and private.got == []


def test_a_server_that_is_not_there_and_a_name_that_is_not_known(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for host, sentence in (
        (f"127.0.0.1:{port}", "webhook: cannot be reached (Connection refused); check the address"),
        (
            "nowhere.invalid",
            "webhook: the name of its server is not known here; check the address and this machine's network",
        ),
    ):
        assert notices.send(Notices(webhook=f"http://{host}/{SECRET}"), notice(tmp_path / host), ["webhook"]) == [
            sentence
        ]


def test_a_command_gets_the_facts_and_no_shell(tmp_path: Path):
    out = tmp_path / "out.json"
    code = f"import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open({str(out)!r}, 'w'))"
    command = (sys.executable, "-c", code, "$HOME; rm -rf *")
    assert notices.send(Notices(command=command), notice(tmp_path), ["command"]) == []
    words, environment = json.loads(out.read_text())
    assert words == ["$HOME; rm -rf *"]
    folder = tmp_path / "fox-20261130-120000-abcd"
    assert {name: value for name, value in environment.items() if name.startswith("SHARDSTUDIO_")} == {
        "SHARDSTUDIO_TITLE": "fox has failed",
        "SHARDSTUDIO_RUN": folder.name,
        "SHARDSTUDIO_STATE": "failed",
        "SHARDSTUDIO_REASON": "a <b> & it broke",
        "SHARDSTUDIO_STEP": "3",
        "SHARDSTUDIO_LOSS": str(1 / 3),
        "SHARDSTUDIO_SAMPLE": str(folder / "samples" / "step-000003-0.png"),
        "SHARDSTUDIO_LINK": LINK,
        "SHARDSTUDIO_FOLDER": str(folder),
    }


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("sh", "-c", f"exit 3 # {SECRET}"), "ended with exit code 3; run it in a terminal to see why"),
        (
            (f"/nothing/{SECRET}",),
            "cannot be started (No such file or directory); give the program with its whole path",
        ),
    ],
)
def test_a_command_that_fails_is_said_without_its_words(tmp_path: Path, command: tuple[str, ...], sentence: str):
    assert notices.send(Notices(command=command), notice(tmp_path), ["command"]) == [f"command: {sentence}"]


def test_a_command_that_goes_on_is_ended_with_all_that_it_started(tmp_path: Path, hasty: None):
    pids = tmp_path / "pids"
    command = ("sh", "-c", f"sleep 100 & echo $! $$ > {pids}; wait")
    said = notices.send(Notices(command=command), notice(tmp_path), ["command"])
    assert said == ["command: was ended after 0.3 s; let it do in the background what takes longer"]
    for pid in map(int, pids.read_text().split()):
        deadline = time.monotonic() + 10
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_mail_is_given_to_sendmail_with_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program, out = tmp_path / "bin" / "sendmail", tmp_path / "mail"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {out}.words\ncat > {out}\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert notices.send(Notices(mail="ada@example.org"), notice(tmp_path), ["mail"]) == []
    assert Path(f"{out}.words").read_text() == "-i -t\n"  # others see the arguments of a process
    mail = email.message_from_bytes(out.read_bytes(), policy=email.policy.default)
    assert (mail["To"], mail["Subject"]) == ("ada@example.org", "fox has failed")
    body, picture = mail.get_body(), next(mail.iter_attachments())
    assert body is not None and body.get_content() == f"{TEXT}\n\n{LINK}\n"
    assert picture.get_content().startswith(PNG)


def test_a_machine_without_sendmail_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notices, "SENDMAIL_FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert notices.send(Notices(mail="ada@example.org"), notice(tmp_path), ["mail"]) == [
        "mail: this machine has no sendmail; install one, such as msmtp-mta, or use a webhook"
    ]


def test_the_file_is_only_for_its_user_and_is_closed_when_it_was_not(home: Path):
    set_up = Notices(webhook=f"https://hooks.slack.com/{SECRET}", command=("notify-send", "a b"))
    notices.save(set_up)
    file = home / "notices.json"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (home, file)] == [0o700, 0o600]
    assert notices.read() == set_up
    file.chmod(0o644)
    assert notices.read() == set_up
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_without_a_file_nothing_is_sent():
    assert notices.read() == Notices()
    assert notices.read().ways == ()


ADDRESS = "is not an address that begins with https:// or http://, without spaces, user name or password"
MAIL = "is not the mail address of one person, such as ada@example.org"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        *(
            ({"webhook": address}, f"Webhook: {ADDRESS}")
            for address in (
                f"file:///{SECRET}",
                f"ftp://host/{SECRET}",
                SECRET,
                f"https://ada:{SECRET}@host/",
                f"https:///{SECRET}",
                f"https://host:port/{SECRET}",
                f"https://host/{SECRET} b",
                f"https://host/{SECRET}\r\nX: y",
                f"https://{'a' * 64}.{SECRET}/",
                f"https://höst/{SECRET}",
            )
        ),
        ({"page": SECRET}, f"Address of this page: {ADDRESS}"),
        *(
            ({"mail": address}, f"Mail to: {MAIL}")
            for address in (SECRET, f"-f@{SECRET}", f"a@{SECRET}\nBcc: b@c", f"a@{SECRET}, b@c", f"A <a@{SECRET}>")
        ),
        ({"command": f"'{SECRET}"}, "Command: a quotation mark is not closed; close it"),
        (
            {"command": f"'' {SECRET}"},
            "Command: begins with an empty word, or has a null character; begin with the program's name",
        ),
        ({"format": SECRET}, "Format of the webhook: Input should be 'auto', 'slack', 'discord', 'ntfy' or 'json'"),
        ({"webhok": SECRET}, "notices: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_value_is_refused_without_being_shown(values: dict[str, str], sentence: str):
    with pytest.raises(InputError) as refused:
        notices.checked(values)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "content", [f'{{"webhook": "{SECRET}"}}', f'{{"webhook": "{SECRET}', f'["{SECRET}"]', f'{{"{SECRET}": "webhook"}}']
)
def test_a_damaged_file_is_named_without_what_is_in_it(home: Path, content: str):
    home.mkdir(parents=True)
    (home / "notices.json").write_text(content)
    with pytest.raises(InputError) as refused:
        notices.read()
    assert str(refused.value) == (
        f"{home / 'notices.json'}: damaged, or not of this version; remove it, and fill in the page Machine"
    )


WORKER = """
import os, signal, sys
from pathlib import Path
from tests.runs import step_event, write
from trainer.run.events import StatusEvent
from trainer.run.folder import RunDir
run = RunDir(Path(sys.argv[1]))
write(run, StatusEvent(state="training"), step_event(1, loss=0.5))
if (run.path / "die").exists():
    os.kill(os.getpid(), signal.SIGKILL)
write(run, StatusEvent(state="finished", step=1))
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that stands for the trainer: it ends at once."""
    (tmp_path / "quick_rank.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "quick_rank"


def test_the_process_that_outlives_the_ranks_tells_and_a_failing_webhook_is_one_warning(tmp_path: Path, worker: str):
    cfg = run_config(tmp_path / "pictures")
    with hooked(answers(500)) as hook:
        notices.save(Notices(webhook=hook.url, command=("true",)))
        run = RunDir.create(tmp_path, cfg, at=tmp_path / "run")
        handle = torchrun.start(cfg, run, worker)
        assert handle.process.wait(timeout=60) == 0
    assert [json.loads(got.body)["state"] for got in hook.got] == ["finished"]
    events = EventReader(run.events_file).read()
    assert [event.message for event in events if isinstance(event, WarningEvent)] == [
        "a notice of the end was not sent: webhook: answered 500, an error of the server; try again later"
    ]
    assert process.status(run) == "finished"
    assert not any(SECRET.encode() in file.read_bytes() for file in run.path.rglob("*") if file.is_file())


@pytest.mark.slow
def test_a_killed_rank_is_the_reason_that_is_sent(tmp_path: Path, worker: str):
    cfg = run_config(tmp_path / "pictures")
    with hooked() as hook:
        notices.save(Notices(webhook=hook.url))
        run = RunDir.create(tmp_path, cfg, at=tmp_path / "run")
        (run.path / "die").touch()
        assert torchrun.start(cfg, run, worker).process.wait(timeout=60) == 1
    [got] = [json.loads(got.body) for got in hook.got]
    assert (got["state"], got["reason"], got["loss"]) == ("failed", "killed by SIGKILL", 0.5)
    assert process.wait(run) == "failed"
    [error] = [event for event in EventReader(run.events_file).read() if isinstance(event, ErrorEvent)]
    assert error.message == "killed by SIGKILL"


def test_only_the_process_that_leads_the_run_tells(tmp_path: Path):
    """torchrun below the supervisor of stages, and that of a node that joins, leave it to the first node's leader."""
    run = trained(tmp_path, StatusEvent(state="finished", step=3))
    with hooked() as hook:
        notices.save(Notices(webhook=hook.url))
        notices.tell(str(run.path))  # was never started
        Launch.of(psutil.Process(os.getppid()), ["python"]).write(run)
        notices.tell(str(run.path))
        assert hook.got == []
        Launch.of(psutil.Process(), ["python"]).write(run)
        agent.tell_of_the_end("trainer.captioning", str(run.path))
        run.rehearsed_file.touch()
        agent.tell_of_the_end("trainer", str(run.path))
        assert hook.got == []
        run.rehearsed_file.unlink()
        agent.tell_of_the_end("trainer", str(run.path))
        assert len(hook.got) == 1


def test_a_damaged_file_is_a_warning_of_the_run(tmp_path: Path, home: Path):
    run = trained(tmp_path, StatusEvent(state="finished", step=3))
    Launch.of(psutil.Process(), ["python"]).write(run)
    home.mkdir(parents=True)
    (home / "notices.json").write_text("{")
    notices.tell(str(run.path))
    [warning] = [event for event in EventReader(run.events_file).read() if isinstance(event, WarningEvent)]
    assert warning.message.startswith(f"a notice of the end was not sent: {home / 'notices.json'}: damaged, ")


FEWER = ("sample.steps=2", "sample.every=2", "sample.prompts=[fox]", "data.validation_every=100", "checkpoint.every=2")


@pytest.mark.slow
def test_the_demo_tells_that_it_finished_with_its_newest_sample(tmp_path: Path):
    with hooked() as hook:
        notices.save(Notices(webhook=hook.url, format="discord", page="http://127.0.0.1:7860"))
        done = launch_py(
            tmp_path, "--headless", QUICKSTART, "--run-dir", tmp_path / "run", "train.steps=2", "optim.warmup=0", *FEWER
        )
    assert done.returncode == 0, done.stderr
    [got] = hook.got
    assert b"quickstart" not in got.body and b"**run has finished**" in got.body and PNG in got.body
    assert b"http://127.0.0.1:7860/#/runs/run" in got.body


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "failed"])
def test_the_demo_tells_that_it_was_stopped_or_failed_and_a_hanging_webhook_changes_no_exit_code(
    tmp_path: Path, how: str
):
    with hooked((lambda handler: time.sleep(15)) if how == "failed" else None) as hook:
        notices.save(Notices(webhook=hook.url))
        started = Started(
            tmp_path, "--headless", QUICKSTART, "--run-dir", tmp_path / "run", *FEWER, run=tmp_path / "run"
        )
        started.wait_for(StepEvent)
        if how == "stopped":
            started.press_ctrl_c()
        else:
            started.rank(0).send_signal(signal.SIGKILL)
        code, out, err = started.end()
    assert code == {"stopped": 130, "failed": 1}[how]
    [got] = [json.loads(got.body) for got in hook.got]
    assert (got["state"], got["reason"]) == (how, "" if how == "stopped" else "killed by SIGKILL")
    warned = "a notice of the end was not sent: webhook: "
    assert any(warned in line for line in (*out, err)) == (how == "failed"), (out, err)
    assert SECRET not in f"{out}{err}"


@pytest.mark.slow
def test_a_run_in_stages_tells_once(tmp_path: Path):
    short = "set: {train.steps: 2, optim.warmup: 0}"
    (tmp_path / "stages.yaml").write_text(
        QUICKSTART.read_text().replace("path: quickstart", f"path: {QUICKSTART.with_suffix('')}")
        + f"\nstages:\n  - {{name: one, {short}}}\n  - {{name: two, {short}}}\n"
    )
    with hooked() as hook:
        notices.save(Notices(webhook=hook.url))
        done = launch_py(tmp_path, "--headless", tmp_path / "stages.yaml", "--run-dir", tmp_path / "run", *FEWER)
    assert done.returncode == 0, done.stderr
    assert [json.loads(got.body)["state"] for got in hook.got] == ["finished"]


def test_whatever_goes_wrong_in_making_a_notice_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> str:
        raise ValueError(SECRET)

    monkeypatch.setitem(notices.WAYS, "mail", fails)
    [said] = notices.send(Notices(mail="ada@example.org"), Notice("fox", "finished"), ["mail"])
    assert said == "mail: could not be made (ValueError); try it on the page Machine"
