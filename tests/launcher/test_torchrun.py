"""Runs as processes: started once, watched from outside, ended on request, and what is said when one breaks."""

import json
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.commands import LAUNCH
from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.config.sections import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from trainer.launcher import network, torchrun
from trainer.launcher.commands import attend, explain, watch
from trainer.launcher.schedulers import FIRST_NODE
from trainer.run import allocator, failure
from trainer.run import process as processes
from trainer.run.events import ErrorEvent, EventReader, EventWriter, StatusEvent, WarningEvent
from trainer.run.failure import OUT_OF_MEMORY, missing_memory
from trainer.run.folder import LINK, RunDir
from trainer.run.preemption import PREEMPTION_SIGNALS
from trainer.system.amounts import GIB
from trainer.system.errors import InputError
from trainer.system.files import NOT_REGULAR

WORKER = '''
"""A rank that does what the run is named after. It imports no torch but for the decorator every rank has."""
import os, signal, sys, time
from pathlib import Path
from torch.distributed.elastic.multiprocessing.errors import record
from trainer.run.events import *
from trainer.run.folder import RunDir

@record
def main():
    run, rank = RunDir.open(Path(sys.argv[1])), int(os.environ["RANK"])
    events = EventWriter(run.events_file)
    if rank == 0:
        events.write(StatusEvent(state="training"))
    globals()[run.config().name](run, rank, events)

def good(run, rank, events):
    if rank == 0:
        events.write(ExportEvent(step=3, path="export/good.safetensors", what="adapter", format="diffusers"))
        events.write(StatusEvent(state="finished", step=3))

def raising(run, rank, events):
    if rank == 1:
        events.write(StatusEvent(state="training", step=12))
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    time.sleep(60)

def killed(run, rank, events):
    dying = run.path / "dying"
    if rank == 1:
        dying.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not dying.exists():
        time.sleep(0.02)
    time.sleep(0.05)
    raise RuntimeError("[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4321")

def unwritten(run, rank, events):
    if rank == 1:
        print("[rank1]: Traceback (most recent call last):", file=sys.stderr)
        print("[rank1]: OSError: step-000300 not written ([Errno 30] Read-only file system)", file=sys.stderr)
        print("[rank1]: During handling of the above exception, another exception occurred:", file=sys.stderr)
        print("[rank1]: OSError: [Errno 30] Read-only file system: error.json", file=sys.stderr, flush=True)
        os._exit(1)
    time.sleep(60)

def patient(run, rank, events):
    if rank == 0:
        while not run.requested("stop"):
            time.sleep(0.02)
        run.clear("stop")
        time.sleep(0.5)  # as a trainer that saves: nobody may ask again
        events.write(StatusEvent(state="stopped", step=5))

def stubborn(run, rank, events):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run.path / f"ready{rank}").touch()
    time.sleep(60)

main()
'''


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """Make a run, of two ranks if nothing else is said, that executes the function of WORKER it is named after."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name: str, ranks: int = 2) -> tuple[RunConfig, RunDir]:
        cfg = RunConfig(
            name=name,
            model=ModelConfig(family="flux2"),
            data=DataConfig(path=str(tmp_path)),
            parallel=ParallelConfig(devices=ranks),
        )
        return cfg, RunDir.create(tmp_path / "runs", cfg)

    return make


@pytest.fixture
def run(make_run) -> RunDir:
    """The folder of a run that is not started."""
    return make_run("good")[1]


@pytest.fixture
def start(make_run):
    """Start such a run; every one is gone when the test ends."""
    handles = []

    def start(name: str, ranks: int = 2) -> tuple[RunConfig, RunDir]:
        cfg, run = make_run(name, ranks)
        handles.append(torchrun.start(cfg, run, module="worker"))
        return cfg, run

    yield start
    for handle in handles:
        processes.terminate(handle.run)
        handle.process.wait(10)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def errors_and_end(run: RunDir) -> list[object]:
    """The error events and the last event, without their time."""
    events = EventReader(run.events_file).read()
    return [vars(event) | {"time": 0} for event in events if isinstance(event, ErrorEvent) or event is events[-1]]


@pytest.mark.slow
def test_two_runs_at_once_end_each_in_its_own_way(start, capsys):
    cfg, good = start("good")
    _, raising = start("raising")
    assert watch(cfg, good, EventReader(good.events_file)) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"run folder: {good.path}",
        "starting",
        "training",
        "exported adapter (diffusers): export/good.safetensors",
        "finished",
        f"{good.path}/export/good.safetensors",
    ]
    assert good.report.is_file()
    assert processes.wait(raising, timeout_s=30) == "failed"
    recorded = raising.events_file.read_bytes()
    readers = [threading.Thread(target=processes.record_end, args=(raising,)) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert raising.events_file.read_bytes() == recorded
    [log] = raising.logs.glob("*/attempt_0/1/stderr.log")
    error = ErrorEvent(
        time=0,
        step=12,
        message="RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
        remedy="save memory, first where the result stays the same: set train.checkpointing and "
        "parallel.offload_blocks to auto, lower train.micro_batch, or shard over more ranks; then quantize.format; "
        "data.resolution and data.length last",
        rank=1,
        log=str(log.relative_to(raising.path)),
    )
    assert errors_and_end(raising) == [vars(error), vars(StatusEvent(time=0, step=12, state="failed"))]


def test_a_killed_rank_is_the_cause_although_another_rank_complained_first(start, capsys):
    cfg, run = start("killed")
    assert watch(cfg, run, EventReader(run.events_file)) == 1
    [log] = run.logs.glob("*/attempt_0/1/stderr.log")
    assert capsys.readouterr().err == (
        "error: rank 1, step 0: killed by SIGKILL\n"
        "  what to do: the machine probably ran out of host memory, or the process was killed; the system log shows "
        "which. Use fewer ranks per machine, lower train.micro_batch, or add memory\n"
        f"  log: {log}\n"
    )


@pytest.mark.slow
def test_a_rank_whose_disk_takes_no_error_file_is_reported_with_its_first_error(start, capsys):
    cfg, run = start("unwritten")
    assert watch(cfg, run, EventReader(run.events_file)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: rank 1, step 0: OSError: step-000300 not written ([Errno 30] Read-only file system)"
    assert "make it writable, then continue with --resume" in lines[1]


def test_a_run_is_started_once_in_its_own_session_and_ctrl_c_stops_it(start, capsys):
    cfg, run = start("patient", ranks=1)
    pid = processes.Launch.read(run).pid
    assert os.getsid(pid) == pid
    with pytest.raises(InputError) as error:
        torchrun.start(cfg, run, module="worker")
    assert str(error.value) == f"{run.path}: is already running; stop it first, or start a new run"
    wait_for(lambda: processes.status(run) == "training")
    processes.record_end(run)  # a run under way is left alone
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert watch(cfg, run, EventReader(run.events_file)) == 130
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        f"run folder: {run.path}",
        "starting",
        "training",
        "stopping after this step, with a checkpoint; Ctrl-C again ends it at once, without one",
        "stopped",
    ]
    assert told.err == f"stopped; continue with --resume {run.path}\n"
    assert errors_and_end(run) == [vars(StatusEvent(time=0, step=5, state="stopped"))]


# Both preemption signals are handled alike.
@pytest.mark.parametrize(
    "number",
    [PREEMPTION_SIGNALS[0], *(pytest.param(other, marks=pytest.mark.slow) for other in PREEMPTION_SIGNALS[1:])],
)
def test_a_scheduler_that_asks_to_leave_again_and_again_does_not_cost_the_checkpoint(start, capsys, number):
    cfg, run = start("patient", ranks=1)
    wait_for(lambda: processes.status(run) == "training")
    for after_s in (0.3, 0.6):
        threading.Timer(after_s, os.kill, (os.getpid(), number)).start()
    assert watch(cfg, run, EventReader(run.events_file)) == 130
    assert capsys.readouterr().err == f"stopped; continue with --resume {run.path}\n"
    assert errors_and_end(run) == [vars(StatusEvent(time=0, step=5, state="stopped"))]


@pytest.mark.slow
def test_terminating_ends_ranks_that_ignore_it_and_is_no_failure(start):
    _, run = start("stubborn")
    wait_for(lambda: all((run.path / f"ready{rank}").exists() for rank in range(2)))
    ranks = psutil.Process(processes.Launch.read(run).pid).children()
    processes.terminate(run)
    assert not any(rank.is_running() for rank in ranks)
    assert processes.wait(run) == "stopped"
    end = StatusEvent(time=0, state="stopped", message="terminated; the last checkpoint remains")
    assert errors_and_end(run) == [vars(end)]


def test_ranks_of_a_killed_torchrun_do_not_train_on(start):
    _, run = start("stubborn")
    wait_for(lambda: all((run.path / f"ready{rank}").exists() for rank in range(2)))
    torchrun = psutil.Process(processes.Launch.read(run).pid)
    ranks = torchrun.children()
    torchrun.kill()
    assert processes.wait(run, timeout_s=10) == "failed"
    psutil.wait_procs(ranks, timeout=10)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    [error, _] = errors_and_end(run)
    assert (error["message"], error["remedy"]) == (
        "torchrun exited without a message",
        "it was killed, or the machine ran out of memory: continue with --resume",
    )


def test_the_command_meets_at_a_file_on_one_node_and_at_the_rendezvous_on_several(make_run, monkeypatch, tmp_path):
    cfg, run = make_run("good")
    newer = tmp_path / "run.py"
    newer.write_text('parser.add_argument("--shutdown-timeout", "--signals-to-handle")', encoding="utf-8")
    monkeypatch.setattr(torchrun, "_torchrun_source", lambda: newer)
    assert torchrun.torchrun_argv(cfg.parallel, run) == [
        *(sys.executable, "-m", "trainer.launcher.agent", "--nnodes", "1", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{run.stores}/{run.path.name}-1"),
        *("--rdzv-conf", "store_type=file,keep_alive_interval=86400", "--local-addr", "localhost"),
        *("--rdzv-id", f"{run.path.name}-1", "--max-restarts", "0", "--shutdown-timeout", "600"),
        *("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"),
        *("--redirects", "3", "--log-dir", str(run.logs), "-m", "trainer", str(run.path)),
    ]
    nodes = cfg.model_copy(update={"parallel": ParallelConfig(devices=8, nodes=2, rendezvous="gpu01:29500")})
    assert torchrun.torchrun_argv(nodes.parallel, run)[3:11] == [
        *("--nnodes", "2", "--nproc-per-node", "8", "--rdzv-backend", "static", "--rdzv-endpoint", "gpu01:29500")
    ]
    assert torchrun.torchrun_argv(nodes.parallel, run, node_rank=1)[11:15] == [
        "--node-rank",
        "1",
        "--rdzv-id",
        run.path.name,
    ]


def test_a_torchrun_that_does_not_know_an_option_is_not_given_it(make_run, monkeypatch, tmp_path):
    cfg, run = make_run("good")
    older = tmp_path / "run.py"
    older.write_text('parser.add_argument("--max-restarts")', encoding="utf-8")
    monkeypatch.setattr(torchrun, "_torchrun_source", lambda: older)
    assert not set(torchrun.OPTIONS) & set(torchrun.torchrun_argv(cfg.parallel, run))


@pytest.mark.slow
def test_what_a_stranger_left_where_ranks_meet_is_never_unpickled(make_run, tmp_path):
    cfg, run = make_run("good")
    run.stores.mkdir()
    marker = tmp_path / "executed"
    name = f"{run.path.name}-1"
    state = b64encode(pickle.dumps(Touch(marker)))
    dist.FileStore(str(run.stores / name)).set(f"torch.rendezvous.{name}", state)
    torchrun.start(cfg, run, module="worker")
    end = processes.wait(run, timeout_s=60)
    assert (marker.exists(), end) == (False, "finished")


@dataclass
class Touch:
    """A pickle of it makes a file when it is read."""

    file: Path

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("kind", ["a file", "a link to a folder", "a folder"])
def test_the_store_of_a_former_start_is_gone_at_the_next_and_after_the_end(run, tmp_path, kind):
    others = tmp_path / "others"
    others.mkdir()
    (others / "theirs").touch()
    if kind == "a file":
        run.stores.touch()
    elif kind == "a link to a folder":
        run.stores.symlink_to(others)
    else:
        run.stores.mkdir()
        (run.stores / "tiny-1").touch()
    processes.clear_stores(run)
    assert (list(run.stores.iterdir()), run.stores.stat().st_mode & 0o777) == ([], 0o700)
    pretend_it_ran(run, "Killed\n")
    processes.record_end(run)
    assert not run.stores.exists()
    assert [file.name for file in others.iterdir()] == ["theirs"]


@pytest.fixture
def two_nodes(make_run):
    """A run of two nodes with two ranks each, both of this machine. What it started is gone when the test ends."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

    def make(name: str) -> tuple[RunConfig, RunDir]:
        cfg, run = make_run(name)
        parallel = ParallelConfig(devices=2, nodes=2, rendezvous=f"localhost:{port}")
        runs.append(run)
        return cfg.model_copy(update={"parallel": parallel}), run

    runs: list[RunDir] = []
    yield make
    for run in runs:
        for process in processes_of(run):
            process.kill()
        psutil.wait_procs(processes_of(run), timeout=10)


def processes_of(run: RunDir) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if str(run.path) in (process.info["cmdline"] or ())]


def test_a_node_waits_for_the_first_one_and_joins_once(two_nodes):
    cfg, run = two_nodes("good")
    handle = torchrun.join(cfg.parallel, run, 1)
    while not (environment := psutil.Process(handle.process.pid).environ()):  # for an instant after exec
        time.sleep(0.01)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    with pytest.raises(InputError) as error:
        torchrun.join(cfg.parallel, run, 1)
    assert str(error.value) == f"{run.path}: node 1 of this run is already running on this machine"
    assert handle.process.poll() is None
    assert processes.status(run) == "created"


@pytest.mark.parametrize(
    ("node_rank", "message"),
    [
        (0, "--node-rank 0: the nodes that join {run} have the numbers 1"),
        (2, "--node-rank 2: the nodes that join {run} have the numbers 1"),
    ],
)
def test_a_node_that_is_none_of_the_others_cannot_join(two_nodes, node_rank, message):
    cfg, run = two_nodes("good")
    with pytest.raises(InputError) as error:
        torchrun.join(cfg.parallel, run, node_rank)
    assert str(error.value) == message.format(run=run.path)


def test_a_run_on_one_node_waits_for_no_other(make_run):
    cfg, run = make_run("good")
    with pytest.raises(InputError, match="is a single-node run"):
        torchrun.join(cfg.parallel, run, 1)


@pytest.mark.slow
def test_the_first_node_is_the_one_that_starts_the_run_whatever_their_names(two_nodes):
    cfg, run = two_nodes("good")
    second = subprocess.Popen(
        torchrun.torchrun_argv(cfg.parallel, run, "worker", 1), env=processes.worker_environment()
    )
    torchrun.start(cfg, run, "worker")
    assert processes.wait(run, timeout_s=60) == "finished"
    assert second.wait(60) == 0
    first = (run.logs / "launch-1.log").read_text()
    assert "Traceback" not in first


@pytest.mark.slow
def test_ranks_of_a_killed_torchrun_end_beside_another_node_that_is_left_alone(two_nodes):
    cfg, run = two_nodes("stubborn")
    argv = torchrun.torchrun_argv(cfg.parallel, run, "worker", 1)
    with subprocess.Popen(argv, env=processes.worker_environment()) as second:
        first = torchrun.start(cfg, run, "worker").process
        wait_for(lambda: all((run.path / f"ready{rank}").exists() for rank in range(4)))
        orphans, others = (psutil.Process(leader.pid).children() for leader in (first, second))
        first.kill()
        assert processes.wait(run, timeout_s=10) == "failed"
        _, left = psutil.wait_procs(orphans, timeout=10)
        assert not left
        assert all(rank.is_running() for rank in others)
        assert second.poll() is None
        second.kill()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_node_that_joined_with_all_its_ranks(two_nodes, capsys):
    cfg, run = two_nodes("stubborn")
    first = torchrun.start(cfg, run, "worker")
    joined = torchrun.join(cfg.parallel, run, 1, "worker")
    wait_for(lambda: all((run.path / f"ready{rank}").exists() for rank in range(4)))
    ranks = psutil.Process(joined.process.pid).children()
    for after_s in (0.3, 0.9):
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert attend(joined, torchrun.node_log(run, 1)) == 130
    assert len(ranks) == 2
    assert not any(rank.is_running() for rank in ranks)
    assert first.process.poll() is None
    told = capsys.readouterr()
    assert told.out == "stopping all nodes after this step; Ctrl-C again stops this node at once\n"
    assert told.err == "stopped this node; the other nodes will detect it and exit\n"


def test_who_starts_a_run_of_several_nodes_is_told_once_what_to_type_on_the_others(two_nodes, monkeypatch):
    cfg, run = two_nodes("stubborn")
    torchrun.start(cfg, run, "worker")
    [starting] = EventReader(run.events_file).read()
    assert (starting.state, starting.message) == ("starting", f"waits for the other nodes: {torchrun.joining(run, 2)}")
    monkeypatch.setenv("SLURM_NODEID", "0")  # srun starts the others
    _, job = two_nodes("good")
    torchrun.start(cfg, job, "worker")
    assert [event.message for event in EventReader(job.events_file).read()] == [""]


def test_the_log_of_a_node_never_gets_the_name_of_another_one(run):
    for number in (1, 10):
        (run.logs / f"node2-{number}.log").touch()
    assert torchrun._free_node_log(run, 2).name == "node2-11.log"
    assert torchrun._free_node_log(run, 1).name == "node1-1.log"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("192.0.2.1:29400", "192.0.2.1:29400 is not this machine; start the run there, and use --join here"),
        (
            "nobody.invalid:29400",
            "nobody.invalid:29400: the host name nobody.invalid cannot be resolved here; give the name or address by "
            "which the other nodes reach this one",
        ),
    ],
)
def test_a_run_of_several_nodes_is_started_on_the_first_one(monkeypatch, place, message):
    parallel = ParallelConfig(nodes=2, rendezvous=place)
    with pytest.raises(InputError) as error:
        network.require_free_port(parallel)
    assert str(error.value) == f"parallel.rendezvous: {message}"
    monkeypatch.setenv("PET_NODE_RANK", "0")  # a scheduler's names may come to be known after the first node begins
    network.require_free_port(parallel)


def test_a_job_that_does_not_know_its_first_node_yet_looks_for_none(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)
    network.require_free_port(ParallelConfig(nodes=2, rendezvous=FIRST_NODE))


def ran_on(run: RunDir, host: str, job: str = "") -> None:
    """Leave what a run leaves that is at its fifth step on another machine."""
    processes.Launch(os.getpid(), 1.0, ["-m", "trainer", str(run.path)], host, job).write(run)
    with EventWriter(run.events_file) as events:
        events.write(StatusEvent(state="starting"))
        events.write(StatusEvent(state="training", step=5))


def test_a_run_on_another_machine_lives_as_long_as_it_is_heard_of_and_is_never_judged_from_here(run):
    ran_on(run, "gpu07")
    before = run.events_file.read_bytes()
    assert processes.status(run) == "training"
    processes.record_end(run)
    with pytest.raises(InputError) as error:
        processes.require_ended(run)
    assert str(error.value) == (
        f"{run.path}: is running on gpu07; stop it first, or start a new run. If gpu07 is down, remove "
        f"{run.launch_file}"
    )
    long_ago = time.time() - processes.MAX_SILENCE_S
    for file in (run.launch_file, run.events_file):
        os.utime(file, (long_ago, long_ago))
    assert processes.status(run) == "failed"
    processes.record_end(run)
    processes.require_ended(run)
    assert run.events_file.read_bytes() == before
    run.rank_file(3).touch()  # a heartbeat
    assert processes.status(run) == "training"


def test_a_run_on_another_machine_has_ended_when_it_says_so_or_when_its_slurm_job_was_started_again(run, monkeypatch):
    ran_on(run, "gpu07", job="4711-0")
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert processes.alive(run)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert not processes.alive(run)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert processes.alive(run)
    with EventWriter(run.events_file) as events:
        events.write(StatusEvent(state="stopped", step=6))
    assert not processes.alive(run)
    assert processes.status(run) == "stopped"


@pytest.mark.parametrize("state", ["failed", "training"])
def test_the_end_of_a_run_elsewhere_is_seen_beside_lines_that_are_cut(run, state):
    ran_on(run, "gpu07")
    end = json.dumps(vars(StatusEvent(state=state))).encode() + b"\n"
    half = b'{"step": 7, "type": "status", "sta'  # as a machine leaves it that lost its power
    straddling = b'{"message": "' + b"x" * processes.TAIL_BYTES + b'", "type": "status", "state": "training"}\n'
    no_status = b'{"type": "status"}\n'  # as a stranger may write it
    for tail in (end, half + b"\n" + end, end + half, end + b'{"type": "step"}\n' * 9, end + no_status):
        begin = len(straddling) - (processes.TAIL_BYTES - len(tail))  # the window begins inside its line
        run.events_file.write_bytes(straddling + tail)
        assert begin > 0
        assert processes.alive(run) == (state == "training")
    run.events_file.write_bytes(straddling)
    assert processes.alive(run)


@pytest.mark.parametrize(
    ("variables", "number"),
    [({}, None), ({"SLURM_NODEID": "3", "SLURM_PROCID": "6"}, 3), ({"PET_NODE_RANK": "2", "SLURM_NODEID": "0"}, 2)],
)
def test_a_scheduler_deals_the_numbers_of_the_nodes(monkeypatch, variables, number):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert network.scheduled_node_rank() == number


def test_a_folder_of_the_same_name_in_the_current_one_is_not_taken_for_the_trainer(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    (tmp_path / "trainer" / "__main__.py").write_text("print('not ours')")
    command = [sys.executable, "-m", "trainer", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=processes.worker_environment(), capture_output=True, text=True)
    assert "not ours" not in done.stdout
    assert "RUN_DIR" in done.stdout + done.stderr


def test_a_process_id_that_belongs_to_somebody_else_by_now_is_not_the_run(run):
    assert processes.status(run) == "created"
    pretend_it_ran(run, "Killed\n")
    assert not processes.alive(run)
    assert processes.status(run) == "failed"


def test_a_run_that_does_not_run_cannot_be_stopped(run):
    with pytest.raises(InputError) as error:
        processes.stop(run)
    assert str(error.value) == f"{run.path}: is not running; continue it with --resume"
    assert not run.requested("stop")


def test_the_users_mistake_is_told_once_although_every_rank_finds_it(run):
    pretend_it_ran(run, TABLE)
    message = "model.path /m: no transformer/config.json; download it"
    processes.record_mistake(run, 1, message)
    processes.record_mistake(run, 0, message)
    processes.record_end(run)
    mistake = ErrorEvent(time=0, message=message, rank=1, exit_code=2)
    assert explain(mistake, run) == f"error: {message}"
    assert errors_and_end(run) == [vars(mistake), vars(StatusEvent(time=0, state="failed"))]


def test_an_error_of_an_earlier_start_does_not_hide_that_of_the_latest(run):
    with EventWriter(run.events_file) as events:
        events.write(StatusEvent(state="starting"))
        events.write(ErrorEvent(message="first", step=40))
        events.write(StatusEvent(state="failed", step=40))
    pretend_it_ran(run, "OSError: second\n")
    processes.record_end(run)
    assert [error["message"] for error in errors_and_end(run)[:-1]] == ["first", "OSError: second"]
    recorded = run.events_file.read_bytes()
    processes.record_end(run)
    assert run.events_file.read_bytes() == recorded


NO_MEETING = (
    "the nodes did not connect: check that parallel.rendezvous is host:port of the first node, that --join was started "
    "on every other node within ten minutes, and that no firewall blocks that port"
)
TABLE = """
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
trainer FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_05:48:16
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6372)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 6372
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_05:48:16
  host      : localhost
  rank      : 3 (local_rank: 1)
  exitcode  : 1 (pid: 6373)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


@pytest.mark.parametrize(("arguments", "is_run"), [(["sleep", "1000"], True), ([], True), (["sleep", "10"], False)])
def test_a_process_is_the_runs_own_by_its_arguments_or_while_it_has_none_yet(run, monkeypatch, arguments, is_run):
    """Once in 1,500 starts they are read before the process has them."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        processes.Launch(process.pid, psutil.Process(process.pid).create_time(), ["sleep", "1000"]).write(run)
        monkeypatch.setattr(psutil.Process, "cmdline", lambda self: arguments)
        assert processes.alive(run) == is_run
        process.kill()


DAMAGED = {
    "empty": ("", "Invalid JSON: EOF while parsing a value at line 1 column 0"),
    "garbage": ("\x00\x00{{", "Invalid JSON: expected value at line 1 column 1"),
    "a list": ("[]", "Input should be an object"),
    "null": ("null", "Input should be an object"),
    "a pid of letters": ({"pid": "x"}, "pid: Input should be a valid integer, unable to parse string as an integer"),
    "a negative pid": ({"pid": -5}, "pid: Input should be greater than or equal to 1"),
    "a pid that is too large": ({"pid": 10**30}, "pid: Input should be less than or equal to 4194304"),
    "no argv": ({"argv": None}, "argv: Input should be a valid array"),
    "an empty argv": ({"argv": []}, "argv: List should have at least 1 item after validation, not 0"),
}


@pytest.mark.parametrize(("content", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_launch_file_is_refused_with_a_sentence(run, content, reason):
    pretend_it_ran(run, "Killed\n")
    if isinstance(content, dict):
        content = json.dumps(json.loads(run.launch_file.read_text()) | content)
    run.launch_file.write_text(content)
    events = run.events_file.read_bytes()
    for look in (
        processes.alive,
        processes.status,
        processes.record_end,
        processes.stop,
        processes.terminate,
        processes.require_ended,
    ):
        with pytest.raises(InputError) as error:
            look(run)
        assert str(error.value) == f"{run.launch_file}: damaged ({reason}); remove it if the run has ended"
    assert run.events_file.read_bytes() == events


def test_resume_of_a_run_with_a_damaged_launch_file_ends_with_a_sentence(run):
    run.launch_file.touch()
    argv = [sys.executable, str(LAUNCH), "--resume", str(run.path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        2,
        f"{run.launch_file}: damaged ({DAMAGED['empty'][1]}); remove it if the run has ended\n",
    )
    run.launch_file.unlink()
    assert processes.status(run) == "created"


def test_a_field_of_a_launch_file_that_is_not_known_is_ignored(run):
    launched = processes.Launch(5, 1.0, ["-m", "trainer", str(run.path)])
    run.launch_file.write_text(json.dumps(asdict(launched) | {"other": [1]}))
    assert processes.Launch.read(run) == launched
    assert processes.status(run) == "created"


@pytest.mark.parametrize("name", ["launch-1.log", "tiny_x/attempt_0/0/stderr.log", "tiny_x/attempt_0/0/error.json"])
def test_a_pipe_in_place_of_a_log_keeps_nobody_waiting(run, name):
    pretend_it_ran(run, TABLE.replace("3 (local_rank: 1)", "3 (local_rank: 0)"))
    pipe = run.logs / name.replace("tiny_x", f"{run.path.name}-1_x")
    pipe.unlink(missing_ok=True)
    pipe.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(pipe)

    def end() -> None:
        try:
            processes.record_end(run)
            said.append("")
        except InputError as error:
            said.append(str(error))

    said: list[str] = []
    reader = threading.Thread(target=end, daemon=True)
    reader.start()
    reader.join(10)
    assert said in ([""], [f"{pipe}: not a regular file; remove it, or put a file in its place"])


@pytest.mark.parametrize("damage", [Path.mkdir, os.mkfifo, lambda file: file.symlink_to(file)], ids=["d", "p", "l"])
@pytest.mark.parametrize("name", ["events.jsonl", "ranks/rank1.jsonl"])
def test_what_lies_in_the_place_of_a_file_that_ranks_write_is_named_before_one_is_started(make_run, name, damage):
    cfg, run = make_run("good")
    damage(run.path / name)
    with pytest.raises(InputError) as error:
        torchrun.start(cfg, run, module="worker")
    sentence = LINK if (run.path / name).is_symlink() else NOT_REGULAR
    assert str(error.value) == f"{run.path / name}: {sentence}"
    assert not run.launch_file.exists()


@pytest.mark.parametrize("tail", ["--bind 127.0.0.1 48123", "-m trainer RUN", "-m trainer OTHER"])
def test_looking_at_a_strangers_run_folder_ends_no_process_that_is_not_a_rank_of_it(run, tail):
    words = [{"RUN": str(run.path), "OTHER": f"{run.path}-other"}.get(word, word) for word in tail.split()]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", *words]) as victim:
        pretend_it_ran(run, "Killed\n")
        foreign = {"pid": 2**22, "create_time": 1.0, "argv": ["x", "x", "x", *words]}
        run.launch_file.write_text(json.dumps(foreign))
        processes.record_end(run)
        time.sleep(0.2)
        assert victim.poll() is None
        victim.kill()


def test_a_strangers_launch_file_that_names_another_process_ends_it_neither(run):
    argv = [sys.executable, "-c", "import time; time.sleep(100)"]
    with subprocess.Popen(argv) as victim:
        processes.Launch.of(victim, argv).write(run)
        with pytest.raises(InputError) as error:
            processes.terminate(run)
        assert str(error.value) == (
            f"{run.launch_file}: process {victim.pid} does not belong to this run folder and was not "
            "stopped; remove the file"
        )
        assert victim.poll() is None
        victim.kill()


LOOK = """
import sys
from pathlib import Path
from trainer.run import process
from trainer.run.folder import RunDir
run = RunDir(Path(sys.argv[1]))
process.record_end(run)
process.terminate(run)
print(process.alive(run), process.status(run))
process.require_ended(run)
"""
IN_ANOTHER_CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Such as shares the name of this machine and its disk, but no processes. Needs root, as the tests of two machines."""


def seen_from_another_container(run: RunDir) -> tuple[str, str]:
    """How the run stands there, and why it cannot be started there; empty where it can."""
    argv = [*IN_ANOTHER_CONTAINER, sys.executable, "-c", LOOK, str(run.path)]
    done = subprocess.run(argv, env=processes.worker_environment(), capture_output=True, text=True, timeout=60)
    return done.stdout.strip(), (done.stderr.splitlines() or [""])[-1].partition("InputError: ")[2]


def test_of_two_starts_at_once_the_one_that_runs_trains_by_its_own_config_and_the_other_changes_nothing(start):
    cfg, run = start("stubborn")
    assert not list(run.path.glob("config-*.yaml"))  # that config is saved already
    processes.terminate(run)
    processes.wait(run, 20)
    mine, other = (cfg.model_copy(update={"train": TrainConfig(steps=steps)}) for steps in (20, 30))
    torchrun.start(mine, run, module="worker")
    with pytest.raises(InputError, match="is already running"):
        torchrun.start(other, run, module="worker")
    assert run.config() == mine
    assert [load_config(file).config for file in run.path.glob("config-*.yaml")] == [cfg]


@pytest.mark.slow
def test_a_run_is_neither_judged_nor_started_again_by_another_container_of_its_machine(start):
    _, run = start("stubborn")
    wait_for(lambda: all((run.path / f"ready{rank}").exists() for rank in range(2)))
    before = run.events_file.read_bytes()
    assert seen_from_another_container(run) == (
        "True training",
        f"{run.path}: is already running on {socket.gethostname()}, in another container; stop it first, or start a "
        "new run",
    )
    assert (run.events_file.read_bytes(), processes.status(run)) == (before, "training")
    torchrun = psutil.Process(processes.Launch.read(run).pid)
    torchrun.kill()
    torchrun.wait(10)
    assert seen_from_another_container(run) == ("False failed", "")
    assert run.events_file.read_bytes() == before


@pytest.mark.slow
def test_a_run_whose_container_has_ended_goes_on_at_once_in_the_next(make_run, tmp_path):
    _, run = make_run("stubborn")
    begin = (
        "import sys, time; from pathlib import Path; from trainer.launcher import torchrun\n"
        "from trainer.run import process; from trainer.run.folder import RunDir\n"
        "run = RunDir(Path(sys.argv[1])); torchrun.start(run.config(), run, module='worker')\n"
        "while not all((run.path / f'ready{rank}').exists() for rank in range(2)): time.sleep(0.05)\n"
        "assert process.alive(run)"
    )
    argv = [*IN_ANOTHER_CONTAINER, sys.executable, "-c", begin, str(run.path)]
    subprocess.run(argv, env=processes.worker_environment(), check=True, timeout=60)
    launched, before = processes.Launch.read(run), run.events_file.read_bytes()
    assert (launched.host, launched.is_here) == (socket.gethostname(), False)
    assert processes.status(run) == "failed"
    processes.record_end(run)
    processes.require_ended(run)
    assert run.events_file.read_bytes() == before


def test_a_run_of_before_the_machine_was_started_anew_has_failed(run):
    argv = ["-m", "trainer", str(run.path)]
    processes.Launch(os.getpid(), 1.0, argv, pid_namespace=1, boot_id="of the former start").write(run)
    with EventWriter(run.events_file) as events:
        events.write(StatusEvent(state="training", step=4))
    (run.logs / "launch-1.log").touch()
    processes.record_end(run)
    processes.require_ended(run)
    assert errors_and_end(run)[-1] == vars(StatusEvent(time=0, step=4, state="failed"))


def pretend_it_ran(run: RunDir, output: str) -> None:
    """Leave what a run leaves whose torchrun printed `output` and is gone. Its process id is that of this test."""
    (run.logs / "launch-1.log").write_text(output)
    run.launch_file.write_text(
        json.dumps({"pid": os.getpid(), "create_time": 1.0, "argv": ["-m", "trainer", str(run.path)]})
    )
    with EventWriter(run.events_file) as events:
        events.write(StatusEvent(state="starting"))


def rank_log(run: RunDir, attempt: int, text: str, error: str | None = None) -> str:
    """Leave the log of local rank 1, and its error file. Returns the log's path."""
    folder = run.logs / f"{run.path.name}-1_abc" / f"attempt_{attempt}" / "1"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text(text)
    if error is not None:
        (folder / "error.json").write_text(error)
    return f"{folder}/stderr.log"


def error_of(run: RunDir) -> str:
    processes.record_end(run)
    [error, _] = [event for event in EventReader(run.events_file).read() if event.type in ("error", "status")][1:]
    return explain(error, run)


LEAKED = """nanobind: leaked 64 types!
 - leaked type "triton._C.libtriton.ir.location"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


@pytest.mark.parametrize("after", ["\n", LEAKED])
def test_a_rank_that_ended_before_it_could_record_an_error_speaks_by_its_last_line(run, after):
    pretend_it_ran(run, TABLE)
    log = rank_log(run, 0, f"Traceback:\nModuleNotFoundError: No module named 'peft'\n{after}")
    assert error_of(run) == (
        "error: rank 3, step 0: ModuleNotFoundError: No module named 'peft'\n"
        f"  what to do: the environment is incomplete: run --doctor\n  log: {log}"
    )


def test_after_restarts_the_last_attempt_counts(run):
    pretend_it_ran(run, TABLE)
    for attempt in range(11):
        log = rank_log(run, attempt, f"RuntimeError: attempt {attempt}\n")
    assert error_of(run) == (
        f"error: rank 3, step 0: RuntimeError: attempt 10\n  what to do: read the end of the log\n  log: {log}"
    )


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (
            "OSError: [Errno 28] No space left on device",
            "free some disk space, then continue with --resume; finished checkpoints are intact",
        ),
        (
            "DistNetworkError: The server socket has failed to listen: EADDRINUSE, Address already in use",
            "another program uses the port: start again, or change parallel.rendezvous",
        ),
        (
            "FloatingPointError: step 7: the loss is not finite on 1 of 2 ranks",
            "lower optim.lr, raise optim.warmup or set train.precision: fp32, then continue from the last checkpoint "
            "with --resume",
        ),
        (
            "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error",
            "run --doctor; if the GPUs are fine, set NCCL_DEBUG=INFO and continue with --resume",
        ),
        ("DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.", NO_MEETING),
        (
            "DistNetworkError: The client socket has timed out after 600000ms while trying to connect to "
            "(node0, 29400).",
            NO_MEETING,
        ),
    ],
    ids=["disk", "port", "nan", "nccl", "nobody joined", "first node not found"],
)
def test_a_known_error_comes_with_its_remedy(run, message, remedy):
    pretend_it_ran(run, "")
    recorded = {"message": {"message": message, "extraInfo": {"py_callstack": "...", "timestamp": "1795153696"}}}
    log = rank_log(run, 0, "", error=json.dumps(recorded))
    assert error_of(run) == f"error: rank 1, step 0: {message}\n  what to do: {remedy}\n  log: {log}"


def test_an_error_file_of_one_of_several_nodes_names_no_rank(run):
    """Its folder is named by the rank on that node."""
    pretend_it_ran(run, "")
    log = rank_log(run, 0, "", error=json.dumps({"message": {"message": "RuntimeError: no"}}))
    (run.logs / f"{run.path.name}-1_def" / "attempt_0" / "0").mkdir(parents=True)
    assert error_of(run) == f"error: RuntimeError: no\n  what to do: read the end of the log\n  log: {log}"


def test_of_several_nodes_the_logs_of_the_latest_start_count(run):
    for node, age_s in (("abc", 60), ("def", -1)):
        folder = run.logs / f"{run.path.name}_{node}" / "attempt_0" / "1"
        folder.mkdir(parents=True)
        (folder / "stderr.log").touch()
        (folder / "error.json").write_text(json.dumps({"message": {"message": f"RuntimeError: {node}"}}))
        when = time.time() - age_s
        os.utime(folder.parents[1], (when, when))
    pretend_it_ran(run, "")
    log = run.logs / f"{run.path.name}_def" / "attempt_0" / "1" / "stderr.log"
    assert error_of(run) == (
        f"error: rank 1, step 0: RuntimeError: def\n  what to do: read the end of the log\n  log: {log}"
    )


def test_an_error_file_cut_short_by_a_full_disk_gives_way_to_the_log(run):
    pretend_it_ran(run, "")
    log = rank_log(run, 0, "OSError: [Errno 28] No space left on device\n", error='{"message": {"mess')
    assert error_of(run) == (
        "error: rank 1, step 0: OSError: [Errno 28] No space left on device\n"
        "  what to do: free some disk space, then continue with --resume; finished checkpoints are intact\n"
        f"  log: {log}"
    )


def test_an_error_that_could_not_be_written_is_that_of_the_disk(run, monkeypatch):
    """The error file and the log are empty, for they lie on the disk that is full."""
    pretend_it_ran(run, "")
    log = rank_log(run, 0, "", error="")
    unknown = "exited while writing its error file"
    assert error_of(run) == f"error: rank 1, step 0: {unknown}\n  what to do: read the end of the log\n  log: {log}"
    warning = "checkpoint of step 4 could not be written (OSError: [Errno 122] Disk quota exceeded); free disk space"
    found = failure.diagnose(run, [StatusEvent(state="starting"), WarningEvent(step=4, message=warning)])
    assert (found.message, found.remedy) == (
        f"{unknown}, after this warning: {warning}",
        "free some disk space, then continue with --resume; finished checkpoints are intact",
    )
    largest = run.logs / "launch-1.log"
    largest.write_text("x" * 5000 + "\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    error_file = Path(log).with_name("error.json")
    try:
        found = failure.diagnose(run, [])
        error_file.write_text(json.dumps({"message": {"message": "RuntimeError: unexpected pos 704 vs 598"}}))
        unnamed = failure.diagnose(run, [])  # as torch calls it
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found.message == f"{run.path}: cannot be written (File too large)"
    assert found.remedy.startswith("raise the limit of this shell for the size of files (ulimit -f unlimited)")
    assert unnamed.message == f"RuntimeError: unexpected pos 704 vs 598; {found.message}"
    assert unnamed.remedy == found.remedy


def test_torchrun_that_fails_by_itself_is_told_without_a_rank(run):
    pretend_it_ran(run, "Traceback:\ntorch.distributed.elastic.rendezvous.api.RendezvousConnectionError: no store\n")
    assert error_of(run) == (
        "error: torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: no store\n"
        f"  what to do: {NO_MEETING}\n"
        f"  log: {run.logs}/launch-1.log"
    )


def test_a_full_disk_does_not_hide_why_the_run_failed(make_run, capsys):
    cfg, run = make_run("good")
    pretend_it_ran(run, "OSError: [Errno 28] No space left on device\n")
    before = run.events_file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), hard))
    try:
        code = watch(cfg, run, EventReader(run.events_file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    assert capsys.readouterr().err == (
        f"warning: {run.events_file} could not be written: File too large\n"
        f"warning: {run.report} could not be written: File too large\n"
        "error: OSError: [Errno 28] No space left on device\n"
        "  what to do: free some disk space, then continue with --resume; finished checkpoints are intact\n"
        f"  log: {run.logs}/launch-1.log\n"
    )
    assert run.events_file.read_bytes() == before


@pytest.mark.parametrize(
    "said",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes",
        "cannot allocate memory for thread-local data: ABORT",
        "std::bad_alloc",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA driver error: cudaErrorMemoryAllocation",
        "OSError: [Errno 12] Cannot allocate memory",
        "Memory cgroup out of memory: Killed process 71 (python)",
    ],
)
def test_a_lack_of_memory_is_known_by_what_torch_and_the_system_say(said: str) -> None:
    assert re.search(OUT_OF_MEMORY, said)
    assert missing_memory(said) is not None


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        (
            "out of memory in forward of blocks.0: peak 22.10 of 23.64 GiB (CUDA out of memory. Tried to allocate 2.00 "
            "GiB. GPU 0 has a total capacity of 23.64 GiB of which 512.00 MiB is free. Including non-PyTorch memory)",
            1.5 * GIB,
        ),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ... of which 1.10 GiB is free.", 20 * 2**20),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("std::bad_alloc", 0),
        ("RuntimeError: shapes differ", None),
    ],
)
def test_what_was_missing_is_what_was_tried_without_what_was_free(said: str, missing: float | None) -> None:
    assert missing_memory(said) == missing


def test_ranks_on_cpus_keep_freed_memory_unless_the_user_has_set_the_heap(monkeypatch):
    for name in allocator.HEAP:
        monkeypatch.delenv(name, raising=False)
    on_cpu, on_gpu = ParallelConfig(device="cpu"), ParallelConfig()
    assert torchrun._device_environment(on_cpu, (), False) == allocator.HEAP
    assert not allocator.HEAP.keys() & torchrun._device_environment(on_gpu, (), False).keys()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert torchrun._device_environment(on_cpu, (), False) == {}
