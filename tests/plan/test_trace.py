"""What is recorded of a shortened model, played, against the whole model's own step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.plan.common import MODELS
from trainer.plan.store import SHIPPED
from trainer.plan.tables import decode, encode

ROOT = Path(__file__).parents[2]
EXACT, USUAL = 0.003, 0.01
QUICK = ("flux2-demo",)


def compared(folder: Path, *models: str) -> list[dict[str, Any]]:
    """What `shallow` prints: in a process of its own, whose device cannot be taken back."""
    argv = [sys.executable, "-m", "tests.plan.shallow", str(folder), *models]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_recorded_step_played_again_is_what_the_whole_model_takes(tmp_path: Path) -> None:
    errors = {line["case"]: line["planned"] / line["traced"] - 1 for line in compared(tmp_path)}
    assert Counter(case.split()[0] for case in errors) == {"training": 6, "drawing": 3, "captions": 2}
    assert max(map(abs, errors.values())) < USUAL, errors
    assert sum(abs(error) < EXACT for error in errors.values()) >= 10, errors


@pytest.mark.parametrize(
    "models", [QUICK, pytest.param(tuple(sorted(MODELS.keys() - set(QUICK))), marks=pytest.mark.slow)]
)
def test_what_comes_with_the_program_is_what_is_recorded_today(models: tuple[str, ...], tmp_path: Path) -> None:
    found = compared(tmp_path, *models)
    assert [line["model"] for line in found] == list(models)
    stale = [line["model"] for line in found if not line["is_equal"]]
    assert not stale, f"record again: python -m trainer.plan tables {' '.join(stale)}"


def test_files_are_written_alike_from_the_same_tables() -> None:
    for file in SHIPPED.glob("*.json.gz"):
        assert encode(*decode(file.read_bytes())) == file.read_bytes()
