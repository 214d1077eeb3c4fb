"""Which planted faults the tests catch: `python -m tests.planted`, or with the numbers of some of them.

Each fault is planted in a copy of the tracked files, where the tests near it run first, then all others, until one
fails. `--marks` takes other tests than `make test`, `--near` leaves out the others.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.planted.faults import FAULTS, ROOT, Fault

QUICK = "not slow and not gpu"
PARALLEL = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def main() -> int:
    """Print a line per fault. Returns the number of those that no test caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted")
    parser.add_argument("numbers", type=int, nargs="*", help="from 1; default: all")
    parser.add_argument("--marks", default=QUICK, help=f"as pytest's -m; default: {QUICK}")
    parser.add_argument("--near", action="store_true", help="only the tests near each fault")
    options = parser.parse_args()
    missed = 0
    for number in options.numbers or range(1, len(FAULTS) + 1):
        fault = FAULTS[number - 1]
        began = time.monotonic()
        found = catching_test(fault, options.marks, options.near)
        missed += found is None
        print(f"{number:2} {time.monotonic() - began:5.0f} s  {fault.name}: {found or 'NOT CAUGHT'}", flush=True)
    print(f"{missed} not caught")
    return missed


def catching_test(fault: Fault, marks: str, near_only: bool) -> str | None:
    """The first test that fails with the fault, None where none does."""
    with tempfile.TemporaryDirectory() as folder:
        root = copy_of_the_project(Path(folder) / "project")
        fault.plant(root)
        found = _failing(root, marks, fault.near)
        return found if found or near_only else _failing(root, marks, ("tests",), *PARALLEL)


def copy_of_the_project(to: Path) -> Path:
    """The tracked files as they are now, with this environment."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def _failing(root: Path, marks: str, tests: tuple[str, ...], *options: str) -> str | None:
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode in (0, 5):  # 5: no test has these marks
        return None
    if done.returncode != 1:  # interrupted, or pytest could not run
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    found = FAILED.search(done.stdout)
    return found[1] if found else done.stdout[-500:]


if __name__ == "__main__":
    sys.exit(main())
