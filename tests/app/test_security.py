"""Who may talk to the page, asked over HTTP as a browser, a script and a page of another site would."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from app import security
from trainer.config import InputError

PORT = 7860
HERE = {"host": f"127.0.0.1:{PORT}"}


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("yes")


@pytest.fixture
def client() -> TestClient:
    routes = [Route("/", answer), Route("/start", answer, methods=["POST"])]
    guarded = Starlette(routes=routes, middleware=security.middleware(security.LOCAL, PORT, "secret"))
    client = TestClient(guarded, base_url=f"http://127.0.0.1:{PORT}")
    client.get("/")
    return client


def test_the_own_page_is_answered_and_nothing_is_guessed_about_it(client: TestClient):
    found = client.get("/")
    assert (found.status_code, found.headers["x-content-type-options"]) == (200, "nosniff")
    assert found.headers["x-frame-options"] == "SAMEORIGIN"
    assert client.post("/start", headers={"origin": f"http://127.0.0.1:{PORT}"}).status_code == 200
    assert client.post("/start").status_code == 200


def test_only_who_opened_the_page_starts_something(client: TestClient):
    client.cookies.clear()
    assert client.post("/start").status_code == 403
    client.cookies.set(f"shardstudio-{PORT}", "guessed")
    assert client.post("/start").status_code == 403


def test_pages_that_start_at_once_share_one_secret(tmp_path: Path):
    found = []
    pages = [threading.Thread(target=lambda: found.append(security.kept_secret(tmp_path / "secret"))) for _ in range(8)]
    for page in pages:
        page.start()
    for page in pages:
        page.join()
    assert len(set(found)) == 1
    assert len(found[0]) > 32


def test_the_secret_is_the_owners_and_outlives_the_page(tmp_path: Path):
    file = tmp_path / "drafts" / "secret"
    secret = security.kept_secret(file)
    assert len(secret) > 32
    assert security.kept_secret(file) == secret
    assert file.stat().st_mode & 0o777 == 0o600


def test_no_file_and_nothing_of_unknown_length_is_taken(client: TestClient):
    assert client.post("/gradio_api/upload", files={"files": b"x"}).status_code == 403
    assert client.post("/start", content=iter([b"x"])).status_code == 411


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example"])
def test_a_name_that_was_rebound_to_this_machine_is_refused(client: TestClient, host: str):
    assert client.get("/", headers={"host": host}).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_another_sites_script_starts_nothing(client: TestClient, headers: dict[str, str]):
    assert client.post("/start", headers=headers).status_code == 403


def test_a_body_that_would_fill_the_disk_is_refused(client: TestClient):
    assert client.post("/start", content=b"x" * (security.MAX_BODY_BYTES + 1)).status_code == 413


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.7", "::"])
def test_another_host_needs_a_password(host: str):
    with pytest.raises(InputError, match=f"--host {host}: others could start runs here; add --auth USER:PASS"):
        security.require_password(host, None)
    assert security.require_password(host, "ada:long enough") == ("ada", "long enough")


@pytest.mark.parametrize("auth", ["ada", "ada:", ":secret123", "ada:short"])
def test_a_password_that_is_none_is_refused(auth: str):
    with pytest.raises(InputError, match="--auth: needs USER:PASS"):
        security.require_password("127.0.0.1", auth)


def test_nobody_guesses_quickly():
    now = [0.0]
    login = security.Login("ada", "right one", lambda: now[0])
    assert login("ada", "right one")
    assert not any(login("ada", f"guess {number}") for number in range(security.ATTEMPTS))
    assert not login("ada", "right one")
    now[0] += security.WITHIN_S
    assert login("ada", "right one")
