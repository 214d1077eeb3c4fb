"""What a tracker costs a step: one that hangs for ever, one that raises, one without network, and one that works.

Two processes train the same in turns, one with a tracker and one without; the one whose turn it is not stands
still. Counted are the seconds of the whole process, the tracker's thread included.

    python -m tests.benchmarks.tracker_time [CASE ...]    about 12 minutes; exit code 1 when a limit is exceeded
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from tests.benchmarks.workload import KLEIN_SMALL, Bench, prepare
from trainer.config.sections import ParallelConfig, TrackersConfig
from trainer.distributed.world import connect
from trainer.metrics.trackers.follow import Trackers
from trainer.run.events import EventWriter
from trainer.run.process import worker_environment

LIMIT = 1.01
PAIRS, STEPS = 15, 5
SETTLE_S = 20.0
"""After that a tracker is connected, waits, or is gone."""
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "tensorboard": ("tensorboard", {}),
    "raises": ("tensorboard", {}),
    "hangs": ("wandb", {"WANDB_INIT_TIMEOUT": "1000000", "WANDB_API_KEY": "a" * 40}),
    "no network": (
        "wandb",
        {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "5", "WANDB_API_KEY": "a" * 40},
    ),
}
"""{case: (tracker, environment)}."""


@contextmanager
def turns(folder: Path, case: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A trainer that stands still but in its turns. case: "" has no tracker."""
    argv = [sys.executable, "-m", "tests.benchmarks.tracker_time", "--train", str(folder), case]
    environment = worker_environment() | environment
    with subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            _answer(process, "ready")
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def take(process: subprocess.Popen[str]) -> tuple[float, float]:
    """One turn of `STEPS` steps. Returns CPU seconds and seconds of a step."""
    assert process.stdin
    process.send_signal(signal.SIGCONT)
    process.stdin.write("\n")
    process.stdin.flush()
    cpu, wall = map(float, _answer(process, "turn"))
    process.send_signal(signal.SIGSTOP)
    return cpu, wall


def _answer(process: subprocess.Popen[str], word: str) -> list[str]:
    """The words after this one in the next line that begins with it: trackers print, too."""
    assert process.stdout
    return next(words[1:] for line in process.stdout if (words := line.split())[:1] == [word])


def compare(bench: Bench, case: str) -> tuple[float, float]:
    """The median over the pairs of CPU seconds with the tracker / without, and of seconds."""
    with ExitStack() as stack:
        deaf = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # takes connections and never answers
        environment = {"WANDB_BASE_URL": f"http://127.0.0.1:{deaf.getsockname()[1]}"} | CASES[case][1]
        ours, bare = (stack.enter_context(turns(bench.root, name, environment)) for name in (case, ""))
        ratios = []
        for pair in range(PAIRS):
            order = (bare, ours) if pair % 2 else (ours, bare)
            seconds = {process: take(process) for process in order}
            ratios.append([mine / theirs for mine, theirs in zip(seconds[ours], seconds[bare], strict=True)])
        cpu, wall = (statistics.median(column) for column in zip(*ratios, strict=True))
    return cpu, wall


def train(folder: Path, case: str) -> None:
    """Train in turns: a line of stdin is one, and its seconds are a line of stdout."""
    torch.set_num_threads(1)
    bench = Bench(folder, KLEIN_SMALL)
    cfg = bench.config(train={"precision": "bf16"}, parallel={"device": "cpu", "devices": 1, "strategy": "none"})
    with connect(ParallelConfig(device="cpu", devices=1)) as world:
        trainer = bench.trainer(f"run-{os.getpid()}", cfg, world)
        run = trainer.run
        if case == "raises":
            (run.path / "tensorboard").write_text("no folder")
        if case:
            Trackers().start(TrackersConfig(**{CASES[case][0]: True}), run, EventWriter(run.events_file).write)
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            trainer.train_step()
        print("ready", flush=True)
        for _ in sys.stdin:
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(STEPS):
                trainer.train_step()
            print("turn", (time.process_time() - cpu) / STEPS, (time.perf_counter() - wall) / STEPS, flush=True)


def main() -> int:
    """Print one row per case. Returns 1 when one is over the limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tracker_time", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"some of {', '.join(CASES)}; default: all")
    parser.add_argument("--train", nargs=2, metavar=("FOLDER", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(Path(options.train[0]), options.train[1])
        return 0
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"{unknown[0]} is not one of {', '.join(CASES)}")
    is_within = True
    with tempfile.TemporaryDirectory() as folder:
        bench = prepare(Path(folder), KLEIN_SMALL)
        print(f"{'a step with / without':24}{'CPU s':>8}{'limit':>7}{'wall':>8}")
        for case in options.cases or CASES:
            cpu, wall = compare(bench, case)
            is_within &= cpu <= LIMIT
            print(f"{case:24}{cpu:>8.3f}{LIMIT:>7}{wall:>8.3f}{'' if cpu <= LIMIT else '   over'}", flush=True)
    return int(not is_within)


if __name__ == "__main__":
    sys.exit(main())
