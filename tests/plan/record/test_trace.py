"""The simulated trace of a shortened model against the whole model's own step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig

from tests.plan.common import MODELS, NOWHERE
from trainer.config.load import load_config_text
from trainer.config.schema import RunConfig
from trainer.config.sections import ADAPTERS, family_names
from trainer.models import families
from trainer.models.build import build_model
from trainer.plan.record.make_tables import FORMATS
from trainer.plan.record.memory_tracker import is_quantized
from trainer.plan.record.trace import PassTraces, make_table, trace_step, traced_ranks, units_of
from trainer.plan.search.fixes import planned
from trainer.plan.simulate.sizes import input_of
from trainer.plan.simulate.steps import Unit
from trainer.plan.simulate.tables import encode
from trainer.plan.store import SHIPPED, find_model, known_model, read, traced_peak
from trainer.system.errors import InputError

ROOT = Path(__file__).parents[3]
EXACT, USUAL = 0.003, 0.01
QUICK = ("causal_lm-llama-3.2-1b", "flux2-demo")


def compared(folder: Path, *models: str) -> list[dict[str, Any]]:
    """Return the lines of `shallow`, run in a process of its own since the fake device cannot be removed."""
    argv = [sys.executable, "-m", "tests.plan.shallow", str(folder), *models]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1100)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_a_simulated_step_of_a_shortened_model_takes_what_the_whole_model_takes(tmp_path: Path) -> None:
    errors = {line["case"]: line["planned"] / line["traced"] - 1 for line in compared(tmp_path)}
    assert Counter(case.split()[0] for case in errors) == {"training": 14, "drawing": 8, "captions": 2}
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
        assert encode(*read(file)) == file.read_bytes()


def test_every_method_of_a_published_model_has_a_table() -> None:
    for model, file in MODELS.items():
        methods = {key.split()[0] for key in read(file)[0] if key.split()[1] == "none"}
        assert methods >= ADAPTERS.keys(), model


@pytest.mark.parametrize("format", ["none", *FORMATS])
def test_every_method_of_the_demo_model_has_a_table(format: str) -> None:
    for method in [name for name in ADAPTERS if format == "none" or name != "none"]:
        fields = ("model.family=flux2", "model.path=demo", "train.precision=fp32")
        named = (*fields, f"adapter.type={method}", f"quantize.format={format}")
        cfg = load_config_text("data: {path: .}", named, Path("run.yaml")).config
        assert known_model(cfg, NOWHERE) is not None, named


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux2", "causal_lm", "bagel"])
def test_a_model_whose_adapter_has_dropout_is_traced(tmp_path: Path, family: str) -> None:
    fields = (f"model.family={family}", "model.path=tiny", "adapter.dropout=0.1", "parallel.devices=1")
    cfg = load_config_text("data: {path: .}", fields, Path("run.yaml")).config
    assert planned(cfg, None, tmp_path) is None
    said: list[str] = []
    shares: list[float] = []
    find_model(cfg, tmp_path, said.append, lambda share, left_s: shares.append(share))
    assert said[0].startswith(f"tracing once what {family}-tiny-default allocates with this adapter and format: about")
    assert [sentence.partition(",")[0] for sentence in said[1:]] == [f"{25 * n} % of it traced" for n in (1, 2, 3)]
    assert shares == [number / 32 for number in range(1, 33)]
    found = planned(cfg, None, tmp_path)
    assert found is not None and found.training.peak > 0


def test_a_language_model_is_traced_on_a_cpu_though_where_documents_begin_has_no_value(tmp_path: Path) -> None:
    fields = ("model.family=causal_lm", "model.path=tiny", "parallel={devices: 1, strategy: none}", "data.length=64")
    cfg = load_config_text("data: {path: .}", fields, Path("run.yaml")).config
    size = input_of(cfg)
    peaks = [
        trace_step(cfg, families.make(cfg, tmp_path), torch.device("cpu"), replace(size, batch=rows)).peak
        for rows in (1, 2)
    ]
    assert 0 < peaks[0] < peaks[1] < 2 * peaks[0]


def test_the_operation_of_dropout_is_not_taken_for_one_on_quantized_weights() -> None:
    assert not is_quantized(torch.ops.shardstudio.uniform.default)
    assert is_quantized(torch.ops.shardstudio.linear_backward.default)


@pytest.mark.slow
def test_the_processes_of_a_trace_end_when_it_is_killed(tmp_path: Path) -> None:
    fields = ("model.family=flux2", "model.path=tiny", "parallel.devices=1")
    cfg = load_config_text("data: {path: .}", fields, Path("run.yaml")).config
    (tmp_path / "config.json").write_text(cfg.model_dump_json())
    argv = [sys.executable, "-m", "trainer.plan", "record", str(tmp_path / "config.json"), str(tmp_path)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE) as planner:
        assert planner.stdout is not None and planner.stdout.readline() == b"pass\n"
        workers = psutil.Process(planner.pid).children()
        planner.kill()
    assert len(workers) >= 2
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def narrow(folder: Path, *fields: str) -> RunConfig:
    """A run of a language model whose smallest layers, those of keys and values, have 16 outputs."""
    folder.mkdir(exist_ok=True)
    LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    named = ("model.family=causal_lm", f"model.path={folder}", "parallel.devices=1", "data.length=64")
    return load_config_text("data: {path: .}", (*named, *fields), Path("run.yaml")).config


@pytest.mark.parametrize("kind", ["lora", "dora", "loha"])
def test_narrow_layers_are_traced_with_ranks_that_they_take(tmp_path: Path, kind: str) -> None:
    cfg = narrow(tmp_path / "model", f"adapter.type={kind}", "adapter.rank=4")
    assert traced_ranks(cfg, tmp_path) == (8, 16)
    wide = load_config_text("data: {path: .}", ("model.family=flux2", "model.path=tiny"), Path("run.yaml")).config
    assert traced_ranks(wide, tmp_path) == (16, 32)


def test_a_rank_of_the_run_that_is_too_large_is_refused_with_its_own_number(tmp_path: Path) -> None:
    cfg = narrow(tmp_path / "model", "adapter.rank=20")
    with pytest.raises(InputError, match=r"^adapter\.rank: 20 is too large for '.*k_proj', whose weight is 16 x 32"):
        traced_ranks(cfg, tmp_path)


@pytest.mark.parametrize("family", family_names())
def test_parameters_of_a_tiny_model_are_paired_though_they_have_one_shape_at_some_ranks(
    tmp_path: Path, family: str
) -> None:
    def units(rank: int) -> tuple[Unit, ...]:
        fields = (f"model.family={family}", "model.path=tiny", f"adapter.rank={rank}", "train.precision=fp32")
        cfg = load_config_text("data: {path: .}", fields, Path("run.yaml")).config
        made = families.make(cfg, tmp_path)
        return units_of(build_model(cfg, made).module, made.shard.blocks, torch.float32)

    cfg = load_config_text("data: {path: .}", (f"model.family={family}", "model.path=tiny"), Path("run.yaml")).config
    ranks = traced_ranks(cfg, tmp_path)
    traces = [PassTraces(units(rank), (), 0, {"kept": ((),), "drawn": ((),)}, rank) for rank in ranks]
    table = make_table(cfg, traces)
    for rank in (1, 4, 16):
        planned_units = table.sampling(input_of(cfg), rank).units
        assert [_shapes(unit) for unit in planned_units] == [_shapes(unit) for unit in units(rank)]


def _shapes(unit: Unit) -> Counter[tuple[int, int, int, bool]]:
    """{(rows, numbers per row, bytes of each, whether it is trained): number of such parameters}"""
    shapes: Counter[tuple[int, int, int, bool]] = Counter()
    for p in unit.parameters:
        shapes[p.rows, p.row, p.stored, p.is_trained] += p.count
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux2", "qwen_image"])
def test_the_plan_of_a_tiny_model_takes_what_its_whole_step_takes(tmp_path: Path, family: str) -> None:
    named = (f"model.family={family}", "model.path=tiny", "adapter.rank=4", "data.resolution=64")
    fields = (*named, "parallel={devices: 1, strategy: none}", "train={batch_size: 4, micro_batch: 4}")
    cfg = load_config_text("data: {path: .}", fields, Path("run.yaml")).config
    find_model(cfg, tmp_path)
    found = planned(cfg, None, tmp_path)
    assert found is not None
    assert found.training.peak == pytest.approx(traced_peak(cfg, "none", tmp_path), rel=USUAL)


@pytest.mark.slow
def test_the_plan_of_narrow_layers_takes_what_the_whole_step_takes(tmp_path: Path) -> None:
    cfg = narrow(tmp_path / "model", "adapter.rank=4", "parallel.strategy=full", "parallel.device=cpu")
    table = find_model(cfg, tmp_path).table
    assert table.ranks == (8, 16)
    small, large = (table.training(input_of(cfg), rank, "none") for rank in (4, 16))
    bytes_of = [
        sum(p.rows * p.row for unit in one.units for p in unit.parameters if p.is_trained) for one in (small, large)
    ]
    assert 0 < 4 * bytes_of[0] == bytes_of[1]
