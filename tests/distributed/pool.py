"""Worker processes that are started once and reused: importing torch and diffusers costs more than most tests.

See DECISIONS 153.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import gc
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from trainer.distributed.world import World, joined

T = TypeVar("T")
TIMEOUT_S = 500
OTHERS_WITHIN_S = 20
"""How long ranks that may wait for one that died have for their own end."""
EXIT_WITHIN_S = 10
"""From the end of a worker's connection to that of its process."""
MOST_OUTPUT = 8_000
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
    """A process that serves tasks. output: the file that it prints to."""

    def __init__(self, context: Any, index: int, output: Path) -> None:
        self.output = output
        self.connection, its_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(its_end, str(output)), daemon=True, name=f"rank{index}")
        self.process.start()
        its_end.close()  # the worker has the only one: when it dies, the connection ends

    def send(self, *task: Any) -> None:
        """Give it a task. A worker that has died says so when it is asked for the outcome."""
        self.output.write_bytes(b"")
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(task)

    def outcome(self) -> tuple[bool, Any]:
        """(whether it failed, result or why): what it answers, or how it died."""
        try:
            answer: tuple[bool, Any] = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return True, f"{self._how_it_died()}, without a result; {self.last_output()}"
        return answer

    def last_output(self) -> str:
        """The end of what it printed during its task."""
        text = self.output.read_text(errors="replace").strip()
        return f"its last output:\n{text[-MOST_OUTPUT:]}" if text else "it printed nothing"

    def _how_it_died(self) -> str:
        self.process.join(EXIT_WITHIN_S)
        code = self.process.exitcode
        return f"ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"


class _Pool:
    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(list(IMPORTED))
        self._workers: list[_Worker] = []
        self._outputs = tempfile.TemporaryDirectory()

    def run(self, count: int, function: Callable[..., T], arguments: tuple[Any, ...]) -> list[T]:
        while len(self._workers) < count:
            index = len(self._workers)
            self._workers.append(_Worker(self._context, index, Path(self._outputs.name) / f"rank{index}.txt"))
        workers = self._workers[:count]
        with tempfile.TemporaryDirectory() as folder:
            for rank, worker in enumerate(workers):
                worker.send(rank, count, str(Path(folder) / "store"), function, arguments)
            outcomes = _outcomes(workers)
        failures = [f"rank {rank}:\n{text}" for rank, (failed, text) in enumerate(outcomes) if failed]
        if failures:
            self.close()  # a rank that failed may have left another in a collective
            raise RuntimeError("\n".join(failures))
        return [result for _, result in outcomes]

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        self._workers.clear()


def _outcomes(workers: Sequence[_Worker]) -> list[tuple[bool, Any]]:
    """Of every worker, in their order. Once one has died, the others have some seconds for theirs."""
    waiting = {worker.connection: worker for worker in workers}
    outcomes: dict[_Worker, tuple[bool, Any]] = {}
    within_s, deadline = TIMEOUT_S, time.monotonic() + TIMEOUT_S
    while waiting and (ready := connection.wait(list(waiting), max(0, deadline - time.monotonic()))):
        for worker in [waiting.pop(end) for end in ready]:  # type: ignore[call-overload]
            outcomes[worker] = worker.outcome()
            if worker.process.exitcode is not None and within_s == TIMEOUT_S:
                within_s, deadline = OTHERS_WITHIN_S, time.monotonic() + OTHERS_WITHIN_S
    for worker in waiting.values():
        after = "" if within_s == TIMEOUT_S else " after another rank had died"
        outcomes[worker] = True, f"no result within {within_s} s{after}; {worker.last_output()}"
    return [outcomes[worker] for worker in workers]


_POOL: list[_Pool] = []


def _pool(count: int) -> _Pool:
    if not _POOL:
        _POOL.append(_Pool())
        atexit.register(_POOL[0].close)
    return _POOL[0]


def _serve(parent: Any, output: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    _print_to(output)
    gc.freeze()
    while True:
        rank, count, store, function, arguments = parent.recv()
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
            parent.send((False, function(world, *arguments)))
        except BaseException:  # noqa: BLE001 - reported to the test that called
            parent.send((True, traceback.format_exc()))
        finally:
            leave_process_group()


def _print_to(output: str) -> None:
    """Let this process print to a file, and its stacks when a signal of the kernel ends it."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.enable()


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
