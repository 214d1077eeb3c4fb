"""The handlers of the Train page as a browser asks them, also when its requests overtake the answers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app.form import Draft
from app.pages import train
from app.pages.train import TrainPage
from app.studio import Studio
from tests.runs import make_pictures, write_preset

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # gradio's event loops


class Shown:
    """What a browser shows of the page."""

    def __init__(self, page: TrainPage) -> None:
        self.page = page
        self.token, self.preset, self.wants_all, self.looks = "", "quickstart", False, 0
        self.values = {name: component.value for name, component in page.inputs.items()}
        self.visible = {name for name, component in page.inputs.items() if component.visible}

    def ask(self) -> list[Any]:
        return train.looked(self.page)(self.token, self.preset, self.wants_all, self.looks, *self.values.values())

    def take(self, answer: list[Any]) -> None:
        self.token = answer[0]
        self.preset = answer[self.page.outputs.index(self.page.preset)].get("value", self.preset)
        for name, update in zip(self.values, answer[-len(self.values) :], strict=True):
            self.values[name] = update.get("value", self.values[name])
            if "visible" in update:
                (self.visible.add if update["visible"] else self.visible.discard)(name)


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    folder = make_pictures(tmp_path / "pictures", count=2)
    studio = Studio(tmp_path / "runs")
    write_preset(studio.runs / "presets" / "own.yaml", folder)
    return studio


@pytest.fixture
def browser(studio: Studio) -> Iterator[Shown]:
    with gr.Blocks(analytics_enabled=False):
        shown = Shown(train.build(studio))
    shown.take(train.opened(shown.page))
    yield shown
    gc.collect()


def test_a_chosen_preset_fills_the_inputs(browser: Shown, studio: Studio):
    browser.preset = "own"
    browser.take(browser.ask())
    assert browser.values["data.path"].endswith("pictures")
    assert browser.values["train.steps"] == "20"
    assert studio.draft() == Draft(studio.preset("own"))


def test_all_settings_are_shown_when_they_are_wanted_and_no_longer_when_not(browser: Shown):
    in_front = set(browser.visible)
    assert "train.steps" in in_front
    browser.wants_all = True
    browser.take(browser.ask())
    assert browser.visible > in_front | {"parallel.max_restarts", "cluster.slurm"}
    browser.wants_all = False
    browser.take(browser.ask())
    assert browser.visible == in_front


def test_what_is_typed_before_the_answer_to_a_preset_is_all_that_differs_from_it(browser: Shown, studio: Studio):
    browser.preset = "own"
    late = browser.ask()
    browser.values["train.steps"] = "57"
    overtaking = browser.ask()
    browser.take(late)
    browser.take(overtaking)
    assert studio.draft() == Draft(studio.preset("own"), {"train.steps": 57})
    assert browser.values["data.path"].endswith("pictures")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_is_shown_is_what_would_be_started_in_whatever_order_answers_come(
    browser: Shown, studio: Studio, order: tuple[int, int]
):
    browser.preset = "own"
    answers = [browser.ask(), browser.ask()]  # gradio tells of one choice twice
    for index in order:
        browser.take(answers[index])
    browser.values["train.steps"] = "7"
    browser.take(browser.ask())
    assert studio.draft() == Draft(studio.preset("own"), {"train.steps": 7})


def test_a_look_before_the_first_answer_is_at_the_kept_draft(browser: Shown, studio: Studio):
    kept = Draft(studio.preset("own"), {"train.steps": 9})
    studio.keep_draft(kept)
    fresh = Shown(browser.page)  # gradio tells of the choice of a tab while the page is opened
    fresh.take(fresh.ask())
    assert (fresh.preset, fresh.values["train.steps"]) == ("own", "9")
    assert studio.draft() == kept


def test_after_a_restart_of_the_page_a_browser_goes_on_with_what_it_shows(browser: Shown, studio: Studio):
    browser.preset = "own"
    browser.take(browser.ask())
    with gr.Blocks(analytics_enabled=False):
        browser.page = train.build(studio)
    browser.values["train.steps"] = "33"
    browser.take(browser.ask())
    assert studio.draft() == Draft(studio.preset("own"), {"train.steps": 33})


def test_images_are_read_again_when_the_page_is_come_back_to(browser: Shown, studio: Studio, tmp_path: Path):
    def told() -> str:
        for _ in range(100):
            answer = browser.ask()
            browser.take(answer)
            text = str(answer[browser.page.outputs.index(browser.page.problems)])
            if "are being read" not in text:
                return text
        raise AssertionError(text)

    browser.preset = "own"
    assert "Ready" in told()
    (tmp_path / "pictures" / "broken.png").write_bytes(b"no picture")
    assert "Ready" in told()
    browser.looks += 1
    assert "broken.png" in told()


def test_a_preset_that_is_gone_is_told(browser: Shown, studio: Studio):
    browser.preset = "own"
    browser.take(browser.ask())
    studio.preset("own").unlink()
    assert "own" in str(browser.ask())
