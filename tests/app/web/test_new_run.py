"""The handlers of the Train page as a browser asks them, also when its requests overtake the answers."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app import form
from app.form import Draft
from app.plan_preview import THIS_MACHINE
from app.studio import Studio
from app.web.pages import train
from app.web.pages.train import TrainPage
from tests.runs import make_pictures, write_preset

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # gradio's event loops


SCHNELL = "flux1-schnell-lora-1gpu"
RECORDED_WITHIN_S = 240
PREFLIGHT_S = 0.1
"""Measured by `make bench`; here only what is far beyond fails."""


class Shown:
    """What a browser shows of the page."""

    def __init__(self, page: TrainPage) -> None:
        self.page = page
        self.token, self.preset, self.wants_all, self.refreshes, self.target = "", "quickstart", False, 0, THIS_MACHINE
        self.plan, self.fixes, self.can_record, self.can_verify = "", [], False, False
        self.values = {name: component.value for name, component in page.inputs.items()}
        self.visible = {name for name, component in page.inputs.items() if component.visible}

    def ask(self) -> list[Any]:
        return train.on_edit(self.page)(*self.sent)

    @property
    def sent(self) -> list[Any]:
        return [self.token, self.preset, self.wants_all, self.refreshes, self.target, *self.values.values()]

    def take(self, answer: list[Any]) -> None:
        self.token = answer[0]
        at = self.page.outputs.index
        self.preset = answer[at(self.page.preset)].get("value", self.preset)
        self.plan, self.can_record = answer[at(self.page.plan.bar)], answer[at(self.page.plan.record)]["visible"]
        self.can_verify = answer[at(self.page.plan.verify)]["visible"]
        updates = [answer[at(fix)] for fix in self.page.plan.fixes]
        self.fixes = [update["value"] for update in updates if update["visible"]]
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
    shown.take(train.on_open(shown.page))
    yield shown
    gc.collect()


def test_the_page_says_beside_start_what_to_know_before_a_distilled_model_is_trained() -> None:
    presets = Path(__file__).parents[3] / "presets"
    shown = {
        name: train._problems(form.check(Draft(presets / f"{name}.yaml")), "") for name in ("sdxl-lora-1gpu", SCHNELL)
    }
    assert shown["sdxl-lora-1gpu"] == '<p role="status">Ready to start.</p>'
    assert "the model was distilled to draw in 4 steps without guidance" in shown[SCHNELL]


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
    studio.save_draft(kept)
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


def test_advice_on_what_is_typed_stands_under_the_status(browser: Shown):
    browser.values |= {"adapter.type": "loha", "optim.lr": "2e-4"}
    said = browser.ask()[browser.page.outputs.index(browser.page.problems)]
    assert said.endswith(
        '</p><div class="slow"><p class="sentence">optim.lr: 0.0002 is a usual learning rate for lora, but loha '
        "learns about ten times more slowly with it; try 10 times as much.</p></div>"
    )


def test_images_are_read_again_when_the_page_is_come_back_to(browser: Shown, studio: Studio, tmp_path: Path):
    def told() -> str:
        for _ in range(100):
            answer = browser.ask()
            browser.take(answer)
            text = str(answer[browser.page.outputs.index(browser.page.problems)])
            if "Reading the images" not in text:
                return text
        raise AssertionError(text)

    browser.preset = "own"
    assert "Ready" in told()
    (tmp_path / "pictures" / "broken.png").write_bytes(b"no picture")
    assert "Ready" in told()
    browser.refreshes += 1
    assert "broken.png" in told()


def test_a_preset_that_is_gone_is_told(browser: Shown, studio: Studio):
    browser.preset = "own"
    browser.take(browser.ask())
    studio.preset("own").unlink()
    assert "own" in str(browser.ask())


def test_the_plan_is_for_the_gpus_that_are_chosen(browser: Shown):
    browser.preset = "flux2-dev-lora-4gpu"
    browser.take(browser.ask())
    assert "No GPU here; it fits 32 GB (RTX 5090) and larger." in browser.plan
    assert browser.fixes == []
    browser.target = "24gb"
    browser.take(browser.ask())
    assert 'data-verdict="does not fit"' in browser.plan
    assert len(browser.fixes) == 3
    assert browser.fixes[0] == "Make it fit: quantize.format=nf4"


def test_a_way_to_make_the_run_fit_is_taken_over_with_a_click(browser: Shown, studio: Studio):
    browser.preset, browser.target = "flux2-dev-lora-4gpu", "24gb"
    browser.take(browser.ask())
    handler = train.page_handler(browser.page, partial(train._apply_fix, 0))
    browser.take(handler(*browser.sent))
    assert browser.values["quantize.format"] == "nf4"
    assert 'data-verdict="fits"' in browser.plan
    assert browser.fixes == []
    assert studio.draft().values == {"quantize.format": "nf4"}


def clicked_and_awaited(browser: Shown, handler: Any, waiting: str) -> None:
    """Click, see what is said meanwhile, and look until it is no longer said."""
    browser.take(train.page_handler(browser.page, handler)(*browser.sent))
    assert waiting in browser.plan
    assert not browser.can_record
    assert not browser.can_verify
    ends = time.monotonic() + RECORDED_WITHIN_S
    while waiting in browser.plan and time.monotonic() < ends:
        time.sleep(1)
        browser.take(browser.ask())


@pytest.mark.slow
def test_a_model_that_was_not_recorded_is_recorded_with_a_click(browser: Shown, studio: Studio):
    browser.preset = "own"
    browser.take(browser.ask())
    assert "No recording of" in browser.plan
    assert browser.can_record
    clicked_and_awaited(browser, train._record, "Recording ")
    assert "GiB on each GPU" in browser.plan


@pytest.mark.slow
def test_a_plan_is_compared_with_a_trace_with_a_click(browser: Shown):
    browser.preset = "quickstart"
    browser.take(browser.ask())
    assert browser.can_verify
    clicked_and_awaited(browser, train._verify, "Tracing the whole model, block by block.")
    said = re.search(
        r"Training traced, block by block: 0\.06 GiB of tensors; planned 0\.06 \(([+-][\d.]+)%\)", browser.plan
    )
    assert said is not None
    assert abs(float(said[1])) < 1
    assert not browser.can_verify


def test_a_plan_with_its_ways_is_there_while_somebody_types(browser: Shown, studio: Studio):
    browser.preset, browser.target = "flux2-dev-lora-4gpu", "24gb"
    browser.take(browser.ask())
    checked = form.check(studio.draft())
    began = time.perf_counter()
    for _ in range(5):
        studio.plan(checked, "24gb")
    assert (time.perf_counter() - began) / 5 < 3 * PREFLIGHT_S
