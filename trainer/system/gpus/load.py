"""What this machine does at the moment: its GPUs as the driver's own library (NVML) says it, and its host memory.

No process is started and no context made on a GPU, so that it may be asked every few seconds while a run trains.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import psutil
from pydantic import Field

Reason = Literal["power", "heat", "hardware"]
REASONS: dict[int, Reason] = {0x04: "power", 0x08: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "hardware"}
"""{bit of NVML's reasons for lower clocks (nvmlClocksEventReason*): what slows the GPU down}. Clocks that are low since
the GPU is idle, or were chosen, are not among them."""
Number = Annotated[float, Field(ge=-1, lt=1e9, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
LEAST_SLOW = 0.5
"""A GPU is called slow where more than this share of its last loads were."""


@dataclass(frozen=True)
class GpuLoad:
    """One GPU. A number that the driver does not report is -1.

    Attributes:
        index: nvidia-smi's.
        busy: Percent of the last moment in which a kernel ran.
        celsius: Temperature.
        watts: Power.
        limit_watts: The limit of its power.
        mhz: Clock of its multiprocessors.
        slowed_by: What lowers its clocks: its power limit, heat, its hardware.
    """

    index: Annotated[int, Field(ge=0, lt=4096)]
    busy: Number = -1
    celsius: Number = -1
    watts: Number = -1
    limit_watts: Number = -1
    mhz: Number = -1
    slowed_by: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Load:
    """A machine at one time.

    Attributes:
        host_used: Bytes of host memory that are not available.
        host_total: Bytes of host memory.
        gpus: Those that CUDA_VISIBLE_DEVICES names, or all.
        time: Unix seconds.
    """

    host_used: Bytes
    host_total: Bytes
    gpus: Annotated[tuple[GpuLoad, ...], Field(max_length=64)] = ()
    time: Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)] = field(default_factory=time.time)


def read() -> Load:
    """Return what this machine does now. Without NVIDIA's library there are no GPUs in it."""
    memory, nvml = psutil.virtual_memory(), _library()
    gpus = tuple(_gpus(nvml)) if nvml else ()
    return Load(memory.total - memory.available, memory.total, gpus)


@functools.cache
def _library() -> Any:
    """NVIDIA's library as a module, once it has found the driver; None without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return None
    except pynvml.NVMLError:  # there is no driver, or it is of another version than its library
        return None
    return pynvml


def _gpus(nvml: Any) -> list[GpuLoad]:
    def number(ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except nvml.NVMLError:  # this card or driver does not report it
            return None

    found = []
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    for index in range(number(nvml.nvmlDeviceGetCount) or 0):
        card = number(nvml.nvmlDeviceGetHandleByIndex, index)
        uuid = number(nvml.nvmlDeviceGetUUID, card) if card else ""
        if not card or (visible and not any(word == str(index) or uuid.startswith(word) for word in visible)):
            continue
        busy = number(nvml.nvmlDeviceGetUtilizationRates, card)
        watts, limit = number(nvml.nvmlDeviceGetPowerUsage, card), number(nvml.nvmlDeviceGetEnforcedPowerLimit, card)
        reasons = number(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, card) or 0  # its name on every driver
        celsius = number(nvml.nvmlDeviceGetTemperature, card, nvml.NVML_TEMPERATURE_GPU)
        mhz = number(nvml.nvmlDeviceGetClockInfo, card, nvml.NVML_CLOCK_SM)
        found.append(
            GpuLoad(
                index,
                -1 if busy is None else busy.gpu,
                -1 if celsius is None else celsius,
                -1 if watts is None else watts / 1000,
                -1 if limit is None else limit / 1000,
                -1 if mhz is None else mhz,
                tuple(dict.fromkeys(word for bit, word in REASONS.items() if reasons & bit)),
            )
        )
    return found


def mean(loads: Sequence[Load]) -> Load:
    """Return one load for several in a row of the same GPUs: means, at the time of the last, with every reason."""
    gpus = []
    for same in zip(*(load.gpus for load in loads), strict=False):
        numbers = {
            name: sum(getattr(gpu, name) for gpu in same) / len(same)
            for name in ("busy", "celsius", "watts", "limit_watts", "mhz")
        }
        reasons = tuple(dict.fromkeys(word for gpu in same for word in gpu.slowed_by))
        gpus.append(replace(same[-1], **numbers, slowed_by=reasons))
    used = sum(load.host_used for load in loads) // len(loads)
    return replace(loads[-1], host_used=used, gpus=tuple(gpus))


def slow(loads: Sequence[Load]) -> list[str]:
    """Return a sentence for each GPU that is slowed down in most of these loads, with what can be done."""
    sentences = []
    for gpu in loads[-1].gpus if loads else ():
        same = [other for load in loads for other in load.gpus if other.index == gpu.index]
        why: dict[Reason, str] = {
            "heat": f"by its temperature ({gpu.celsius:.0f} °C): improve its cooling, or lower its power limit",
            "hardware": "by its hardware: check its power cables, power supply and cooling",
            "power": f"to its power limit ({gpu.watts:.0f} of {gpu.limit_watts:.0f} W), which is usual under full "
            "load: nvidia-smi -pl changes the limit",
        }
        often = [reason for reason in why if sum(reason in one.slowed_by for one in same) > LEAST_SLOW * len(same)]
        sentences += [f"GPU {gpu.index} is slowed down {why[often[0]]}."] if often else []
    return sentences
