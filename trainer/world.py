"""The ranks of a run and how they talk."""

from __future__ import annotations

import datetime
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist

from trainer.board import Board
from trainer.config import InputError, ParallelConfig
from trainer.pulse import Pulse

BEYOND_THE_WATCH_S = 120


@dataclass(frozen=True)
class World:
    """This rank among the others. Every method that talks to other ranks must be called by all of them.

    rank, size: of all ranks.  local_rank, local_size: of this machine.  background: a group of its own for
    checkpoints that are written while training goes on.  board: notes beside the collectives.  pulse: of this rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    background: dist.ProcessGroup
    board: Board
    pulse: Pulse = field(default_factory=Pulse)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order."""
        self.pulse.beat()
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over the ranks, computed in fp64."""
        self.pulse.beat()
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        summed: list[float] = tensor.tolist()
        return summed

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.pulse.beat()
        if self.size > 1:
            dist.barrier()

    @property
    def restarts_left(self) -> int:
        """How often torchrun will start the ranks again when one of them fails."""
        return _torchrun("TORCHELASTIC_MAX_RESTARTS", 0) - _torchrun("TORCHELASTIC_RESTART_COUNT", 0)

    @property
    def memory(self) -> int:
        """Bytes this rank may fill: of its GPU, or its part of the host's memory."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        share = int(psutil.virtual_memory().total) // self.local_size
        return share if limit == resource.RLIM_INFINITY else min(share, limit)


@contextmanager
def connect(cfg: ParallelConfig) -> Iterator[World]:
    """Join the ranks torchrun started, on the device `parallel.device` names; leave them at a good end.

    Raises InputError when CUDA is asked for and absent, or has fewer devices than ranks.
    """
    local_rank, local_size = _torchrun("LOCAL_RANK", 0), _torchrun("LOCAL_WORLD_SIZE", 1)
    device = _device(cfg, local_rank, local_size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # The watch comes first, and knows more. This is for what it does not see.
    timeout = datetime.timedelta(seconds=cfg.timeout + BEYOND_THE_WATCH_S)
    if _torchrun("WORLD_SIZE", 1) == 1:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    else:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun starts ranks again with the store of before, and gloo would call those that are gone.
        attempt = dist.PrefixStore(f"attempt_{_torchrun('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=size, timeout=timeout)
    yield joined(device, local_rank, local_size)
    # Not after an error: NCCL would wait for the other ranks, and torchrun would hear of it only after the timeout.
    dist.destroy_process_group()


def joined(device: torch.device, local_rank: int, local_size: int) -> World:
    """The world of a default process group that exists already."""
    background = dist.new_group(backend="gloo")
    assert background is not None
    board = Board(dist.distributed_c10d._get_default_store())
    return World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device, background, board)


def _torchrun(name: str, alone: int) -> int:
    return int(os.environ.get(name, alone))


def _device(cfg: ParallelConfig, local_rank: int, local_size: int) -> torch.device:
    if cfg.device == "cpu" or (cfg.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.cuda.device_count() < local_size:
        raise InputError(
            f"parallel.devices: {local_size} ranks on this node, but it has {torch.cuda.device_count()} CUDA devices; "
            "lower parallel.devices or set parallel.device: cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
