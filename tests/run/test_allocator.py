"""Settings of torch's allocators for the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import run_config
from trainer.run import allocator
from trainer.run.allocator import pinned_bytes, pins_exactly
from trainer.system.amounts import MIB

OFFLOADED: dict[str, Any] = {"parallel__cpu_offload": True, "parallel__strategy": "full"}


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("changes", [{}, OFFLOADED])
def test_ranks_get_settings_that_this_torch_knows(changes: dict[str, Any]) -> None:
    cfg = run_config(Path("pictures"), **changes)
    settings = allocator.environment(pins_exactly(cfg), ["NVIDIA H100 80GB HBM3"])["PYTORCH_ALLOC_CONF"]
    assert settings.startswith("expandable_segments:True")
    torch._C._accelerator_setAllocatorSettings(settings)  # torch 2.11 raises an error for a name it does not know


@pytest.mark.parametrize("name", allocator.VARIABLES)
def test_what_the_user_has_set_is_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert allocator.environment(True, ["NVIDIA A100"]) == {}
    assert not pins_exactly(run_config(Path("pictures"), **OFFLOADED)), "the plan counts what the ranks will take"


@pytest.mark.parametrize(
    ("kernel", "gpu", "expected"),
    [
        ("6.8.0-45-generic", "NVIDIA GeForce RTX 4090", True),
        ("6.8.0-45-generic", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", True),
        ("5.15.153.1-microsoft-standard-WSL2", "NVIDIA RTX A4000", False),
        ("5.15.148-tegra", "Orin", False),
        ("6.8.0-45-generic", "NVIDIA A40-48Q", False),
        ("6.8.0-45-generic", "GRID T4-16C", False),
    ],
)
def test_expandable_segments_are_left_out_where_drivers_fail_on_them(kernel: str, gpu: str, expected: bool) -> None:
    assert allocator.can_expand(kernel, [gpu]) is expected


def test_a_machine_without_gpus_gets_no_settings() -> None:
    assert allocator.environment(False, []) == {}


@pytest.mark.parametrize(
    ("changes", "installed", "expected"),
    [
        (OFFLOADED, "2.13.1", True),
        (OFFLOADED, "3.0.0", True),
        (OFFLOADED, "2.11.0+cu130", False),
        ({**OFFLOADED, "adapter__type": "none"}, "2.13.1", False),
        ({"parallel__offload_blocks": 0.5}, "2.13.1", True),
        ({}, "2.13.1", False),
    ],
)
def test_a_frozen_base_that_is_offloaded_is_pinned_exactly_where_torch_can(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], installed: str, expected: bool
) -> None:
    monkeypatch.setattr(allocator, "version", lambda name: installed)
    allocator._has_setting.cache_clear()
    try:
        assert pins_exactly(run_config(Path("pictures"), **changes)) is expected
    finally:
        allocator._has_setting.cache_clear()


def test_pinned_memory_is_a_power_of_two_unless_it_is_exact() -> None:
    sizes = [0, 1, 3 * MIB, 16 * MIB, 18 * MIB, 162 * MIB]
    assert [pinned_bytes(size, False) for size in sizes] == [0, 1, 4 * MIB, 16 * MIB, 32 * MIB, 256 * MIB]
    assert [pinned_bytes(size, True) for size in sizes] == [0, 1, 4 * MIB, 16 * MIB, 18 * MIB, 162 * MIB]


@pytest.mark.parametrize("name", [*allocator.HEAP, "GLIBC_TUNABLES"])
def test_what_the_user_has_set_of_the_heap_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (*allocator.HEAP, "GLIBC_TUNABLES"):
        monkeypatch.delenv(other, raising=False)
    assert allocator.heap_environment() == {
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "268435456",
    }
    monkeypatch.setenv(name, "1")
    assert allocator.heap_environment() == {}
