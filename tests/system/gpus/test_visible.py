"""Which GPUs a run may use, and the environment that gives it exactly those."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.gpus.machines import (
    BESIDE_A_DISPLAY_ADAPTER,
    CPU,
    HIDDEN,
    MIXED,
    OLD_DRIVER,
    SLICED,
    TWO_H100,
    Machine,
    install,
    pretend,
    uuids,
)
from trainer.system.errors import InputError
from trainer.system.gpus import visible

FIRST, SECOND = uuids(TWO_H100)
NUMBERS = "of this machine's GPUs (0, 1), and CUDA may ignore it and all that follow; correct the variable, or unset it"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    return lambda described: install(described, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", [0]),
        ("1,0", [1, 0]),
        ("0,-1,1", [0]),
        (SECOND, [1]),
        ("GPU-bbbb, GPU-aaaa", [1, 0]),
    ],
)
def test_the_inherited_variable_restricts_and_orders_the_gpus(machine, monkeypatch, text: str, indices: list[int]):
    machine(TWO_H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert [gpu.index for gpu in visible.visible()] == indices


@pytest.mark.parametrize(
    ("text", "said"),
    [("2", "'2' names none"), ("0,7", "'7' names none"), ("GPU-", "'GPU-' names 2"), ("0,0", "'0' occurs twice")],
)
def test_a_variable_that_names_what_does_not_exist_is_an_error(machine, monkeypatch, text: str, said: str):
    machine(TWO_H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    with pytest.raises(InputError) as error:
        visible.visible()
    assert str(error.value) == f"CUDA_VISIBLE_DEVICES={text}: {said} {NUMBERS}"


def test_a_slice_is_named_by_the_beginning_of_its_uuid(machine, monkeypatch):
    machine(SLICED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-8a1ce3b2")
    assert [gpu.index for gpu in visible.visible()] == [2]
    assert visible.environment(()) == {"CUDA_VISIBLE_DEVICES": "MIG-8a1ce3b2-9f0c-5f3a-8d11-0a1b2c3d4e5f"}


@pytest.mark.parametrize("word", ["0", "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77", "GPU-5d5b"])
def test_a_divided_gpu_that_is_named_as_a_whole_gives_its_first_slice(machine, monkeypatch, word):
    machine(SLICED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", word)
    assert visible.environment(()) == {"CUDA_VISIBLE_DEVICES": "MIG-7f0bd2a1-9f0c-5f3a-8d11-0a1b2c3d4e5f"}


def test_a_chosen_gpu_of_a_mixed_machine_is_named_by_its_uuid_which_cuda_does_not_number_anew(machine):
    machine(MIXED)
    assert visible.environment([0]) == {"CUDA_VISIBLE_DEVICES": uuids(MIXED)[0]}
    assert visible.environment([1]) == {"CUDA_VISIBLE_DEVICES": uuids(MIXED)[1]}


def test_without_a_choice_the_newest_gpu_of_a_mixed_machine_comes_first(machine):
    machine(MIXED)
    assert [gpu.index for gpu in visible.for_run()] == [1, 0]
    assert visible.environment(()) == {"CUDA_VISIBLE_DEVICES": ",".join(reversed(uuids(MIXED)))}


def test_equal_gpus_that_all_may_be_used_need_no_variable(machine):
    machine(TWO_H100)
    assert visible.environment(()) == {}


def test_a_display_adapter_that_torch_cannot_use_is_left_out(machine):
    machine(BESIDE_A_DISPLAY_ADAPTER)
    assert visible.environment(()) == {"CUDA_VISIBLE_DEVICES": uuids(BESIDE_A_DISPLAY_ADAPTER)[1]}


def test_a_run_gets_a_part_of_the_inherited_gpus_only(machine, monkeypatch):
    machine(TWO_H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible.environment(()) == visible.environment([1]) == {"CUDA_VISIBLE_DEVICES": SECOND}
    with pytest.raises(InputError) as error:
        visible.environment([0])
    assert str(error.value) == "GPU 0 was chosen for this run, but the GPUs that it may use are: 1"


def test_without_uuids_numbers_count_as_nvidia_smi_counts(machine, monkeypatch):
    machine(Machine("NVIDIA L4, 23034, 0, 0, 30, [N/A], 580.65.06, 8.9, [N/A]"))
    assert visible.environment([0]) == {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_without_nvidia_smi_a_choice_is_passed_on(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert visible.environment([2, 0]) == {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible.environment(()) == {}


def test_a_run_gets_one_slice_of_a_divided_card(machine):
    machine(SLICED)
    assert [gpu.index for gpu in visible.for_run()] == [1]
    assert visible.environment(()) == {"CUDA_VISIBLE_DEVICES": "MIG-7f0bd2a1-9f0c-5f3a-8d11-0a1b2c3d4e5f"}
    assert visible.environment([2]) == {"CUDA_VISIBLE_DEVICES": "MIG-8a1ce3b2-9f0c-5f3a-8d11-0a1b2c3d4e5f"}


def test_why_a_machine_with_a_driver_offers_no_gpu(machine, monkeypatch):
    machine(TWO_H100)
    listed = visible.visible()
    assert visible.hidden(listed) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible.hidden(listed) == "CUDA_VISIBLE_DEVICES=-1 hides the GPUs of this machine; unset it to use them"
    machine(HIDDEN)
    assert visible.hidden([]) == (
        "nvidia-smi lists no GPU; a container needs --gpus all, a scheduler's job must ask for GPUs"
    )


def test_a_rank_without_cuda_learns_why(machine, monkeypatch):
    machine(OLD_DRIVER)
    assert visible.why_no_cuda().startswith("driver 450.51.06 is too old for torch 2.13.0+cu130")
    machine(TWO_H100)
    assert visible.why_no_cuda() == (
        "CUDA cannot use the NVIDIA H100 80GB HBM3 here; see --doctor, or set parallel.device: cpu"
    )
    pretend(CPU, monkeypatch)
    assert visible.why_no_cuda().startswith("torch 2.13.0+cpu is built without CUDA and cannot use the NVIDIA H100")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert visible.why_no_cuda().startswith("CUDA_VISIBLE_DEVICES=9: '9' names none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible.why_no_cuda() == ""
