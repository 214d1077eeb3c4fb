"""Ranks that hang: the event says who waits for what, and the run ends."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.runs import alone, make_pictures, make_run, run_config
from trainer.config.schema import RunConfig
from trainer.distributed import watchdog
from trainer.distributed.heartbeat import Heartbeat
from trainer.distributed.store import KeyValueStore
from trainer.distributed.watchdog import Report, Watchdog, describe_hang
from trainer.launcher import torchrun
from trainer.run import process
from trainer.run.events import (
    AnyEvent,
    CheckpointEvent,
    ErrorEvent,
    EventReader,
    RankReader,
    StatusEvent,
    StepEvent,
    WarningEvent,
    latest_steps,
)
from trainer.run.folder import RunDir
from trainer.run.manifest import complete, steps_in
from trainer.run.preemption import Preemption, catch_preemption
from trainer.train.log import RunLog

WORKER = '''
"""The trainer, but rank 1 goes its own way after the second step: as the run is named."""
import os, signal, sys, time
import torch
from trainer import __main__ as trainer
from trainer.checkpoint.save import Checkpointer
from trainer.train.loop import Trainer
from trainer.run.folder import RunDir

train_step = Trainer.train_step

def attempt():
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def step(self):
    if self.world.rank == 1 and self.step == 2 and attempt() == 0 and self.cfg.name in globals():
        globals()[self.cfg.name](self)
    return train_step(self)

def deadlock(trainer):
    trainer.world.barrier()  # the others are in their step

def greedy(trainer):
    if trainer.cfg.train.checkpointing == "none":
        trainer.model["transformer"].register_forward_hook(lambda *_: torch.empty(10**15))

def asleep(trainer):
    time.sleep(1000)

write = Checkpointer._write

def write_or_freeze(self, draft, facts, copied):
    if self._world.rank == 1 and facts["step"] == 1 and attempt() == 0 and facts["config"]["name"] == "frozen_writer":
        os.kill(os.getpid(), signal.SIGSTOP)  # all threads, as if its machine were gone
    return write(self, draft, facts, copied)

Checkpointer._write = write_or_freeze
Trainer.train_step = step
sys.exit(trainer.main())
'''


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Start WORKER on two ranks in a run of that name; what still runs at the end is killed."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pictures = make_pictures(tmp_path / "pictures", count=4)
    runs: list[RunDir] = []

    def start(name: str, **changes: object) -> RunDir:
        two = {"parallel__devices": 2, "parallel__strategy": "full", "parallel__timeout": 10}
        cfg = run_config(pictures, **{"name": name, "train__steps": 4, "export__what": "none", **two, **changes})
        runs.append(make_run(tmp_path, cfg, name))
        torchrun.start(cfg, runs[-1], module="worker")
        return runs[-1]

    yield start
    for run in runs:
        process.terminate(run)


def events_of(run: RunDir) -> list[AnyEvent]:
    return EventReader(run.events_file).read()


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_reported_with_both_stacks_and_the_run_ends(start) -> None:
    run = start("deadlock")
    assert process.wait(run, timeout_s=120) == "failed"
    events = events_of(run)
    [error] = [event for event in events if isinstance(event, ErrorEvent)]
    last = latest_steps(events)[-1]
    assert error.time - last.time < 10 + 20
    assert error.message.startswith("step 2: nothing moved for 1")
    assert "rank 0 waits in " in error.message
    assert "rank 1 waits in barrier, called by loop.py" in error.message
    assert "raise parallel.timeout" in error.remedy
    stacks = (run.path / error.log).read_text()
    rank0, rank1 = stacks.split("== rank 1 on ")
    assert "all_gather" in rank0
    assert "deadlock" in rank1
    assert "world.barrier()" in rank1


@pytest.mark.slow
def test_a_rank_that_was_frozen_is_named_and_ended_and_the_run_resumes_by_itself(start) -> None:
    run = start("asleep", parallel__max_restarts=1, checkpoint__every=1)
    while not any(isinstance(event, StepEvent) and event.step == 2 for event in events_of(run)):
        time.sleep(0.1)
    os.kill(rank(run, 1).pid, signal.SIGSTOP)
    assert process.wait(run, timeout_s=180) == "finished"
    events = events_of(run)
    [warning] = [event.message for event in events if isinstance(event, WarningEvent)]
    assert warning.startswith("step 2: nothing moved for 1")
    assert "rank 1 on " in warning
    assert " does not answer" in warning
    assert warning.endswith("; the ranks are started again")
    assert latest_steps(events)[-1].step == 4


@pytest.mark.slow
def test_a_rank_that_is_frozen_while_it_saves_is_named_and_ended(start) -> None:
    """A slow save is no hang: its rank still shows that it lives, which a frozen one does not."""
    run = start("frozen_writer", parallel__max_restarts=1, checkpoint__every=1)
    assert process.wait(run, timeout_s=180) == "finished"
    [warning] = [event.message for event in events_of(run) if isinstance(event, WarningEvent)]
    assert "rank 1 on " in warning
    assert " does not answer; the ranks are started again" in warning
    assert latest_steps(events_of(run))[-1].step == 4


@pytest.mark.slow
def test_when_rank_0_is_frozen_another_one_reports(start) -> None:
    run = start("untouched", train__steps=100_000)
    while not any(isinstance(event, StepEvent) for event in events_of(run)):
        time.sleep(0.1)
    os.kill(rank(run, 0).pid, signal.SIGSTOP)
    assert process.wait(run, timeout_s=120) == "failed"
    [error] = [event for event in events_of(run) if isinstance(event, ErrorEvent)]
    assert re.search(r"nothing moved for \d+ s: rank 0 on \S+ does not answer; rank 1 waits in ", error.message)
    assert "down or frozen" in error.remedy


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_has_all_start_again_with_less(start) -> None:
    retry = {"train__out_of_memory": "retry", "parallel__max_restarts": 2, "checkpoint__every": 1}
    run = start("greedy", **retry)
    assert process.wait(run, timeout_s=180) == "finished"
    events = events_of(run)
    warnings = [event.message for event in events if isinstance(event, WarningEvent)]
    assert warnings == [
        "memory ran out; the ranks are started again with train.checkpointing=full, parallel.offload_blocks=0"
    ]
    assert run.config().train.checkpointing == "full"
    assert latest_steps(events)[-1].step == 4
    [log] = run.logs.glob("greedy-1_*/attempt_0/1/stderr.log")
    assert re.search(
        r"out of memory in .*: peak \S+ of \S+ GiB: weights \S+, gradients \S+, optimizer state \S+, activations, "
        r"gathered blocks and the rest \S+ GiB \(.*can't allocate memory",
        log.read_text(),
    )
    notes = [event.message for event in events if isinstance(event, StatusEvent)]
    assert any("train.checkpointing: none -> full" in message for message in notes)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_torchrun_saves_and_leaves(start, number: signal.Signals) -> None:
    run = start("untouched", train__steps=100_000)
    while not any(isinstance(event, StepEvent) for event in events_of(run)):
        time.sleep(0.1)
    os.kill(process.Launch.read(run).pid, number)  # type: ignore[union-attr]
    assert process.wait(run, timeout_s=120) == "stopped"
    events = events_of(run)
    last = latest_steps(events)[-1].step
    assert [event.step for event in events if isinstance(event, CheckpointEvent)] == [last]
    notes = [event.message for event in events if isinstance(event, StatusEvent)]
    assert "stopped by a signal; checkpoint saved, continue with --resume" in notes
    assert steps_in(complete(run.checkpoints)[-1]) == last


def rank(run: RunDir, number: int) -> psutil.Process:
    torchrun = psutil.Process(process.Launch.read(run).pid)  # type: ignore[union-attr]
    return next(child for child in torchrun.children() if child.environ()["RANK"] == str(number))


class Ended(threading.Event):
    """Stands for the end of the process."""

    code: int

    def __call__(self, code: int) -> None:
        self.code = code
        self.set()


def watch(tmp_path: Path, limit_s: float) -> tuple[Watchdog, Ended, Heartbeat]:
    cfg: RunConfig = run_config(tmp_path)
    # What one test left in the store is nothing to the next.
    ended, world = Ended(), replace(alone(), store=KeyValueStore(dist.HashStore()), heartbeat=Heartbeat())
    run = make_run(tmp_path, cfg, "watched")
    return Watchdog(world, run, limit_s, Preemption(), end=ended), ended, world.heartbeat


def test_a_rank_that_moves_is_left_alone_and_one_that_stands_still_in_a_step_is_not(tmp_path: Path) -> None:
    one, ended, heartbeat = watch(tmp_path, 2.0)
    with one:
        heartbeat.enter("saving", moves=False)
        assert not ended.wait(3)
        for _ in range(8):
            heartbeat.enter("forward of blocks.0")
            assert not ended.wait(0.4)
        assert ended.wait(10)
    [error] = [event for event in events_of(RunDir(tmp_path / "watched")) if isinstance(event, ErrorEvent)]
    assert re.fullmatch(r"step 0: nothing moved for \d s: rank 0 is busy with forward of blocks.0", error.message)
    assert ended.code == 1


def test_a_rank_that_is_to_leave_and_whose_torchrun_is_gone_waits_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LEAVE_WITHIN_S", 0.5)
    one, ended, heartbeat = watch(tmp_path, 60)
    one._preemption._by = "SIGTERM"
    heartbeat.enter("forward of blocks.0")
    with one:
        assert not ended.wait(3)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert ended.wait(3)
    assert ended.code == 1


def test_a_rank_that_is_long_in_one_thing_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "HEARTBEAT_EVERY_S", 0.4)
    one, ended, heartbeat = watch(tmp_path, 60)
    memory = {"allocated": 1, "reserved": 2, "peak": 3, "limit": 4}
    line = {"rank": 0, "step": 7, "phase": "loading", "time": 1.0, **memory}
    with one:
        heartbeat.line = line
        assert not ended.wait(2.5)
    beats = RankReader(RunDir(tmp_path / "watched").rank_file(0)).read()
    assert len(beats) >= 2
    assert all(vars(beat) == {**line, "time": beat.time} for beat in beats)
    assert time.time() - beats[-1].time < 5


def test_a_line_that_is_repeated_never_follows_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "HEARTBEAT_EVERY_S", 0)
    one, _, _ = watch(tmp_path, 60)
    run = RunDir(tmp_path / "watched")
    log = RunLog(run, one._world, lambda event: None)
    training = threading.Thread(target=lambda: [log.heartbeat("training", step) for step in range(3000)])
    training.start()
    while training.is_alive():
        one._repeat_heartbeat()
    steps = [beat.step for beat in RankReader(run.rank_file(0)).read()]
    assert len(steps) > 3001, "some were repeated"
    assert steps == sorted(steps)


def test_a_signal_is_known_while_the_main_thread_is_in_torch(tmp_path: Path) -> None:
    heard = []
    with catch_preemption() as preemption:
        listener = threading.Thread(target=lambda: heard.append((time.sleep(0.3), preemption.by)))
        listener.start()
        os.kill(os.getpid(), signal.SIGUSR1)
        listener.join()
    assert heard == [(None, "SIGUSR1")]


def test_ranks_that_wait_in_the_same_collective_are_named_together() -> None:
    def report(rank: int, waits_in: str, where: str) -> Report:
        return Report(rank, "node-a", where, waits_in, 60.0, "")

    together = [report(rank, "all_reduce, called by train.py:7 _agree", "optimizer") for rank in (0, 1, 2, 4)]
    assert describe_hang([*together, report(3, "", "forward of blocks.1")], ["node-a"] * 5 + ["node-b"]) == (
        "nothing moved for 60 s: each of ranks 0, 1, 2, 4 waits in all_reduce, called by train.py:7 _agree "
        "(optimizer); rank 3 is busy with forward of blocks.1; rank 5 on node-b does not answer"
    )


def test_nothing_is_collected_while_the_frames_of_another_thread_are_walked() -> None:
    """A finalizer may hand over to the thread that is looked at, which returns from a frame that is in use here."""
    collected: list[int] = []
    main = threading.get_ident()

    def note(phase: str, _: dict[str, int]) -> None:
        collected.append(threading.get_ident())

    def look() -> None:
        with watchdog._other_threads() as frames:
            collected.clear()
            watchdog._collective(frames[main])
            found.append(len(collected))

    def look_from_below(depth: int) -> None:
        if depth:
            return look_from_below(depth - 1)
        thread = threading.Thread(target=look)
        thread.start()
        return thread.join()

    found: list[int] = []
    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        look_from_below(100)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert found == [0]
    assert gc.isenabled()
