"""The ranks of a run and how they talk."""

from __future__ import annotations

import datetime
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist

from trainer.config.errors import InputError
from trainer.config.sections import ParallelConfig
from trainer.distributed.heartbeat import Heartbeat
from trainer.distributed.store import KeyValueStore
from trainer.run.folder import RunDir

BEYOND_THE_WATCH_S = 120
SLOW_STORAGE = datetime.timedelta(minutes=30)
MEET_WITHIN = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """This rank among the others. Every method that talks to other ranks must be called by all of them.

    rank, size: of all ranks.  local_rank, local_size: of this machine.  background: a group of its own for
    checkpoints that are written while training goes on.  store: notes that do not wait for collectives.  heartbeat: of
    this rank.  guests: ranks on machines that do not see the run folder of rank 0.  guest_leaders: the first on each of
    those.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    background: dist.ProcessGroup
    store: KeyValueStore
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    guests: tuple[int, ...] = ()
    guest_leaders: tuple[int, ...] = ()

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.heartbeat.waiting("all_gather_object"):
            dist.all_gather_object(values, value)
        return values

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over the ranks, computed in fp64."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.heartbeat.waiting("all_reduce"):
            dist.all_reduce(tensor)
            summed: list[float] = tensor.tolist()
        return summed

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            with self.heartbeat.waiting("barrier"):
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


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one attempt meet, before they can talk."""

    store: dist.Store
    rank: int
    size: int


def find_rendezvous(run: RunDir | None = None) -> Rendezvous:
    """Find the store of the ranks that torchrun started; a process without torchrun is alone.

    run: what they train. On one machine its folder holds the file at which torchrun itself meets, and no port is
    opened. Ranks of a torchrun that somebody started by hand, and those of several machines, meet at its port.
    """
    rank, size = _torchrun("RANK", 0), _torchrun("WORLD_SIZE", 1)
    if size == 1:
        return Rendezvous(dist.HashStore(), 0, 1)
    file = run.stores / os.environ.get("TORCHELASTIC_RUN_ID", "none") if run else None
    store: dist.Store
    if file and file.is_file():
        store = dist.FileStore(str(file))
        store.set_timeout(MEET_WITHIN)
    else:
        store, _, _ = next(dist.rendezvous("env://", timeout=MEET_WITHIN))
    # torchrun starts ranks again with the store of before, and gloo would call those that are gone.
    return Rendezvous(dist.PrefixStore(f"attempt_{_torchrun('TORCHELASTIC_RESTART_COUNT', 0)}", store), rank, size)


@contextmanager
def connect(cfg: ParallelConfig, rendezvous: Rendezvous | None = None, is_guest: bool = False) -> Iterator[World]:
    """Join the ranks torchrun started, on the device `parallel.device` names; leave them at a good end.

    rendezvous: of the ranks, if it was found before.  is_guest: this machine does not see the run folder.
    Raises InputError when CUDA is asked for and absent, or has fewer devices than ranks.
    """
    local_rank, local_size = _torchrun("LOCAL_RANK", 0), _torchrun("LOCAL_WORLD_SIZE", 1)
    device = _device(cfg, local_rank, local_size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # The watch comes first, and knows more. This is for what it does not see.
    timeout = datetime.timedelta(seconds=cfg.timeout + BEYOND_THE_WATCH_S)
    place = rendezvous or find_rendezvous()
    if place.size == local_size:
        _stay_on_loopback()
    dist.init_process_group(backend, store=place.store, rank=place.rank, world_size=place.size, timeout=timeout)
    yield _with_guests(joined(device, local_rank, local_size, timeout), is_guest)
    # Not after an error: NCCL would wait for the other ranks, and torchrun would hear of it only after the timeout.
    dist.destroy_process_group()


def _stay_on_loopback() -> None:
    """Have gloo and NCCL listen where no other machine reaches them. They ask the environment alone.

    What comes from another rank is unpickled (`all_gather_object`). By default gloo listens at the address of the
    machine's own name and NCCL at that of its first network card; what others set for several machines is not meant
    for one. Between GPUs of one machine data go through NVLink, PCIe or shared memory, and not through this.
    """
    interfaces = psutil.net_if_addrs().items()
    loopback = next((name for name, at in interfaces if any(one.address == "127.0.0.1" for one in at)), "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    os.environ["NCCL_SOCKET_IFNAME"] = f"={loopback}"  # without the sign it is the beginning of a name


def joined(device: torch.device, local_rank: int, local_size: int, timeout: datetime.timedelta | None = None) -> World:
    """The world of a default process group that exists already. timeout: longest wait for a checkpoint's other ranks;
    storage may be slow for one of them only."""
    background = dist.new_group(backend="gloo", timeout=timeout and max(timeout, SLOW_STORAGE))
    assert background is not None
    store = KeyValueStore(dist.distributed_c10d._get_default_store())
    return World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device, background, store)


def _with_guests(world: World, is_guest: bool) -> World:
    found = world.gather((is_guest, world.local_rank))
    guests = tuple(rank for rank, (guest, _) in enumerate(found) if guest)
    return replace(world, guests=guests, guest_leaders=tuple(rank for rank in guests if found[rank][1] == 0))


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
