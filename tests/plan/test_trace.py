"""The simulated trace of a shortened model against the whole model's own step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plan.common import MODELS
from trainer.config.load import load_config_text
from trainer.models import families
from trainer.plan.fixes import planned
from trainer.plan.memory_tracker import is_quantized
from trainer.plan.sizes import size_of
from trainer.plan.store import SHIPPED, find_model
from trainer.plan.tables import decode, encode
from trainer.plan.trace import trace_step

ROOT = Path(__file__).parents[2]
EXACT, USUAL = 0.003, 0.01
QUICK = ("causal_lm-llama-3.2-1b", "flux2-demo")


def compared(folder: Path, *models: str) -> list[dict[str, Any]]:
    """Return the lines of `shallow`, run in a process of its own since the fake device cannot be removed."""
    argv = [sys.executable, "-m", "tests.plan.shallow", str(folder), *models]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_a_simulated_step_of_a_shortened_model_takes_what_the_whole_model_takes(tmp_path: Path) -> None:
    errors = {line["case"]: line["planned"] / line["traced"] - 1 for line in compared(tmp_path)}
    assert Counter(case.split()[0] for case in errors) == {"training": 13, "drawing": 7, "captions": 2}
    assert max(map(abs, errors.values())) < USUAL, errors
    assert sum(abs(error) < EXACT for error in errors.values()) >= len(errors) - 1, errors


@pytest.mark.parametrize(
    "models", [QUICK, pytest.param(tuple(sorted(MODELS.keys() - set(QUICK))), marks=pytest.mark.slow)]
)
def test_the_shipped_tables_are_what_is_traced_today(models: tuple[str, ...], tmp_path: Path) -> None:
    found = compared(tmp_path, *models)
    assert [line["model"] for line in found] == list(models)
    stale = [line["model"] for line in found if not line["is_equal"]]
    assert not stale, f"make them again: python -m trainer.plan tables {' '.join(stale)}"


def test_files_are_written_alike_from_the_same_tables() -> None:
    for file in SHIPPED.glob("*.json.gz"):
        assert encode(*decode(file.read_bytes())) == file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux2", "causal_lm", "bagel"])
def test_a_model_whose_adapter_has_dropout_is_traced(tmp_path: Path, family: str) -> None:
    fields = (f"model.family={family}", "model.path=tiny", "adapter.dropout=0.1", "parallel.devices=1")
    cfg = load_config_text("data: {path: .}", fields, Path("run.yaml")).config
    assert planned(cfg, None, tmp_path) is None
    find_model(cfg, tmp_path)
    found = planned(cfg, None, tmp_path)
    assert found is not None and found.training.peak > 0


def test_a_language_model_is_traced_on_a_cpu_though_where_documents_begin_has_no_value(tmp_path: Path) -> None:
    fields = ("model.family=causal_lm", "model.path=tiny", "parallel={devices: 1, strategy: none}", "data.length=64")
    cfg = load_config_text("data: {path: .}", fields, Path("run.yaml")).config
    size = size_of(cfg)
    peaks = [
        trace_step(cfg, families.make(cfg, tmp_path), torch.device("cpu"), replace(size, batch=rows)).peak
        for rows in (1, 2)
    ]
    assert 0 < peaks[0] < peaks[1] < 2 * peaks[0]


def test_the_operation_of_dropout_is_not_taken_for_one_on_quantized_weights() -> None:
    assert not is_quantized(torch.ops.shardstudio.uniform.default)
    assert is_quantized(torch.ops.shardstudio.linear_backward.default)
