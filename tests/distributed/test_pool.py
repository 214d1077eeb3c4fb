"""Worker processes outlive their process groups, so nothing of a group may outlive it; and a worker may die."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from tests.distributed.pool import run_ranks
from trainer.distributed.world import World


def doubled(world: World, groups_before: int) -> list[float]:
    """An operation whose result torch remembers by shape of the mesh, made after so many other groups."""
    for _ in range(groups_before):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, world.size // 2))
    halves = distribute_tensor(torch.arange(4.0), mesh, [Replicate(), Shard(0)])
    numbers: list[float] = (halves * 2).full_tensor().tolist()
    return numbers


def test_a_process_group_is_not_remembered_after_it_ended() -> None:
    late, early = (run_ranks(4, doubled, before)[0] for before in (5, 0))
    assert late == early == [0.0, 2.0, 4.0, 6.0]


def sharded_once(world: World) -> None:
    """A block whose hooks and groups hold each other."""
    block = nn.Linear(8, 8)
    fully_shard(block, mesh=init_device_mesh("cpu", (world.size,)))
    block(torch.ones(2, 8)).sum().backward()


def threads_of_gloo(world: World) -> int:
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def test_the_threads_of_a_process_group_end_with_it() -> None:
    run_ranks(2, sharded_once)
    before = run_ranks(2, threads_of_gloo)
    for _ in range(3):
        run_ranks(2, sharded_once)
    assert run_ranks(2, threads_of_gloo) == before


def killed(world: World) -> None:
    """Rank 1 is killed, as by a kernel that lacks memory; rank 0 waits for it."""
    if world.rank == 1:
        os.write(2, b"the last words\n")
        os.kill(os.getpid(), 9)
    world.barrier()


def crashed(world: World) -> None:
    """Rank 0 reads address 0, as a fault of native code would."""
    if world.rank == 0:
        ctypes.string_at(0)
    world.barrier()


def left(world: World) -> None:
    os._exit(7)


@pytest.mark.parametrize(
    ("function", "rank", "said"),
    [
        (killed, 1, "ended by SIGKILL, without a result; its last output:\nthe last words"),
        (crashed, 0, "ended by SIGSEGV, without a result; its last output:\nFatal Python error: Segmentation fault"),
        (left, 0, "ended with exit code 7, without a result; it printed nothing"),
    ],
    ids=["killed", "crashed", "left"],
)
def test_a_worker_that_dies_is_reported_within_seconds_with_its_signal_and_last_output(
    function: Callable[[World], None], rank: int, said: str
) -> None:
    run_ranks(2, threads_of_gloo)  # the workers are there
    began = time.monotonic()
    with pytest.raises(RuntimeError) as failed:
        run_ranks(2, function)
    assert time.monotonic() - began < 60  # of a machine with other work
    assert f"rank {rank}:\n{said}" in str(failed.value)
    assert len(run_ranks(2, threads_of_gloo)) == 2


def without_a_form(world: World) -> Callable[[], None]:
    return lambda: None


def test_a_result_that_cannot_be_sent_is_an_error_that_says_so() -> None:
    with pytest.raises(RuntimeError, match="pickle"):
        run_ranks(1, without_a_form)
