"""What a machine does now: by a small library in place of NVIDIA's, by a real one where there is a GPU, and by none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trainer.system.gpus import load
from trainer.system.gpus.load import GpuLoad, Load

NVML = """
#include <string.h>
typedef unsigned int u;
int nvmlInitWithFlags(u flags) { return %(init)d; }
int nvmlDeviceGetCount_v2(u *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(u index, void **card) { *card = (void *)(unsigned long)(index + 1); return 0; }
int nvmlDeviceGetUUID(void *card, char *uuid, u length) {
  strcpy(uuid, card == (void *)1 ? "GPU-aa" : "GPU-bb");
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *card, u *rates) { rates[0] = 97; rates[1] = 40; return 0; }
int nvmlDeviceGetPowerUsage(void *card, u *mw) { *mw = 699500; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *card, u *mw) { *mw = 700000; return 0; }
int nvmlDeviceGetTemperature(void *card, int sensor, u *celsius) { *celsius = 88; return card == (void *)1 ? 0 : 3; }
int nvmlDeviceGetClockInfo(void *card, int kind, u *mhz) { *mhz = kind == 1 ? 1410 : 1; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *card, unsigned long long *reasons) {
  *reasons = card == (void *)1 ? 0x4 | 0x20 | 0x40 : 0x1;
  return 0;
}
char *nvmlErrorString(int code) { return "none"; }
"""
ASK = """
import json, os, sys
from dataclasses import asdict
from trainer.system.gpus import load
found = []
for os.environ["CUDA_VISIBLE_DEVICES"] in sys.argv[1:]:
    found.append(asdict(load.read())["gpus"])
print(json.dumps(found))
"""


def asked(folder: Path, *visible: str, init: int = 0) -> list[list[dict[str, object]]]:
    """The GPUs that a process finds which is given this library, for each choice of GPUs."""
    (folder / "nvml.c").write_text(NVML % {"init": init})
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, folder / "nvml.c"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    argv = [sys.executable, "-c", ASK, *visible]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    found: list[list[dict[str, object]]] = json.loads(done.stdout)
    return found


needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
HOT = {
    "index": 0, "busy": 97, "celsius": 88, "watts": 699.5, "limit_watts": 700, "mhz": 1410,
    "slowed_by": ["power", "heat"],
}  # fmt: skip
IDLE = HOT | {"index": 1, "celsius": -1, "slowed_by": []}
"""A card that does not report its temperature, and whose clocks are low since it is idle."""


@needs_cc
def test_the_drivers_library_says_what_each_gpu_of_the_run_does(tmp_path: Path):
    assert asked(tmp_path, "", "1", "GPU-a", "1,0") == [[HOT, IDLE], [IDLE], [HOT], [HOT, IDLE]]


@needs_cc
def test_a_library_without_its_driver_is_no_gpu_and_no_error(tmp_path: Path):
    assert asked(tmp_path, "", init=9) == [[]]


def test_without_the_library_there_is_the_host_memory():
    found = load.read()
    assert found.host_total == psutil.virtual_memory().total
    assert 0 < found.host_used < found.host_total


@pytest.mark.gpu
def test_a_real_gpu_reports_all_numbers(device: str):
    assert device == "cuda"
    assert all(min(gpu.busy, gpu.celsius - 1, gpu.watts - 1, gpu.mhz - 1) >= 0 for gpu in load.read().gpus)
    assert load.read().gpus


def at(time: float, busy: float, *slowed_by: load.Reason) -> Load:
    return Load(100, 1000, (GpuLoad(0, busy, 87.0, 295.0, 300.0, 1200.0, slowed_by),), time)


def test_several_looks_are_one_line_with_their_means_and_every_reason():
    assert load.mean([at(1, 0, "heat"), at(6, 50), at(11, 100, "power")]) == at(11, 50, "heat", "power")
    assert load.mean([at(1, 10)]) == at(1, 10)


@pytest.mark.parametrize(
    ("reasons", "sentence"),
    [
        ([["heat", "power"]] * 3, "by its temperature (87 °C): improve its cooling, or lower its power limit"),
        ([["hardware"]] * 2 + [[]], "by its hardware: check its power cables, power supply and cooling"),
        (
            [["power"]],
            "to its power limit (295 of 300 W), which is usual under full load: nvidia-smi -pl changes the limit",
        ),
        ([["heat"], []], ""),
        ([[]] * 3, ""),
    ],
)
def test_a_gpu_that_is_slow_most_of_the_time_is_said_with_what_to_do(reasons: list[list[load.Reason]], sentence: str):
    found = load.slow([at(step, 100, *words) for step, words in enumerate(reasons)])
    assert found == ([f"GPU 0 is slowed down {sentence}."] if sentence else [])


def test_no_load_is_not_slow():
    assert load.slow([]) == []
