"""Memory and recomputed operations of FLUX.2 dev, by size, ranks, format of the base and recompute, from its tables.

python -m tests.benchmarks.recompute_table        a second; exit code 1 when a limit is exceeded
"""

from __future__ import annotations

import sys
from itertools import product

from tests.plan.common import NOWHERE, run
from trainer.plan.memory import MemoryPlan, plan_of
from trainer.plan.store import known_model
from trainer.system.amounts import GIB

SIDES, RANKS, FORMATS, MODES = (512, 1024), (1, 2, 4), ("none", "int8", "nf4"), ("none", "selective", "full")
LIMIT = 20 * GIB
"""Most bytes of tensors at 512 px on four ranks with a base in nf4, no product of the base computed twice."""


def planned(side: int, ranks: int, base: str, mode: str) -> MemoryPlan:
    """The plan of a LoRA of rank 16, one image per rank and pass."""
    fields = (f"data.resolution={side}", f"parallel.devices={ranks}", f"train.batch_size={ranks}")
    strategy = "none" if ranks == 1 else "full"
    more = (f"parallel.strategy={strategy}", f"quantize.format={base}", f"train.checkpointing={mode}")
    cfg = run("flux2 dev", *fields, *more, "adapter.rank=16")
    model = known_model(cfg, NOWHERE)
    assert model is not None
    return plan_of(cfg, model, None)


def main() -> int:
    """Print a table in Markdown: GiB of tensors in training, without the reserve, and TFLOP computed again."""
    print("| px | ranks | base | " + " | ".join(f"{mode}, GiB | again, TFLOP" for mode in MODES) + " |")
    print("|---" * (3 + 2 * len(MODES)) + "|")
    for side, ranks, base in product(SIDES, RANKS, FORMATS):
        plans = {mode: planned(side, ranks, base, mode) for mode in MODES}
        kept = plans["none"].flops
        cells = [f"{plan.training.peak / GIB:.1f} | {(plan.flops - kept) / 1e12:.1f}" for plan in plans.values()]
        stored = "bf16" if base == "none" else base
        print(f"| {side} | {ranks} | {stored} | " + " | ".join(cells) + " |")
    selective = planned(512, 4, "nf4", "selective")
    print(f"\n512 px, four ranks, nf4, selective: {selective.training.peak / GIB:.2f} GiB, limit {LIMIT / GIB:.0f}")
    return int(selective.training.peak > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
