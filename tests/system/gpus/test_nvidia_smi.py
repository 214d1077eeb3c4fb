"""What is read from nvidia-smi: of old and new drivers, of divided cards, and where no GPU can be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.gpus.machines import HIDDEN, OLD_DRIVER, SLICED, TWO_H100, install
from trainer.system import gpus
from trainer.system.gpus import Gpu


def test_a_gpu_has_its_uuid_driver_and_compute_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(TWO_H100, tmp_path, monkeypatch)
    first, second = gpus.read()
    uuid = "GPU-aaaa1111-0000-1111-2222-333344445555"
    assert first == Gpu(0, "NVIDIA H100 80GB HBM3", 81559, 4, 0, 31, uuid, "580.65.06", "9.0")
    assert (second.index, second.busy, second.capability) == (1, 97, (9, 0))


def test_a_driver_that_does_not_know_a_field_is_asked_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(OLD_DRIVER, tmp_path, monkeypatch)
    (card,) = gpus.read()
    assert (card.driver_version, card.memory, card.compute_cap, card.capability) == ("450.51.06", 40536, "", ())


def test_numbers_and_texts_that_the_driver_does_not_report_are_marked() -> None:
    (card,), divided = gpus.parse("NVIDIA GB10, [N/A], [N/A], 3, 40, [N/A], 580.95.05, 12.1, [N/A]\n")
    assert (card.memory, card.memory_used, card.busy, card.uuid, divided) == (-1, -1, 3, "", set())


def test_a_driver_without_a_gpu_lists_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(HIDDEN, tmp_path, monkeypatch)
    assert gpus.exist() and gpus.read() == []


def test_slices_stand_in_place_of_the_card_that_they_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(SLICED, tmp_path, monkeypatch)
    first, second = gpus.read()
    assert first.name == "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    assert (first.index, first.memory, first.memory_used, first.is_slice) == (1, 38912, -1, True)
    assert first.uuid == "MIG-7f0bd2a1-9f0c-5f3a-8d11-0a1b2c3d4e5f"
    assert (second.index, second.uuid[:12], second.capability) == (2, "MIG-8a1ce3b2", (8, 0))


def test_slices_of_old_drivers_and_cards_without_slices() -> None:
    whole = [Gpu(index, "A100", 40536, 0, 0, 30, f"GPU-{index}") for index in range(3)]
    listing = """GPU 0: A100 (UUID: GPU-0)
GPU 1: A100 (UUID: GPU-1)
  MIG 1g.5gb Device 0: (UUID: MIG-GPU-1/7/0)
  MIG 1c.3g.20gb Device 1: (UUID: MIG-GPU-1/2/0)
GPU 2: A100 (UUID: GPU-2)"""
    found = gpus.with_slices(whole, {1, 2}, listing)
    assert [(gpu.index, gpu.uuid, gpu.memory) for gpu in found] == [
        (0, "GPU-0", 40536),
        (3, "MIG-GPU-1/7/0", 4864),
        (4, "MIG-GPU-1/2/0", 19456),
    ]
