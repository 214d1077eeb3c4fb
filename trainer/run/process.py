"""The process of a run: whether it is alive, what state the run is in, and how to stop it. Imports no torch.

Whether a run is alive is derived from its process and never stored. `record_end` writes to the run folder: a reader
that finds the process gone without a final status records the failure. See DECISIONS 97, 127.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
from annotated_types import Interval, MinLen
from pydantic import TypeAdapter

from trainer.run import compiler
from trainer.run.events import (
    ENDS,
    ErrorEvent,
    EventReader,
    EventWriter,
    State,
    StatusEvent,
    last_state,
    since_start,
)
from trainer.run.failure import diagnose, launches, output_file
from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.installation import CHECKOUT

SUPERVISOR = "trainer.launcher.supervisor"
"""The module that starts a torchrun for each stage."""
TORCHRUN = "trainer.launcher.agent"
"""The module that is torchrun."""
LEADERS = frozenset({TORCHRUN, SUPERVISOR})
"""Modules that lead the ranks of a run."""
MAX_SILENCE_S = 1800
"""After this long without a write, a run on another machine counts as ended. Loading and exporting write nothing."""
TAIL_BYTES = 65536
"""How much of the end of `events.jsonl` is read to find a final status."""
DELETED = ".deleted-"
"""Start of the name of a folder of deleted runs that is being removed."""
STARTING_S, YOUNG_S = 1.0, 10.0
"""How long processes are waited for that start just now, and their age: some hide their command line for ever."""
HIGHEST_PID = 2**22
"""PID_MAX_LIMIT of Linux on 64 bits."""


@dataclass(frozen=True)
class Launch:
    """The contents of `launch.json`: the process of the latest start.

    Attributes:
        pid: Its process id. Another process may have the same id later; the create time distinguishes them.
        create_time: Unix seconds.
        argv: Its command line.
        host: Name of its machine.
        job: SLURM job with the number of its restarts; empty outside of SLURM.
        since_boot: Create time in seconds since boot, which does not change when the clock is set.
        pid_namespace: PID namespace in which `pid` is valid. Containers may share the name of their machine, but not
            their processes.
        boot_id: Boot of the machine during which `pid` is valid.
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
    def of(cls, process: subprocess.Popen[bytes] | psutil.Process, argv: list[str]) -> Launch:
        """Return the launch of a process that was started on this machine."""
        created = psutil.Process(process.pid).create_time()
        since_boot = created - psutil.boot_time()
        return cls(process.pid, created, argv, socket.gethostname(), _job(), since_boot, _pid_namespace(), _boot_id())

    @property
    def is_on_this_machine(self) -> bool:
        """Whether it was started on a machine of this name, in any container."""
        return self.host == socket.gethostname()

    @property
    def is_of_this_boot(self) -> bool:
        """Whether its machine was not rebooted since. No process survives a reboot."""
        return self.boot_id in ("", _boot_id())

    @property
    def is_here(self) -> bool:
        """Whether its process is visible from here, or was until this machine was rebooted."""
        is_seen = self.pid_namespace in (None, _pid_namespace())
        return self.is_on_this_machine and (is_seen or not self.is_of_this_boot)

    @classmethod
    def read(cls, run: RunDir) -> Launch | None:
        """Read the latest start of a run, or None if it was never started. Raises InputError as `read_file`."""
        return cls.read_file(run.launch_file, "remove it if the run has ended")

    @classmethod
    def read_file(cls, file: Path, remedy: str) -> Launch | None:
        """Read a start that `write_file` wrote, or None if there is no such file. Fields of later versions are ignored.

        Args:
            file: The file.
            remedy: What the user can do about a damaged one.

        Raises:
            InputError: The file is damaged, so that it is unknown whether the process is alive.
        """
        try:
            return files.read_json(file, _LAUNCH, remedy)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror}); make it readable") from error

    def write(self, run: RunDir) -> None:
        self.write_file(run.launch_file)

    def write_file(self, file: Path) -> None:
        files.replace(file, json.dumps(asdict(self), indent=1))

    def process(self) -> psutil.Process | None:
        """Return its process if that is alive and visible from here."""
        if not self.is_here or not self.is_of_this_boot:
            return None
        try:
            process = psutil.Process(self.pid)
            # The create time is derived from the boot time, and both change when the clock is set.
            created, known = process.create_time(), self.create_time
            if self.since_boot is not None:
                created, known = created - psutil.boot_time(), self.since_boot
            same = abs(created - known) < 1.0
            # The command line is empty for a moment while a process starts, and while it exits.
            same = same and process.cmdline() in (self.argv, [])
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return None


_LAUNCH = TypeAdapter(Launch)


def clear_stores(run: RunDir) -> None:
    """Empty the folder of rendezvous files for the next start. No process of the run may be alive.

    Files in it are from a start that was killed, or came with a copied run folder and cannot be trusted.
    """
    remove_stores(run)
    run.stores.mkdir(mode=0o700)


def remove_stores(run: RunDir) -> None:
    """Remove the folder of rendezvous files, or whatever has its name."""
    if run.stores.is_symlink() or run.stores.is_file():
        run.stores.unlink()
    elif run.stores.exists():
        shutil.rmtree(run.stores)


def _job() -> str:
    """Return the SLURM job of this process with the number of its restarts; empty outside of jobs."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return f"{job}-{os.environ.get('SLURM_RESTART_COUNT', 0)}" if job else ""


def _pid_namespace() -> int | None:
    """Return the number of this process's PID namespace, or None on a system without namespaces."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def _boot_id() -> str:
    """Return a random id that changes with each boot of this machine; empty on a system without one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def require_ended(run: RunDir) -> None:
    """Raise InputError if the run is running, here or on another machine."""
    launch = Launch.read(run)
    if launch is None or not alive(run):
        return
    if _process(run) is not None:
        raise InputError(f"{run.path}: is already running; stop it first, or start a new run")
    if launch.is_on_this_machine:
        raise InputError(
            f"{run.path}: is already running on {launch.host}, in another container; stop it first, or start a new run"
        )
    raise InputError(
        f"{run.path}: is running on {launch.host}; stop it first, or start a new run. If {launch.host} is down, "
        f"remove {run.launch_file}"
    )


def worker_environment() -> dict[str, str]:
    """Return the environment for processes that run `python -m trainer`, from an installation or from a checkout."""
    inherited = os.environ.get("PYTHONPATH")
    # An installation is found anyway, and its folder must not come before the standard library.
    folders = [str(folder) for folder in (CHECKOUT, inherited) if folder]
    return {
        "OMP_NUM_THREADS": "1",  # ranks share the cores; without it each rank would use all of them
        **compiler.cache_environment()[0],
        **os.environ,
        **({"PYTHONPATH": os.pathsep.join(folders)} if folders else {}),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # else Python would import a folder named trainer in the current folder
    }


def alive(run: RunDir) -> bool:
    """Whether the torchrun process of the latest start is still running.

    In another container of this machine, it is recognized by its lock. Processes of another machine are not visible: a
    run there counts as alive until its last status is an end, or it wrote nothing for MAX_SILENCE_S seconds, or its
    SLURM job was restarted, which ends all of the job's processes.

    Raises:
        InputError: `launch.json` is damaged.
    """
    launch = Launch.read(run)
    if launch is None or launch.is_here:  # not by the lock: ranks that outlive their torchrun hold it too
        return _process(run) is not None
    if launch.is_on_this_machine:
        return launch.boot_id != "" and _is_held(output_file(run, launches(run)))
    if launch.job and launch.job != _job() and launch.job.partition("-")[0] == _job().partition("-")[0]:
        return False
    # Only the end of the file is read, because watchers call this every second.
    begin = max(0, run.events_file.stat().st_size - TAIL_BYTES)
    if last_state(EventReader(run.events_file, begin).read()) in ENDS:
        return False
    written = (run.launch_file, run.events_file, *run.ranks.glob("*.jsonl"))
    return time.time() - max(files.written(file.stat()) for file in written) < MAX_SILENCE_S


def _is_held(output: Path) -> bool:
    """Whether the process that writes its output to this file is alive, in any container of the machine.

    `launcher.torchrun` locks the file for it.
    """
    try:
        with files.opened(output) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _process(run: RunDir) -> psutil.Process | None:
    launch = Launch.read(run)
    return launch.process() if launch else None


def status(run: RunDir) -> State:
    """Return the current state of a run, derived from its process and its events."""
    with run.locked():
        return derive_state(alive(run), last_state(EventReader(run.events_file).read()))


def derive_state(is_alive: bool, last: State) -> State:
    """Return the state of a run whose last status was `last`: if its process is gone before an end, it has failed."""
    return last if is_alive or last in ENDS or last == "created" else "failed"


def stop(run: RunDir) -> None:
    """Request a stop after the current step or the next, with a checkpoint. Raises InputError if it is not running."""
    if not alive(run):
        raise InputError(f"{run.path}: is not running; continue it with --resume")
    run.request("stop")


def wait(run: RunDir, timeout_s: float | None = None) -> State:
    """Wait until the run has ended, but at most `timeout_s` seconds, and return its state."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while alive(run) and (deadline is None or time.monotonic() < deadline):
        time.sleep(0.1)
    record_end(run)
    return status(run)


def terminate(run: RunDir) -> None:
    """Stop the run at once, without a checkpoint. No error is recorded; complete checkpoints remain.

    Raises:
        InputError: The process named in `launch.json` does not belong to this run folder.
    """
    with run.locked():
        process, launch = _process(run), Launch.read(run)
        if process is None or launch is None:
            return
        if not _is_same(launch.argv[-1], run.path):
            raise InputError(
                f"{run.launch_file}: process {launch.pid} does not belong to this run folder and was not stopped; "
                "remove the file"
            )
        end_family(process.pid)
        step = max((event.step for event in EventReader(run.events_file).read()), default=0)
        with EventWriter(run.events_file) as events:
            events.write(StatusEvent(state="stopped", step=step, message="terminated; the last checkpoint remains"))


def end_family(pid: int) -> None:
    """Kill a torchrun and its ranks. On SIGTERM they would save a checkpoint first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = [process, *process.children()]  # torchrun gives each rank a session of its own
        leaders = [child for child in family[1:] if LEADERS & set(argv_of(child)[:3])]
        family += [rank for leader in leaders for rank in leader.children()]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)


def put_away(run: RunDir, aside: Path) -> None:
    """Rename a run folder to where nothing is started in it.

    A folder of a stranger is renamed as well, with the links in it.

    Args:
        run: The run.
        aside: The new path, on the same file system. Nothing may be there.

    Raises:
        InputError: The run is running, or another process has deleted it.
        OSError: The folder cannot be renamed.
    """
    if run.path.is_symlink():
        raise InputError(f"{run.path}: is a link; remove it by hand")
    is_odd = False
    with contextlib.suppress(OSError):
        is_odd = not stat.S_ISREG(os.lstat(run.events_file).st_mode)
    with contextlib.ExitStack() as held:
        if not is_odd:  # else no start gets the lock either
            held.enter_context(run.locked())
        if alive(run):
            raise InputError(f"{run.path.name}: is running; stop it first")
        try:
            files.rename(run.path, aside)
        except FileNotFoundError as error:
            raise InputError(run.gone) from error


def remove(folder: Path) -> None:
    """Remove a folder of deleted runs for good, its name first: what is not removed yet cannot be restored.

    Nothing that a link in it leads to is removed.

    Args:
        folder: A folder below the trash of a folder of runs.

    Raises:
        InputError: Not all of it could be removed.
        OSError: It cannot be renamed.
    """
    aside = folder.parents[1] / f"{DELETED}{secrets.token_hex(8)}"
    files.rename(folder, aside)
    try:
        shutil.rmtree(aside)
    except OSError as error:
        if aside.exists():  # else another process has removed it, as `remove_deleted`
            raise InputError(
                f"{folder.name}: files could not be removed ({error.strerror}: {error.filename}); remove the folder "
                f"{aside} by hand"
            ) from error


def remove_deleted(runs: Path) -> None:
    """Remove what was being removed for good when that was interrupted."""
    for folder in runs.glob(f"{DELETED}*"):
        shutil.rmtree(folder, ignore_errors=True)


def record_mistake(run: RunDir, rank: int, message: str) -> None:
    """Record a mistake in the user's input: one ErrorEvent with exit code 2, from the first rank that finds it."""
    with run.locked():
        events = since_start(EventReader(run.events_file).read())
        if not any(isinstance(event, ErrorEvent) for event in events):
            with EventWriter(run.events_file) as writer:
                writer.write(ErrorEvent(message=message, rank=rank, exit_code=2))


def record_end(run: RunDir) -> None:
    """Record the failure of a run whose process is gone without a final status: one ErrorEvent, then `failed`.

    Any number of readers may call this at any time; only the first call after the end writes something. It does nothing
    on other machines than the one where the run was, because from there a suspended run looks like one that is gone.
    """
    with run.locked():
        launch = Launch.read(run)
        if launch is None or not launch.is_here or alive(run):
            return
        end_orphans(run, next((module for module in LEADERS if module in launch.argv[:3]), TORCHRUN))
        with contextlib.suppress(OSError):  # read-only disk: the next start removes them, or reports why it cannot
            remove_stores(run)
        events = since_start(EventReader(run.events_file).read())
        end = last_state(events)
        if end in ("finished", "stopped"):
            return
        with EventWriter(run.events_file) as writer:
            if not any(isinstance(event, ErrorEvent) for event in events):
                writer.write(diagnose(run, events))
            if end != "failed":
                writer.write(StatusEvent(state="failed", step=max(event.step for event in events)))


def adopt(run: RunDir) -> bool:
    """Record the process of a run whose starter was killed before it could do so. Returns whether there is one."""
    for process in all_processes():
        argv = argv_of(process)
        if argv[1:2] == ["-m"] and argv[2] in LEADERS and _is_same(argv[-1], run.path):
            Launch.of(process, argv).write(run)
            return True
    return False


def end_orphans(run: RunDir, leader: str) -> None:
    """Kill the ranks of a torchrun that was itself killed. Otherwise they would train on and write into a resumed run.

    Processes are recognized only by the path of the run in their command line; no file in the folder is trusted. Ranks
    below a living leader are not killed: they belong to another node of the run on this machine. In a run with stages,
    torchrun itself is below the supervisor.

    Args:
        run: The run.
        leader: Module of the process that was killed: torchrun or a supervisor.
    """
    own = [process for process in all_processes() if _is_of(process, run)]
    leaders = {process for process in own if argv_of(process)[1:3] == ["-m", leader]}
    for process in set(own) - leaders:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if not leaders.intersection(process.parents()):
                process.kill()


def all_processes() -> list[psutil.Process]:
    """Return all processes. The command line of one is empty for a moment while it starts, which is waited for."""
    deadline = time.monotonic() + STARTING_S
    while any(map(_is_starting, found := list(psutil.process_iter()))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _is_starting(process: psutil.Process) -> bool:
    try:
        # The kernel's own and zombies have no program.
        return not process.cmdline() and process.exe() != "" and time.time() - process.create_time() < YOUNG_S
    except psutil.Error:  # gone, or of another user
        return False


def _is_of(process: psutil.Process, run: RunDir) -> bool:
    """Whether a process leads the ranks of a run, or is one of them, which torchrun marks in their environment."""
    argv = argv_of(process)
    if argv[-3:-2] != ["-m"] or not _is_same(argv[-1], run.path):
        return False
    try:
        is_leader = argv[1:2] == ["-m"] and argv[2] in LEADERS
        return is_leader or "TORCHELASTIC_RUN_ID" in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _is_same(path: str, folder: Path) -> bool:
    """Whether a path leads to a folder, through any links."""
    return os.path.realpath(path) == os.path.realpath(folder)


def argv_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it is gone or not accessible."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []
