"""How browsers get the scripts of the page, each file as a module and nothing else, and what is left of its styles."""

from __future__ import annotations

import re

import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, Route, expect
from starlette.testclient import TestClient

from app.web import scripts
from tests.app.browser import PATIENCE_S, ROOT, Server

TOO_OLD = "ShardStudio needs a browser that runs module scripts, such as a current Firefox, Chrome, Edge or Safari."


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    scripts.add(app)
    return TestClient(app)


def test_each_script_of_the_page_is_served_as_it_is_and_kept_by_the_browser(client: TestClient):
    listed = re.findall(r'<script type="module" src="([^"]+)"></script>', scripts.page_end({}))
    names = [address.rpartition("/")[2] for address in listed]
    assert names[: len(scripts.NAMES)] == [f"{name}.js" for name in scripts.NAMES], "in the order of the rail"
    assert sorted(names) == sorted(file.name for file in scripts.FOLDER.glob("*.js"))
    for address in listed:
        answer = client.get(address)
        assert answer.content == (scripts.FOLDER / address.rpartition("/")[2]).read_bytes()
        assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
        assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"


def test_every_script_that_another_one_imports_is_served(client: TestClient):
    for content in scripts.contents().values():
        for name in re.findall(r"from '\./([^']+)'", content.decode()):
            assert client.get(f"{scripts.folder()}/{name}").status_code == 200, name


@pytest.mark.parametrize("name", ["page.css", "none.js", "..%2fserver.py", "../server.py", "%2e%2e/server.py", ""])
def test_no_other_file_is_served(client: TestClient, name: str):
    assert client.get(f"{scripts.folder()}/{name}").status_code == 404


def test_the_address_changes_with_the_scripts(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    before = scripts.folder()
    scripts.folder.cache_clear()
    monkeypatch.setattr(scripts, "contents", lambda: {"core.js": b"export {};"})
    assert scripts.folder() != before
    scripts.folder.cache_clear()
    assert client.get(f"{before.rpartition('/')[0]}/0123456789abcdef/core.js").status_code == 404


def test_what_the_scripts_are_told_cannot_end_its_element():
    assert "<b>" not in scripts.page_end({"unwritable": '/runs/"><b>'})


def test_a_browser_without_scripts_says_so():
    assert f"<noscript><p>{TOO_OLD}</p></noscript>" in scripts.page_end({})


@pytest.mark.slow
def test_a_browser_without_module_scripts_says_so(browser: Browser, server: Server):
    """No current browser is without them: here the script for such browsers runs, and no module."""

    def make_old(route: Route) -> None:
        answer = route.fetch()
        body = answer.text().replace(" nomodule", "").replace('type="module"', 'type="none"')
        route.fulfill(response=answer, body=body)

    with browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        page.route(re.compile(r"/$"), make_old)
        page.reload()
        expect(page.locator("#too-old")).to_have_text(TOO_OLD)
        expect(page.locator("#too-old")).to_be_visible(timeout=PATIENCE_S * 1e3)


STYLES = sorted((ROOT / "app" / "web" / "assets").glob("*.css"))
RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_a_border_of_a_variable_colour_is_not_changed_in_part(style):
    """`border: solid var(--x)` with a `border-width` after it is written anew without its colour: it becomes black.

    Gradio writes each rule of a style anew as the browser parsed it. See DECISIONS 155.
    """
    text = re.sub(r"/\*.*?\*/", "", style.read_text(encoding="utf-8"), flags=re.DOTALL)
    for selector, body in RULE.findall(text):
        names = re.findall(r"(?:^|;)\s*(border(?:-width|-style|-color|-top|-right|-bottom|-left)?)\s*:", body)
        is_variable = re.search(r"(?:^|;)\s*border\s*:[^;]*var\(", body)
        assert not (is_variable and len(names) > 1), selector.strip()
