"""What strangers might ask of a page that is being served, each refused: files, other names, other sites, guesses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.app.browser import ROOT, Server, recorded, serving

USER, PASSWORD = "ada", "long enough"


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """One that has opened the page, as a browser has."""
    with httpx.Client(base_url=server.origin) as client:
        assert client.get(server.url, follow_redirects=True).status_code == 200
        yield client


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("guarded")
    with serving(folder / "runs", environment={"SHARDSTUDIO_AUTH": f"{USER}:{PASSWORD}"}) as server:
        yield server


WAYS = ("component_server/", "queue/join", "run/predict")
"""Addresses that gradio has for functions; the page uses none."""


def ask(client: httpx.Client, name: str = "live", data: Any = None, **options: Any) -> httpx.Response:
    """Ask for a function as the page's script does."""
    return client.post(f"/calls/{name}", json=data or {}, **options)


ALONE = {"connection": "close"}
"""Of a request whose answer may be a fault of gradio, after which uvicorn closes the connection."""


def test_the_page_is_one_component_and_its_functions_answer_its_owner(client: httpx.Client):
    [component] = client.get("/config").json()["components"]
    assert (component["type"], component["props"]["elem_id"]) == ("column", "place")
    assert set(ask(client).json()["value"]) >= {"runs", "ended", "num_waiting"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("component", [0, 1, 99, "x"])
def test_gradios_own_ways_to_a_function_lead_nowhere(client: httpx.Client, way: str, component: int | str):
    body = {"data": {}, "fn_index": 0, "component_id": component, "fn_name": "live", "session_hash": "guessed"}
    answer = client.post(f"/gradio_api/{way}", json=body, headers=ALONE)
    assert answer.status_code >= 400 or "error" in answer.text.lower()


OTHERS = "preprocess postprocess get_config __class__ __init__ unrender load start calls nothing _answering new_run"


def test_a_body_that_is_no_text_is_refused_where_gradio_reads_it(client: httpx.Client):
    answer = client.post("/gradio_api/run/predict", content=b"ab\xea")
    assert (answer.status_code, answer.text) == (422, "The page takes no such request.\n")


@pytest.mark.parametrize("name", ["", *OTHERS.split(), "new_record.__globals__", "live.__wrapped__", "../live"])
def test_nothing_but_the_exported_functions_can_be_called(client: httpx.Client, name: str):
    assert ask(client, name=name).status_code == 404


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"data": {}}', b"[" * 20_000])
def test_what_is_no_request_for_a_function_is_refused_and_the_page_goes_on(client: httpx.Client, content: bytes):
    answer = client.post("/calls/live", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 or "reload the page" in answer.json()["error"]
    assert ask(client).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/proc/self/environ",
        "{runs}/../../etc/passwd",
        "{runs}/%2e%2e/%2e%2e/etc/passwd",
        "{runs}/drafts/secret",
        "{runs}/probed/config.yaml",
        "{runs}/probed/launch.json",
        "{runs}/probed/samples/page.html",
        "{runs}/probed/samples/.hidden",
        "{runs}/probed/samples/step-000020-0.png",
        "{runs}/probed/out",
        "launch.py",
        "app/web/server.py",
    ],
)
def test_no_file_but_thumbnails_is_served(client: httpx.Client, runs: Path, path: str):
    if not (runs / "probed").exists():
        run = recorded(runs, "probed")
        (run.samples / "page.html").write_text("<script>alert(1)</script>")
        (run.samples / ".hidden").write_text("x")
        os.symlink("/etc/passwd", run.path / "out")
    answer = client.get(f"/gradio_api/file={path.format(runs=runs)}")
    assert answer.status_code in (400, 403, 404), answer.text


def test_a_thumbnail_is_an_image_and_nothing_else(client: httpx.Client, own_data: Path):
    deadline = time.monotonic() + 20
    while not (shown := ask(client, name="new_thumbnails").json()["value"]):
        assert time.monotonic() < deadline
    answer = client.get(shown[0]["src"])
    assert (answer.headers["content-type"], answer.headers["x-content-type-options"]) == ("image/webp", "nosniff")
    assert client.get(f"/gradio_api/file={own_data}/00.png").status_code in (403, 404)


def test_the_interface_is_not_described_and_fetches_nothing_for_others(client: httpx.Client):
    assert client.get("/gradio_api/info").json() == {"named_endpoints": {}, "unnamed_endpoints": {}}
    assert {client.get(address).status_code for address in ("/docs", "/redoc", "/openapi.json")} == {404}
    for way in ("file=http://127.0.0.1:1/", "proxy=http://127.0.0.1:1/x"):
        assert client.get(f"/gradio_api/{way}").status_code in (400, 403, 404)


@pytest.mark.parametrize(
    "address",
    ["/", "/config", "/static/img/logo.svg", "/theme.css", "/gradio_api/info", "/gradio_api/openapi.json"]
    + [f"/gradio_api/{name}" for name in ("heartbeat/x", "startup-events", "app_id", "token", "dev/reload")],
)
def test_no_address_answers_whoever_did_not_open_the_page(server: Server, address: str):
    with httpx.Client(base_url=server.origin) as stranger, stranger.stream("GET", address) as answer:
        assert answer.status_code == 401
        assert "printed in the terminal" in answer.read().decode()


def test_guesses_end_after_a_few_and_the_password_opens(guarded: Server):
    with httpx.Client(base_url=guarded.origin) as client:
        assert "token" not in guarded.url
        assert client.get("/").status_code == ask(client).status_code == 401
        assert login(client, PASSWORD).status_code == 303
        assert client.get("/config").status_code == 200
        for number in range(5):
            stranger = {"x-forwarded-for": f"192.0.2.{number}"}  # believed where a proxy was announced by --name
            assert login(client, f"guess {number}", stranger).status_code == 401
        assert login(client, PASSWORD).status_code == 429
        assert client.get("/config").status_code == 200, "who is in stays in"


def login(client: httpx.Client, password: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return client.post("/login", data={"username": USER, "password": password}, headers=headers)


def test_no_process_of_the_page_inherits_the_password(guarded: Server):
    assert guarded.process is not None
    page = psutil.Process(guarded.process.pid)
    assert PASSWORD not in " ".join(page.cmdline())
    program = (
        "import os; from app.web.access import Access; access = Access.checked('127.0.0.1', 0, (), None, None); "
        "print(access.user, os.environ.get('SHARDSTUDIO_AUTH'))"
    )
    environment = {**os.environ, "SHARDSTUDIO_AUTH": f"{USER}:{PASSWORD}"}
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert answer.stdout == f"('{USER}', '{PASSWORD}') None\n"


def test_the_page_is_served_without_torch(server: Server):
    assert server.process is not None
    loaded = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "orjson" in loaded  # gradio's
    assert "libtorch" not in loaded


def test_who_may_open_the_page_is_checked_before_gradio_is_loaded():
    program = "import sys, app.web.access; sys.exit('gradio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.slow
def test_ctrl_c_ends_the_page_at_once_while_a_browser_shows_it(tmp_path: Path):
    with serving(tmp_path / "runs") as server, httpx.Client() as client:
        client.get(server.url, follow_redirects=True)
        with client.stream("GET", f"{server.origin}/gradio_api/heartbeat/shown") as open_connection:
            assert open_connection.status_code == 200
            assert server.process is not None
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(timeout=30) == 0
        assert "Traceback" not in server.log


def not_started(*options: str, **environment: str) -> tuple[int, str]:
    """Exit code and message of a page that does not start."""
    argv = [sys.executable, "launch.py", "--runs", "/nonexistent/runs", *options]
    answer = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    return answer.returncode, answer.stderr.strip().splitlines()[-1]


def test_a_page_that_others_could_open_does_not_start(tmp_path: Path):
    opened = tmp_path / "password"
    opened.write_text("ada:long enough")
    opened.chmod(0o644)
    needs = "others could start runs here; add --auth-file FILE with one line USER:PASS, or set SHARDSTUDIO_AUTH"
    assert not_started("--host", "0.0.0.0") == (2, f"--host 0.0.0.0: {needs}")
    asked = f"--auth-file {opened}: others may read it (mode 0644); run chmod 600 {opened}"
    assert not_started("--auth-file", str(opened)) == (2, asked)
    assert "--name goes with the page only; leave it out" in not_started("--doctor", "--name", "a.example")[1]


def test_the_page_tells_no_secret(client: httpx.Client, server: Server):
    secret = (server.runs / "drafts" / "secret").read_text()
    assert secret not in client.get("/").text
    assert secret not in json.dumps(client.get("/config").json())
