"""A training step that recomputes, against the same step that keeps everything, and the memory that this saves.

Both trainers live in one process and take turns; what counts is CPU seconds, as in `step_time`.

    python -m tests.benchmarks.recompute_time        about 4 minutes; exit code 1 when a limit is exceeded
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from tests.benchmarks.processes import run_ranks_afresh
from tests.benchmarks.step_time import DTYPES, PAIRS, Ratio, compare_configs
from tests.benchmarks.workload import KLEIN_SMALL, Bench, prepare
from trainer.config.sections import ParallelConfig
from trainer.distributed.world import World, connect

LIMITS = {"selective": 1.06, "full": None}
"""{`train.checkpointing`: largest ratio to `none`; None: it is only shown}"""
MODULE = "tests.benchmarks.recompute_time"


def compare_with_keeping(world: World, bench: Bench, checkpointing: str, precision: str, pairs: int = PAIRS) -> Ratio:
    """Steps with this `train.checkpointing` against steps with none, on one rank."""
    train, parallel = {"batch_size": 1, "precision": precision}, {"device": "cpu", "strategy": "none"}
    again, kept = (
        bench.config(train={**train, "checkpointing": value}, parallel=parallel) for value in (checkpointing, "none")
    )
    return compare_configs(world, bench, f"{checkpointing}-{precision}", (again, kept), pairs)


def main() -> int:
    """Print one row per comparison. Returns 1 when one is over its limit."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "CHECKPOINTING", "PRECISION"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        _measure(Path(options.one[0]), *options.one[1:])
        return 0
    print(f"{'':18}{'again':>9}{'kept':>9}{'ratio':>8}{'limit':>7}   (CPU s per step, klein-small)", flush=True)
    is_over = False
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), KLEIN_SMALL)
        for checkpointing, limit in LIMITS.items():
            for precision in DTYPES:
                found = Ratio(**run_ranks_afresh(1, MODULE, "--one", folder, checkpointing, precision))
                figures = f"{found.ours:>9.3f}{found.by_hand:>9.3f}{found.cpu:>8.3f}"
                print(f"{checkpointing:10}{precision:8}{figures}{limit or '':>7}", flush=True)
                is_over |= limit is not None and found.cpu > limit
    return int(is_over)


def _measure(folder: Path, checkpointing: str, precision: str) -> None:
    torch.set_num_threads(1)
    with connect(ParallelConfig(device="cpu")) as world:
        print(json.dumps(asdict(compare_with_keeping(world, Bench(folder, KLEIN_SMALL), checkpointing, precision))))


if __name__ == "__main__":
    sys.exit(main())
