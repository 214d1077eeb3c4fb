"""Worker processes that are started once and reused: importing torch and diffusers costs more than most tests."""

from __future__ import annotations

import atexit
import datetime
import gc
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from trainer.distributed.world import World, joined

T = TypeVar("T")
TIMEOUT_S = 500
IMPORTED = (
    "trainer.train.loop",
    "diffusers.models.transformers",
    "diffusers.models.unets",
    "transformers.models.t5.modeling_t5",
)
"""Modules every worker needs: imported once, by the process they are forked from."""


def run_ranks(count: int, function: Callable[..., T], *arguments: Any) -> list[T]:
    """function(world, *arguments) on `count` ranks; their results in rank order.

    The function must be importable by the workers (module level of a test file). Raises RuntimeError with the
    tracebacks of the ranks that failed.
    """
    return _pool(count).run(count, function, arguments)


class _Worker:
    def __init__(self, context: Any, index: int) -> None:
        self.tasks: Any = context.Queue()
        self.results: Any = context.Queue()
        self.process = context.Process(target=_serve, args=(self.tasks, self.results), daemon=True, name=f"rank{index}")
        self.process.start()


class _Pool:
    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(list(IMPORTED))
        self._workers: list[_Worker] = []

    def run(self, count: int, function: Callable[..., T], arguments: tuple[Any, ...]) -> list[T]:
        while len(self._workers) < count:
            self._workers.append(_Worker(self._context, len(self._workers)))
        with tempfile.TemporaryDirectory() as folder:
            for rank, worker in enumerate(self._workers[:count]):
                worker.tasks.put((rank, count, str(Path(folder) / "store"), function, arguments))
            outcomes = [self._result(worker) for worker in self._workers[:count]]
        failures = [f"rank {rank}:\n{text}" for rank, (failed, text) in enumerate(outcomes) if failed]
        if failures:
            self.close()  # a rank that failed may have left another in a collective
            raise RuntimeError("\n".join(failures))
        return [result for _, result in outcomes]

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        self._workers.clear()

    def _result(self, worker: _Worker) -> tuple[bool, Any]:
        try:
            outcome: tuple[bool, Any] = worker.results.get(timeout=TIMEOUT_S)
        except queue.Empty:
            return True, f"no result within {TIMEOUT_S} s"
        return outcome


_POOL: list[_Pool] = []


def _pool(count: int) -> _Pool:
    if not _POOL:
        _POOL.append(_Pool())
        atexit.register(_POOL[0].close)
    return _POOL[0]


def _serve(tasks: Any, results: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    gc.freeze()
    while True:
        rank, count, store, function, arguments = tasks.get()
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, count),
                rank=rank,
                world_size=count,
                timeout=datetime.timedelta(seconds=TIMEOUT_S),
            )
            world: World = joined(torch.device("cpu"), rank, count)
            torch.manual_seed(0)
            results.put((False, function(world, *arguments)))
        except BaseException:  # noqa: BLE001 - reported to the test that called
            results.put((True, traceback.format_exc()))
        finally:
            leave_process_group()


def leave_process_group() -> None:
    """End the process group of this process, if it has one, and its threads.

    Each group of gloo has a thread that wakes a hundred times a second, until the last cycle of objects that holds the
    group is collected.
    """
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    # Results of operations are remembered by the shape of the mesh, with a mesh whose groups have just ended.
    _clear_sharding_prop_cache()
    gc.collect()
