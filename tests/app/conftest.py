"""One server and one tab of the browser for all tests of the page: its scripts are read and compiled once."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from app.form.model_choices import ModelChoices
from app.studio import Studio
from tests.app.browser import Server, serving, visited
from tests.runs import make_pictures, write_preset


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    runs = tmp_path_factory.mktemp("page") / "runs"
    with serving(runs) as server:
        yield server


@pytest.fixture(scope="session")
def context(browser: Browser) -> Iterator[BrowserContext]:
    with closing(browser.new_context()) as context:
        yield context


@pytest.fixture
def tab(context: BrowserContext) -> Page:
    """What one test after the other shows the page in; another one after its process has died."""
    return context.pages[0] if context.pages else context.new_page()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelChoices:
    """The models to choose from. The shipped presets are planned once for all tests."""
    return ModelChoices(tmp_path_factory.mktemp("models"))


@pytest.fixture
def studio(tmp_path: Path, models: ModelChoices) -> Studio:
    """What a page of a new folder knows and does, without a browser."""
    studio = Studio(tmp_path / "runs")
    studio.models = models
    studio.prepare()
    return studio


@pytest.fixture
def runs(server: Server) -> Path:
    """The folder the page shows."""
    return server.runs


@pytest.fixture
def draft(runs: Path) -> Path:
    """Where the page keeps what is in its form: nothing yet."""
    file = runs / "drafts" / "draft.json"
    file.unlink(missing_ok=True)
    return file


@pytest.fixture
def own_data(runs: Path, draft: Path) -> Iterator[Path]:
    """Pictures a test may change, and a preset of them in the form of a page that is opened after this."""
    folder = make_pictures(runs.parent / "own")
    preset = write_preset(runs / "presets" / "own.yaml", folder, steps=2)
    draft.write_text(json.dumps({"preset": "own", "values": {}}))
    yield folder
    shutil.rmtree(folder)
    preset.unlink()


@pytest.fixture
def listed() -> Iterator[list[str]]:
    """The folders that this process lists meanwhile."""
    found: list[str] = []
    is_over = False

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("os.scandir", "os.listdir") and not is_over:
            found.append(str(arguments[0]))

    sys.addaudithook(hook)
    yield found
    is_over = True


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The run's process is taken to be there until this is emptied."""
    alive = {"alive"}
    monkeypatch.setattr("trainer.run.process.alive", lambda run: bool(alive))
    yield alive
    alive.clear()


@pytest.fixture
def page(tab: Page, server: Server, draft: Path) -> Iterator[Page]:
    """The page as a newcomer finds it, with the quickstart in the form, or a draft that was kept before."""
    with visited(tab, server.url) as page:
        yield page
