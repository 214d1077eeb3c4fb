"""Run every check, write tests/benchmarks/AUDIT.md, and end with 1 when a figure exceeds its limit."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import diffusers
import torch
import transformers

from tests.audit import adapters, bagel, families, language_models, loop, samples
from tests.audit.check import Check

MODULES: tuple[ModuleType, ...] = (families, bagel, language_models, samples, adapters, loop)
"""Each has a tuple CHECKS, and a table under the first line of its docstring."""
RESULTS = Path(__file__).parents[1] / "benchmarks" / "AUDIT.md"
PACKAGES = ("torch", "diffusers", "transformers", "peft")


def audit(tables: Mapping[str, Sequence[Check]], results: Path) -> int:
    """Measure the checks of each table by its title, write the results, return 1 if one is beyond its limit."""
    began = time.perf_counter()
    found: dict[Check, float] = {}
    for check in (check for checks in tables.values() for check in checks):
        print(f"{check.subject}, {check.name}: ", end="", flush=True)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found[check] = check.measure(Path(folder))
        print(f"{cell(check, found[check])}, {time.perf_counter() - started:.1f} s", flush=True)
    wrong = [check for check in found if is_beyond(check, found[check])]
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    parts = [
        "# Audit",
        f"Written by `make audit` on {datetime.date.today()}: {len(found)} checks on a CPU in fp32, {versions}. A cell "
        "has the largest difference of the trainer from a reference that shares no code with it, relative for losses, "
        "and the limit. The loop's reference takes the trainer's losses and encodings, which have tables of their own. "
        f"{len(wrong)} are beyond it.",
        *(f"## {title}\n\n{table({check: found[check] for check in checks})}" for title, checks in tables.items()),
    ]
    results.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    for check in wrong:
        print(f"{check.subject}, {check.name}: {cell(check, found[check])} is beyond its limit")
    seconds = time.perf_counter() - began
    print(f"{len(found)} checks, {len(wrong)} beyond their limit, {seconds:.0f} s: {results}")
    return 1 if wrong else 0


def is_beyond(check: Check, value: float) -> bool:
    return not value <= check.limit  # NaN is


def cell(check: Check, value: float) -> str:
    return f"{value:.2g} / {check.limit:g}"


def table(found: Mapping[Check, float]) -> str:
    """Markdown: a row per subject, a column per name; what is beyond its limit is bold."""
    columns = list(dict.fromkeys(check.name for check in found))
    cells: dict[str, dict[str, str]] = {}
    for check, value in found.items():
        text = cell(check, value)
        cells.setdefault(check.subject, {})[check.name] = f"**{text}**" if is_beyond(check, value) else text
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for subject, row in cells.items():
        lines.append(f"| {subject} | {' | '.join(row.get(column, '') for column in columns)} |")
    return "\n".join(lines)


def title_of(module: ModuleType) -> str:
    assert module.__doc__
    return module.__doc__.splitlines()[0].removesuffix(".")


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__).parse_args()
    # One thread, as `make audit` has it: with more the last digits of a run are others.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    return audit({title_of(module): module.CHECKS for module in MODULES}, RESULTS)


if __name__ == "__main__":
    sys.exit(main())
