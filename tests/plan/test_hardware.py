"""The speed of a GPU, known by the name that its driver gives it, and what a machine of several is planned as."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.common import run
from tests.system.gpus.machines import BESIDE_A_DISPLAY_ADAPTER, MIXED, SLICED, install
from trainer.launcher.plan_command import lines
from trainer.plan.cards import SPEEDS, speed_of
from trainer.plan.hardware import CARDS, MEMORY, detected, like, named, of_machine
from trainer.plan.search.fixes import planned
from trainer.system.amounts import GB, GIB, MIB
from trainer.system.gpus import Gpu


@pytest.mark.parametrize(
    ("text", "count", "name", "mib"),
    [
        ("4x4090", 4, "RTX 4090", 24564),
        ("8xh100", 8, "H100", 81559),
        ("8 x H100", 8, "H100", 81559),
        ("2xNVIDIA GeForce RTX 3090", 2, "RTX 3090", 24576),
        ("a100-80gb", None, "A100 SXM4 80GB", 81920),
        ("2xA100-SXM4-40GB", 2, "A100 SXM4 40GB", 40960),
        ("RTX PRO 6000 Blackwell", None, "RTX PRO 6000 Blackwell", 97887),
        ("4x24GB", 4, "24 GB (RTX 4090)", 24564),
        ("80gb", None, "80 GB (H100)", 81559),
    ],
)
def test_gpus_are_named_by_their_memory_or_their_model(text: str, count: int | None, name: str, mib: int) -> None:
    found = named(text)
    assert (found.count, found.card.name, found.card.memory) == (count, name, mib * MIB)


def test_each_card_that_can_be_named_has_a_speed_of_its_own() -> None:
    assert all(named(name).card == like(model, mib * MIB) for name, (model, mib) in MEMORY.items())


def gpu(index: int, name: str, mib: int) -> Gpu:
    return Gpu(index, name, mib, 0, 0, 40)


@pytest.mark.parametrize(
    ("name", "tflops", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 3350),
        ("NVIDIA H100 PCIe", 756, 2000),
        ("NVIDIA H100 NVL", 835, 3900),
        ("NVIDIA H200", 989, 4800),
        ("NVIDIA B200", 2250, 8000),
        ("NVIDIA GH200 480GB", 989, 4000),
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA A100-PCIE-40GB", 312, 1555),
        ("NVIDIA A10", 125, 600),
        ("NVIDIA A10G", 70, 600),
        ("NVIDIA A40", 150, 696),
        ("NVIDIA RTX A6000", 155, 768),
        ("NVIDIA RTX A4000", 77, 448),
        ("NVIDIA RTX 6000 Ada Generation", 364, 960),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503, 1792),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 439, 1792),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA L40", 181, 864),
        ("NVIDIA L40S", 362, 864),
        ("Tesla T4", 8.1, 320),
        ("Tesla V100-SXM2-32GB", 15.7, 900),
        ("Tesla V100-PCIE-16GB", 14, 900),
        ("Quadro RTX 6000", 16.3, 672),
        ("NVIDIA GeForce RTX 3060", 25, 360),
        ("NVIDIA GeForce RTX 3090", 71, 936),
        ("NVIDIA GeForce RTX 4070", 58, 504),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88, 672),
        ("NVIDIA GeForce RTX 4090", 165, 1008),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 66, 576),
        ("NVIDIA GeForce RTX 5070 Ti", 88, 896),
        ("NVIDIA GeForce RTX 5090", 209, 1792),
    ],
)
def test_a_card_is_known_by_its_name_whatever_its_memory(name: str, tflops: float, bandwidth: float) -> None:
    card = like(name, 24 * GIB)
    assert (card.tflops, card.bandwidth, card.speed_of) == (tflops, bandwidth * GB, "")


def test_every_row_is_found_by_its_own_words() -> None:
    assert [row.words for row in SPEEDS if speed_of(f"NVIDIA {row.words}") is not row] == []


def test_links_are_those_of_the_form_of_the_card() -> None:
    assert like("NVIDIA A100-SXM4-80GB", 80 * GIB).link == 240 * GB
    assert like("NVIDIA A100 80GB PCIe", 80 * GIB).link == 11 * GB


def test_an_unknown_card_is_as_fast_as_one_of_its_memory_and_says_so() -> None:
    card = like("NVIDIA RTX 9999", 90 * GIB)
    assert (card.tflops, card.memory) == (CARDS["80gb"].tflops, 90 * GIB)
    assert card.speed_of == "that of 80 GB (H100), which has the nearest memory"
    laptop = like("NVIDIA RTX 2000 Ada Generation Laptop GPU", 8 * GIB)
    assert (laptop.tflops, laptop.speed_of) == (24, "half that of RTX 2000 Ada")


def test_the_plan_says_that_a_speed_was_assumed(tmp_path: Path) -> None:
    cfg = run("flux2 klein-4b", "train.checkpointing=full")

    def said(name: str) -> list[str]:
        found = planned(cfg, like(name, 24 * GIB), tmp_path)
        assert found is not None
        return [line for line in lines(cfg, found) if line.startswith("speed ")]

    assert said("NVIDIA RTX 9999") == [
        "speed            unknown for this GPU; assumed: that of 24 GB (RTX 4090), which has the nearest memory"
    ]
    assert said("NVIDIA GeForce RTX 3090") == []


def test_a_slice_has_its_share_of_the_card() -> None:
    whole = like("NVIDIA A100-SXM4-80GB", 81920 * MIB)
    part = like("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 38912 * MIB)
    assert part.tflops == pytest.approx(whole.tflops * 3 / 7) and part.bandwidth == whole.bandwidth / 2
    assert part.memory == 38912 * MIB
    one = like("NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb", 38912 * MIB)
    assert one.tflops == pytest.approx(whole.tflops / 7) and one.bandwidth == whole.bandwidth / 2
    assert like("NVIDIA A30 MIG 2g.12gb", 11673 * MIB).tflops == 165 / 2


def test_a_machine_is_as_good_as_its_smallest_gpu() -> None:
    assert of_machine([]) is None and of_machine([gpu(0, "NVIDIA GB10", -1)]) is None
    hardware = of_machine([gpu(0, "NVIDIA H100 PCIe", 81559), gpu(1, "GPU of 24000", 24000)])
    assert hardware is not None
    assert (hardware.count, hardware.card.name, hardware.card.memory) == (2, "GPU of 24000", 24000 * MIB)
    assert hardware.card.tflops == CARDS["24gb"].tflops
    equal = of_machine([gpu(0, "NVIDIA GeForce RTX 4090", 24564), gpu(1, "NVIDIA GeForce RTX 3090", 24564)])
    assert equal is not None and equal.card.name == "NVIDIA GeForce RTX 3090", "of equal memory the slower counts"


def test_the_plan_is_for_the_gpus_that_a_run_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(SLICED, tmp_path, monkeypatch)
    found = detected()
    assert found is not None and (found.count, found.card.name) == (1, "NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    install(MIXED, tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = detected()
    assert found is not None and (found.count, found.card.name) == (1, "NVIDIA GeForce RTX 4090")


def test_a_display_adapter_that_torch_has_no_code_for_is_not_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(BESIDE_A_DISPLAY_ADAPTER, tmp_path, monkeypatch)
    found = detected()
    assert found is not None
    assert (found.card.name, found.count) == ("NVIDIA GeForce RTX 3090", 1)


def test_a_laptops_card_is_not_taken_for_its_namesake() -> None:
    assert like("NVIDIA RTX PRO 5000 Blackwell Generation Laptop GPU", 24 * GIB).speed_of
    assert not like("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 96 * GIB).speed_of
