"""Who may talk to the page, asked over HTTP as a browser, a script and a page of another site would."""

from __future__ import annotations

import base64
import hashlib
import socket
import threading
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from app.data.upload.uploads import MOST_CHUNK
from app.web import security
from app.web.access import Access
from app.web.security import Guard, Login
from trainer.system.errors import InputError

PORT = 7860
TOKEN = "t" * 43
OPENED = {"token": TOKEN}


async def answer(request: Request) -> Response:
    return HTMLResponse(PAGE) if request.url.path == "/" else PlainTextResponse("yes")


PAGE = "<script>own()</script><script src='x.js'></script><p onclick='theirs()'>"


def client_of(
    *names: str, login: Login | None = None, https: bool = False, peer: str = "127.0.0.1", closed: str = ""
) -> TestClient:
    """A browser before it has opened the page. names: as given by --name.  closed: why no images are taken."""
    routes = [Route("/", answer), Route("/file", answer), Route("/start", answer, methods=["POST"])]
    routes.append(Route("/uploads/{id}", answer, methods=["PUT"]))
    app = Starlette(routes=routes)
    known = [security.parsed_name(name) for name in names]
    guard = Guard(app, names=known, port=PORT, secret="secret", token=TOKEN, login=login, uploads_closed=closed)
    address = f"http{'s' if https else ''}://127.0.0.1:{PORT}"
    return TestClient(guard, base_url=address, client=(peer, 50000), follow_redirects=False)


@pytest.fixture
def client() -> TestClient:
    client = client_of()
    assert client.get("/", params=OPENED).status_code == 303
    return client


def test_the_own_page_is_answered_and_nothing_is_guessed_about_it(client: TestClient):
    found = client.get("/")
    assert (found.status_code, found.headers["x-content-type-options"]) == (200, "nosniff")
    assert found.headers["x-frame-options"] == "SAMEORIGIN"
    assert found.headers["cache-control"] == "no-store"  # no browser shows it again after an upgrade
    assert client.post("/start", headers={"origin": f"http://127.0.0.1:{PORT}"}).status_code == 200
    assert client.post("/start").status_code == 200


def test_the_printed_address_gives_the_cookie_and_leaves_no_token_in_the_address():
    answer = client_of().get("/", params=OPENED)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    name, _, rest = answer.headers["set-cookie"].partition("=")
    assert name == f"shardstudio-{PORT}"
    assert rest.partition("; ")[2] == "HttpOnly; SameSite=Strict; Path=/"
    assert TOKEN not in answer.headers["set-cookie"]


def test_by_https_the_cookie_is_never_sent_in_clear_text():
    assert client_of(https=True).get("/", params=OPENED).headers["set-cookie"].endswith("; Secure")


@pytest.mark.parametrize(
    "params", [{}, {"token": ""}, {"token": "guessed"}, {"token": TOKEN[:-1]}, {"token": "\u00fc"}]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("HEAD", "/"), ("OPTIONS", "/"), ("GET", "/file"), ("POST", "/start"), ("GET", "/gradio_api/info")],
)
def test_nothing_is_answered_without_the_printed_address(method: str, path: str, params: dict[str, str]):
    client = client_of()
    answer = client.request(method, path, params=params)
    assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
    assert method == "HEAD" or "printed in the terminal" in answer.text


def test_a_guessed_cookie_opens_nothing():
    client = client_of()
    client.cookies.set(f"shardstudio-{PORT}", "guessed")
    assert client.get("/").status_code == client.post("/start").status_code == 401


def test_a_page_that_another_sites_link_opens_asks_again_by_itself():
    """Browsers do not send the cookie along a link from elsewhere, as from a terminal in a browser."""
    client = client_of()
    linked = client.get("/", headers={"sec-fetch-site": "cross-site"})
    assert (linked.status_code, 'content="0; url=/"' in linked.text) == (401, True)
    assert "http-equiv" not in client.get("/", headers={"sec-fetch-site": "same-origin"}).text


def test_the_pages_own_scripts_run_and_no_handler_that_stands_in_markup(client: TestClient):
    policy = client.get("/").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    own = base64.b64encode(hashlib.sha256(b"own()").digest()).decode()
    assert rules["script-src"] == f"'self' 'sha256-{own}'"
    assert (rules["default-src"], rules["object-src"], rules["frame-ancestors"]) == ("'self'", "'none'", "'self'")
    assert client.get("/file").headers["content-security-policy"].startswith("default-src 'none';")


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
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_no_file_and_nothing_of_unknown_length_is_taken(client: TestClient):
    assert client.post("/gradio_api/upload", files={"files": b"x"}).status_code == 403
    assert client.post("/start", content=iter([b"x"])).status_code == 411


def test_a_chunk_of_an_image_is_taken_at_one_address_and_no_larger_than_it_may_be(client: TestClient):
    address = f"/uploads/{'a' * 32}-9"
    assert client.put(address, content=b"x" * MOST_CHUNK).status_code == 200
    for same in (address, f"/uploads/%61{'a' * 31}-9"):
        assert client.put(same, content=b"x" * (MOST_CHUNK + 1)).status_code == 413
    assert client.put(address, content=iter([b"x"])).status_code == 411
    assert client.put(address, content=b"x", headers={"origin": "https://evil.example"}).status_code == 403
    assert client_of().put(address, content=b"x").status_code == 401


def test_without_a_password_a_page_that_has_a_name_takes_no_images():
    client = client_of("studio.example", closed=security.UPLOADS_CLOSED)
    assert client.get("/", params=OPENED).status_code == 303
    for same in (f"{'a' * 32}-9", f"%61{'a' * 31}-9"):
        answer = client.put(f"/uploads/{same}", content=b"x")
        assert (answer.status_code, answer.text) == (403, security.UPLOADS_CLOSED)
    assert client.post("/start").status_code == 200


@pytest.mark.parametrize(
    ("name", "auth", "is_closed"),
    [([], None, False), (["a.example"], None, True), (["a.example"], "ada:long enough", False)],
)
def test_a_name_needs_a_password_for_uploads(name: list[str], auth: str | None, is_closed: bool):
    assert bool(Access.checked("127.0.0.1", 0, name, auth, None).uploads_closed) is is_closed


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example"])
def test_a_name_that_was_rebound_to_this_machine_is_refused(client: TestClient, host: str):
    assert client.get("/", headers={"host": host}).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://127.0.0.1"},
        {"origin": "https://127.0.0.1"},
        {"origin": "http://localhost"},
        {"origin": "https://localhost"},
        {"origin": f"http://localhost:{PORT}"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_sites_script_starts_nothing(client: TestClient, headers: dict[str, str]):
    assert client.post("/start", headers=headers).status_code == 403


def test_a_body_that_would_fill_the_disk_is_refused(client: TestClient):
    assert client.post("/start", content=b"x" * (security.MAX_BODY_BYTES + 1)).status_code == 413


@pytest.mark.parametrize("auth", ["ada", "ada:", ":secret123", "ada:short"])
def test_a_password_that_is_none_is_refused(auth: str):
    with pytest.raises(InputError, match="--auth: needs USER:PASS"):
        security.password(auth, "--auth")


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("ada:long enough\n", 0o640, "others may read it .mode 0640.; run chmod 600"),
        ("ada:long enough\n", 0o604, "others may read it .mode 0604.; run chmod 600"),
        ("ada:short\n", 0o600, "needs USER:PASS with a password of 8 characters or more"),
        ("ada:long enough\nbob:long enough\n", 0o600, "has 2 lines; write one line USER:PASS"),
        ("", 0o600, "has 0 lines; write one line USER:PASS"),
    ],
)
def test_a_password_file_that_is_open_or_none_is_refused(tmp_path: Path, content: str, mode: int, message: str):
    file = tmp_path / "password"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(InputError, match=f"--auth-file {file}: {message}"):
        security.read_password(file)


def test_a_password_file_is_read(tmp_path: Path):
    file = tmp_path / "password"
    file.write_text("ada:long: enough\n")
    file.chmod(0o400)
    assert security.read_password(file) == ("ada", "long: enough")
    with pytest.raises(InputError, match="cannot be read"):
        security.read_password(tmp_path / "none")
    with pytest.raises(InputError, match="not a regular file"):
        security.read_password(tmp_path)


def log_in(client: TestClient, word: str) -> httpx.Response:
    return client.post("/login", data={"username": "ada", "password": word})


def test_with_a_password_the_page_asks_for_it_and_answers_nothing_else():
    client = client_of(login=Login("ada", "right one"))
    assert 'name="password"' in client.get("/").text
    assert client.get("/", params=OPENED).status_code == client.get("/file").status_code == 401
    assert log_in(client, "wrong one").status_code == client.get("/").status_code == 401
    assert (log_in(client, "right one").status_code, client.get("/").status_code) == (303, 200)


def test_another_password_closes_the_page_to_browsers_of_before():
    cookie = log_in(client_of(login=Login("ada", "right one")), "right one").headers["set-cookie"].partition(";")[0]
    assert client_of(login=Login("ada", "right one")).get("/", headers={"cookie": cookie}).status_code == 200
    assert client_of(login=Login("ada", "new one")).get("/", headers={"cookie": cookie}).status_code == 401


def test_nobody_guesses_quickly_and_a_stranger_locks_only_himself_out():
    now = [0.0]
    login = Login("ada", "right one", lambda: now[0])
    stranger, owner = client_of(login=login, peer="192.168.0.66"), client_of(login=login, peer="192.168.0.7")
    assert {log_in(stranger, f"guess {number}").status_code for number in range(security.ATTEMPTS)} == {401}
    assert log_in(stranger, "right one").status_code == 429
    assert log_in(owner, "right one").status_code == 303
    now[0] += security.WITHIN_S
    assert log_in(stranger, "right one").status_code == 303


def test_one_network_of_ipv6_is_one_guesser_and_no_number_of_addresses_fills_the_memory():
    login = Login("ada", "right one")
    for number in range(security.ATTEMPTS):
        assert not login(f"2001:db8::{number:x}", "ada", "guess")
    assert login.is_locked("2001:db8::ffff")
    assert not login.is_locked("2001:db8:0:1::1")
    for number in range(2 * security.MOST_CLIENTS):
        login(f"10.0.{number // 256}.{number % 256}", "ada", "guess")
    assert len(login._failures) == security.MOST_CLIENTS


@pytest.mark.parametrize(
    ("name", "host", "origin"),
    [
        ("studio.example", "studio.example", "https://studio.example"),
        ("Studio.Example", "studio.example", "https://studio.example"),
        ("studio.example", "127.0.0.1:7860", "https://studio.example"),
        ("studio.example", f"studio.example:{PORT}", f"http://studio.example:{PORT}"),
        ("studio.example:8443", "studio.example:8443", "https://studio.example:8443"),
        ("[2001:db8::7]:8443", "[2001:db8::7]:8443", "https://[2001:db8::7]:8443"),
        ("studio.example", "localhost:8000", "http://localhost:8000"),
    ],
)
def test_a_page_behind_a_proxy_is_reached_by_the_name_it_was_given(name: str, host: str, origin: str):
    client = client_of(name)
    cookie = client.get("/", params=OPENED, headers={"host": host}).headers["set-cookie"].partition(";")[0]
    headers = {"host": host, "origin": origin, "cookie": cookie}
    assert client.post("/start", headers=headers).status_code == 200
    foreign = headers | {"origin": "https://evil.example"}
    assert client.post("/start", headers=foreign).status_code == 403


def test_a_page_that_others_reach_by_https_takes_nothing_from_the_same_name_in_clear_text():
    """The proxy says that its browser uses https: port 80 of this name may be another program."""
    client = client_of("studio.example:443", https=True)
    cookie = client.get("/", params=OPENED).headers["set-cookie"].partition(";")[0]
    headers = {"host": "studio.example", "cookie": cookie}
    assert client.post("/start", headers=headers | {"origin": "https://studio.example"}).status_code == 200
    assert client.post("/start", headers=headers | {"origin": "http://studio.example"}).status_code == 403


def test_the_names_of_a_page_for_the_network_are_those_of_its_port(tmp_path: Path):
    file = tmp_path / "login"
    file.write_text("ada:a-long-password\n")
    file.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    access = Access.checked("0.0.0.0", port, ["studio.example"], None, file)
    assert {name.port for name in access.names if name.host != "studio.example"} == {str(port)}


@pytest.mark.parametrize("name", ["https://a.example", "a.example/", "a.example:0", "a.example:99999", "", "a b", "*"])
def test_a_name_that_is_none_is_refused(name: str):
    with pytest.raises(InputError, match="needs HOST or HOST:PORT, as in --name studio"):
        security.parsed_name(name)


def test_a_page_for_the_network_knows_this_machines_own_names():
    names = {str(name) for name in security.own_names("0.0.0.0")}
    assert {socket.gethostname().lower(), "127.0.0.1"} <= names
    assert [str(name) for name in security.own_names("fd00::7")][1:] == ["[fd00::7]"]


def test_a_page_on_another_port_of_this_machine_reads_nothing_with_the_cookie(client: TestClient):
    assert client.get("/config", headers={"origin": "http://localhost:9999"}).status_code == 403
    assert client.get("/", headers={"origin": f"http://127.0.0.1:{PORT}"}).status_code == 200
