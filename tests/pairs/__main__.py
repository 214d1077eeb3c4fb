"""`python -m tests.pairs`: every pair of values of the fields that decide what a run does, in a real run.

Each config trains three steps of a tiny model, is stopped after the first and resumed, draws and exports, and its
losses are compared with those of the same config without what must not change them: recompute, offload, strategy,
passes, samples, checkpoints. It must run, or be refused by a sentence before a rank starts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.pairs.array import Pair, pairs_of
from tests.pairs.choices import IMAGES, KINDS, kind_of
from tests.pairs.search import Search
from tests.pairs.trials import OUTCOMES, WRONG
from trainer.models import families


def main() -> int:
    """Exit code 1 if a config crashed, was refused too late or trained something else."""
    arguments = _parser().parse_args()
    share, shares = (int(number) for number in arguments.share.split("/"))
    only = dict(part.split("=", 1) for part in arguments.only)
    if arguments.family in IMAGES:
        only["model"] = arguments.family
    counts: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        search = Search(Path(folder), arguments.seed)
        for kind in (kind_of(arguments.family),) if arguments.family else KINDS:
            began, covered = time.monotonic(), set[Pair]()
            for trial in search.trials(kind, share, shares, only):
                counts[trial.outcome] += 1
                covered |= set(pairs_of(trial.row)) if trial.outcome == "ran" else set()
                if trial.outcome != "ran" or arguments.verbose:
                    print(f"{trial}\n", flush=True)
            seconds = time.monotonic() - began
            print(f"{kind}: {search.counts[kind]}; {len(covered)} ran in this share, {seconds:.0f} s", flush=True)
    print(f"{counts.total()} configs; " + "; ".join(f"{outcome}: {counts[outcome]}" for outcome in OUTCOMES))
    return int(any(counts[outcome] for outcome in WRONG))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.pairs", description=__doc__)
    parser.add_argument("--share", default="1/1", metavar="K/N", help="the K-th of N shares of the configs")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other rows with the same pairs")
    parser.add_argument("--family", choices=families.names(), help="only configs of this family")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="CHOICE=VALUE",
        help="only configs with this value, as recompute=2",
    )
    parser.add_argument("--verbose", action="store_true", help="also show configs that run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
