"""Kill a run 200 times and see whether anything is lost: `python -m tests.survival [--kills N] [--seed N]`.

Exits with 1 if anything is; the folders of the chains that lost something are kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from tests.runs import make_pictures
from tests.survival.chain import Chain, Kill, Outcome, Phase, Target, make_reference, planned, survival_config

NUM_PICTURES = 24
CHAIN = 10
"""Kills of a run before it may end."""


def main() -> int:
    arguments = _parser().parse_args()
    root = Path(tempfile.mkdtemp(prefix="survival-"))
    began = time.monotonic()
    cfg = survival_config(make_pictures(root / "pictures", NUM_PICTURES))
    reference = make_reference(root / "reference", cfg)
    print(f"reference: {cfg.train.steps} steps in {time.monotonic() - began:.0f} s; folder {root}", flush=True)
    outcomes: list[Outcome] = []
    sizes = [min(CHAIN, arguments.kills - done) for done in range(0, arguments.kills, CHAIN)]
    for number, size in enumerate(sizes, start=1):
        numbers = random.Random(f"{arguments.seed} {number}")
        folder = root / f"chain-{number:02d}"
        outcome = Chain(folder, cfg, reference, planned(numbers, size), numbers).go()
        outcomes.append(outcome)
        _tell_chain(f"chain {number}/{len(sizes)}", outcome)
        done, elapsed = sum(len(one.kills) for one in outcomes), time.monotonic() - began
        print(f"  {elapsed / 60:.1f} min so far, {elapsed / done * arguments.kills / 60:.1f} min in all", flush=True)
        if not outcome.problems:
            shutil.rmtree(folder)
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    print("\n".join(table([kill for outcome in outcomes for kill in outcome.kills])))
    print(f"{len(problems)} problems; {(time.monotonic() - began) / 60:.1f} min")
    if problems:
        print(f"kept for inspection: {root}")
        return 1
    shutil.rmtree(root)
    return 0


def table(kills: Sequence[Kill]) -> list[str]:
    """Kills by what the run was doing and by what was killed, as they were and not as they were meant."""
    counts = Counter((kill.phase, kill.target) for kill in kills)
    targets = get_args(Target)
    lines = ["", "| killed during | " + " | ".join(targets) + " | all |", "|---" * (len(targets) + 2) + "|"]
    for phase in get_args(Phase):
        row = [counts[phase, target] for target in targets]
        lines.append(f"| {phase} | " + " | ".join(map(str, [*row, sum(row)])) + " |")
    row = [sum(kill.target == target for kill in kills) for target in targets]
    lines.append("| all | " + " | ".join(map(str, [*row, len(kills)])) + " |")
    drafting = sum(kill.drafting for kill in kills)
    ends = ", ".join(f"{count} {end}" for end, count in Counter(kill.end for kill in kills).most_common())
    seconds = statistics.fmean(kill.seconds for kill in kills)
    return [*lines, "", f"a checkpoint was being written at {drafting}; then: {ends}; {seconds:.1f} s per kill"]


def _tell_chain(name: str, outcome: Outcome) -> None:
    missed = f", {outcome.missed} starts ended before" if outcome.missed else ""
    print(f"{name}: {len(outcome.kills)} kills in {outcome.seconds:.0f} s{missed}", flush=True)
    for kill in outcome.kills:
        drafting = ", checkpoint being written" if kill.drafting else ""
        print(
            f"  {kill.target:8} during {kill.phase:8} (aimed at {kill.aim:8}) at {kill.after_s:5.2f} s, "
            f"step {kill.step:2}{drafting}; {kill.end}; {kill.seconds:.1f} s"
        )
    for problem in outcome.problems:
        print(f"  PROBLEM {problem}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.survival", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many in all")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed and when; what is met there is chance")
    return parser


if __name__ == "__main__":
    sys.exit(main())
