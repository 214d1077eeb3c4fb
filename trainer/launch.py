"""Start, watch and end the torchrun process of a run. No torch here: it is only named on a command line.

torchrun gets a session of its own and writes to files, so the training outlives the page, kernel or terminal that
started it, and any of them can attach again through the run folder.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib.util
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from trainer.config import InputError, ParallelConfig, RunConfig
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
        "--rdzv-id", f"{run.path.name}-{_launches(run) + 1}",
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


def start(cfg: RunConfig, run: RunDir, module: str = "trainer") -> RunHandle:
    """Start the ranks in a session of their own and return at once.

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
        process = _spawn(argv, _output_file(run, _launches(run) + 1))
        Launch(process.pid, psutil.Process(process.pid).create_time(), argv).write(run)
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


def _spawn(argv: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("xb") as file:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=worker_environment(),
            start_new_session=True,
        )


def _launches(run: RunDir) -> int:
    """How often this run was started."""
    return len(list(run.logs.glob("launch-*.log")))


def _output_file(run: RunDir, number: int) -> Path:
    return run.logs / f"launch-{number}.log"


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
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
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


def diagnose(run: RunDir, events: Sequence[AnyEvent]) -> ErrorEvent:
    """Why the latest start of a run failed, from torchrun's output and the ranks' error files.

    events: those since that start.  The earliest failing rank is named. Ranks that torchrun ended, or that only lost
    another rank, come last: they are consequences, though they may be noticed first.
    """
    number = _launches(run)
    output = _output_file(run, number)
    attempts = _last_attempts(run, number)
    failures = [*_reported(output, attempts), *_recorded(attempts)]
    torchrun_itself = _Failure(None, last_line(output) or "torchrun ended without a message", math.inf, output)
    cause = min(failures, key=lambda failure: (failure.is_consequence, failure.when), default=torchrun_itself)
    return ErrorEvent(
        message=cause.message,
        remedy=_remedy(cause.message),
        rank=cause.rank,
        step=max((event.step for event in events), default=0),
        log=os.path.relpath(cause.log, run.path),
    )


_LOST_ANOTHER_RANK = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|pair closure|remote process exited"
    r"|ncclRemoteError|killed by SIGTERM"
)


@dataclass(frozen=True)
class _Failure:
    """How one rank ended. rank: None when only its node knows it.  when: unix seconds.  log: file with the details."""

    rank: int | None
    message: str
    when: float
    log: Path

    @property
    def is_consequence(self) -> bool:
        return _LOST_ANOTHER_RANK.search(self.message) is not None


def _last_attempts(run: RunDir, number: int) -> list[Path]:
    """The folders with the ranks' logs, one per node: those of the last attempt where torchrun started ranks again."""
    nodes = run.logs.glob(f"{glob.escape(run.path.name)}-{number}_*")
    attempts = [sorted(node.glob("attempt_*"), key=lambda folder: int(folder.name.partition("_")[2])) for node in nodes]
    return [folders[-1] for folders in attempts if folders]


_REPORT = re.compile(
    r"^  time +: (?P<time>\S+)\n"
    r"  host +: .*\n"
    r"  rank +: (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\n"
    r"  exitcode +: (?P<code>-?\d+) .*\n"
    r"  error_file: (?P<error_file>.*)$",
    re.MULTILINE,
)


def _reported(output: Path, attempts: Sequence[Path]) -> Iterator[_Failure]:
    """Failures of this node's ranks, from the table torchrun prints at its end."""
    for report in _REPORT.finditer(output.read_text(encoding="utf-8", errors="replace")):
        rank, error_file = int(report["rank"]), Path(report["error_file"])
        if error_file.is_file():
            yield _from_error_file(error_file, rank)
            continue
        logs = [attempt / report["local_rank"] / "stderr.log" for attempt in attempts]
        log = logs[0] if len(logs) == 1 else output
        # The table's times are cut to seconds: counted up, so that a rank that left an error file comes first.
        when = datetime.strptime(report["time"], "%Y-%m-%d_%H:%M:%S").timestamp() + 1
        yield _Failure(rank, _how_it_ended(int(report["code"]), log), when, log)


def _recorded(attempts: Sequence[Path]) -> Iterator[_Failure]:
    """Failures that left an error file, also those of other nodes that share the run folder.

    torchrun's table may lack the first: it is written when any rank has ended. The folders are named by the rank on
    its node, which is the rank of the run where there is only one.
    """
    for attempt in attempts:
        for error_file in attempt.glob("*/error.json"):
            yield _from_error_file(error_file, int(error_file.parent.name) if len(attempts) == 1 else None)


def _from_error_file(file: Path, rank: int | None) -> _Failure:
    try:
        message = json.loads(file.read_text(encoding="utf-8"))["message"]["message"]
    except (ValueError, KeyError, TypeError):  # cut short: the disk was full
        message = last_line(file.with_name("stderr.log")) or "ended while writing its error file"
    return _Failure(rank, message, file.stat().st_mtime, file.with_name("stderr.log"))


def _how_it_ended(code: int, log: Path) -> str:
    if code < 0:
        names = {known.value: known.name for known in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}"
    return last_line(log) or f"ended with exit code {code}"


def last_line(file: Path) -> str:
    """The last line of a log that says something, empty without one."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n") if file.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip(" =-")), "")


_REMEDIES = (
    (
        r"FloatingPointError",
        "lower optim.lr, raise optim.warmup or set train.precision: fp32, and start again from the last checkpoint "
        "with --resume",
    ),
    (
        r"out of memory|OutOfMemoryError",
        "lower train.micro_batch or data.resolution, set train.checkpointing: full, or use more ranks",
    ),
    (
        r"SIGKILL",
        "probably the machine ran out of memory, or somebody killed it: use fewer ranks per machine, lower "
        "train.micro_batch, or give it more memory; the system log tells",
    ),
    (r"torchrun ended without", "it was killed, or the machine ran out of memory: continue with --resume"),
    (r"SIGTERM|SignalException", "it was ended from outside: continue with --resume"),
    (r"No space left on device", "free some disk space, then continue with --resume; finished checkpoints are intact"),
    (
        r"[Aa]ddress already in use|EADDRINUSE",
        "another program holds the port: start again, or change parallel.rendezvous",
    ),
    (r"Rendezvous\w*Error", "no meeting of the nodes: check that parallel.rendezvous is host:port of the first node"),
    (r"ModuleNotFoundError|ImportError", "the environment is incomplete: run --doctor"),
    (r"CUDA|NCCL", "run --doctor; if the GPUs are fine, set NCCL_DEBUG=INFO and continue with --resume"),
)


def _remedy(message: str) -> str:
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, message)), "read the end of the log")
