"""Whether the installed torch can use this machine's GPUs: its build, the driver and the cards. Imports no torch.

See DECISIONS 171.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.system.gpus import Gpu, version_of

DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""{CUDA major version: oldest driver}. Within a major version every driver runs every minor one.
Source: CUDA Compatibility, NVIDIA, table 1 (minor version compatibility)."""
CAPABILITIES = {12: "5.0", 13: "7.5"}
"""{CUDA major version: least compute capability}. CUDA 13 dropped Maxwell, Pascal and Volta."""
BLACKWELL, BLACKWELL_CUDA = (10, 0), (12, 8)
BF16_CAPABILITY = (8, 0)
"""Cards before Ampere have no bf16 products, and attention in bf16 falls back to the kernel that keeps all scores."""
OR_CPU = "or set parallel.device: cpu"


@dataclass(frozen=True)
class Build:
    """The platform that torch was built for; an empty version without one."""

    version: str
    cuda: str = ""
    hip: str = ""
    xpu: str = ""


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy."""

    fact: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.fact}; {self.remedy}" if self.remedy else self.fact


def installed() -> Build | None:
    """Return the build of the installed torch, or None without one. Reads its version.py as text."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    file = Path(torch.origin).parent / "version.py"
    return parse_build(file.read_text(encoding="utf-8")) if file.is_file() else None


def parse_build(text: str) -> Build:
    """Parse torch's version.py."""
    values = dict(re.findall(r"^(\w+)[^=\n]*= *'([^']*)'", text, re.MULTILINE))
    return Build(values.get("__version__", ""), *(values.get(name, "") for name in ("cuda", "hip", "xpu")))


def unusable(listed: Sequence[Gpu], build: Build | None) -> Finding | None:
    """Return why torch cannot use any of these NVIDIA GPUs, or None if nothing speaks against it."""
    if not listed or build is None:
        return None
    if not build.cuda:
        made_for = "for ROCm" if build.hip else "for Intel GPUs" if build.xpu else "without CUDA"
        return Finding(
            f"torch {build.version} is built {made_for} and cannot use the {listed[0].name} here",
            f"install the CUDA build (pip install torch), {OR_CPU}",
        )
    return _old_driver(listed[0].driver_version, build) or (
        _wrong_card(listed[0], build) if all(_wrong_card(gpu, build) for gpu in listed) else None
    )


def usable(listed: Sequence[Gpu], build: Build | None) -> list[Gpu]:
    """Return the GPUs that torch has code for. A display adapter too old for it must not stop the GPU next to it."""
    return [gpu for gpu in listed if build is None or not build.cuda or not _wrong_card(gpu, build)]


def _old_driver(driver: str, build: Build) -> Finding | None:
    major = version_of(build.cuda)[0]
    oldest = DRIVERS.get(major, "")
    if known := libcuda_version():
        is_old = known // 1000 < major
    else:
        is_old = bool(driver and oldest) and version_of(driver) < version_of(oldest)
    if not is_old:
        return None
    needs = f" {oldest} or newer" if oldest else " a newer one"
    return Finding(
        f"driver {driver} is too old for torch {build.version}: CUDA {build.cuda} needs{needs}",
        f"update the driver, install a torch built for CUDA {major - 1}, {OR_CPU}",
    )


def libcuda_version() -> int:
    """Return the CUDA version that the driver's library supports, such as 12040; 0 if it cannot be loaded.

    A container may bring a newer library than the driver's own (package cuda-compat). It needs no context.
    """
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _wrong_card(gpu: Gpu, build: Build) -> Finding | None:
    cuda = version_of(build.cuda)
    least = CAPABILITIES.get(cuda[0], "")
    if not gpu.capability:
        return None
    has = f"{gpu.name} has compute capability {gpu.compute_cap}"
    if gpu.capability < version_of(least):
        return Finding(
            f"{has}, and torch {build.version} needs {least} or more",
            f"install a torch built for CUDA {cuda[0] - 1}, use a newer card, {OR_CPU}",
        )
    if gpu.capability >= BLACKWELL and cuda < BLACKWELL_CUDA:
        return Finding(
            f"{has}, and torch {build.version} has no code for it",
            f"install a torch built for CUDA 12.8 or newer, {OR_CPU}",
        )
    return None


def lacks_bf16(gpu: Gpu) -> bool:
    """Whether training in bf16 is refused on this GPU."""
    return bool(gpu.capability) and gpu.capability < BF16_CAPABILITY


def other_makers(build: Build | None) -> Finding | None:
    """Return what becomes of the GPUs of other makers, as far as the build of torch or their tools show them."""
    if build is None:
        return None
    on_cpu = "ShardStudio trains on NVIDIA GPUs, and here on the CPU"
    if build.hip:
        return Finding(
            f"torch {build.version} is built for ROCm: AMD GPUs are used as CUDA devices, which was never tested, and "
            "the plan and the queue do not see them"
        )
    if build.xpu:
        return Finding(f"torch {build.version} is built for Intel GPUs: {on_cpu}")
    if shutil.which("rocm-smi"):
        return Finding(f"rocm-smi is installed, but torch {build.version} is not built for ROCm: {on_cpu}")
    if platform.system() == "Darwin":
        return Finding(f"Apple's GPU is not used: {on_cpu}")
    return None
