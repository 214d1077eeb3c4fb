"""What the screen of a run is sent: everything once, then what changed."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.runs.run_screen import NUM_EVENTS, LogWish
from app.studio import Studio
from app.web.pages import run as page
from tests.app.browser import recorded
from tests.runs import run_config, step_event, write
from trainer.run.events import (
    ErrorEvent,
    ExportEvent,
    SampleEvent,
    StageEvent,
    StatusEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
)
from trainer.run.folder import RunDir
from trainer.system.errors import InputError

PARTS = ("seconds_data", "seconds_forward", "seconds_backward", "seconds_optimizer", "seconds_communication")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


class Browser:
    """What a window of the page remembers between two calls."""

    def __init__(self, runs: Path, name: str) -> None:
        self.calls = page.calls(Studio(runs))
        self.name = name
        self.known: dict[str, str] = {}
        self.log = LogWish()

    def tick(self, **options: Any) -> dict[str, Any]:
        """Return {part: its content} of the parts that were sent."""
        answer = self.calls["run_view"](self.name, self.known, self.log, **options)
        json.dumps(answer, allow_nan=False)
        if "log" in answer:
            found = answer["log"]
            self.log = LogWish(found["source"], self.log.level, found["file"], found["offset"])
        self.known |= {part: sent["key"] for part, sent in answer.get("parts", {}).items()}
        return {part: sent["value"] for part, sent in answer.get("parts", {}).items()} | {
            name: value for name, value in answer.items() if name != "parts"
        }


def step(number: int, loss: float = 0.5) -> StepEvent:
    return step_event(number, loss, seconds=0.6, **dict.fromkeys(PARTS, 0.1))


def test_everything_is_sent_once_and_then_nothing(runs: Path):
    recorded(runs, "one")
    browser = Browser(runs, "one")
    parts = {"run", "head", "memory", "samples", "events", "prompts", "notes", "curves"}
    assert set(browser.tick()) == parts | {"title", "id", "log"}
    assert set(browser.tick()) == {"title", "id", "log"}
    assert set(Browser(runs, "one").tick(only_head=True)) == {"run", "head", "title", "id", "log"}


def test_only_what_is_new_is_sent(runs: Path):
    run = recorded(runs, "one")
    browser = Browser(runs, "one")
    assert browser.tick()["events"]["is_fresh"] is True
    write(run, WarningEvent(message="look"))
    sent = browser.tick()
    assert "curves" not in sent
    assert [row["text"] for row in sent["events"]["rows"]] == ["Warning: look"]
    assert sent["events"]["is_fresh"] is False


def test_a_server_that_was_started_again_sends_everything_to_a_page_that_was_open(runs: Path):
    recorded(runs, "one")
    former, browser = Browser(runs, "one"), Browser(runs, "one")
    former.tick()
    browser.known, browser.log = former.known, former.log
    sent = browser.tick()
    assert {"head", "curves", "samples"} <= set(sent)
    assert sent["events"]["is_fresh"] is True


def test_a_folder_that_was_made_again_under_the_same_name_is_another_run(runs: Path):
    recorded(runs, "one")
    browser = Browser(runs, "one")
    browser.tick()
    shutil.rmtree(runs / "one")
    recorded(runs, "one", train__steps=20)
    sent = browser.tick()
    assert (sent["head"]["step"], sent["events"]["is_fresh"]) == (20, True)


def test_of_many_events_the_newest_are_sent_and_more_events_than_there_are_bring_all(runs: Path):
    run = recorded(runs, "one")
    write(run, *(WarningEvent(message=str(number)) for number in range(NUM_EVENTS)))
    browser = Browser(runs, "one")
    rows = browser.tick()["events"]["rows"]
    assert [row["text"] for row in rows] == [f"Warning: {number}" for number in range(NUM_EVENTS)]
    browser.known["events"] = "100000"
    assert browser.tick()["events"]["is_fresh"] is True


def test_a_finished_run_shows_its_export_with_its_check_and_can_only_go_on_with_a_checkpoint(runs: Path):
    export = ExportEvent(
        step=40, path="export/fox.safetensors", what="adapter", format="auto", difference=1.3e-3, dtype="bf16"
    )
    run = recorded(runs, "fox-20261124-211219-aebff6", [export, StatusEvent(state="finished", step=40)])
    (run.export / "fox.safetensors").write_bytes(b"0" * 1000)
    browser = Browser(runs, run.path.name)
    shown = browser.tick()
    head = shown["head"]
    assert (shown["title"], head["state"], head["step"], head["num_steps"]) == ("fox", "finished", 40, 40)
    assert head["about"] == "Tiny model (flux2) · LoRA rank 4 · 2 ranks"
    assert head["figures"]["best"] == {"loss": pytest.approx(1 / 40 + 1e-4), "step": 40}
    assert head["exports"] == [
        {
            "name": "fox.safetensors",
            "size": 1000,
            "step": 40,
            "is_file": True,
            "check": "verified: reloaded and equal within bf16 rounding (1.3e-03)",
            "is_verified": True,
        }
    ]
    assert head["more"] == {"kind": "", "saved": 0}
    with pytest.raises(InputError, match="has finished; let it go on for more steps"):
        browser.calls["run_resume"](run.path.name)
    with pytest.raises(InputError, match="is not running any more"):
        browser.calls["run_request"](run.path.name, "stop")
    (run.export / "fox.safetensors").unlink()
    assert browser.tick()["head"]["exports"] == []


@pytest.mark.parametrize(("state", "kind"), [("stopped", "resume"), ("failed", "resume")])
def test_a_run_that_has_steps_left_can_be_resumed(runs: Path, state: Any, kind: str):
    recorded(runs, "one", [StatusEvent(state=state, step=40)], train__steps=80)
    assert Browser(runs, "one").tick()["head"]["more"] == {"kind": kind, "saved": 0}


def test_the_sentence_about_a_stop_is_there_until_it_has_stopped(runs: Path, living):
    run = recorded(runs, "one", [StatusEvent(state="training", step=40)])
    browser = Browser(runs, "one")
    assert browser.tick()["head"]["pending"] == []
    browser.calls["run_request"]("one", "stop")
    assert browser.tick()["head"]["pending"] == ["It stops after this step and writes a checkpoint."]
    write(run, StatusEvent(state="stopped", step=40))
    assert browser.tick()["head"]["pending"] == []


def test_an_error_names_rank_remedy_and_the_log_to_show(runs: Path):
    error = ErrorEvent(
        step=40, rank=1, message="boom", remedy="less", retry=("optim.lr=1e-05",), log="logs/launch-1.log"
    )
    run = recorded(runs, "one", [error, StatusEvent(state="failed", step=40)])
    (run.logs / "launch-1.log").write_text("first\n")
    browser = Browser(runs, "one")
    shown = browser.tick()
    found = shown["head"]["error"]
    assert (found["rank"], found["message"], found["remedy"]) == (1, "boom", "less")
    assert (found["retry"], found["source"]) == (["optim.lr=1e-05"], "torchrun")
    assert (shown["log"]["text"], shown["log"]["is_fresh"]) == ("first\n", True)
    with (run.logs / "launch-1.log").open("a") as log:
        log.write("second\n")
    log = browser.tick()["log"]
    assert (log["text"], log["is_fresh"]) == ("second\n", False)
    (run.logs / "launch-2.log").write_text("of the next start\n")
    log = browser.tick()["log"]
    assert (log["text"], log["is_fresh"]) == ("of the next start\n", True)


def test_prompts_for_the_samples_to_come_are_requested_and_shown_as_asked(runs: Path, living):
    recorded(runs, "one", [StatusEvent(state="training", step=40)])
    browser = Browser(runs, "one")
    assert browser.tick()["prompts"] == {"now": ["a cat", "a dog"], "asked": None}
    with pytest.raises(InputError, match="prompt 1: empty"):
        browser.calls["run_prompts"]("one", [" "])
    browser.calls["run_prompts"]("one", ["a fox"])
    assert browser.tick()["prompts"] == {"now": ["a cat", "a dog"], "asked": ["a fox"]}


def test_the_next_samples_and_the_parts_of_a_step(runs: Path, living):
    recorded(runs, "one", [StatusEvent(state="training", step=40)], train__steps=40, sample__every=30)
    run = RunDir(runs / "one")
    run.events_file.unlink()
    write(run, StatusEvent(state="training"), *(step(number) for number in range(1, 11)))
    head = Browser(runs, "one").tick()["head"]
    assert head["next_sample"] == {"step": 30, "eta_s": pytest.approx(12.0)}
    assert head["figures"]["eta_s"] == pytest.approx(18.0)
    assert sum(head["split"].values()) == pytest.approx(0.6) == pytest.approx(head["figures"]["step_s"])
    assert head["marks"]["sample"] == 30


def test_the_time_that_is_left_counts_pauses_between_steps_and_not_the_slow_first_step(runs: Path, living):
    run = recorded(runs, "one", train__steps=110)
    run.events_file.unlink()
    began = time.time() - 100
    slow = replace(step(1), seconds=30.0, time=began)
    steps = [replace(step(number), seconds=1.0, time=began + 3 * (number - 1)) for number in range(2, 11)]
    write(run, StatusEvent(state="training", time=began - 31), slow, *steps)
    assert Browser(runs, "one").tick()["head"]["figures"]["eta_s"] == pytest.approx(100 * 3)


def test_no_time_is_said_to_be_left_after_the_last_step_and_of_a_silent_run(runs: Path, living):
    run = recorded(runs, "one", [StatusEvent(state="exporting", step=40)])
    head = Browser(runs, "one").tick()["head"]
    assert head["figures"]["eta_s"] is None
    assert head["next_sample"] is None
    run.events_file.unlink()
    for file in run.ranks.iterdir():
        file.unlink()
    write(run, *(replace(one, time=time.time() - 1000) for one in (StatusEvent(state="training"), step(1), step(2))))
    head = Browser(runs, "one").tick()["head"]
    assert head["is_stuck"]
    assert head["figures"]["eta_s"] is None


def test_the_speed_is_that_of_the_whole_time(runs: Path):
    run = recorded(runs, "one")
    run.events_file.unlink()
    fast, slow = (replace(step(at), seconds=s, images_per_second=8 / s) for at, s in ((1, 1.0), (2, 7.0)))
    write(run, fast, slow, StatusEvent(state="finished"))
    figures = Browser(runs, "one").tick()["head"]["figures"]
    assert figures["rate"] == pytest.approx(16 / 8)
    assert figures["step_s"] == pytest.approx(4.0)


def test_a_loss_that_is_not_a_number_any_more_is_said(runs: Path):
    run = recorded(runs, "one", [StatusEvent(state="training", step=40)])
    assert Browser(runs, "one").tick()["head"]["figures"]["diverged_at"] is None
    write(run, step(41, float("nan")), step(42), step(43, float("nan")), step(44, float("inf")))
    assert Browser(runs, "one").tick()["head"]["figures"]["diverged_at"] == 43


def test_newest_steps_with_samples_and_numbers_that_are_not_finite(runs: Path):
    run = recorded(runs, "one", [StatusEvent(state="failed", step=40)])
    many = (SampleEvent(step=50 + at, prompt="a cat", index=0, path="samples/x.png") for at in range(10))
    write(run, step(41, float("nan")), ValidationEvent(step=41, loss=float("nan")), *many)
    shown = Browser(runs, "one").tick()
    assert [one["step"] for one in shown["samples"]["steps"]] == list(range(52, 60))
    assert (shown["samples"]["num_steps"], shown["samples"]["num_samples"]) == (12, 14)
    assert shown["head"]["figures"]["best"]["step"] == 40
    assert json.loads(shown["curves"]["Loss"])["lines"][0]["values"][-1] is None


def test_a_run_in_stages_says_which_one_it_is_in(runs: Path, tmp_path: Path, living):
    stages = [{"name": "first", "set": {"train.steps": 3}}, {"name": "second", "set": {"train.steps": 5}}]
    config = run_config(tmp_path, stages=stages)
    run = RunDir.create(runs, config, runs / "staged")
    write(run, StatusEvent(state="training"), step(3), StageEvent(step=3, name="second", number=2, count=2))
    head = Browser(runs, "staged").tick()["head"]
    assert head["stages"] == {"names": ["first", "second"], "steps": [3, 5], "number": 2}
    assert head["num_steps"] == 8


def test_a_run_whose_folder_was_deleted_is_gone(runs: Path):
    run = recorded(runs, "one")
    browser = Browser(runs, "one")
    browser.tick()
    for file in (run.config_file, run.logs):
        file.rename(file.with_suffix(".moved"))
    assert browser.tick() == {"is_gone": True}


def test_a_call_with_nothing_new_costs_little(runs: Path):
    recorded(runs, "one", [StatusEvent(state="stopped", step=2000)], train__steps=2000, sample__every=500)
    browser = Browser(runs, "one")
    browser.tick()
    spent = []
    for _ in range(20):
        began = time.thread_time()
        browser.tick()
        spent.append(time.thread_time() - began)
    assert sorted(spent)[10] < 0.01
