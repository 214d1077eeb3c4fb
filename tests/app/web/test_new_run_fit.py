"""The button Fit of the screen New run, as a browser asks for what it shows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from app.form import draft as form
from app.form.fit_preview import FAILED
from app.form.plan_preview import Background
from app.studio import Studio
from tests.app.web.test_new_run import Window
from tests.runs import make_pictures, write_preset
from tests.system.gpus.machines import TWO_H100, install
from trainer.plan.hardware import CARDS
from trainer.plan.search.choices import KEPT, kept_fields
from trainer.plan.search.fit import Fit, Target, fit
from trainer.run.folder import shared_cache
from trainer.system.errors import InputError

LARGE = "flux2-dev-lora-4gpu"
SEARCHED_WITHIN_S = 60


@pytest.fixture
def window(studio: Studio) -> Window:
    return Window(studio)


def search(window: Window, target: str, *allow: str) -> dict[str, Any]:
    """Return what a search finds."""
    answer = window.call("fit", allow=list(allow), target=target)
    deadline = time.monotonic() + SEARCHED_WITHIN_S
    while answer["is_running"]:
        assert time.monotonic() < deadline
        answer = window.call("fit", allow=list(allow), key=answer["made_for"], target=target)
    return answer


def expected(studio: Studio, target: str) -> Fit:
    cfg = form.check(studio.draft()).config
    kept = kept_fields(KEPT)
    return fit(cfg, Target(CARDS[target], cfg.parallel.devices, kept), shared_cache(cfg, studio.runs))


@pytest.mark.parametrize(
    ("preset", "target"),
    [
        (LARGE, "24gb"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("qwen3-8b-qlora-1x24gb", "12gb"), ("sdxl-full-4gpu", "24gb")]
        ),
    ],
)
def test_each_of_the_fastest_settings_can_be_taken_and_gives_the_config_that_was_planned(
    window: Window, studio: Studio, preset: str, target: str
):
    window.call("preset", name=preset, target=target)
    before, wanted = studio.draft(), expected(studio, target)
    found = search(window, target)
    assert len(json.dumps(found)) < 4_000
    assert [(one["seconds"], one["need"]) for one in found["proposals"]] == [
        (one.seconds, one.plan.need) for one in wanted.proposals
    ]
    for number, one in enumerate(wanted.proposals):
        window.call("take", key=found["made_for"], number=number, allow=[], target=target)
        assert form.check(studio.draft()).config == one.config
        assert window.state["plan"]["verdict"] == "fits"
        assert window.state["plan"]["need"] == pytest.approx(one.plan.need, rel=1e-12)
        shown = {change["field"]: change for change in window.state["changes"]}
        assert [shown[change["field"]] for change in found["proposals"][number]["changes"]] == found["proposals"][
            number
        ]["changes"]
        assert window.state["fit"]["key"] != found["made_for"]
        studio.save_draft(before)


def test_what_is_offered_is_said_in_words(window: Window):
    window.call("preset", name=LARGE, target="24gb")
    assert window.state["fit"]["words"] == "Fit to 4 × 24 GB"
    found = search(window, "24gb")
    assert (found["gpus"], found["samples"], found["steps"]) == ("4 × 24 GB (RTX 4090)", 4, 1500)
    first = found["proposals"][0]
    assert first["whole"] == pytest.approx(1500 * first["seconds"])
    assert {"field": "parallel.offload_blocks", "label": "Block offload", "old": "0", "new": "1.0"} in first["changes"]
    assert found["reason"].startswith("Faster than the first one: Gradient checkpointing full ")
    assert found["reason"].endswith(" of 24.0 GiB, more than 92%.")
    assert [words for _, words in found["may"]] == ["4 bits", "smaller images", "a lower rank"]


def test_where_nothing_planned_is_faster_only_that_is_said(window: Window, studio: Studio):
    window.call("preset", name="sdxl-lora-1gpu", target="80gb")
    found = search(window, "80gb")
    assert expected(studio, "80gb").proposals[0].faster is None
    assert found["reason"] == (
        "No planned setting that does not fit would save 1 % of the time or more. "
        "The longest part of a step is computing."
    )


def test_what_changes_the_result_is_left_unless_it_is_allowed(window: Window, studio: Studio):
    window.call("preset", name=LARGE, target="12gb")
    window.call("edit", edits={"data.resolution": "4096", "parallel.devices": "1"}, target="12gb")
    found = search(window, "12gb")
    assert (found["proposals"], found["needed"], found["allow"]) == ([], [["Resolution", "1024"]], ["resolution"])
    allowed = search(window, "12gb", "resolution")
    assert {change["field"]: change["new"] for change in allowed["proposals"][0]["changes"]}[
        "data.resolution"
    ] == "1024"
    window.call("take", key=allowed["made_for"], number=0, allow=["resolution"], target="12gb")
    assert form.check(studio.draft()).config.data.resolution == 1024
    window.call("edit", edits={"data.resolution": "1024"}, target="24gb")
    formats = [change["new"] for one in search(window, "24gb", "format")["proposals"] for change in one["changes"]]
    assert "nf4" in formats


def test_settings_of_a_search_before_the_form_was_changed_are_refused(window: Window, studio: Studio):
    window.call("preset", name=LARGE, target="24gb")
    found = search(window, "24gb")
    window.call("edit", edits={"name": "fox"}, target="24gb")
    assert window.state["fit"]["key"] == found["made_for"]  # a name changes nothing
    window.call("edit", edits={"data.resolution": "512"}, target="24gb")
    before = studio.draft()
    taken = {"key": found["made_for"], "number": 0, "allow": []}
    changed = "The form or the GPUs were changed after this search: search again."
    assert window.refused("take", **taken, target="24gb") == changed
    window.call("edit", edits={"data.resolution": "1024"}, target="24gb")
    assert window.refused("take", **taken, target="80gb") == changed
    forgotten = "The page has forgotten this search: search again."
    assert window.refused("take", **taken | {"number": 3}, target="24gb") == forgotten
    assert window.refused("take", **taken | {"number": -1}, target="24gb") == forgotten
    assert Window(Studio(studio.runs)).refused("take", **taken, target="24gb") == forgotten
    assert studio.draft().values == {"name": "fox"}
    assert before.values == {"name": "fox", "data.resolution": 512}
    window.call("take", **taken, target="24gb")


def test_an_answer_does_not_wait_for_a_long_search(window: Window, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.form.fit_preview.WAIT_S", 0.0)
    window.call("preset", name=LARGE, target="24gb")
    answer = window.call("fit", allow=[], target="24gb")
    assert answer == {"made_for": window.state["fit"]["key"], "is_running": True}
    assert search(window, "24gb")["proposals"]


def test_a_search_that_was_not_started_has_no_result(window: Window):
    window.call("preset", name=LARGE, target="24gb")
    assert window.refused("fit", allow=[], key=window.state["fit"]["key"], target="24gb") == FAILED


def test_a_search_whose_form_was_changed_meanwhile_has_not_failed(window: Window):
    window.call("preset", name=LARGE, target="24gb")
    key = window.call("fit", allow=[], target="24gb")["made_for"]
    changed = {"made_for": key, "is_running": False, "is_changed": True}
    assert window.call("fit", allow=[], key=key, target="80gb") == changed
    window.call("edit", edits={"data.resolution": "512"}, target="24gb")
    assert window.call("fit", allow=[], key=key, target="24gb") == changed
    window.call("edit", edits={"train.steps": "many"}, target="24gb")
    assert window.call("fit", allow=[], key=key, target="24gb") == changed


def test_undo_returns_only_what_still_has_the_values_that_were_taken(window: Window, studio: Studio):
    window.call("preset", name=LARGE, target="24gb")
    window.call("edit", edits={"train.micro_batch": "1", "train.checkpointing": "selective"}, target="24gb")
    before = studio.draft()
    found = search(window, "24gb")
    taking = {"key": found["made_for"], "number": 0, "allow": [], "target": "24gb"}
    undo = window.call("take", **taking)["undo"]
    assert undo["taken"]["parallel.offload_blocks"] == "1.0"
    assert window.call("undo", **undo)["left"] == []
    assert studio.draft() == before
    undo = window.call("take", **taking)["undo"]
    window.call("edit", edits={"parallel.offload_blocks": "1", "train.steps": "7"})  # one block, and not all of them
    assert window.call("undo", **undo)["left"] == ["Block offload"]
    assert studio.draft().values == {**before.values, "parallel.offload_blocks": 1, "train.steps": 7}
    window.call("preset", name="flux2-dev-lora-8gpu")
    former = studio.draft()
    assert window.refused("undo", **undo) == "Another preset was chosen after that: nothing was undone."
    assert studio.draft() == former


@pytest.mark.parametrize(
    ("preset", "edits", "why"),
    [
        (LARGE, {"train.steps": "many"}, "Correct the errors of the form first."),
        ("single_node_8gpu", {}, "This run has stages: launch.py --fit finds the settings of each."),
        ("own", {}, "The memory of this combination is not known yet."),
    ],
)
def test_a_search_that_is_not_possible_says_why(
    window: Window, studio: Studio, tmp_path: Path, preset: str, edits: dict[str, str], why: str
):
    write_preset(studio.own_presets / "own.yaml", make_pictures(tmp_path / "pictures", count=2))
    window.call("preset", name=preset, target="24gb")
    window.call("edit", edits=edits, target="24gb")
    assert window.state["fit"]["why_not"] == window.refused("fit", allow=[], target="24gb") == why


def test_the_gpus_of_this_machine_are_fitted_and_its_memory_is_not_exceeded(
    window: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    window.call("preset", name=LARGE)
    assert window.state["fit"] is None
    assert window.refused("fit", allow=[]) == "There are no GPUs to fit: choose some above."
    install(TWO_H100, tmp_path, monkeypatch)
    monkeypatch.setattr("app.studio.GPUS_EVERY_S", 0)
    window.call("state")
    assert window.state["fit"]["words"] == "Fit to my GPUs"
    assert window.state["fit"]["why_not"] == ""  # four GPUs in the config, two here
    found = search(window, "this machine")
    assert found["gpus"] == "2 × NVIDIA H100 80GB HBM3"
    assert all(one["host"] <= found["host"] for one in found["proposals"])
    assert {"parallel.devices"} <= {change["field"] for change in found["proposals"][0]["changes"]}


def test_only_the_last_results_of_a_background_are_kept():
    def failing() -> int:
        raise InputError("no")

    background = Background[int](2)
    for number in range(4):
        background.start(number, lambda number=number: number)
        background.wait(number, 10)
    background.start("failing", failing)
    background.wait("failing", 10)
    assert [background.result(number) for number in range(4)] == [None, None, 2, 3]
    assert background.failure("failing") == "no"
