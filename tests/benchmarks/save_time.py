"""How long a checkpoint keeps training waiting, for full fine-tuning: it is written while training goes on.

A save collects the tensors; threads copy them to host memory during the next forward and backward pass, then write.
Counted is what training waits: for the save, and before the optimizer's step for what is left of the copy. What the
threads take of the cores is told beside it: on two cores with two ranks they have none of their own.

    python -m tests.benchmarks.save_time        about 2 minutes; exit code 1 when the limit is exceeded
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.processes import run_ranks_afresh
from tests.benchmarks.workload import LITTLE, Bench, prepare
from trainer.checkpoint.save import Checkpointer
from trainer.config.sections import ParallelConfig
from trainer.distributed.world import World, connect

RANKS = 2
PERIODS = 5
STEPS = 8
"""Between two saves: enough for the writing to end before the next one."""
LIMIT = 0.05
MODULE = "tests.benchmarks.save_time"


@dataclass(frozen=True)
class Blocked:
    """Medians, seconds of the slowest rank. step: one without a save beside it.  save: training waited for it.

    beside: a step while the checkpoint is written.
    """

    step: float
    save: float
    beside: float

    @property
    def share(self) -> float:
        return self.save / self.step


class Timed(Checkpointer):
    """waited: seconds that training waited for copies, until it is set to zero."""

    waited = 0.0

    def wait_for_copy(self) -> None:
        began = time.perf_counter()
        super().wait_for_copy()
        self.waited += time.perf_counter() - began


def measure(world: World, bench: Bench) -> Blocked:
    """Train and save in turns. Collective."""
    cfg = bench.config(
        adapter={"type": "none"},
        train={"steps": 10_000_000, "precision": "fp32"},
        parallel={"devices": world.size, "device": "cpu", "strategy": "full"},
    )
    trainer = bench.trainer("save", cfg, world)
    trainer.checkpointer = checkpointer = Timed(trainer.run.checkpoints, world, cfg.checkpoint.keep)
    saves, beside, alone = [], [], []
    for _ in range(3):
        trainer.train_step()
    for _ in range(PERIODS):
        began = time.perf_counter()
        trainer.save()
        saving = time.perf_counter() - began
        checkpointer.waited = 0.0
        while trainer.checkpointer.writing:
            began = time.perf_counter()
            agreed = trainer.train_step()
            beside.append(_slowest(world, time.perf_counter() - began))
            if agreed.saved:
                began = time.perf_counter()
                trainer.checkpointer.wait()
                saving += time.perf_counter() - began
        saves.append(_slowest(world, saving + checkpointer.waited))
        for _ in range(STEPS):
            began = time.perf_counter()
            trainer.train_step()
            alone.append(_slowest(world, time.perf_counter() - began))
    trainer.close()
    return Blocked(statistics.median(alone), statistics.median(saves), statistics.median(beside))


def _slowest(world: World, seconds: float) -> float:
    return max(world.gather(seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    if folder := parser.parse_args().measure:
        with connect(ParallelConfig(devices=RANKS, device="cpu")) as world:
            found = measure(world, Bench(folder, LITTLE))
            if world.rank == 0:
                print(json.dumps(asdict(found)))
        return 0
    with tempfile.TemporaryDirectory() as root:
        prepare(Path(root), LITTLE)
        found = Blocked(**run_ranks_afresh(RANKS, MODULE, "--measure", root))
    verdict = "ok" if found.share <= LIMIT else "TOO LONG"
    print(
        f"full fine-tuning, {RANKS} ranks: step {found.step:.3f} s, a save blocks {found.save * 1000:.1f} ms = "
        f"{found.share:.1%} (limit {LIMIT:.0%}), steps while it is written {found.beside:.3f} s: {verdict}"
    )
    return 0 if found.share <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
