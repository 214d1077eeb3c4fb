"""How long a run will take, by earlier runs of its kind."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.form.earlier_runs import EarlierRuns, Estimate
from tests.runs import make_pictures, run_config, step_event, write
from trainer.config.schema import RunConfig
from trainer.run.events import AnyEvent, StatusEvent
from trainer.run.folder import RunDir

BEGAN = 1_790_000_000.0
STARTING, SAMPLING, STEP, ENDING = 30.0, 12.0, 2.0, 8.0
STEPS, EVERY = 40, 20


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_pictures(tmp_path / "pictures", count=2)
    return tmp_path / "runs"


def config(runs: Path, **changes: Any) -> RunConfig:
    own = {"sample__prompts": ["a", "b"], "sample__every": EVERY, "train__steps": STEPS}
    return run_config(runs.parent / "pictures", **own | changes)


def history(steps: int = STEPS, step_s: float = STEP, began: float = BEGAN) -> list[AnyEvent]:
    """A run whose times are known: it starts, draws samples at 0, 20 and at the end, and exports."""
    now, events = began, []

    def at(event: AnyEvent, seconds: float) -> None:
        nonlocal now
        events.append(event)
        now += seconds

    at(StatusEvent(state="starting", time=now), STARTING)
    at(StatusEvent(state="sampling", time=now), SAMPLING)
    at(StatusEvent(state="training", time=now), 0)
    for step in range(1, steps + 1):
        now += step_s
        parts = ("seconds_data", "seconds_forward", "seconds_backward", "seconds_optimizer")
        times = dict.fromkeys(parts, step_s / 4) | {"seconds": step_s, "seconds_communication": 0}
        at(step_event(step, time=now, **times), 0)
        if step % EVERY == 0:
            at(StatusEvent(step=step, state="sampling", time=now), SAMPLING)
            at(StatusEvent(step=step, state="training", time=now), 0)
    at(StatusEvent(step=steps, state="exporting", time=now), ENDING)
    at(StatusEvent(step=steps, state="finished", time=now), 0)
    return events


def ended(runs: Path, name: str, events: Sequence[AnyEvent] | None = None, **changes: Any) -> RunDir:
    run = RunDir.create(runs, config(runs, name=name, **changes), at=runs / name)
    write(run, *(history() if events is None else events))
    return run


def estimated(runs: Path, earlier: EarlierRuns | None = None, **changes: Any) -> Estimate | None:
    """The estimate of a folder whose runs were all read."""
    earlier = earlier or EarlierRuns(runs)
    cfg = config(runs, **changes)
    earlier.estimate(cfg, cfg.stage_steps)
    deadline = time.monotonic() + 60
    while earlier.is_looking:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return earlier.estimate(cfg, cfg.stage_steps)


def test_the_same_run_again_takes_as_long_as_it_took(runs: Path):
    ended(runs, "first")
    found = estimated(runs)
    assert found is not None
    assert found.seconds == pytest.approx(STARTING + STEPS * STEP + 3 * SAMPLING + ENDING)
    assert (found.run, found.name, found.began, found.host) == ("first", "first", BEGAN, "")
    assert found.step_s == pytest.approx(STEP) and found.has_samples


def test_a_run_in_stages_takes_the_sum_of_its_stages_where_every_length_is_known(runs: Path):
    ended(runs, "first")
    stages = [{"name": "one", "set": {}}, {"name": "two", "set": {"train.steps": 100, "sample.every": 50}}]
    found = estimated(runs, stages=stages)
    assert found is not None
    assert found.seconds == pytest.approx(2 * (STARTING + 3 * SAMPLING + ENDING) + (STEPS + 100) * STEP)
    assert (found.run, found.step_s) == ("first", pytest.approx(STEP))
    assert estimated(runs, stages=[*stages, {"name": "three", "set": {"train.epochs": 2}}]) is None
    assert estimated(runs, stages=[*stages, {"name": "three", "set": {"adapter.type": "lokr"}}]) is None


def test_steps_passes_and_prompts_take_their_time_each(runs: Path):
    ended(runs, "first")
    changes = {"train__steps": 100, "train__batch_size": 8, "sample__prompts": ["a", "b", "c"], "adapter__rank": 8}
    found = estimated(runs, **changes)
    assert found is not None
    step_s = 2 * 0.75 * STEP + 0.25 * STEP  # twice the passes, one update
    assert found.step_s == pytest.approx(step_s)
    assert found.seconds == pytest.approx(STARTING + 100 * step_s + 6 * 1.5 * SAMPLING + ENDING)


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter__type": "lokr"},
        {"data__resolution": 128},
        {"train__micro_batch": 2},
        {"parallel__devices": 2},
        {"quantize": {"format": "int8"}},
        {"model": {"family": "flux2", "path": "demo"}},
    ],
    ids=str,
)
def test_a_run_of_another_kind_says_nothing(runs: Path, changes: dict[str, Any]):
    ended(runs, "first")
    assert estimated(runs, **changes) is None


def test_samples_of_another_size_are_left_out_and_that_is_said(runs: Path):
    ended(runs, "first")
    found = estimated(runs, sample__size=[32, 32])
    assert found is not None and not found.has_samples
    assert found.seconds == pytest.approx(STARTING + STEPS * STEP + ENDING)
    none = estimated(runs, sample__every=0)
    assert none is not None and none.has_samples and none.seconds == found.seconds


def test_the_newest_run_with_enough_steps_counts_and_a_damaged_one_does_not_harm(runs: Path):
    ended(runs, "first")
    ended(runs, "second", history(step_s=3.0, began=BEGAN + 9000))
    ended(runs, "stopped-at-once", history(began=BEGAN + 99000)[:4])
    (runs / "damaged").mkdir()
    (runs / "damaged" / "config.yaml").write_text("train: 5\n")
    found = estimated(runs)
    assert found is not None and found.run == "second"


def test_a_run_that_ends_meanwhile_is_noticed_and_one_that_is_deleted_forgotten(
    runs: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.form.earlier_runs.LOOK_EVERY_S", 0.0)
    earlier = EarlierRuns(runs)
    assert estimated(runs, earlier) is None
    ended(runs, "first")

    def is_known() -> bool:
        return earlier.estimate(config(runs), (STEPS,)) is not None

    for there in (True, False):
        deadline = time.monotonic() + 30
        while is_known() is not there:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if there:
            shutil.rmtree(runs / "first")


def test_a_long_run_is_measured_by_its_beginning_and_its_end(runs: Path):
    events = history(steps=4000)
    run = ended(runs, "long", events, train__steps=4000)
    assert run.events_file.stat().st_size > 3 * 256 * 1024
    found = estimated(runs, train__steps=4000)
    assert found is not None
    assert found.seconds == pytest.approx(events[-1].time - BEGAN)


def test_an_answer_waits_for_no_run_to_be_read(runs: Path):
    first = ended(runs, "first")
    for number in range(60):
        shutil.copytree(first.path, runs / f"copy-{number}")
    earlier, cfg = EarlierRuns(runs), config(runs)
    began = time.thread_time()
    earlier.estimate(cfg, cfg.stage_steps)
    assert time.thread_time() - began < 0.02
    assert estimated(runs, earlier) is not None
    began = time.thread_time()
    for _ in range(10):
        earlier.estimate(cfg, cfg.stage_steps)
    assert (time.thread_time() - began) / 10 < 0.02
