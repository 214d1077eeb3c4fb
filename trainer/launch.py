"""Start, watch and end the torchrun process of a run. No torch here: it is only named on a command line.

torchrun gets a session of its own and writes to files, so the training outlives the page, kernel or terminal that
started it, and any of them can attach again through the run folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Annotated

import psutil
from annotated_types import Interval, MinLen
from pydantic import TypeAdapter

from trainer.cluster import FIRST_NODE
from trainer.config import files
from trainer.config.errors import InputError
from trainer.config.schema import RunConfig
from trainer.config.sections import ParallelConfig
from trainer.diagnosis import diagnose, launches, output_file
from trainer.events import ENDS, AnyEvent, ErrorEvent, EventReader, EventWriter, State, StatusEvent, last_state
from trainer.rundir import RunDir

OPTIONS = {
    "--shutdown-timeout": "600",
    "--signals-to-handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
}
"""Of torchrun: seconds between SIGTERM and the end of a rank, enough to save a checkpoint of a large model; what it
hands on to the ranks, SIGUSR1 too, which SLURM can be told to send before it takes the machine away."""


TORCHRUN, SUPERVISOR = "torch.distributed.run", "trainer.stages"
"""Modules that lead the ranks of a run: by themselves, or by a torchrun for each stage."""
UNHEARD_S = 1800
"""A run on another machine that wrote nothing for so long is taken for ended. Loading or exporting is silent too."""
LAST_WORDS = 65536
"""Bytes at the end of a run's events among which its end stands, where it has ended."""
HIGHEST_PID = 2**22
"""PID_MAX_LIMIT of Linux on 64 bits."""
ELSEWHERE = ("192.0.2.1", 9)
"""An address that is no machine's (RFC 5737): the way to it is the way out. Nothing is ever sent there."""


@dataclass(frozen=True)
class Launch:
    """What `launch.json` holds. A process id alone may belong to another process by now; the create time tells.

    create_time: unix seconds.  since_boot: the same, which no clock that is set moves.
    host: the machine it is a process of.  job: of SLURM, with the number of its restarts; empty without one.
    pid_namespace, boot_id: where and since which start of the machine `pid` is that process. Containers may share the
    name of their machine, but not their processes. Earlier versions wrote neither.
    """

    pid: Annotated[int, Interval(ge=1, le=HIGHEST_PID)]
    create_time: float
    argv: Annotated[list[str], MinLen(1)]
    host: str = field(default_factory=socket.gethostname)
    job: str = ""
    since_boot: float | None = None
    pid_namespace: int | None = None
    boot_id: str = ""

    @classmethod
    def of(cls, process: subprocess.Popen[bytes], argv: list[str]) -> Launch:
        """The launch of a process that was begun just now."""
        created = psutil.Process(process.pid).create_time()
        since_boot = created - psutil.boot_time()
        return cls(process.pid, created, argv, socket.gethostname(), _job(), since_boot, _pid_namespace(), _boot_id())

    @property
    def is_on_this_machine(self) -> bool:
        """Whether it was begun on a machine of this name, in whatever container."""
        return self.host == socket.gethostname()

    @property
    def is_of_this_boot(self) -> bool:
        """Whether its machine was not started anew since. A process does not outlive that."""
        return self.boot_id in ("", _boot_id())

    @property
    def is_here(self) -> bool:
        """Whether its process can be seen from here, or could until this machine was started anew."""
        is_seen = self.pid_namespace in (None, _pid_namespace())
        return self.is_on_this_machine and (is_seen or not self.is_of_this_boot)

    @classmethod
    def read(cls, run: RunDir) -> Launch | None:
        """The latest start of a run, None when there was none. What a later version wrote besides is passed over.

        Raises InputError when the file is damaged: whether the run is alive cannot be known then.
        """
        try:
            return files.read_json(run.launch_file, _LAUNCH, "remove it if the run has ended")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"{run.launch_file}: cannot be read ({error.strerror}); make it readable") from error

    def write(self, run: RunDir) -> None:
        files.replace(run.launch_file, json.dumps(asdict(self), indent=1))


_LAUNCH = TypeAdapter(Launch)


@dataclass(frozen=True)
class RunHandle:
    """A run started by this process."""

    run: RunDir
    process: subprocess.Popen[bytes]
    argv: list[str]


def command(parallel: ParallelConfig, run: RunDir, module: str, node_rank: int, has_stages: bool) -> list[str]:
    """The command of a run on one node: torchrun, or what starts one for each stage, and ends with the same words."""
    if not has_stages:
        return torchrun_argv(parallel, run, module, node_rank)
    return [sys.executable, "-m", SUPERVISOR, str(node_rank), "-m", module, str(run.path)]


def torchrun_argv(parallel: ParallelConfig, run: RunDir, module: str = "trainer", node_rank: int = 0) -> list[str]:
    """The command that starts the ranks of one node.

    One node rendezvouses at a file in its run folder, so runs never meet. module: what every rank executes.
    """
    return [
        sys.executable, "-m", TORCHRUN,
        "--nnodes", str(parallel.nodes),
        "--nproc-per-node", str(parallel.devices),
        *_meeting_place(parallel, run, node_rank),
        "--max-restarts", str(parallel.max_restarts),
        *_known_options(_torchrun_source()),
        "--redirects", "3",
        "--log-dir", str(run.logs),
        "-m", module, str(run.path),
    ]  # fmt: skip


def _meeting_place(parallel: ParallelConfig, run: RunDir, node_rank: int) -> list[str]:
    if parallel.nodes > 1:
        # Rank 0 must be where the run was started: it writes the run folder. c10d numbers nodes by their sorted
        # addresses. The name of the meeting counts no starts, as another node may not see them, or see them late.
        place = ["--rdzv-backend", "static", "--rdzv-endpoint", str(parallel.rendezvous)]
        return [*place, "--node-rank", str(node_rank), "--rdzv-id", run.path.name]
    # torchrun unpickles what it finds where it rendezvouses. A port would be open to all networks of this machine; into
    # this file, which `clear_stores` has removed before, only the owner of the run writes. It grows with each sign of
    # life, which another node would wait for, and there is none.
    name = f"{run.path.name}-{launches(run) + 1}"
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(run.stores / name)]
    place += ["--rdzv-conf", "store_type=file,keep_alive_interval=86400"]
    # The machine's own name is never looked up: many containers cannot resolve it.
    return [*place, "--local-addr", "localhost", "--rdzv-id", name]


def clear_stores(run: RunDir) -> None:
    """Remove what ranks of one machine met at, and make an empty folder for the next. None of the run may be alive.

    What lies there comes from a start that was killed, or from whoever the folder came from.
    """
    _remove_stores(run)
    run.stores.mkdir(mode=0o700)


def _remove_stores(run: RunDir) -> None:
    if run.stores.is_symlink() or run.stores.is_file():
        run.stores.unlink()
    elif run.stores.exists():
        shutil.rmtree(run.stores)


def dealt_node_rank() -> int | None:
    """The number that a scheduler gave this node, None without one.

    Kubeflow's runtime for torch sets PET_NODE_RANK, as torchrun's own option. SLURM sets SLURM_NODEID, which counts
    nodes; SLURM_PROCID counts tasks, and is the same only while each node has one.
    """
    names = (name for name in ("PET_NODE_RANK", "SLURM_NODEID") if name in os.environ)
    return next((int(os.environ[name]) for name in names), None)


def _job() -> str:
    """The SLURM job this process belongs to, another one after each restart; empty outside of jobs."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return f"{job}-{os.environ.get('SLURM_RESTART_COUNT', 0)}" if job else ""


def _pid_namespace() -> int | None:
    """The number of the PID namespace of this process, None where the system has none."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def _boot_id() -> str:
    """Another word after each start of this machine, empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _node_environment(parallel: ParallelConfig) -> dict[str, str]:
    """How the ranks are reached: of one node not by a store of torchrun, which would listen on all networks.

    Of several nodes by a network interface: gloo takes the address of the machine's own name, which is 127.0.0.1 in
    many containers and 127.0.1.1 on Debian. NCCL passes over such addresses by itself.
    """
    if parallel.nodes == 1:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    interface = _interface_towards(*_host_and_port(parallel))
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def _interface_towards(host: str, port: int) -> str | None:
    """The network interface by which this machine reaches another one, None where it cannot.

    The first node asks about itself. Where its name is a loopback address the interface by which it reaches all
    others is taken, unless that is what the user named.
    """
    address = _own_address(host, port)
    if address is not None and address.is_loopback and not _is_loopback(host):
        address = _own_address(*ELSEWHERE) or address
    for name, addresses in psutil.net_if_addrs().items():
        if any(str(address) == one.address.partition("%")[0] for one in addresses):
            return name
    return "lo" if address is not None and address.is_loopback else None


def _own_address(host: str, port: int) -> IPv4Address | IPv6Address | None:
    """The address with which packets to another machine leave this one. None are sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:  # an unknown name, or no way: torchrun tells
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_and_port(parallel: ParallelConfig) -> tuple[str, int]:
    host, _, port = str(parallel.rendezvous).rpartition(":")
    return host.strip("[]"), int(port)


def _torchrun_source() -> Path:
    """The file of torchrun, found without importing torch. Raises InputError when torch is not installed."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise InputError("torch is not installed in this Python; run make .venv and use .venv/bin/python")
    return Path(torch.origin).parent / "distributed" / "run.py"


def _known_options(torchrun: Path) -> list[str]:
    """Those of OPTIONS that this version has: it refuses what it does not know, and 2.11 kills after 30 s."""
    source = torchrun.read_text(encoding="utf-8")
    return [word for option, value in OPTIONS.items() if option in source for word in (option, value)]


def start(cfg: RunConfig, run: RunDir, module: str = "trainer", gpus: Sequence[int] = ()) -> RunHandle:
    """Start the ranks in a session of their own and return at once. gpus: those they may see; none for all.

    Raises InputError when this run is running already.
    """
    environment = _node_environment(cfg.parallel) | _seen(gpus)  # looks names up: not while others wait for the lock
    waits = f"waits for the other nodes: {joining(run, cfg.parallel.nodes)}" if must_be_joined(cfg.parallel) else ""
    with run.locked():
        require_ended(run)
        run.complete_folders(cfg)
        _require_readable([run.events_file, *map(run.rank_file, range(cfg.parallel.world_size))])
        argv = command(cfg.parallel, run, module, 0, has_stages=bool(cfg.stages))
        _end_orphans(run, argv[2])
        clear_stores(run)
        for request in ("stop", "save", "sample"):
            run.clear(request)
        with EventWriter(run.events_file) as events:
            events.write(StatusEvent(state="starting", message=waits))
        process = _spawn(argv, output_file(run, launches(run) + 1), environment)
        Launch.of(process, argv).write(run)
    return _begun(run, process, argv)


def _require_readable(written: Iterable[Path]) -> None:
    """Raises InputError for what lies in the place of a file that the ranks write."""
    for file in written:
        try:
            files.opened(file).close()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise files.unreadable(file, error) from error


def must_be_joined(parallel: ParallelConfig) -> bool:
    """Whether a person starts the other nodes of a run: there are some, and no scheduler does."""
    return parallel.nodes > 1 and dealt_node_rank() is None


def joining(run: RunDir, nodes: int) -> str:
    """What is typed on the other nodes, with the number to fill in where they are several."""
    argv = [sys.executable, str(Path(__file__).parents[1] / "launch.py"), "--join", str(run.path), "--node-rank"]
    return f"{shlex.join(argv)} 1" if nodes == 2 else f"{shlex.join(argv)} K  # K = 1 to {nodes - 1}, another on each"


def join(parallel: ParallelConfig, run: RunDir, node_rank: int, module: str = "trainer") -> RunHandle:
    """Start this machine's ranks of a run on several nodes, the first of which calls `start`, and return at once.

    It may be called before that: the nodes wait for each other, for ten minutes. Where this machine does not see the
    run folder, one of that path is made for the logs. Raises InputError when the run is for one node or has no node of
    this number, and when that was begun on this machine already.
    """
    nodes = parallel.nodes
    run.logs.mkdir(parents=True, exist_ok=True)
    if nodes == 1:
        raise InputError(f"{run.path}: waits for no other node; start a run with parallel.nodes above 1 on the first")
    if not 1 <= node_rank < nodes:
        numbers = "1" if nodes == 2 else f"1 to {nodes - 1}"
        raise InputError(f"--node-rank {node_rank}: the nodes that join {run.path} have the numbers {numbers}")
    environment = _node_environment(parallel)
    # A machine that does not see the run folder cannot train in stages; its ranks say so.
    has_stages = run.config_file.is_file() and bool(run.config().stages)
    with run.locked():
        argv = command(parallel, run, module, node_rank, has_stages)
        if any(_arguments(process) == argv for process in psutil.process_iter()):
            raise InputError(f"{run.path}: node {node_rank} of it runs on this machine already")
        _end_orphans(run, argv[2])
        process = _spawn(argv, _free_node_log(run, node_rank), environment)
    return _begun(run, process, argv)


def node_log(run: RunDir, node_rank: int) -> Path:
    """What torchrun of another node than the first printed at its latest start, where there was one."""
    logs = run.logs.glob(f"node{node_rank}-*.log")
    return max(logs, key=lambda file: file.stat().st_mtime, default=run.logs / f"node{node_rank}-1.log")


def _free_node_log(run: RunDir, node_rank: int) -> Path:
    logs = run.logs.glob(f"node{node_rank}-*.log")
    numbers = (int(log.stem.partition("-")[2]) for log in logs)  # counted they would repeat where one was removed
    return run.logs / f"node{node_rank}-{max(numbers, default=0) + 1}.log"


def _begun(run: RunDir, process: subprocess.Popen[bytes], argv: list[str]) -> RunHandle:
    # Whoever started it may not care for its end, and it would stay as a zombie.
    threading.Thread(target=process.wait, name=f"end of {run.path.name}", daemon=True).start()
    return RunHandle(run, process, argv)


def _seen(gpus: Sequence[int]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}


def require_ended(run: RunDir) -> None:
    """Raises InputError when the run is running, here or on another machine."""
    launch = Launch.read(run)
    if launch is None or not alive(run):
        return
    if _process(run) is not None:
        raise InputError(f"{run.path}: is running already; stop it first, or start a new run")
    if launch.is_on_this_machine:
        raise InputError(
            f"{run.path}: is running on {launch.host} already, in another container; stop it first, or start a new run"
        )
    raise InputError(
        f"{run.path}: is running on {launch.host}; stop it first, or start a new run. If {launch.host} is down, "
        f"remove {run.launch_file}"
    )


def require_free_port(parallel: ParallelConfig) -> None:
    """Raises InputError when `parallel.rendezvous` is no place of this machine, or one that another program holds.

    The machine that starts a run is its first node. torchrun would wait there for the machine of that name, or take
    that program for the first node. A job of a cluster learns its first node only when it runs.
    """
    if parallel.nodes == 1 or parallel.rendezvous == FIRST_NODE:
        return
    host, port = _host_and_port(parallel)
    field, place = "parallel.rendezvous", parallel.rendezvous
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torchrun: a port just left is free
            probe.bind(address)
    except socket.gaierror as error:
        if must_be_joined(parallel):  # a scheduler may start the first node before its name is known
            raise InputError(
                f"{field}: {place}: no machine of the name {host} is known here; give the name or address by which "
                "the other nodes reach this one"
            ) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"{field}: another program holds {place}; end it or name another port") from error
        if error.errno == errno.EADDRNOTAVAIL and must_be_joined(parallel):
            raise InputError(f"{field}: {place} is not this machine; start the run there, and --join here") from error


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


def _spawn(argv: Sequence[str], output: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with output.open("xb") as file:
        # The process holds the lock as long as it lives, and who does not see the process sees that.
        fcntl.flock(file, fcntl.LOCK_EX)
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**worker_environment(), **environment},
            start_new_session=True,
        )


def alive(run: RunDir) -> bool:
    """Whether the torchrun process of the latest start still runs. Raises InputError when launch.json is damaged.

    In another container of this machine it is known by its lock. The processes of another machine cannot be seen. There
    a run counts as alive until it says that it has ended, or says nothing for UNHEARD_S seconds, or its SLURM job was
    started anew: that ends all it had begun.
    """
    launch = Launch.read(run)
    if launch is None or launch.is_here:  # ranks that outlive their torchrun hold its lock too
        return _process(run) is not None
    if launch.is_on_this_machine:
        return launch.boot_id != "" and _is_held(output_file(run, launches(run)))
    if launch.job and launch.job != _job() and launch.job.partition("-")[0] == _job().partition("-")[0]:
        return False
    if _has_said_its_end(run):
        return False
    return time.time() - _last_heard(run) < UNHEARD_S


def _is_held(output: Path) -> bool:
    """Whether a process lives to whose output `_spawn` gave this file, in whatever container of the machine."""
    try:
        with files.opened(output) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _has_said_its_end(run: RunDir) -> bool:
    """Whether the last status is an end. Only the end of the file is read: whoever watches asks every second."""
    begin = max(0, run.events_file.stat().st_size - LAST_WORDS)
    return last_state(EventReader(run.events_file, begin).read()) in ENDS


def _last_heard(run: RunDir) -> float:
    """When a rank wrote last, or somebody an event: unix seconds."""
    return max(file.stat().st_mtime for file in (run.launch_file, run.events_file, *run.ranks.glob("*.jsonl")))


def _process(run: RunDir) -> psutil.Process | None:
    launch = Launch.read(run)
    if launch is None or not launch.is_here or not launch.is_of_this_boot:
        return None
    try:
        process = psutil.Process(launch.pid)
        # The create time is derived from the boot time, and both move when the clock is set.
        created, known = process.create_time(), launch.create_time
        if launch.since_boot is not None:
            created, known = created - psutil.boot_time(), launch.since_boot
        same = abs(created - known) < 1.0
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


def terminate(run: RunDir) -> None:
    """End the run now, without a checkpoint. No error is recorded; every checkpoint that is complete stays so.

    Raises InputError when the process that launch.json names is not one of this run folder.
    """
    with run.locked():
        process, launch = _process(run), Launch.read(run)
        if process is None or launch is None:
            return
        if not _is_same(launch.argv[-1], run.path):
            raise InputError(
                f"{run.launch_file}: process {launch.pid} is not of this run folder and is left alone; remove the file"
            )
        end_family(process.pid)
        step = max((event.step for event in EventReader(run.events_file).read()), default=0)
        with EventWriter(run.events_file) as events:
            events.write(StatusEvent(state="stopped", step=step, message="terminated; the last checkpoint remains"))


def end_family(pid: int) -> None:
    """Kill a torchrun and its ranks: asked to leave they would save first. Trackers see it and end by themselves."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = [process, *process.children()]  # torchrun gives each rank a session of its own
        family += [rank for child in family[1:] if TORCHRUN in _arguments(child) for rank in child.children()]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)


def record_mistake(run: RunDir, rank: int, message: str) -> None:
    """An ErrorEvent with exit code 2: a rank found the user's input wrong. All ranks find it, the first records it."""
    with run.locked():
        events = _since_start(EventReader(run.events_file).read())
        if not any(isinstance(event, ErrorEvent) for event in events):
            with EventWriter(run.events_file) as writer:
                writer.write(ErrorEvent(message=message, rank=rank, exit_code=2))


def settle(run: RunDir) -> None:
    """Record the end of a run whose process is gone without having said so: one ErrorEvent, then `failed`.

    Any number of readers may call it, at any time; only the first call after the end writes something. Only those on
    the machine where it ran do: from elsewhere a run that is suspended or cut off looks like one that is gone.
    """
    with run.locked():
        launch = Launch.read(run)
        if launch is None or not launch.is_here or alive(run):
            return
        _end_orphans(run, SUPERVISOR if SUPERVISOR in launch.argv[:3] else TORCHRUN)
        with contextlib.suppress(OSError):  # a disk that is read-only: the next start removes them, or says why not
            _remove_stores(run)
        events = _since_start(EventReader(run.events_file).read())
        end = last_state(events)
        if end in ("finished", "stopped"):
            return
        with EventWriter(run.events_file) as writer:
            if not any(isinstance(event, ErrorEvent) for event in events):
                writer.write(diagnose(run, events))
            if end != "failed":
                writer.write(StatusEvent(state="failed", step=max(event.step for event in events)))


def _end_orphans(run: RunDir, leader: str) -> None:
    """Kill the ranks of a torchrun that was itself killed: they would train on, and write beside a continued run.

    leader: the module of what was killed. Nothing but the run's own path tells what is killed, whatever the folder
    says of itself. Those below a leader that lives are left alone: they belong to another node of the run on this
    machine. In stages a torchrun is itself below the process that starts them.
    """
    own = [process for process in psutil.process_iter() if _is_of(process, run)]
    leaders = {process for process in own if _arguments(process)[1:3] == ["-m", leader]}
    for process in set(own) - leaders:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if not leaders.intersection(process.parents()):
                process.kill()


def _is_of(process: psutil.Process, run: RunDir) -> bool:
    """Whether a process leads the ranks of a run or is one of them: torchrun has marked it."""
    arguments = _arguments(process)
    if arguments[-3:-2] != ["-m"] or not _is_same(arguments[-1], run.path):
        return False
    try:
        return arguments[1:3] in (["-m", TORCHRUN], ["-m", SUPERVISOR]) or "TORCHELASTIC_RUN_ID" in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _is_same(path: str, folder: Path) -> bool:
    """Whether a path leads to a folder, by whatever links."""
    return os.path.realpath(path) == os.path.realpath(folder)


def _arguments(process: psutil.Process) -> list[str]:
    """The command line of a process, empty where it is gone or not ours to see."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []


def _since_start(events: Sequence[AnyEvent]) -> Sequence[AnyEvent]:
    starts = [at for at, event in enumerate(events) if isinstance(event, StatusEvent) and event.state == "starting"]
    return events[starts[-1] :] if starts else events
