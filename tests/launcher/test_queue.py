"""Runs that wait for their turn: their order, their GPUs, what a failure does, and what a restart finds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from PIL import Image

from tests.runs import run_config
from tests.system.gpus.machines import MIXED, install, uuids
from trainer.config.schema import RunConfig
from trainer.launcher import torchrun
from trainer.launcher.queue import Queue, Settings, run_queue
from trainer.run import process
from trainer.run.events import EventWriter, StatusEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError

# What the queue starts instead of the trainer: a run that does what its name says, once its file `go` is there.
WORKER = """
import os, sys, time
from pathlib import Path
from trainer.run.events import *
from trainer.run.folder import RunDir
run = RunDir.open(Path(sys.argv[1]))
events = EventWriter(run.events_file)
events.write(StatusEvent(state="training", message=os.environ.get("CUDA_VISIBLE_DEVICES", "all")))
name = run.config().name
while name.startswith("waits") and not (run.path.parent / "go").exists():
    time.sleep(0.02)
if name.endswith("fails"):
    raise SystemExit("cannot go on")
events.write(StatusEvent(state="finished"))
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], RunConfig]:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a")
    return lambda name: run_config(tmp_path, name=name)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "queueworker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    queue = Queue(tmp_path / "runs", module="queueworker")
    yield queue
    for entry in queue.running():
        process.terminate(queue.run_of(entry))


def names(entries) -> list[str]:
    return [entry.name for entry in entries]


def ended(queue: Queue) -> bool:
    return not queue.running()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_runs_wait_in_order_and_can_be_moved_and_taken_out(queue, config):
    a, _, c = (queue.add(config(name)) for name in "abc")
    assert names(queue.waiting()) == ["a", "b", "c"]
    queue.move(c.number, -1)
    assert names(queue.waiting()) == ["a", "c", "b"]
    queue.move(a.number, 1)
    assert names(queue.waiting()) == ["c", "a", "b"]
    queue.move(queue.waiting()[0].number, -1)
    queue.remove(queue.waiting()[2].number)
    queue.remove(999)
    queue.move(999, 1)
    assert names(Queue(queue.runs).waiting()) == ["c", "a"]


def test_the_config_is_frozen_when_it_is_put_in(queue, config, tmp_path):
    entry = queue.add(replace_steps(config("a"), 7))
    assert "steps: 7" in entry.config
    assert "steps: 7" in Queue(queue.runs).waiting()[0].config


def replace_steps(cfg: RunConfig, steps: int) -> RunConfig:
    return cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": steps})})


def test_a_run_that_was_started_beside_the_queue_is_waited_for(queue, config):
    """By Start, a notebook or a command: two runs on the same GPUs would both run out of memory."""
    run = RunDir.create(queue.runs, config("waits"))
    torchrun.start(run.config(), run, "queueworker")
    queue.add(config("b"), gpus=(1,))
    with queue.starting():
        assert queue.start_next() == []
        assert [entry.run for entry in queue.blockers(queue.waiting()[0])] == [run.path.name]
        (queue.runs / "go").touch()
        wait_for(lambda: not process.alive(run))
        assert names(queue.start_next()) == ["b"]
    wait_for(lambda: ended(queue))


def test_a_run_of_another_machine_is_not_waited_for(queue, config):
    run = RunDir.create(queue.runs, config("elsewhere"))
    EventWriter(run.events_file).write(StatusEvent(state="training"))
    replace(process.Launch.of(psutil.Process(), ["python"]), host="another-machine").write(run)
    assert process.alive(run)
    assert queue.blockers(queue.add(config("b"))) == []


def test_one_run_at_a_time_unless_their_gpus_differ(queue, config, tmp_path):
    queue.add(config("waits-a"), gpus=(0, 1))
    queue.add(config("waits-b"), gpus=(2,))
    queue.add(config("waits-c"), gpus=(1,))
    queue.add(config("waits-d"), gpus=(3,))
    assert names(queue.start_next()) == ["waits-a", "waits-b"]
    assert names(queue.waiting()) == ["waits-c", "waits-d"]
    assert queue.start_next() == []
    (queue.runs / "go").touch()
    wait_for(lambda: ended(queue))
    seen = [queue.run_of(entry).events_file.read_text() for entry in queue.taken()]
    assert '"message": "0,1"' in seen[0]
    assert '"message": "2"' in seen[1]


def test_a_queued_run_sees_its_gpus_by_uuid_whatever_order_cuda_gives_them(queue, config, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    install(MIXED, tmp_path / "bin", monkeypatch)
    for index in (0, 1):
        queue.add(config(f"on-{index}"), gpus=(index,))
    assert names(queue.start_next()) == ["on-0", "on-1"]
    wait_for(lambda: ended(queue))
    for entry, uuid in zip(queue.taken(), uuids(MIXED), strict=True):
        assert f'"message": "{uuid}"' in queue.run_of(entry).events_file.read_text()


def test_more_ranks_than_the_gpus_that_were_chosen_are_refused(queue, config, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    install(MIXED, tmp_path / "bin", monkeypatch)
    wide = config("wide")
    parallel = wide.parallel.model_copy(update={"device": "cuda", "devices": 2})
    queue.add(wide.model_copy(update={"parallel": parallel}), gpus=(1,))
    (entry,) = queue.start_next()
    assert "parallel.devices: 2 are asked for, this run may use 1 GPU" in entry.error


def test_an_entry_of_an_older_queue_whose_gpu_is_hidden_now_says_so(queue, config, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    install(MIXED, tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuids(MIXED)[1])
    queue.add(config("hidden"), gpus=(0,))
    (entry,) = queue.start_next()
    assert "GPU 0 was chosen for this run, but the GPUs that it may use are: 1" in entry.error


@pytest.mark.slow
@pytest.mark.parametrize(("after_failure", "left"), [("go on", []), ("pause", ["b"])])
def test_a_failure_lets_the_others_go_on_or_wait_as_is_wanted(queue, config, after_failure, left):
    queue.change(Settings(after_failure=after_failure))
    queue.add(config("a-fails"))
    queue.add(config("b"))
    queue.start_next()
    wait_for(lambda: ended(queue))
    queue.start_next()
    wait_for(lambda: ended(queue))
    assert names(queue.waiting()) == left
    assert queue.settings.is_paused == bool(left)
    if left:
        queue.change(replace(queue.settings, is_paused=False))
        assert names(queue.start_next()) == left
        wait_for(lambda: ended(queue))
        queue.start_next()
        assert not queue.settings.is_paused


def test_a_run_that_cannot_be_started_says_why_and_holds_up_nobody(queue, config, tmp_path):
    gone = config("a").model_copy(update={"data": config("a").data.model_copy(update={"path": str(tmp_path / "gone")})})
    queue.add(gone)
    queue.add(config("b"))
    bad, good = queue.start_next()
    assert f"data.path: no folder '{tmp_path}/gone'" in bad.error
    assert good.name == "b" and not good.error
    wait_for(lambda: ended(queue))


def test_only_one_process_starts_runs(queue):
    with queue.starting() as first, Queue(queue.runs).starting() as second:
        assert (first, second) == (True, False)
    with Queue(queue.runs).starting() as again:
        assert again


def test_a_starter_killed_between_two_steps_loses_no_run(queue, config):
    queue.add(config("a"))
    queue.add(config("b"))
    waiting = queue.runs / "queue" / "waiting"
    (waiting / "000001.json").rename(queue.runs / "queue" / "taken" / "000001.json")
    assert names(queue.start_next()) == ["a"]
    wait_for(lambda: ended(queue))


def start_until_killed(queue: Queue, at: str) -> None:
    """Let another process start the queue's runs. It is killed where it calls a function of `torchrun`."""
    code = (
        "import os, sys; from pathlib import Path; from trainer.launcher import queue, torchrun\n"
        f"torchrun.{at} = lambda *_, **__: os._exit(9)\n"
        "waiting = queue.Queue(Path(sys.argv[1]), 'queueworker')\n"
        "with waiting.starting(): waiting.start_next()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(queue.runs)], env=process.worker_environment(), check=False)
    assert done.returncode == 9


@pytest.mark.slow
def test_a_starter_killed_before_it_started_a_run_starts_it_in_the_folder_that_it_made(queue, config):
    queue.add(config("a"))
    start_until_killed(queue, at="_spawn")
    (entry,) = queue.taken()
    assert (queue.running(), queue.state_of(entry)) == ([], "failed")
    with queue.starting():
        assert queue.start_next() == []
        assert queue.running() == queue.taken() == [entry]
        wait_for(lambda: ended(queue))
    assert [path.name for path in queue.runs.glob("a-*")] == [entry.run]
    assert queue.state_of(entry) == "finished"


def test_a_run_whose_starter_was_killed_waits_while_the_queue_is_paused(queue, config):
    queue.add(config("a"))
    start_until_killed(queue, at="_spawn")
    queue.change(Settings(is_paused=True, after_failure="pause"))
    with queue.starting():
        queue.start_next()
        assert (queue.running(), queue.settings.noted) == ([], 0)
        queue.change(Settings())
        queue.start_next()
        assert names(queue.running()) == ["a"]
        wait_for(lambda: ended(queue))


def test_a_lock_that_is_a_link_makes_no_file_elsewhere(queue, tmp_path):
    (queue.runs / "queue").mkdir(parents=True)
    (queue.runs / "queue" / "starter.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"starter\.lock"), queue.starting():
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_a_starter_killed_after_it_started_a_run_never_starts_it_twice(queue, config, monkeypatch):
    queue.add(config("waits"))
    start_until_killed(queue, at="Launch.of")  # before launch.json is written
    shown_at, shown = time.monotonic() + 0.3, psutil.Process.cmdline

    def cmdline(process: psutil.Process) -> list[str]:
        """As that of a process which is being started: empty."""
        argv = shown(process)
        is_of_run = bool(argv) and argv[-1].startswith(str(queue.runs))
        return [] if is_of_run and time.monotonic() < shown_at else argv

    monkeypatch.setattr(psutil.Process, "cmdline", cmdline)
    (entry,) = queue.taken()
    log = queue.run_of(entry).logs / "launch-1.log"
    with queue.starting():
        assert queue.start_next() == []
        assert queue.running() == [entry]  # it was found by its command line
    assert [path.name for path in queue.runs.glob("waits-*")] == [entry.run]
    (queue.runs / "go").touch()
    wait_for(lambda: ended(queue))
    assert queue.state_of(entry) == "finished"
    assert list(log.parent.glob("launch-*.log")) == [log]


def test_a_starter_killed_before_it_noted_that_a_run_was_started_starts_no_second_one(queue, config):
    queue.add(config("waits"))
    start_until_killed(queue, at="_handle")  # the last thing that a start does
    with queue.starting():
        assert queue.start_next() == []
        assert len(queue.running()) == 1
    assert len(list(queue.runs.glob("waits-*"))) == 1
    (queue.runs / "go").touch()
    wait_for(lambda: ended(queue))


def test_the_command_works_the_queue_off_and_tells_each_run(tmp_path, config, capsys, monkeypatch):
    queue = Queue(tmp_path / "runs")
    monkeypatch.setattr("trainer.launcher.queue.POLL_S", 0.05)
    (tmp_path / "queueworker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    queue.add(config("a"))
    queue.add(config("b-fails"))
    assert run_queue(tmp_path / "runs", print, module="queueworker") == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == ["a", "b-fails"]
    with queue.starting(), pytest.raises(InputError, match="already starts runs from this queue"):
        run_queue(tmp_path / "runs", print)


def test_a_damaged_entry_is_put_aside_with_a_named_error_and_the_next_one_starts(queue: Queue, config):
    for name in ("damaged", "next"):
        queue.add(config(name))
    file = queue.runs / "queue" / "waiting" / "000001.json"
    file.write_text("[]")
    assert names(queue.waiting()) == ["next"]
    with queue.starting():
        damaged, following = queue.start_next()
    assert damaged.error.startswith(f"{file}: damaged (") and "put aside as queue/damaged/000001.json" in damaged.error
    assert following.name == "next" and not following.error
    assert [entry.number for entry in queue.taken()] == [1, 2] and queue.waiting() == []
    assert queue.add(config("later")).number == 3


def test_damaged_settings_start_nothing_until_they_are_changed(queue: Queue, config):
    queue.add(config("waits"))
    file = queue.runs / "queue" / "settings.json"
    file.write_text("")
    assert queue.settings.is_paused
    assert [problem.startswith(f"{file}: damaged (") for problem in queue.problems()] == [True]
    with queue.starting():
        assert queue.start_next() == []
    with pytest.raises(InputError, match=r"settings.json: damaged \(.*\); remove it, or change a setting in the page"):
        run_queue(queue.runs, print)
    queue.change(Settings())
    assert queue.problems() == [] and not queue.settings.is_paused


@pytest.mark.slow
def test_a_run_that_was_deleted_or_damaged_keeps_no_other_from_its_turn(queue: Queue, config):
    for name in ("deleted", "damaged"):
        queue.add(config(name))
        with queue.starting():
            (entry,) = queue.start_next()
        process.wait(queue.run_of(entry))
    deleted, damaged = queue.taken()
    shutil.rmtree(queue.run_of(deleted).path)
    queue.run_of(damaged).launch_file.write_text("null")
    queue.add(config("next"))
    with queue.starting():
        assert names(queue.start_next()) == ["next"]
    assert queue.state_of(deleted) == "deleted"
    assert queue.state_of(damaged).startswith(f"damaged: {queue.run_of(damaged).launch_file}: damaged (")


@pytest.mark.slow
def test_an_unstarted_run_whose_files_nobody_can_make_sense_of_keeps_no_other_from_its_turn(
    queue: Queue, config, monkeypatch
):
    queue.add(config("odd"))
    start_until_killed(queue, at="_spawn")
    queue.add(config("next"))

    def misread(events: object) -> None:
        raise TypeError("unhashable type: 'list'")

    monkeypatch.setattr("trainer.launcher.queue.last_state", misread)
    with queue.starting() as may_start:
        assert may_start and names(queue.start_next()) == ["next"]
        wait_for(lambda: ended(queue))


def test_a_run_knows_when_it_was_queued_and_taken_also_after_it_was_moved(queue: Queue, config):
    before = time.time()
    for name in ("a", "b"):
        queue.add(config(name))
    queue.move(2, -1)
    first, second = queue.waiting()
    assert before <= second.queued_at <= first.queued_at <= time.time() and first.taken_at == 0.0
    with queue.starting():
        (taken,) = queue.start_next()
    assert taken.name == "b" and queue.taken() == [taken]
    assert taken.queued_at == first.queued_at <= taken.taken_at <= time.time()
    process.wait(queue.run_of(taken))


def test_the_events_of_a_run_that_has_ended_are_read_once(queue: Queue, config):
    queue.add(config("long"))
    with queue.starting():
        (entry,) = queue.start_next()
    run = queue.run_of(entry)
    process.wait(run)
    with EventWriter(run.events_file) as events:
        for step in range(5_000):
            events.write(StatusEvent(state="training", step=step))
        events.write(StatusEvent(state="finished", step=5_000))
    assert queue.state_of(entry) == "finished"
    began = time.process_time()
    for _ in range(20):
        assert queue.state_of(entry) == "finished" and not queue.has_failed(entry)
    assert time.process_time() - began < 0.1
    with EventWriter(run.events_file) as events:
        events.write(StatusEvent(state="stopped", step=5_001))
    assert queue.state_of(entry) == "stopped"
