"""The ranks of a run and how they communicate."""

from __future__ import annotations

import datetime
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config.sections import ParallelConfig
from trainer.distributed.heartbeat import Heartbeat
from trainer.distributed.store import KeyValueStore
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.system.gpus import visible

BEYOND_THE_WATCHDOG_S = 120
SLOW_STORAGE = datetime.timedelta(minutes=30)
MEET_WITHIN = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class PendingSum:
    """A sum over the ranks that is under way."""

    _tensor: Tensor
    _work: dist.Work | None
    _heartbeat: Heartbeat

    def wait(self) -> list[float]:
        """Wait for the sum, which is the same on every rank."""
        if self._work is not None:
            with self._heartbeat.waiting("all_reduce"):
                self._work.wait()
        summed: list[float] = self._tensor.tolist()
        return summed


@dataclass(frozen=True)
class World:
    """This rank among the others. `gather`, the sums and `barrier` are collective.

    A rank is a process. What follows from the samples of a step (who reads which of them, their sums, the scale of the
    loss) asks `data_rank` and `data_size`; what is about processes asks `rank` and `size`.

    Attributes:
        rank, size: Among all ranks.
        local_rank, local_size: Among the ranks of this machine.
        background: Process group for checkpoints, which are written while training goes on.
        store: Messages that do not wait for collectives.
        heartbeat: That of this rank.
        remote_ranks: Ranks on machines that do not see the run folder of rank 0.
        remote_leaders: The first rank on each of those machines.
        ranks_per_sample: Ranks that work on the same samples and compute the same loss. They follow each other.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    background: dist.ProcessGroup
    store: KeyValueStore
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    remote_ranks: tuple[int, ...] = ()
    remote_leaders: tuple[int, ...] = ()
    ranks_per_sample: int = 1

    @property
    def data_rank(self) -> int:
        """Number of this rank's share of the samples, equal on the ranks that work on the same samples."""
        return self.rank // self.ranks_per_sample

    @property
    def data_size(self) -> int:
        """Number of shares into which the samples of a step are divided."""
        return self.size // self.ranks_per_sample

    def gather(self, value: Any) -> list[Any]:
        """Gather `value` of every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.heartbeat.waiting("all_gather_object"):
            dist.all_gather_object(values, value)
        return values

    def sum(self, values: list[float]) -> list[float]:
        """Sum element-wise over the ranks, in fp64."""
        return self.begin_sum(values).wait()

    def begin_sum(self, values: list[float]) -> PendingSum:
        """Begin to sum element-wise over the ranks, in fp64, while this rank goes on. The device has no part in it."""
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, async_op=True) if self.size > 1 else None
        return PendingSum(tensor, work, self.heartbeat)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor of the device over the ranks, in place. With an accelerator the host does not wait."""
        if self.size > 1:
            with self.heartbeat.waiting("all_reduce"):
                dist.all_reduce(tensor)

    def sum_over_data(self, tensor: Tensor) -> None:
        """Sum a tensor of the device over the samples of all ranks, in place: an `all_reduce` that counts each once."""
        if self.rank % self.ranks_per_sample:  # another rank brings the same numbers
            tensor.zero_()
        self.all_reduce(tensor)

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
        """Bytes this rank may fill: its GPU, or its share of the host's memory."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        share = int(psutil.virtual_memory().total) // self.local_size
        return share if limit == resource.RLIM_INFINITY else min(share, limit)


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one attempt meet, before they can communicate."""

    store: dist.Store
    rank: int
    size: int


def find_rendezvous(run: RunDir | None = None) -> Rendezvous:
    """Find the store of the ranks that torchrun started; a process without torchrun is alone.

    Args:
        run: The run they train. On one machine its folder holds the file through which torchrun itself meets, and no
            port is opened. Ranks of a torchrun that was started by hand, or of several machines, meet at its port.
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
    # torchrun starts ranks again with the same store, in which gloo would still find the ranks that are gone.
    return Rendezvous(dist.PrefixStore(f"attempt_{_torchrun('TORCHELASTIC_RESTART_COUNT', 0)}", store), rank, size)


@contextmanager
def connect(cfg: ParallelConfig, rendezvous: Rendezvous | None = None, is_remote: bool = False) -> Iterator[World]:
    """Join the ranks that torchrun started, on the device of `parallel.device`; leave them if no error is raised.

    Args:
        rendezvous: Where they meet, if it was found before.
        is_remote: This machine does not see the run folder.

    Raises:
        InputError: CUDA is wanted and absent, or has fewer devices than ranks, or this torch has no NCCL; or
            `parallel.device: auto` would leave an NVIDIA GPU unused.
    """
    local_rank, local_size = _torchrun("LOCAL_RANK", 0), _torchrun("LOCAL_WORLD_SIZE", 1)
    device = _device(cfg, local_rank, local_size)
    meeting = rendezvous or find_rendezvous()
    backend = _backend(device, meeting.size)
    # The watchdog comes first and knows more; this timeout is for what it does not notice.
    timeout = datetime.timedelta(seconds=cfg.timeout + BEYOND_THE_WATCHDOG_S)
    with _on_loopback() if meeting.size == local_size else nullcontext():
        dist.init_process_group(
            backend, store=meeting.store, rank=meeting.rank, world_size=meeting.size, timeout=timeout
        )
        world = joined(device, local_rank, local_size, timeout)
        ranks = world.gather((is_remote, local_rank))
        remote_ranks = tuple(rank for rank, (is_far, _) in enumerate(ranks) if is_far)
        yield replace(
            world, remote_ranks=remote_ranks, remote_leaders=tuple(rank for rank in remote_ranks if ranks[rank][1] == 0)
        )
        # Not after an error: NCCL would wait for the other ranks, and torchrun would learn of it after the timeout.
        dist.destroy_process_group()


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Inside, gloo and NCCL listen on localhost only. Both read only the environment, which is restored at the end: a
    run of several machines may be started from the same process later.

    Messages from another rank are unpickled (`all_gather_object`). By default gloo listens at the address of the
    machine's own name and NCCL at that of its first network card; a setting for several machines is not meant for one.
    Data between GPUs of one machine go through NVLink, PCIe or shared memory, not through this interface.
    """
    interfaces = psutil.net_if_addrs().items()
    loopback = next((name for name, at in interfaces if any(one.address == "127.0.0.1" for one in at)), "lo")
    # Without "=", NCCL takes every interface whose name begins so.
    names = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def joined(device: torch.device, local_rank: int, local_size: int, timeout: datetime.timedelta | None = None) -> World:
    """The world of a default process group that exists already.

    Args:
        timeout: Longest wait for the other ranks of a checkpoint; storage may be slow for only one of them.
    """
    background = dist.new_group(backend="gloo", timeout=timeout and max(timeout, SLOW_STORAGE))
    assert background is not None
    store = KeyValueStore(dist.distributed_c10d._get_default_store())
    return World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device, background, store)


def _torchrun(name: str, alone: int) -> int:
    return int(os.environ.get(name, alone))


def _device(cfg: ParallelConfig, local_rank: int, local_size: int) -> torch.device:
    if cfg.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = visible.why_no_cuda()
        if cfg.device == "auto" and not why:
            return torch.device("cpu")
        said = why or "no NVIDIA GPU is visible to this process; see --doctor, or set parallel.device: cpu"
        raise InputError(f"parallel.device: {cfg.device}: {said}{_cuda_says()}")
    if torch.cuda.device_count() < local_size:
        raise InputError(
            f"parallel.devices: {local_size} ranks on this node, but it has {torch.cuda.device_count()} CUDA devices; "
            "lower parallel.devices or set parallel.device: cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _cuda_says() -> str:
    """Return the first line of the error with which CUDA fails, in brackets."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f" ({str(error).splitlines()[0]})" if str(error) else ""
    return ""


def _backend(device: torch.device, size: int) -> str:
    """Return the backends of the default process group. Raises InputError if several GPUs have no NCCL."""
    if device.type == "cpu":
        return "gloo"
    if dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    if size == 1:
        return "gloo"
    raise InputError(
        f"parallel.devices: {size} ranks on GPUs communicate through NCCL, which torch {torch.__version__} is built "
        "without; install the CUDA build of torch (pip install torch), or set parallel.devices: 1"
    )


def connect_gpus(world: World) -> None:
    """Have NCCL connect the GPUs of several ranks now, and not in the first step. Collective.

    To be called while the watchdog watches: what is wrong with links often shows as a wait without an end.

    Raises:
        RuntimeError: As `require_communication`.
    """
    if world.device.type == "cuda" and world.size > 1:
        with world.heartbeat.waiting("the first all_reduce between the GPUs"):
            require_communication(world.device)


def require_communication(device: torch.device) -> None:
    """Sum a number over all ranks. Collective.

    Raises:
        RuntimeError: It fails, or the sum is wrong.
    """
    size = dist.get_world_size()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    between = f"the first all_reduce between {size} ranks, on {device} ({name}) of rank {dist.get_rank()},"
    remedy = (
        "run --doctor; NCCL_DEBUG=INFO logs what NCCL tries, NCCL_P2P_DISABLE=1 avoids faulty links, and "
        "parallel.devices: 1 needs none"
    )
    try:
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        found = int(total.item())
    except RuntimeError as error:
        said = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise RuntimeError(f"{between} failed: {said}; {remedy}") from error
    if found != size:
        raise RuntimeError(f"{between} gave {found}: the GPUs do not exchange data correctly; {remedy}")
