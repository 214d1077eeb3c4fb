"""What the page says of a machine: one sentence, its disk, versions, and checks that are renewed in the background."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from app import machine
from app.machine import Examination, Machine
from trainer.launcher.doctor import Check
from trainer.system.gpus import Gpu

FINE = Check("ok", "disk", "99 GB free")
ADVICE = Check("warn", "shared memory", "64 MiB", "mount more")
ERROR = Check("fail", "torch", "not installed", "pip install torch")


def gpus(*sizes: int) -> list[Gpu]:
    return [Gpu(index, "NVIDIA L40S", size, 0, 0, 30) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("checks", "sizes", "sentence"),
    [
        (
            [FINE],
            (),
            "CPU only: the demo model trains here, and small language models; FLUX.2 and its kind need GPUs.",
        ),
        ([FINE], (49152,), "1 GPU, 48 GiB: runs can start. New run says which models fit."),
        (
            [FINE, ADVICE],
            (81920, 49152),
            "2 GPUs, 48 GiB each: runs can start. New run says which models fit. 1 warning below.",
        ),
        ([FINE, ADVICE, ERROR], (49152,), "Runs may not start: see torch."),
    ],
    ids=["cpu", "one", "two", "broken"],
)
def test_one_sentence_says_what_can_run_here(checks: list[Check], sizes: tuple[int, ...], sentence: str):
    assert machine.headline(checks, gpus(*sizes)) == sentence


def ended(examined: Machine, after: float = 0.0) -> Examination:
    deadline = time.monotonic() + 30
    while (found := examined.examined()).is_running or found.at <= after:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_the_last_checks_are_there_at_once_while_others_run(tmp_path: Path):
    examined = Machine(tmp_path / "runs")
    first = examined.examined()
    assert first == Examination(is_running=True)
    found = ended(examined)
    names = [check.what for check in found.checks]
    assert names[0] == "python" and {"torch", "disk", "port"} <= set(names)
    assert [check.what for check in machine.packages(found.checks)][:1] == ["python"]
    assert "disk" not in {check.what for check in machine.packages(found.checks)}
    again = examined.examined(is_fresh=True)
    assert again.is_running and again.checks == found.checks and again.at == found.at
    assert ended(examined, found.at).at > found.at


def test_checks_that_cannot_be_made_say_why_and_are_made_when_asked_again(tmp_path: Path):
    examined = Machine(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no file can be opened any more
    try:
        found = ended(examined)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.failure.startswith("This machine cannot be checked: [Errno 24] Too many open files")
    examined.examined(is_fresh=True)
    assert ended(examined, found.at).failure == ""


def test_the_disk_counts_a_file_with_two_names_once(tmp_path: Path):
    runs = tmp_path / "runs"
    (runs / "a" / "export").mkdir(parents=True)
    (runs / "a" / "export" / "adapter.safetensors").write_bytes(os.urandom(300_000))
    (runs / "downloads").mkdir()
    (runs / "downloads" / "adapter.safetensors").hardlink_to(runs / "a" / "export" / "adapter.safetensors")
    disk = machine.disk_of(runs)
    assert 290_000 < disk.runs < 320_000
    assert 0 < disk.free <= disk.total
    assert machine.disk_of(tmp_path / "later" / "runs").runs == 0
