"""Downloads of models from New run in Chromium: real processes, which ask a hub on this machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page

from tests.app.browser import (
    PATIENCE_S,
    TRAINED_WITHIN_S,
    Server,
    free_port,
    look_settled,
    opened,
    reload,
    serving,
    state_is,
)
from tests.app.browser import until_so as wait_until
from tests.runs import make_pictures, run_config
from tests.weights.hub_server import Hub, HubServer
from tests.weights.test_download import FILES, MIB, WEIGHTS
from trainer.config.models import published_models
from trainer.launcher.jobs.downloads import Downloads
from trainer.models import families

OPEN, GATED = "black-forest-labs/FLUX.2-klein-base-4B", "black-forest-labs/FLUX.2-dev"
PRESETS = {"open": OPEN, "gated": GATED}
TRANSFORMER = len(FILES[WEIGHTS])
pytestmark = pytest.mark.slow


@dataclass
class Site:
    """A page, the hub that its downloads ask, and the cache that they fill."""

    server: Server
    home: Path
    port: int

    @property
    def cache(self) -> Path:
        return self.home / "hub"

    def log_in(self, token: str) -> None:
        """As `hf auth login` does."""
        self.home.mkdir(exist_ok=True)
        (self.home / "token").write_text(token)

    def choose(self, preset: str) -> None:
        """Put a preset into the form of pages that are opened after this."""
        drafts = self.server.runs / "drafts"
        drafts.mkdir(exist_ok=True)
        (drafts / "draft.json").write_text(json.dumps({"preset": preset, "values": {}}))

    @contextmanager
    def hub(self, model_id: str = OPEN, **values: object) -> Iterator[Hub]:
        """The hub that answers at the address the page's processes know."""
        with HubServer(Hub(model_id, dict(FILES)), self.port) as server:
            for name, value in values.items():
                setattr(server.hub, name, value)
            yield server.hub


@contextmanager
def site_in(folder: Path, **options: object) -> Iterator[Site]:
    runs, home, port = folder / "runs", folder / "home", free_port()
    pictures = make_pictures(folder / "pictures", count=4)
    (runs / "presets").mkdir(parents=True)
    for name, model_id in PRESETS.items():
        (runs / "presets" / f"{name}.yaml").write_text(
            f"name: {name}\nmodel: {{family: flux2, path: {model_id}}}\n"
            f"data: {{path: {pictures}, resolution: 64}}\nadapter: {{type: lora, rank: 2}}\n"
            "train: {steps: 1, batch_size: 1, precision: fp32}\nparallel: {device: cpu}\ncheckpoint: {every: 0}\n"
            "sample: {prompts: [a cat], size: [64, 64], steps: 1}\n"
        )
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HUB_CACHE": str(home / "hub"), "HF_TOKEN": ""}
    with serving(runs, environment=environment, **options) as server:
        yield Site(server, home, port)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_in(tmp_path_factory.mktemp("download")) as site:
        yield site


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """Nothing was downloaded yet, and `open` is in the form."""
    shared.choose("open")
    yield shared
    folder = shared.server.runs / "drafts" / "models"
    if folder.is_dir():
        for model_id in PRESETS.values():
            Downloads(folder).pause(model_id)
        shutil.rmtree(folder)
    shutil.rmtree(shared.home, ignore_errors=True)


def facts(page: Page) -> Locator:
    return page.locator("#model-facts")


def tile(page: Page, model_id: str = OPEN) -> Locator:
    return page.locator(f"#tiles [data-model='{model_id}']")


def press(page: Page, word: str) -> None:
    facts(page).get_by_role("button", name=word, exact=True).click()


def says(page: Page, text: str, within_s: float = PATIENCE_S) -> None:
    facts(page).get_by_text(text).wait_for(timeout=within_s * 1e3)


def is_here(page: Page, model_id: str = OPEN) -> None:
    """Wait until everything on the page says that the model is on this machine."""
    tile(page, model_id).locator(".tag.ok", has_text="here").wait_for()
    says(page, "is on this machine")
    assert facts(page).get_by_role("button").count() == 0
    page.locator("#why[data-state=ready]").wait_for()


def num_bytes_here(site: Site) -> int:
    return sum(part.stat().st_size for part in site.cache.rglob("*.incomplete"))


def test_a_model_to_download_names_size_licence_and_login_first(browser: Browser, site: Site):
    site.choose("gated")
    with opened(browser, site.server.url) as page:
        tile(page, GATED).locator(".tag", has_text="to download").wait_for()
        says(page, "113 GB to download")
        licence = facts(page).get_by_role("link", name="Licence: FLUX Non-Commercial License")
        assert licence.get_attribute("href") == f"https://huggingface.co/{GATED}"
        assert licence.get_attribute("title") == "FLUX Non-Commercial License: non-commercial"
        says(page, "It is gated: accept its licence on")
        says(page, "log in with `hf auth login`")
        page.locator("#why", has_text="not on this machine yet; download it on the first card, 113 GB").wait_for()
        assert page.locator("#start").is_disabled()


def test_a_download_is_paused_and_goes_on_where_it_was_until_start_is_ready(browser: Browser, site: Site):
    with site.hub(hold_after=3 * MIB) as hub, opened(browser, site.server.url) as page:
        press(page, "Download")
        says(page, "of 6.3 MB")
        wait_until(page, lambda: num_bytes_here(site) > 2 * MIB)
        bar = facts(page).get_by_role("progressbar")
        wait_until(page, lambda: 30 < int(bar.get_attribute("aria-valuenow") or 0) < 60)
        page.locator("#why[data-state=refused]", has_text="is being downloaded").wait_for()
        press(page, "Pause")
        says(page, "Paused.")
        begin = num_bytes_here(site)
        reload(page)
        says(page, "Paused.")
        assert 30 < int(bar.get_attribute("aria-valuenow") or 0) < 60
        hub.hold_after = None
        hub.released.set()
        hub.ranges.clear()
        press(page, "Continue")
        is_here(page)
        assert f"bytes={begin}-" in hub.ranges


def test_the_end_of_a_download_is_noticed_when_another_model_was_looked_at_meanwhile(browser: Browser, site: Site):
    with site.hub(hold_after=3 * MIB) as hub, opened(browser, site.server.url) as page:
        press(page, "Download")
        says(page, "of 6.3 MB")
        tile(page, "demo").first.click()
        says(page, "comes with ShardStudio")
        tile(page).locator(".tag", has_text=re.compile(r"downloading, \d+ %")).wait_for()
        hub.released.set()
        tile(page).locator(".tag.ok", has_text="here").wait_for()
        tile(page).click()
        says(page, "is on this machine")


def test_a_download_outlives_a_reload_and_the_page_and_is_shown_in_every_window(browser: Browser, site: Site):
    server = site.server
    with site.hub(hold_after=3 * MIB) as hub, opened(browser, server.url) as page:
        press(page, "Download")
        wait_until(page, lambda: num_bytes_here(site) > 2 * MIB)
        reload(page)
        says(page, "of 6.3 MB")
        server.kill()
        page.locator("#lost:visible").wait_for()
        server.start()
        page.goto("about:blank")
        page.goto(f"{server.url}#/new")
        look_settled(page)
        says(page, "of 6.3 MB")
        with opened(browser, server.url) as other:
            press(other, "Pause")
            says(other, "Paused.")
            says(page, "Paused.")
            press(page, "Continue")
            other.locator("#model-facts").get_by_role("button", name="Pause").wait_for()
            hub.released.set()
            is_here(page)
            is_here(other)


def test_a_hub_that_cannot_be_reached_is_said_and_asked_again(browser: Browser, site: Site):
    with opened(browser, site.server.url) as page:
        press(page, "Download")
        says(page, "The hub cannot be reached. Check the network and HF_ENDPOINT, and start again")
        with site.hub(is_down=True):
            press(page, "Continue")
            says(page, "The hub answered with an error (503).")
        with site.hub():
            press(page, "Continue")
            is_here(page)


def test_a_gated_model_says_who_must_do_what_until_it_may_be_downloaded(browser: Browser, site: Site):
    site.choose("gated")
    with site.hub(GATED, is_gated=True) as hub, opened(browser, site.server.url) as page:
        press(page, "Download")
        says(page, "FLUX.2 dev needs a login: accept its licence on")
        facts(page).locator(".notice").get_by_role("link", name=f"https://huggingface.co/{GATED}").wait_for()
        site.log_in("hf_of_somebody")
        press(page, "Continue")
        says(page, "The account that is logged in may not download FLUX.2 dev")
        site.log_in(hub.token)
        press(page, "Continue")
        is_here(page, GATED)


def test_a_refused_start_of_a_download_is_said_at_its_button_which_can_be_pressed_again(browser: Browser, site: Site):
    blocking = site.server.runs / "drafts" / "models"
    blocking.write_text("a file")
    with site.hub(), opened(browser, site.server.url) as page:
        press(page, "Download")
        facts(page).get_by_role("alert").wait_for()
        blocking.unlink()
        press(page, "Download")
        is_here(page)


def test_the_focus_stays_on_the_button_while_the_numbers_change(browser: Browser, site: Site):
    with site.hub(hold_after=MIB) as hub, opened(browser, site.server.url) as page:
        press(page, "Download")
        says(page, "of 6.3 MB")
        facts(page).get_by_role("button", name="Pause").focus()
        before = facts(page).inner_text()
        hub.hold_after = 4 * MIB
        hub.released.set()
        hub.released.clear()
        wait_until(page, lambda: facts(page).inner_text() != before)
        assert page.evaluate("document.activeElement.textContent") == "Pause"
        hub.released.set()


def test_a_model_that_was_downloaded_trains(browser: Browser, site: Site, tmp_path: Path):
    folder = families.make(run_config(tmp_path), tmp_path / "cache").folder
    tiny = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    needed = {name: content for name, content in tiny.items() if published_models()[OPEN].needs(name)}
    assert needed.keys() == tiny.keys()
    with site.hub(files=tiny), opened(browser, site.server.url) as page:
        press(page, "Download")
        is_here(page)
        page.locator("#start").click()
        state_is(page, "finished", timeout_s=TRAINED_WITHIN_S)
