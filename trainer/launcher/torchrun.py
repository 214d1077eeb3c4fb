"""Start the torchrun process of a run, on its first node or on one that joins. Imports no torch.

torchrun runs in its own session and writes to files, so that training outlives the page, notebook kernel or terminal
that started it. Any of them can attach again through the run folder. See DECISIONS 94.
"""

from __future__ import annotations

import fcntl
import importlib.util
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.config.sections import ParallelConfig
from trainer.launcher.network import must_be_joined, node_environment
from trainer.run import allocator, compiler
from trainer.run.allocator import pins_exactly
from trainer.run.events import EventWriter, StatusEvent, WarningEvent
from trainer.run.failure import launches, output_file
from trainer.run.folder import RunDir
from trainer.run.process import (
    SUPERVISOR,
    TORCHRUN,
    Launch,
    all_processes,
    argv_of,
    clear_stores,
    end_orphans,
    require_ended,
    worker_environment,
)
from trainer.system import files
from trainer.system import gpus as machine_gpus
from trainer.system.errors import InputError
from trainer.system.gpus import visible
from trainer.system.installation import start_command
from trainer.system.terminal import not_installed

OPTIONS = {
    "--shutdown-timeout": "600",
    "--signals-to-handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
}
"""{torchrun option: value}. Seconds between SIGTERM and SIGKILL of a rank: enough for a checkpoint of a large model.
Signals forwarded to the ranks: also SIGUSR1, which SLURM can send before it takes the machine away."""


@dataclass(frozen=True)
class RunHandle:
    """A run that was started by this process."""

    run: RunDir
    process: subprocess.Popen[bytes]
    argv: list[str]


def command(parallel: ParallelConfig, run: RunDir, module: str, node_rank: int, has_stages: bool) -> list[str]:
    """Return the command of a run on one node: torchrun, or a supervisor that starts one torchrun for each stage.

    Both end with the same arguments.
    """
    if not has_stages:
        return torchrun_argv(parallel, run, module, node_rank)
    return [sys.executable, "-m", SUPERVISOR, str(node_rank), "-m", module, str(run.path)]


def torchrun_argv(parallel: ParallelConfig, run: RunDir, module: str = "trainer", node_rank: int = 0) -> list[str]:
    """Return the command that starts the ranks of one node.

    A run on one node rendezvouses through a file in its run folder, so that runs cannot interfere.

    Args:
        parallel: The run's section `parallel`.
        run: The run.
        module: Python module that every rank executes.
        node_rank: Number of the node.
    """
    # Of OPTIONS, those that this torchrun has: it refuses unknown ones, and 2.11 always kills after 30 s.
    source = _torchrun_source().read_text(encoding="utf-8")
    return [
        sys.executable, "-m", TORCHRUN,
        "--nnodes", str(parallel.nodes),
        "--nproc-per-node", str(parallel.devices),
        *_rendezvous_options(parallel, run, node_rank),
        "--max-restarts", str(parallel.max_restarts),
        *[word for option, value in OPTIONS.items() if option in source for word in (option, value)],
        "--redirects", "3",
        "--log-dir", str(run.logs),
        "-m", module, str(run.path),
    ]  # fmt: skip


def _rendezvous_options(parallel: ParallelConfig, run: RunDir, node_rank: int) -> list[str]:
    if parallel.nodes > 1:
        # Rank 0 must be on the node that started the run, because it writes the run folder; c10d would number nodes by
        # their sorted addresses. The id does not count starts: another node may not see them, or see them late.
        options = ["--rdzv-backend", "static", "--rdzv-endpoint", str(parallel.rendezvous)]
        return [*options, "--node-rank", str(node_rank), "--rdzv-id", run.path.name]
    # torchrun unpickles what it reads at the rendezvous. A port would be open to all networks of this machine; this
    # file, which `clear_stores` has removed before, is written by the owner of the run only. It grows with every
    # keep-alive, which only other nodes need, and there are none.
    name = f"{run.path.name}-{launches(run) + 1}"
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(run.stores / name)]
    options += ["--rdzv-conf", "store_type=file,keep_alive_interval=86400"]
    # localhost, so that the machine's own name is never looked up: many containers cannot resolve it.
    return [*options, "--local-addr", "localhost", "--rdzv-id", name]


def _torchrun_source() -> Path:
    """Return the source file of torchrun, without importing torch. Raises InputError if torch is not installed."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise InputError(not_installed(ModuleNotFoundError(name="torch")))
    return Path(torch.origin).parent / "distributed" / "run.py"


def start(cfg: RunConfig, run: RunDir, module: str = "trainer", gpus: Sequence[int] = ()) -> RunHandle:
    """Start the ranks of a run in their own session and return at once.

    Args:
        cfg: Config of the run. It is saved where the run folder has another one: a start that is refused changes
            nothing there, and of two at once the one that runs trains by its own config.
        run: The run.
        module: Python module that every rank executes.
        gpus: nvidia-smi's indices of the GPUs that the ranks may use; empty for all.

    Raises:
        InputError: The run is already running, or a GPU is not visible here.
    """
    # Resolves names and asks nvidia-smi, so not while the lock is held.
    environment = node_environment(cfg.parallel) | _device_environment(cfg.parallel, gpus, pins_exactly(cfg))
    run.guard()
    compiling, problem = compiler.environment(cfg)
    waits = f"waits for the other nodes: {joining(run, cfg.parallel.nodes)}" if must_be_joined(cfg.parallel) else ""
    with run.locked():
        require_ended(run)
        run.complete_folders(cfg)
        _require_readable([run.events_file, *map(run.rank_file, range(cfg.parallel.world_size))])
        argv = command(cfg.parallel, run, module, 0, has_stages=bool(cfg.stages))
        end_orphans(run, argv[2])
        clear_stores(run)
        for request in ("stop", "save", "sample"):
            run.clear(request)
        if not _is_saved(cfg, run):
            run.replace_config(cfg)
        with EventWriter(run.events_file) as events:
            events.write(StatusEvent(state="starting", message=waits))
            if problem:
                events.write(WarningEvent(message=problem))
        process = _spawn(argv, output_file(run, launches(run) + 1), environment | compiling)
        Launch.of(process, argv).write(run)
    return _handle(run, process, argv)


def _is_saved(cfg: RunConfig, run: RunDir) -> bool:
    try:
        return run.config() == cfg
    except InputError:  # a field that is no longer allowed, which an override mends
        return False


def _device_environment(parallel: ParallelConfig, chosen: Sequence[int], is_exact: bool) -> dict[str, str]:
    """Which GPUs the ranks see, and how they take memory. is_exact: as `allocator.pins_exactly` says."""
    if parallel.device == "cpu" and not chosen:
        return allocator.heap_environment()
    listed = machine_gpus.read()
    return visible.environment(chosen, listed) | allocator.environment(is_exact, [gpu.name for gpu in listed])


def _require_readable(written: Iterable[Path]) -> None:
    """Raise InputError if a file that the ranks append to exists but is not a readable regular file."""
    for file in written:
        try:
            files.opened(file).close()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise files.unreadable(file, error) from error


def joining(run: RunDir, nodes: int) -> str:
    """Return the command to type on the other nodes, with a number to fill in if there are several."""
    argv = [*start_command(), "--join", str(run.path), "--node-rank"]
    return f"{shlex.join(argv)} 1" if nodes == 2 else f"{shlex.join(argv)} K  # K = 1 to {nodes - 1}, another on each"


def join(parallel: ParallelConfig, run: RunDir, node_rank: int, module: str = "trainer") -> RunHandle:
    """Start this node's ranks of a run whose first node calls `start`, and return at once.

    The order does not matter: the nodes wait ten minutes for each other. If this machine does not see the run folder,
    one of the same path is made for the logs.

    Args:
        parallel: The run's section `parallel`.
        run: The run.
        node_rank: Number of this node, from 1.
        module: Python module that every rank executes.

    Raises:
        InputError: The run has one node only, or no node of this number, or that node already runs on this machine.
    """
    nodes = parallel.nodes
    run.guard()
    run.logs.mkdir(parents=True, exist_ok=True)
    if nodes == 1:
        raise InputError(f"{run.path}: is a single-node run; start a run with parallel.nodes above 1 on the first node")
    if not 1 <= node_rank < nodes:
        numbers = "1" if nodes == 2 else f"1 to {nodes - 1}"
        raise InputError(f"--node-rank {node_rank}: the nodes that join {run.path} have the numbers {numbers}")
    # A machine that does not see the run folder cannot train in stages; its ranks report that.
    cfg = run.config() if run.config_file.is_file() else None
    has_stages, is_exact = cfg is not None and bool(cfg.stages), cfg is not None and pins_exactly(cfg)
    environment = node_environment(parallel) | _device_environment(parallel, (), is_exact)
    if cfg is not None:
        environment |= compiler.environment(cfg)[0]
    with run.locked():
        argv = command(parallel, run, module, node_rank, has_stages)
        if any(argv_of(process) == argv for process in all_processes()):
            raise InputError(f"{run.path}: node {node_rank} of this run is already running on this machine")
        end_orphans(run, argv[2])
        process = _spawn(argv, _free_node_log(run, node_rank), environment)
    return _handle(run, process, argv)


def node_log(run: RunDir, node_rank: int) -> Path:
    """Return the file with torchrun's output at the latest start of a node that joined."""
    logs = run.logs.glob(f"node{node_rank}-*.log")
    return max(logs, key=lambda file: file.stat().st_mtime, default=run.logs / f"node{node_rank}-1.log")


def _free_node_log(run: RunDir, node_rank: int) -> Path:
    logs = run.logs.glob(f"node{node_rank}-*.log")
    numbers = (
        int(log.stem.partition("-")[2]) for log in logs
    )  # counting files would reuse a number if one was removed
    return run.logs / f"node{node_rank}-{max(numbers, default=0) + 1}.log"


def _handle(run: RunDir, process: subprocess.Popen[bytes], argv: list[str]) -> RunHandle:
    # Somebody must wait for the process, or it stays as a zombie after its end.
    threading.Thread(target=process.wait, name=f"end of {run.path.name}", daemon=True).start()
    return RunHandle(run, process, argv)


def _spawn(argv: Sequence[str], output: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with output.open("xb") as file:
        # The process holds this lock while it lives; other containers cannot see the process, but they see the lock.
        fcntl.flock(file, fcntl.LOCK_EX)
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**worker_environment(), **environment},
            start_new_session=True,
        )
