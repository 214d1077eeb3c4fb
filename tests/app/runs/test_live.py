"""Which runs are running: seldom read, seen when they start, remembered when they end."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from app.runs import run_trash
from app.runs.live import Live
from app.runs.monitor import Follower
from tests.app.browser import in_training
from tests.runs import run_config, write
from trainer.run import process
from trainer.run.events import StatusEvent
from trainer.run.folder import RunDir
from trainer.run.process import Launch

NUM_RUNS = 500
QUICK_S = 0.05
"""CPU time of a look at 500 runs that have ended. 3 ms when it was written; only a time far above it fails."""


@pytest.fixture
def live(tmp_path: Path) -> Live:
    (tmp_path / "runs").mkdir()
    return Live(tmp_path / "runs", Follower)


def make_run(runs: Path, name: str, state: str = "finished") -> RunDir:
    run = RunDir.create(runs, run_config(runs.parent / "pictures"), at=runs / name)
    write(run, StatusEvent(state=state, step=5))
    return run


def names(live: Live) -> list[str]:
    return [view.path.name for view in live.views()]


def test_a_started_run_appears_and_an_ended_one_is_remembered_with_its_state(live: Live, tmp_path: Path):
    make_run(tmp_path / "runs", "old")
    assert names(live) == []
    run = make_run(tmp_path / "runs", "new", state="training")
    with in_training(run):
        assert names(live) == ["new"]
        assert live.views()[0].state == "training"
        assert live.ended == {}
        write(run, StatusEvent(state="finished", step=5))
    assert names(live) == []
    assert {name: view.state for name, view in live.ended.items()} == {"new": "finished"}
    with in_training(run):  # it is resumed
        assert names(live) == ["new"]
        assert live.ended == {}  # else windows would say again and again that it has ended


def test_a_run_whose_folder_is_deleted_while_it_runs_does_no_harm(live: Live, tmp_path: Path):
    gone, stays = (make_run(tmp_path / "runs", name, state="training") for name in ("gone", "stays"))
    with in_training(gone), in_training(stays):
        assert sorted(names(live)) == ["gone", "stays"]
        shutil.rmtree(gone.path)
        assert names(live) == ["stays"]
    assert names(live) == []
    assert "stays" in live.ended


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 100, b"[]", b'{"pid": 0}'])
def test_a_damaged_launch_record_hides_no_other_run(live: Live, tmp_path: Path, content: bytes):
    harmed, good = (make_run(tmp_path / "runs", name, state="training") for name in ("harmed", "good"))
    harmed.launch_file.write_bytes(content)
    with in_training(good):
        assert names(live) == ["good"]


def test_a_run_of_which_one_look_failed_is_shown_again_and_not_taken_for_ended(live: Live, tmp_path: Path):
    run = make_run(tmp_path / "runs", "new", state="training")
    with in_training(run):
        assert names(live) == ["new"]
        aside = run.events_file.rename(run.path / "aside")
        run.events_file.mkdir()  # cannot be read
        assert names(live) == []
        assert live.ended == {}
        run.events_file.rmdir()
        aside.rename(run.events_file)
        assert names(live) == ["new"]
    write(run, StatusEvent(state="stopped", step=5))
    assert names(live) == []
    assert {name: view.state for name, view in live.ended.items()} == {"new": "stopped"}


def test_a_run_on_another_machine_with_dates_to_come_has_ended_like_any_other(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An archive sets any date, and this run would be shown as running until then, and could not be deleted."""
    run = make_run(tmp_path / "runs", "far", state="training")
    Launch(1, 1.0, ["torchrun"], host="another").write(run)
    (run.ranks / "rank0.jsonl").touch()
    for file in (run.launch_file, run.events_file, run.ranks / "rank0.jsonl"):
        os.utime(file, (4e9, 4e9))
    monkeypatch.setattr(process, "MAX_SILENCE_S", 0.3)
    time.sleep(0.4)
    assert names(live) == []
    run_trash.delete(run)
    assert not run.path.exists()


def test_a_folder_without_runs_has_none_running(tmp_path: Path):
    assert Live(tmp_path / "none", Follower).views() == []


def test_hundreds_of_runs_that_have_ended_are_looked_at_once(live: Live, tmp_path: Path):
    run = make_run(tmp_path / "runs", "0")
    argv = ["python", "-m", "trainer"]
    Launch(2**22 - 1, 1.0, argv, since_boot=1.0).write(run)
    for number in range(1, NUM_RUNS):
        shutil.copytree(run.path, tmp_path / "runs" / str(number))
    assert names(live) == []
    began = time.process_time()
    for _ in range(5):
        assert live.views() == []
    assert (time.process_time() - began) / 5 < QUICK_S
    with in_training(run):
        assert names(live) == ["0"]
