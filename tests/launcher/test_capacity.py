"""What a machine lacks for a run, found before it starts: GPUs, memory of the host, space on the disk."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.runs import run_config
from trainer.config.installation import PRESETS
from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.gpus import Gpu
from trainer.launcher import capacity
from trainer.plan.fixes import planned
from trainer.plan.phases import ASSUMED
from trainer.run.folder import shared_cache

MANY = 10_000
"""Checkpoints that no disk has room for."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpus(count: int) -> list[Gpu]:
    values = {field.name: 0 for field in dataclasses.fields(Gpu)}
    return [Gpu(**values | {"name": "NVIDIA H100", "memory": 80 * 2**30, "index": index}) for index in range(count)]


def preset(name: str, *overrides: str) -> RunConfig:
    return load_config(PRESETS / f"{name}.yaml", overrides).config


def said(cfg: RunConfig, runs: Path, listed: Sequence[Gpu]) -> dict[str, str]:
    return {problem.field: problem.message for problem in capacity.problems(cfg, runs, listed)}


def test_the_quickstart_is_trained_anywhere(runs: Path):
    assert said(preset("quickstart"), runs, []) == {}
    assert said(preset("quickstart"), runs, gpus(1)) == {}


@pytest.mark.parametrize(
    ("count", "devices", "message"),
    [
        (1, 4, "4 are asked for, this machine has 1 GPU; set 1 or fewer"),
        (2, 4, "4 are asked for, this machine has 2 GPUs; set 2 or fewer"),
        (4, 4, None),
        (8, 4, None),
    ],
)
def test_more_gpus_than_there_are_is_a_problem(runs: Path, tmp_path: Path, count: int, devices: int, message: str):
    cfg = run_config(tmp_path, parallel__device="cuda", parallel__devices=devices)
    assert said(cfg, runs, gpus(count)).get("parallel.devices") == message


@pytest.mark.parametrize(("visible", "usable"), [("", 0), ("-1", 0), ("0", 1), ("0,2", 2), ("0,1,2,3,4", 4)])
def test_only_the_visible_gpus_are_counted(monkeypatch: pytest.MonkeyPatch, visible: str, usable: int):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert capacity._num_gpus(gpus(4)) == usable


def test_cuda_without_a_gpu_is_a_problem_and_auto_takes_the_cpu(runs: Path, tmp_path: Path):
    cuda = run_config(tmp_path, parallel__device="cuda")
    assert said(cuda, runs, []) == {
        "parallel.device": "cuda: this machine has no usable GPU; set cpu or auto, or see --doctor"
    }
    assert said(run_config(tmp_path, parallel__device="auto", parallel__devices=2), runs, []) == {}
    assert said(run_config(tmp_path, parallel__device="cpu", parallel__devices=2), runs, gpus(1)) == {}


def test_weights_that_are_larger_than_the_hosts_memory_are_a_problem_without_a_gpu(runs: Path):
    have = psutil.virtual_memory().total
    cfg = preset("flux2-dev-lora-4gpu", "parallel.device=cpu", f"parallel.devices={1 + have // (60 * 10**9)}")
    message = said(cfg, runs, [])["parallel.device"]
    assert message.startswith("without a GPU the weights alone take ")
    assert message.endswith("; choose a smaller model, or quantize.format: nf4")
    on_gpus = said(preset("flux2-dev-lora-4gpu"), runs, gpus(4))
    assert "parallel.device" not in on_gpus


def test_checkpoints_that_the_disk_has_no_room_for_are_a_problem(runs: Path):
    many = (f"checkpoint.keep={MANY}", "checkpoint.every=1", f"train.steps={10 * MANY}")
    cfg = preset("flux2-dev-lora-4gpu", *many)
    sizes = {item.name: item.size for item in planned(cfg, None, shared_cache(cfg, runs), ASSUMED).disk}
    assert sizes["checkpoint"] * MANY > shutil.disk_usage(runs.parent).free, "the test needs a smaller disk"
    message = said(cfg, runs, gpus(4))["checkpoint.keep"]
    assert message.startswith(f"{MANY}: checkpoints and export take ")
    assert f"{runs} has " in message and message.endswith("keep fewer, free some space, or choose another folder")
    assert "checkpoint.keep" not in said(preset("flux2-dev-lora-4gpu", many[0], "checkpoint.every=0"), runs, gpus(4))


@pytest.mark.parametrize(
    ("keep", "every", "count"),
    [(3, 0, 1), (3, 50, 3), (3, 10, 5), (10_000, 10, 11), (1, 1, 3)],
)
def test_no_more_checkpoints_are_counted_than_the_run_makes(keep: int, every: int, count: int):
    cfg = preset("quickstart", "train.steps=100", f"checkpoint.keep={keep}", f"checkpoint.every={every}")
    assert cfg.checkpoint.keep_best == 1
    assert capacity.num_checkpoints(cfg) == count


def test_a_model_that_is_not_recorded_is_judged_by_its_gpus_only(runs: Path, tmp_path: Path):
    cfg = run_config(tmp_path, model__path="someone/some-model", parallel__devices=3, parallel__device="auto")
    assert list(said(cfg, runs, gpus(2))) == ["parallel.devices"]
    assert said(cfg, runs, []) == {}


def test_a_disk_without_room_for_the_quantized_base_is_a_problem_of_that(runs: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(runs.parent)
    monkeypatch.setattr("trainer.launcher.capacity.shutil.disk_usage", lambda _: usage._replace(free=20 * 10**9))
    found = said(preset("flux2-dev-lora-int8-4gpu", "quantize.cache=true"), runs, gpus(4))
    assert found["quantize.cache"].startswith("true: the quantized base, checkpoints and export take ")
    assert "checkpoint.keep" not in found
