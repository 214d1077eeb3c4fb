"""Whether a torch can use a GPU, judged by its version.py, the driver's version and the card's compute capability."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys

import pytest
import torch

from tests.system.gpus.machines import CPU, CU128, CU130, pretend
from trainer.system.gpus import Gpu, support
from trainer.system.gpus.support import Build

ROCM = Build("2.13.0+rocm7.0", hip="7.0.51831")
XPU = Build("2.13.0+xpu", xpu="20250302")
CARD = Gpu(0, "NVIDIA L40S", 46068, 0, 0, 30, "GPU-1", "580.65.06", "8.9")


def card(driver: str = "580.65.06", capability: str = "8.9") -> Gpu:
    return dataclasses.replace(CARD, driver_version=driver, compute_cap=capability)


def said(gpu: Gpu, build: Build) -> str:
    return str(support.unusable([gpu], build) or "")


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    script = (
        "import sys; from trainer.system.gpus import support\n"
        "print(support.installed()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    build = support.installed()
    assert done.stdout.strip() == str(build)
    assert build == Build(torch.__version__, torch.version.cuda or "", torch.version.hip or "", torch.version.xpu or "")


def test_version_files_of_other_builds() -> None:
    text = "from typing import Optional\n__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\n"
    assert support.parse_build(text + "hip: Optional[str] = None\nxpu: Optional[str] = None\n") == CU130
    assert support.parse_build("__version__ = '2.13.0+rocm7.0'\ncuda = None\nhip: Optional[str] = '7.0.51831'") == ROCM


@pytest.mark.parametrize(
    ("driver", "build", "needs"),
    [
        ("580.65.06", CU130, ""),
        ("590.12", CU130, ""),
        ("575.57.08", CU130, "580 or newer"),
        ("525.60.13", CU128, ""),
        ("550.54.15", CU128, ""),
        ("525.60.11", CU128, "525.60.13 or newer"),
        ("", CU130, ""),
    ],
)
def test_a_driver_must_be_as_new_as_torchs_cuda_needs(monkeypatch, driver: str, build: Build, needs: str) -> None:
    pretend(build, monkeypatch)
    major = int(build.cuda[:2])
    expected = (
        f"driver {driver} is too old for torch {build.version}: CUDA {build.cuda} needs {needs}; update the driver, "
        f"install a torch built for CUDA {major - 1}, or set parallel.device: cpu"
    )
    assert said(card(driver), build) == (expected if needs else "")


def test_the_drivers_own_library_knows_better_than_its_number(monkeypatch) -> None:
    pretend(CU130, monkeypatch, libcuda=13000)  # package cuda-compat of a container
    assert said(card("535.104.05"), CU130) == ""
    pretend(CU130, monkeypatch, libcuda=12080)
    assert said(card("570.86.10"), CU130).startswith("driver 570.86.10 is too old")


@pytest.mark.parametrize(
    ("capability", "build", "expected"),
    [
        ("7.5", CU130, ""),
        (
            "7.0",
            CU130,
            "NVIDIA L40S has compute capability 7.0, and torch 2.13.0+cu130 needs 7.5 or more; install a torch built "
            "for CUDA 12, use a newer card, or set parallel.device: cpu",
        ),
        ("7.0", CU128, ""),
        ("12.0", CU128, ""),
        (
            "12.0",
            Build("2.9.0+cu126", cuda="12.6"),
            "NVIDIA L40S has compute capability 12.0, and torch 2.9.0+cu126 has no code for it; install a torch built "
            "for CUDA 12.8 or newer, or set parallel.device: cpu",
        ),
        ("", CU130, ""),
    ],
)
def test_a_card_must_be_one_that_torch_has_code_for(monkeypatch, capability: str, build: Build, expected: str) -> None:
    pretend(build, monkeypatch)
    assert said(card(capability=capability), build) == expected


@pytest.mark.parametrize(
    ("build", "made_for"), [(CPU, "without CUDA"), (ROCM, "for ROCm"), (XPU, "for Intel GPUs")], ids=["cpu", "hip", "x"]
)
def test_a_torch_of_another_kind_cannot_use_an_nvidia_gpu(build: Build, made_for: str) -> None:
    assert said(CARD, build) == (
        f"torch {build.version} is built {made_for} and cannot use the NVIDIA L40S here; install the CUDA build (pip "
        "install torch), or set parallel.device: cpu"
    )


def test_one_card_that_is_too_old_does_not_stop_the_others(monkeypatch) -> None:
    pretend(CU130, monkeypatch)
    old = card(capability="6.1")
    assert support.unusable([old, CARD], CU130) is None
    assert support.usable([old, CARD], CU130) == [CARD]


@pytest.mark.parametrize(("capability", "refused"), [("7.5", True), ("8.0", False), ("", False)])
def test_bf16_needs_ampere(capability: str, refused: bool) -> None:
    assert support.lacks_bf16(card(capability=capability)) == refused


def test_gpus_of_other_makers_are_spoken_of_truly(monkeypatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in found else None)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert support.other_makers(CPU) is None and support.other_makers(CU130) is None
    assert str(support.other_makers(ROCM)) == (
        "torch 2.13.0+rocm7.0 is built for ROCm: AMD GPUs are used as CUDA devices, which was never tested, and the "
        "plan and the queue do not see them"
    )
    on_cpu = "ShardStudio trains on NVIDIA GPUs, and here on the CPU"
    assert str(support.other_makers(XPU)) == f"torch 2.13.0+xpu is built for Intel GPUs: {on_cpu}"
    found.append("rocm-smi")
    assert str(support.other_makers(CPU)) == (
        f"rocm-smi is installed, but torch 2.13.0+cpu is not built for ROCm: {on_cpu}"
    )
    found.clear()
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert str(support.other_makers(CPU)) == f"Apple's GPU is not used: {on_cpu}"
