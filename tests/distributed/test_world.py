"""How a process joins the ranks and leaves them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import run_ranks
from tests.system.gpus.machines import CPU, HIDDEN, OLD_DRIVER, TWO_H100, install, pretend
from trainer.config.sections import ParallelConfig
from trainer.distributed import world as worlds
from trainer.distributed.world import World, connect_gpus, require_communication
from trainer.system.errors import InputError

SCRIPT = """
import os
from trainer.config.sections import ParallelConfig
from trainer.distributed.world import connect

def networks():
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")

with connect(ParallelConfig(device="cpu")):
    print(*networks())
print(*networks())
"""


def test_only_while_the_ranks_of_one_machine_are_connected_do_they_stay_on_loopback() -> None:
    environment = {**os.environ, "NCCL_SOCKET_IFNAME": "eth0"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["lo =lo", "None eth0"], "a run of several machines may follow"


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose CUDA does not work."""

    def init() -> None:
        raise RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


def device_or_error(device: str) -> str:
    try:
        return str(worlds._device(ParallelConfig(device=device), 0, 1))
    except InputError as error:
        return str(error)


CUDA_SAYS = " (Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized)"


@pytest.mark.usefixtures("no_cuda")
def test_auto_never_leaves_an_nvidia_gpu_for_the_cpu_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(OLD_DRIVER, tmp_path, monkeypatch)
    for device in ("auto", "cuda"):
        assert device_or_error(device) == (
            f"parallel.device: {device}: driver 450.51.06 is too old for torch 2.13.0+cu130: CUDA 13.0 needs 580 or "
            "newer; update the driver, install a torch built for CUDA 12, or set parallel.device: cpu" + CUDA_SAYS
        )
    assert device_or_error("cpu") == "cpu"
    install(TWO_H100, tmp_path, monkeypatch)
    assert device_or_error("auto") == (
        "parallel.device: auto: CUDA cannot use the NVIDIA H100 80GB HBM3 here; see --doctor, or set parallel.device: "
        "cpu" + CUDA_SAYS
    )
    pretend(CPU, monkeypatch)
    assert "torch 2.13.0+cpu is built without CUDA and cannot use the NVIDIA H100" in device_or_error("auto")


@pytest.mark.usefixtures("no_cuda")
def test_auto_trains_on_the_cpu_where_no_gpu_can_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(HIDDEN, tmp_path, monkeypatch)
    assert device_or_error("auto") == "cpu"
    assert device_or_error("cuda") == (
        "parallel.device: cuda: no NVIDIA GPU is visible to this process; see --doctor, or set parallel.device: cpu"
        + CUDA_SAYS
    )
    install(TWO_H100, tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_or_error("auto") == "cpu"


def test_several_ranks_on_gpus_need_nccl_and_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert worlds._backend(cuda, 4) == worlds._backend(cuda, 1) == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert worlds._backend(torch.device("cpu"), 4) == worlds._backend(cuda, 1) == "gloo"
    with pytest.raises(InputError, match=r"^parallel\.devices: 4 ranks on GPUs communicate through NCCL, which torch "):
        worlds._backend(cuda, 4)


def communicate(world: World, fault: str) -> str:
    """The error of `require_communication`, on gloo, with a fault in its collective on every rank."""
    actual = dist.all_reduce

    def faulty(tensor: torch.Tensor) -> None:
        actual(tensor)
        if fault == "raises":
            raise dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94\nncclUnhandledCudaError\nDuplicate GPU")
        if fault == "wrong":
            tensor.zero_()

    dist.all_reduce = faulty
    try:
        require_communication(world.device)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.all_reduce = actual
    return ""


REMEDY = (
    "run --doctor; NCCL_DEBUG=INFO logs what NCCL tries, NCCL_P2P_DISABLE=1 avoids faulty links, and "
    "parallel.devices: 1 needs none"
)


def test_the_first_collective_names_the_gpu_its_error_and_a_remedy() -> None:
    assert run_ranks(2, communicate, "") == ["", ""]
    first, second = run_ranks(2, communicate, "raises")
    assert first == (
        "the first all_reduce between 2 ranks, on cpu (cpu) of rank 0, failed: NCCL error in: ProcessGroupNCCL.cpp:94 "
        f"ncclUnhandledCudaError Duplicate GPU; {REMEDY}"
    )
    assert " of rank 1, failed: NCCL error" in second
    assert run_ranks(2, communicate, "wrong")[0] == (
        "the first all_reduce between 2 ranks, on cpu (cpu) of rank 0, gave 0: the GPUs do not exchange data "
        f"correctly; {REMEDY}"
    )


def test_ranks_on_gpus_communicate_before_anything_else_and_one_rank_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.device, str]] = []
    for kind, size in (("cpu", 2), ("cuda", 1), ("cuda", 2)):
        world = World(0, size, 0, size, torch.device(kind, 0), None, None)  # type: ignore[arg-type]
        noting = lambda device, world=world: asked.append((device, world.heartbeat.waits_in))  # noqa: E731
        monkeypatch.setattr(worlds, "require_communication", noting)
        connect_gpus(world)
        assert world.heartbeat.waits_in == ""
    assert asked == [(torch.device("cuda", 0), "the first all_reduce between the GPUs")]
