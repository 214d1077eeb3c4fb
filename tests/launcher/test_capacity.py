"""What a machine lacks for a run, found before it starts: GPUs, memory of the host, space on the disk."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from tests.runs import run_config
from tests.system.gpus.machines import CPU, CU130, OLD_DRIVER, TWO_H100, install, pretend
from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.launcher import capacity, preflight
from trainer.plan.search.decide import decided
from trainer.plan.search.fixes import planned
from trainer.plan.simulate.phases import ASSUMED
from trainer.run.folder import RunDir, shared_cache
from trainer.system import gpus as machine_gpus
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu
from trainer.system.gpus.support import Build
from trainer.system.installation import PRESETS

MANY = 10_000
"""Checkpoints that no disk has room for."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pretend(CU130, monkeypatch)


def gpus(count: int, **values: Any) -> list[Gpu]:
    one = Gpu(0, "NVIDIA H100", 81559, 0, 0, 0, "GPU-0", "580.65.06", "9.0")
    return [dataclasses.replace(one, index=index, uuid=f"GPU-{index}", **values) for index in range(count)]


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
        (1, 4, "4 are asked for, this run may use 1 GPU; set 1 or fewer"),
        (2, 4, "4 are asked for, this run may use 2 GPUs; set 2 or fewer"),
        (4, 4, None),
        (8, 4, None),
    ],
)
def test_more_gpus_than_there_are_is_a_problem(runs: Path, tmp_path: Path, count: int, devices: int, message: str):
    cfg = run_config(tmp_path, parallel__device="cuda", parallel__devices=devices)
    assert said(cfg, runs, gpus(count)).get("parallel.devices") == message


@pytest.mark.parametrize(("text", "usable"), [("0", 1), ("0,2", 2), ("GPU-1,GPU-3,GPU-0", 3)])
def test_only_the_visible_gpus_are_counted(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, usable: int
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    cfg = run_config(tmp_path, parallel__device="auto", parallel__devices=4)
    count = f"{usable} GPU" + ("s" if usable > 1 else "")
    assert said(cfg, runs, gpus(4)) == {
        "parallel.devices": f"4 are asked for, this run may use {count}; set {usable} or fewer"
    }


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_a_problem_and_never_a_run_on_the_cpu(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
):
    cfg = run_config(tmp_path, parallel__device=device)
    assert said(cfg, runs, gpus(1, driver_version="550.54.15")) == {
        "parallel.device": f"{device}: driver 550.54.15 is too old for torch 2.13.0+cu130: CUDA 13.0 needs 580 or "
        "newer; update the driver, install a torch built for CUDA 12, or set parallel.device: cpu"
    }
    assert said(cfg, runs, gpus(1, compute_cap="7.0"))["parallel.device"].startswith(
        f"{device}: NVIDIA H100 has compute capability 7.0, and torch 2.13.0+cu130 needs 7.5 or more; "
    )
    pretend(CPU, monkeypatch)
    assert said(cfg, runs, gpus(1))["parallel.device"].startswith(
        f"{device}: torch 2.13.0+cpu is built without CUDA and cannot use the NVIDIA H100 here; "
    )
    assert said(run_config(tmp_path, parallel__device="cpu"), runs, gpus(1)) == {}


def test_a_driver_that_does_not_answer_is_a_problem_except_on_the_cpu(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> list[Gpu]:
        raise InputError("nvidia-smi says: Driver/library version mismatch")

    monkeypatch.setattr(machine_gpus, "read", fail)

    def of(device: str) -> list[str]:
        return [str(one) for one in capacity.problems(run_config(tmp_path, parallel__device=device), runs)]

    assert of("auto") == ["parallel.device: auto: nvidia-smi says: Driver/library version mismatch; or set cpu"]
    assert of("cpu") == []
    assert capacity.warnings(run_config(tmp_path, parallel__device="auto"), runs) == []


def test_bf16_on_a_card_before_ampere_is_a_problem_of_the_precision(runs: Path, tmp_path: Path):
    old = gpus(2, name="Tesla T4", compute_cap="7.5", memory=15360)
    bf16 = run_config(tmp_path, parallel__device="auto", parallel__devices=2, train__precision="bf16")
    assert said(bf16, runs, old) == {
        "train.precision": "bf16: Tesla T4 has compute capability 7.5, and bf16 needs 8.0 or more; set fp32, or use a "
        "newer GPU"
    }
    fp32 = run_config(tmp_path, parallel__device="auto", parallel__devices=2, train__precision="fp32")
    assert said(fp32, runs, old) == {}
    mixed = [*gpus(1), dataclasses.replace(old[1], index=1)]
    one = run_config(tmp_path, parallel__device="auto", train__precision="bf16")
    assert said(one, runs, mixed) == {}, "one rank gets the newer GPU"
    assert list(said(bf16, runs, mixed)) == ["train.precision"]


def test_several_ranks_on_slices_of_a_card_are_a_problem_and_one_is_not(runs: Path, tmp_path: Path):
    slices = gpus(2, name="NVIDIA A100-SXM4-80GB MIG 3g.40gb", compute_cap="8.0", memory=38912, is_slice=True)
    assert said(run_config(tmp_path, parallel__device="auto", parallel__devices=2), runs, slices) == {
        "parallel.devices": "2 are asked for, but a run trains on one MIG slice: NCCL connects none; set 1"
    }
    assert said(run_config(tmp_path, parallel__device="auto"), runs, slices) == {}


def test_the_gpus_that_the_queue_chose_are_counted(runs: Path, tmp_path: Path):
    cfg = run_config(tmp_path, parallel__device="cuda", parallel__devices=2)
    (problem,) = capacity.problems(cfg, runs, gpus(4), chosen=(3,))
    assert str(problem) == "parallel.devices: 2 are asked for, this run may use 1 GPU; set 1 or fewer"
    (problem,) = capacity.problems(cfg, runs, gpus(2), chosen=(3,))
    assert str(problem) == (
        "parallel.device: cuda: GPU 3 was chosen for this run, but the GPUs that it may use are: 0, 1; or set cpu"
    )


def test_rocm_sees_gpus_that_nvidia_smi_does_not(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pretend(Build("2.13.0+rocm7.0", hip="7.0"), monkeypatch)
    cfg = run_config(tmp_path, parallel__device="cuda", parallel__devices=2)
    assert said(cfg, runs, []) == {}
    (warning,) = capacity.warnings(cfg, runs, [])
    assert warning.startswith(
        "parallel.device: cuda: torch 2.13.0+rocm7.0 is built for ROCm: AMD GPUs are used as CUDA"
    )


def test_a_gpu_that_others_use_is_warned_of_by_the_plan_or_from_half_its_memory(runs: Path, tmp_path: Path):
    planned_run = decided(preset("flux2-dev-lora-nf4-2x24gb"), "full", 0)
    cards = gpus(2, name="NVIDIA GeForce RTX 4090", memory=24564, memory_used=9000, compute_cap="8.9")
    assert said(planned_run, runs, cards) == {}
    first, second = capacity.warnings(planned_run, runs, cards)
    assert second.startswith("GPU 1, ") and re.fullmatch(
        r"GPU 0, NVIDIA GeForce RTX 4090: other processes use 8\.8 of 24\.0 GiB, and the plan needs 1\d\.\d: memory "
        r"may run out; end them \(nvidia-smi lists them\), or choose another GPU",
        first,
    )
    assert capacity.warnings(planned_run, runs, gpus(2, memory=81559, memory_used=50_000)) == [], "there is room for it"
    unknown = run_config(tmp_path, model__path="someone/some-model", parallel__device="auto")
    assert capacity.warnings(unknown, runs, gpus(1, memory_used=40_000)) == []
    (warning,) = capacity.warnings(unknown, runs, gpus(1, memory_used=50_000))
    assert "other processes use 48.8 of 79.6 GiB, and the run's need is not known: memory may run out" in warning


def test_hidden_gpus_are_an_error_for_cuda_and_a_warning_for_auto(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(TWO_H100, tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    why = "CUDA_VISIBLE_DEVICES= hides the GPUs of this machine; unset it to use them"
    cuda, auto = (run_config(tmp_path, parallel__device=device) for device in ("cuda", "auto"))
    (problem,) = capacity.problems(cuda, runs)
    assert str(problem) == f"parallel.device: cuda: {why}; set cpu or auto, or see --doctor"
    assert list(capacity.problems(auto, runs)) == []
    assert capacity.warnings(auto, runs) == [f"parallel.device: auto: {why}; the run trains on the CPU"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    (problem,) = capacity.problems(auto, runs)
    assert str(problem).startswith("parallel.device: auto: CUDA_VISIBLE_DEVICES=5: '5' names none of this machine's")


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


@pytest.mark.parametrize(
    ("fields", "field", "start", "end"),
    [
        (
            ("parallel.offload_blocks=1.0", "parallel.devices=2"),
            "parallel.offload_blocks",
            "1.0: offloading on 2 ranks needs ",
            "offload fewer blocks, or set quantize.format: nf4",
        ),
        (
            ("parallel.cpu_offload=true", "parallel.devices=1"),
            "parallel.cpu_offload",
            "true: offloading needs ",
            "set false and offload some blocks (parallel.offload_blocks), or quantize.format: nf4",
        ),
    ],
)
def test_offloaded_weights_that_are_larger_than_the_hosts_memory_are_a_problem(
    runs: Path, monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...], field: str, start: str, end: str
):
    memory = psutil.virtual_memory()
    cfg = preset("flux2-dev-lora-4gpu", "parallel.strategy=full", *fields)
    monkeypatch.setattr("trainer.launcher.capacity.psutil.virtual_memory", lambda: memory._replace(total=16 * 2**30))
    message = said(cfg, runs, gpus(4))[field]
    assert message.startswith(start) and message.endswith(f"of host memory, this machine has 16.00 GiB; {end}")
    monkeypatch.setattr("trainer.launcher.capacity.psutil.virtual_memory", lambda: memory._replace(total=256 * 2**30))
    assert field not in said(cfg, runs, gpus(4))


def test_what_is_offloaded_where_it_has_to_be_is_counted_for_the_gpus_of_the_run(
    runs: Path, monkeypatch: pytest.MonkeyPatch
):
    memory = psutil.virtual_memory()
    cfg = preset("flux2-klein-9b-lora-2gpu", "parallel.strategy=ddp", "parallel.offload_blocks=auto")
    monkeypatch.setattr("trainer.launcher.capacity.psutil.virtual_memory", lambda: memory._replace(total=16 * 2**30))
    assert "parallel.offload_blocks" not in said(cfg, runs, gpus(2))
    assert "parallel.offload_blocks" in said(cfg, runs, gpus(2, memory=16376))


def test_a_full_fine_tune_is_not_told_to_offload_blocks(runs: Path, monkeypatch: pytest.MonkeyPatch):
    memory = psutil.virtual_memory()
    cfg = preset("bagel-7b-mot-full-8x80gb", "parallel.cpu_offload=true")
    monkeypatch.setattr("trainer.launcher.capacity.psutil.virtual_memory", lambda: memory._replace(total=16 * 2**30))
    message = said(cfg, runs, gpus(8))["parallel.cpu_offload"]
    assert message.endswith("set false, or train an adapter (adapter.type: lora)")


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


def test_a_run_that_continues_on_a_machine_whose_gpu_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(OLD_DRIVER, tmp_path, monkeypatch)
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a")
    run = RunDir.create(tmp_path / "runs", run_config(tmp_path, parallel__device="auto"))
    with pytest.raises(InputError, match=r"parallel\.device: auto: driver 450\.51\.06 is too old for torch 2\.13"):
        preflight.continued_run(run, ())
    preflight.continued_run(run, ["parallel.device=cpu"])
