"""Worker processes outlive their process groups, so nothing of a group may outlive it."""

from __future__ import annotations

from pathlib import Path

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
