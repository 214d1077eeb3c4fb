"""A training step of a LoRA on a base in 4 or 8 bits, against the same step on bf16, on two ranks that share the base.

Both trainers live in one process and take turns; what counts is CPU seconds, as in `step_time`.

    python -m tests.benchmarks.quantized_time        about 5 minutes; exit code 1 when a limit is exceeded
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
from tests.benchmarks.step_time import PAIRS, Ratio, compare_configs
from tests.benchmarks.workload import KLEIN_SMALL, Bench, prepare
from trainer.config.sections import ParallelConfig
from trainer.distributed.world import World, connect

LIMITS = {"nf4": 1.00, "int8": 1.00, "fp8": 1.00}
"""{`quantize.format`: largest ratio to bf16}"""
RANKS = 2
MODULE = "tests.benchmarks.quantized_time"


def compare_with_bf16(world: World, bench: Bench, format: str, pairs: int = PAIRS) -> Ratio:
    """Steps on a base in this format against steps on one in bf16, sharded fully over the ranks. Collective."""
    train = {"batch_size": world.size, "precision": "bf16"}
    parallel = {"device": "cpu", "devices": world.size, "strategy": "full"}
    coded, plain = (
        bench.config(train=train, parallel=parallel, quantize={"format": value}) for value in (format, "none")
    )
    return compare_configs(world, bench, format, (coded, plain), pairs)


def main() -> int:
    """Print one row per format. Returns 1 when one is over its limit."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "FORMAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        _measure(Path(options.one[0]), options.one[1])
        return 0
    print(
        f"{'':6}{'base':>9}{'bf16':>9}{'ratio':>8}{'limit':>7}   (CPU s per step, klein-small, {RANKS} ranks)",
        flush=True,
    )
    is_over = False
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), KLEIN_SMALL)
        for format, limit in LIMITS.items():
            found = Ratio(**run_ranks_afresh(RANKS, MODULE, "--one", folder, format))
            print(f"{format:6}{found.ours:>9.3f}{found.by_hand:>9.3f}{found.cpu:>8.3f}{limit:>7}", flush=True)
            is_over |= found.cpu > limit
    return int(is_over)


def _measure(folder: Path, format: str) -> None:
    torch.set_num_threads(1)
    with connect(ParallelConfig(device="cpu", devices=RANKS)) as world:
        ratio = compare_with_bf16(world, Bench(folder, KLEIN_SMALL), format)
    if world.rank == 0:  # lines of two ranks mix
        print(json.dumps(asdict(ratio)))


if __name__ == "__main__":
    sys.exit(main())
