"""Whether a run is alive, which nobody stores, and how one is ended. No torch: its process is looked at from outside.

`settle` writes: a reader that finds the process gone without a word records the end of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
from annotated_types import Interval, MinLen
from pydantic import TypeAdapter

from trainer.config import files
from trainer.config.errors import InputError
from trainer.config.installation import CHECKOUT
from trainer.run.events import ENDS, AnyEvent, ErrorEvent, EventReader, EventWriter, State, StatusEvent, last_state
from trainer.run.failure import diagnose, launches, output_file
from trainer.run.folder import RunDir

TORCHRUN = "torch.distributed.run"
SUPERVISORS = ("trainer.launcher.supervisor", "trainer.stages")
"""Modules that start a torchrun for each stage. The second is the name of 0.1: a run that it started may still live."""
UNHEARD_S = 1800
"""A run on another machine that wrote nothing for so long is taken for ended. Loading or exporting is silent too."""
LAST_WORDS = 65536
"""Bytes at the end of a run's events among which its end stands, where it has ended."""
HIGHEST_PID = 2**22
"""PID_MAX_LIMIT of Linux on 64 bits."""


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


def clear_stores(run: RunDir) -> None:
    """Remove what ranks of one machine met at, and make an empty folder for the next. None of the run may be alive.

    What lies there comes from a start that was killed, or from whoever the folder came from.
    """
    remove_stores(run)
    run.stores.mkdir(mode=0o700)


def remove_stores(run: RunDir) -> None:
    if run.stores.is_symlink() or run.stores.is_file():
        run.stores.unlink()
    elif run.stores.exists():
        shutil.rmtree(run.stores)


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


def worker_environment() -> dict[str, str]:
    """The environment of processes that run `python -m trainer`, from an installation or from a checkout."""
    inherited = os.environ.get("PYTHONPATH")
    # An installation is found anyway, and its folder must not come before the standard library.
    folders = [str(folder) for folder in (CHECKOUT, inherited) if folder]
    return {
        "OMP_NUM_THREADS": "1",  # ranks share the cores; without it each would take all of them
        **os.environ,
        **({"PYTHONPATH": os.pathsep.join(folders)} if folders else {}),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # else a folder named trainer in the current one is taken for this package
    }


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
        family += [rank for child in family[1:] if TORCHRUN in argv_of(child) for rank in child.children()]
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
        end_orphans(run, next((module for module in SUPERVISORS if module in launch.argv[:3]), TORCHRUN))
        with contextlib.suppress(OSError):  # a disk that is read-only: the next start removes them, or says why not
            remove_stores(run)
        events = _since_start(EventReader(run.events_file).read())
        end = last_state(events)
        if end in ("finished", "stopped"):
            return
        with EventWriter(run.events_file) as writer:
            if not any(isinstance(event, ErrorEvent) for event in events):
                writer.write(diagnose(run, events))
            if end != "failed":
                writer.write(StatusEvent(state="failed", step=max(event.step for event in events)))


def end_orphans(run: RunDir, leader: str) -> None:
    """Kill the ranks of a torchrun that was itself killed: they would train on, and write beside a continued run.

    leader: the module of what was killed. Nothing but the run's own path tells what is killed, whatever the folder
    says of itself. Those below a leader that lives are left alone: they belong to another node of the run on this
    machine. In stages a torchrun is itself below the process that starts them.
    """
    own = [process for process in psutil.process_iter() if _is_of(process, run)]
    leaders = {process for process in own if argv_of(process)[1:3] == ["-m", leader]}
    for process in set(own) - leaders:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if not leaders.intersection(process.parents()):
                process.kill()


def _is_of(process: psutil.Process, run: RunDir) -> bool:
    """Whether a process leads the ranks of a run or is one of them: torchrun has marked it."""
    argv = argv_of(process)
    if argv[-3:-2] != ["-m"] or not _is_same(argv[-1], run.path):
        return False
    try:
        is_leader = argv[1:2] == ["-m"] and argv[2] in (TORCHRUN, *SUPERVISORS)
        return is_leader or "TORCHELASTIC_RUN_ID" in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _is_same(path: str, folder: Path) -> bool:
    """Whether a path leads to a folder, by whatever links."""
    return os.path.realpath(path) == os.path.realpath(folder)


def argv_of(process: psutil.Process) -> list[str]:
    """The command line of a process, empty where it is gone or not ours to see."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []


def _since_start(events: Sequence[AnyEvent]) -> Sequence[AnyEvent]:
    starts = [at for at, event in enumerate(events) if isinstance(event, StatusEvent) and event.state == "starting"]
    return events[starts[-1] :] if starts else events
