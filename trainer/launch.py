"""Start, watch and end the torchrun process of a run. No torch here: it is only named on a command line.

torchrun gets a session of its own and writes to files, so the training outlives the page, kernel or terminal that
started it, and any of them can attach again through the run folder.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from trainer.config import InputError, ParallelConfig, RunConfig
from trainer.diagnosis import diagnose, launches, output_file
from trainer.events import ENDS, AnyEvent, ErrorEvent, EventReader, EventWriter, State, StatusEvent, last_state
from trainer.rundir import RunDir

SHUTDOWN_TIMEOUT_S = 600
"""How long torchrun waits after SIGTERM before it kills a rank: enough to save a checkpoint of a large model."""


@dataclass(frozen=True)
class Launch:
    """What `launch.json` holds. A process id alone may belong to another process by now; the create time tells."""

    pid: int
    create_time: float
    argv: list[str]

    @classmethod
    def read(cls, run: RunDir) -> Launch | None:
        """The latest start of a run, None when there was none."""
        if not run.launch_file.exists():
            return None
        return cls(**json.loads(run.launch_file.read_text(encoding="utf-8")))

    def write(self, run: RunDir) -> None:
        draft = run.launch_file.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        draft.replace(run.launch_file)


@dataclass(frozen=True)
class RunHandle:
    """A run started by this process."""

    run: RunDir
    process: subprocess.Popen[bytes]
    argv: list[str]


def torchrun_argv(cfg: RunConfig, run: RunDir, module: str = "trainer") -> list[str]:
    """The command that starts the ranks of this node; on several nodes it is the same on each of them.

    One node rendezvouses on a free port of its own, so runs never meet. module: what every rank executes.
    """
    parallel = cfg.parallel
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes", str(parallel.nodes),
        "--nproc-per-node", str(parallel.devices),
        "--rdzv-backend", "c10d", *_meeting_place(parallel),
        "--rdzv-id", f"{run.path.name}-{launches(run) + 1}",
        "--max-restarts", str(parallel.max_restarts),
        *_shutdown_timeout(_torchrun_source()),
        "--redirects", "3",
        "--log-dir", str(run.logs),
        "-m", module, str(run.path),
    ]  # fmt: skip


def _meeting_place(parallel: ParallelConfig) -> list[str]:
    if parallel.nodes > 1:
        return ["--rdzv-endpoint", str(parallel.rendezvous)]
    # The machine's own name is never looked up: many containers cannot resolve it.
    return ["--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]


def _torchrun_source() -> Path:
    """The file of torchrun, found without importing torch. Raises InputError when torch is not installed."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise InputError("torch is not installed in this Python; run make .venv and use .venv/bin/python")
    return Path(torch.origin).parent / "distributed" / "run.py"


def _shutdown_timeout(torchrun: Path) -> list[str]:
    """torch 2.11 has no such option and kills after 30 s; torchrun refuses options it does not know."""
    option = "--shutdown-timeout"
    return [option, str(SHUTDOWN_TIMEOUT_S)] if option in torchrun.read_text(encoding="utf-8") else []


def start(cfg: RunConfig, run: RunDir, module: str = "trainer", gpus: Sequence[int] = ()) -> RunHandle:
    """Start the ranks in a session of their own and return at once. gpus: those they may see; none for all.

    Raises InputError when this run is running already.
    """
    with run.locked():
        require_ended(run)
        _end_orphans(run)
        for request in ("stop", "save", "sample"):
            run.clear(request)
        argv = torchrun_argv(cfg, run, module)
        with EventWriter(run.events_file) as events:
            events.write(StatusEvent(state="starting"))
        process = _spawn(argv, output_file(run, launches(run) + 1), gpus)
        Launch(process.pid, psutil.Process(process.pid).create_time(), argv).write(run)
    # Whoever started it may not care for its end, and it would stay as a zombie.
    threading.Thread(target=process.wait, name=f"end of {run.path.name}", daemon=True).start()
    return RunHandle(run, process, argv)


def require_ended(run: RunDir) -> None:
    """Raises InputError when the run is running."""
    if alive(run):
        raise InputError(f"{run.path}: is running already; stop it first, or start a new run")


def require_free_port(parallel: ParallelConfig) -> None:
    """Raises InputError when `parallel.rendezvous` is a port of this machine that another program holds.

    torchrun would take that program for the first node, and wait for its answer.
    """
    if parallel.nodes == 1:
        return
    host, _, port = str(parallel.rendezvous).rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torchrun: a port just left is free
            probe.bind(address)
    except OSError as error:  # anything else: the address of another machine
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"parallel.rendezvous: another program holds {parallel.rendezvous}; end it or name another port"
            ) from error


def worker_environment() -> dict[str, str]:
    """The environment of processes that run `python -m trainer`, from an installation or from a checkout."""
    checkout = str(Path(__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {
        "OMP_NUM_THREADS": "1",  # ranks share the cores; without it each would take all of them
        **os.environ,
        "PYTHONPATH": f"{checkout}{os.pathsep}{inherited}" if inherited else checkout,
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # else a folder named trainer in the current one is taken for this package
    }


def _spawn(argv: Sequence[str], output: Path, gpus: Sequence[int]) -> subprocess.Popen[bytes]:
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
    with output.open("xb") as file:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=worker_environment() | seen,
            start_new_session=True,
        )


def alive(run: RunDir) -> bool:
    """Whether the torchrun process of the latest start still runs."""
    return _process(run) is not None


def _process(run: RunDir) -> psutil.Process | None:
    launch = Launch.read(run)
    if launch is None:
        return None
    try:
        process = psutil.Process(launch.pid)
        # The create time is derived from the boot time, which moves a little when the clock is adjusted.
        same = abs(process.create_time() - launch.create_time) < 1.0
        # Its arguments are empty for a moment while a process begins, and while it ends.
        same = same and process.cmdline() in (launch.argv, [])
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def status(run: RunDir) -> State:
    """What the run is doing now, derived from its process and its events."""
    with run.locked():
        return derive_state(alive(run), last_state(EventReader(run.events_file).read()))


def derive_state(is_alive: bool, last: State) -> State:
    """State of a run whose last status event said `last`: without a process it cannot be under way."""
    return last if is_alive or last in ENDS or last == "created" else "failed"


def stop(run: RunDir) -> None:
    """Ask the run to end after the current step with a checkpoint. Raises InputError when it is not running."""
    if not alive(run):
        raise InputError(f"{run.path}: is not running; continue it with --resume")
    run.request("stop")


def wait(run: RunDir, timeout_s: float | None = None) -> State:
    """Wait until the run has ended, or for `timeout_s` seconds, and return its state."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while alive(run) and (deadline is None or time.monotonic() < deadline):
        time.sleep(0.1)
    settle(run)
    return status(run)


def terminate(run: RunDir, grace_s: float = 10.0) -> None:
    """End the run now, without a checkpoint: SIGTERM, and after `grace_s` seconds SIGKILL. No error is recorded."""
    process = _process(run)
    if process is None:
        return
    with EventWriter(run.events_file) as events:
        events.write(StatusEvent(state="stopped", message="terminated; the last checkpoint remains"))
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]  # torchrun gives each rank a session of its own
        process.terminate()
        _, survivors = psutil.wait_procs(family, timeout=grace_s)
        for survivor in survivors:
            survivor.kill()
        psutil.wait_procs(survivors)


def record_mistake(run: RunDir, rank: int, message: str) -> None:
    """An ErrorEvent with exit code 2: a rank found the user's input wrong. All ranks find it, the first records it."""
    with run.locked():
        events = _since_start(EventReader(run.events_file).read())
        if not any(isinstance(event, ErrorEvent) for event in events):
            with EventWriter(run.events_file) as writer:
                writer.write(ErrorEvent(message=message, rank=rank, exit_code=2))


def settle(run: RunDir) -> None:
    """Record the end of a run whose process is gone without having said so: one ErrorEvent, then `failed`.

    Any number of readers may call it, at any time; only the first call after the end writes something.
    """
    with run.locked():
        if alive(run) or Launch.read(run) is None:
            return
        _end_orphans(run)
        events = _since_start(EventReader(run.events_file).read())
        end = last_state(events)
        if end in ("finished", "stopped"):
            return
        with EventWriter(run.events_file) as writer:
            if not any(isinstance(event, ErrorEvent) for event in events):
                writer.write(diagnose(run, events))
            if end != "failed":
                writer.write(StatusEvent(state="failed", step=max(event.step for event in events)))


def _end_orphans(run: RunDir) -> None:
    """Kill the ranks of a torchrun that was itself killed: they would train on, and write beside a continued run."""
    launch = Launch.read(run)
    if launch is None:
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.cmdline()[-3:] == launch.argv[-3:]:
                process.kill()


def _since_start(events: Sequence[AnyEvent]) -> Sequence[AnyEvent]:
    starts = [at for at, event in enumerate(events) if isinstance(event, StatusEvent) and event.state == "starting"]
    return events[starts[-1] :] if starts else events
