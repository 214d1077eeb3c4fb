"""The page behind nginx and Caddy with TLS, by the shipped configs, opened by its name in Chromium."""

from __future__ import annotations

import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Playwright

from tests.app.browser import (
    ROOT,
    STARTED_WITHIN_S,
    Server,
    free_port,
    opened,
    serving,
    settled,
    start_chromium,
    until,
    write_over,
)

NAME = "studio.example"
FLAGS = (f"--host-resolver-rules=MAP {NAME} 127.0.0.1", "--ignore-certificate-errors")
PROXIES = ROOT / "app" / "web" / "proxy"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that nobody vouches for, with its key beside it as .key."""
    file = tmp_path_factory.mktemp("tls") / "page.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    argv += ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME},DNS:evil.example"]
    argv += ["-keyout", str(file.with_suffix(".key")), "-out", str(file)]
    subprocess.run(argv, check=True, capture_output=True)
    return file


def nginx(folder: Path, page: int, port: int, certificate: Path) -> list[str]:
    """The shipped config with other ports and a certificate, in a main config that needs no rights."""
    server = (PROXIES / "nginx.conf").read_text()
    for shipped, given in {
        "443 ssl": f"127.0.0.1:{port} ssl",
        "/etc/ssl/studio.example.pem": str(certificate),
        "/etc/ssl/studio.example.key": str(certificate.with_suffix(".key")),
        "127.0.0.1:7860": f"127.0.0.1:{page}",
    }.items():
        assert server.count(shipped) == 1
        server = server.replace(shipped, given)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = folder / "main.conf"
    main.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\nhttp {{ {temporary}\n{server} }}\n"
    )
    return ["nginx", "-c", str(main)]


def caddy(folder: Path, page: int, port: int, certificate: Path) -> list[str]:
    """The shipped config with other ports and a certificate."""
    server = (PROXIES / "Caddyfile").read_text()
    assert server.count("\nstudio.example {\n") == server.count("127.0.0.1:7860") == 1
    tls = f"\tbind 127.0.0.1\n\ttls {certificate} {certificate.with_suffix('.key')}\n"
    server = server.replace("\nstudio.example {\n", f"\nhttps://{NAME}:{port}, https://evil.example:{port} {{\n{tls}")
    server = server.replace("127.0.0.1:7860", f"127.0.0.1:{page}")
    file = folder / "Caddyfile"
    file.write_text(f"{{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n}}\n{server}")
    return ["caddy", "run", "--config", str(file), "--adapter", "caddyfile"]


@contextmanager
def proxying(argv: list[str], port: int, log: Path) -> Iterator[None]:
    """A proxy that answers on a port."""
    with log.open("wb") as output, subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            began = time.monotonic()
            while not answers(port):
                assert process.poll() is None and time.monotonic() - began < STARTED_WITHIN_S, log.read_text()
                time.sleep(0.1)
            yield
        finally:
            process.terminate()


def answers(port: int) -> bool:
    try:
        ask(port, NAME)
    except httpx.TransportError:
        return False
    return True


def ask(port: int, name: str) -> httpx.Response:
    """What the proxy answers to who asks for a name."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with httpx.Client(verify=context) as client:
        return client.get(
            f"https://127.0.0.1:{port}/", headers={"host": f"{name}:{port}"}, extensions={"sni_hostname": name}
        )


@pytest.fixture(scope="module")
def by_name(playwright: Playwright) -> Iterator[Browser]:
    """A Chromium for which the name is this machine's."""
    with closing(start_chromium(playwright, *FLAGS)) as browser:
        yield browser


@pytest.mark.parametrize("proxy", [nginx, caddy])
def test_the_page_works_behind_a_proxy_with_tls_by_its_name(
    by_name: Browser, tmp_path: Path, certificate: Path, proxy: Callable[[Path, int, int, Path], list[str]]
):
    port, runs = free_port(), tmp_path / "runs"
    with (
        serving(runs, "--name", f"{NAME}:{port}") as server,
        proxying(proxy(tmp_path, server.port, port, certificate), port, tmp_path / "proxy.log"),
    ):
        assert (ask(port, NAME).status_code, ask(port, "evil.example").status_code) == (401, 400)
        works(by_name, server, f"https://{NAME}:{port}")


def works(browser: Browser, server: Server, origin: str) -> None:
    """Opened with the printed address; functions answer, images are served, and no request is refused."""
    address = next(line for line in server.log.splitlines() if line.startswith(origin))
    said: list[str] = []
    with opened(browser, address) as page:
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        assert page.url == f"{origin}/#/new"
        cookie = next(cookie for cookie in page.context.cookies() if cookie["name"].startswith("shardstudio"))
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")
        page.locator("#thumbs img").first.wait_for()
        until(page, "document.querySelector('#thumbs img').naturalWidth > 0")
        write_over(page, "field-train-steps", "77")
        page.locator("#changes", has_text="77").wait_for()
        settled(page)
    assert said == []
