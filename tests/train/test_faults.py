"""Ranks that die, disks that fill up and people who press Ctrl-C: one message, and what was saved goes on."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.test_save_and_restore import make_state
from tests.commands import Started, launch_py, preset_folder
from tests.runs import alone
from trainer.checkpoint.restore import StoredWeights
from trainer.checkpoint.save import Checkpointer
from trainer.data.cache import ExampleCache
from trainer.launcher.commands import SILENT_S
from trainer.run.events import AnyEvent, CheckpointEvent, ErrorEvent, EventReader, StepEvent, WarningEvent, latest_steps
from trainer.run.folder import RunDir
from trainer.run.manifest import Progress, complete
from trainer.run.process import Launch

ENDLESS = "train.steps=1000000"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a preset and its dataset."""
    return preset_folder(tmp_path)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Started]]:
    """Start launch.py there. What still runs at the end of the test is killed."""
    everything: list[Started] = []

    def start(*arguments: object) -> Started:
        everything.append(Started(folder, *arguments, run=folder / "runs" / "fox"))
        return everything[-1]

    yield start
    for started in everything:
        started.kill()


def events_of(run: RunDir) -> list[AnyEvent]:
    return EventReader(run.events_file).read()


def last_step(run: RunDir) -> int:
    return latest_steps(events_of(run))[-1].step


def assert_intact(checkpoint: Path) -> None:
    """Every file has the size the manifest gives it, and all tensors can be read."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = {file.name: file.stat().st_size for file in checkpoint.iterdir() if file.name != "manifest.json"}
    assert files == manifest["files"]
    assert len([tensor for tensor in StoredWeights(checkpoint).values() if tensor.isfinite().all()]) == 32


def limit_files(started: Started, num_bytes: int) -> None:
    """Let writes of the ranks beyond this size of a file fail, as on a full disk."""
    for number in range(2):
        started.rank(number).rlimit(psutil.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_goes_on_through_a_full_disk_until_ctrl_c(start):
    killed = start("--headless", "preset.yaml", ENDLESS, "checkpoint.every=10", "--run-dir", "runs/fox")
    run = killed.run
    killed.wait_for(CheckpointEvent)
    killed.rank(1).kill()
    code, out, err = killed.end()
    [log] = run.logs.glob("fox-1_*/attempt_0/1/stderr.log")
    assert (code, out[-1]) == (1, "failed")
    assert err == (
        f"error: rank 1, step {last_step(run)}: killed by SIGKILL\n"
        "  what to do: the machine probably ran out of host memory, or the process was killed; the system log shows "
        "which. Use fewer ranks per machine, lower train.micro_batch, or add memory\n"
        f"  log: {log}\n"
    )
    saved = complete(run.checkpoints)[-1]
    assert_intact(saved)

    resumed = start("--resume", "runs/fox")
    assert f"step-{resumed.wait_for(StepEvent).step - 1:06d}" == saved.name
    limit_files(resumed, 200_000)
    warning = resumed.wait_for(WarningEvent).message
    limit_files(resumed, resource.RLIM_INFINITY)
    [step] = map(int, re.findall(r"checkpoint of step (\d+)", warning))
    assert warning == (
        f"{run.checkpoints}/.step-{step:06d}: checkpoint of step {step} could not be written "
        "(OSError: [Errno 27] File too large); raise ulimit -f; the checkpoints before it are untouched"
    )
    assert_intact(saved)
    assert resumed.wait_for(CheckpointEvent).step > step
    resumed.press_ctrl_c()
    code, out, err = resumed.end()
    assert (code, out[-1], err) == (130, "stopped", f"stopped; continue with --resume {run.path}\n")
    last = complete(run.checkpoints)[-1]
    assert last.name == f"step-{last_step(run):06d}"
    assert_intact(last)


def mix_up(examples: Path) -> None:
    """Put embeddings of another width in the place of all cached ones."""
    cache = ExampleCache(examples)
    for file in examples.rglob("*.safetensors"):
        tensors = load_file(file)
        if "prompt_embeds" in tensors:
            cache.write(file.stem, {"prompt_embeds": tensors["prompt_embeds"][:, :-1].contiguous()})


@pytest.mark.slow
def test_a_rank_that_raises_is_named_and_the_run_ends_well_once_the_cause_is_gone(folder, start):
    raising = start("--headless", "preset.yaml", ENDLESS, "checkpoint.every=10", "--run-dir", "runs/fox")
    run = raising.run
    raising.wait_for(CheckpointEvent)
    examples = folder / "runs" / "cache" / "examples"
    shutil.copytree(examples, folder / "intact")
    mix_up(examples)
    code, out, err = raising.end()
    assert (code, out[-1]) == (1, "failed")
    named = re.fullmatch(
        r"error: rank ([01]), step (\d+): RuntimeError: mat1 and mat2 shapes cannot be multiplied .*\n"
        r"  what to do: read the end of the log\n"
        r"  log: (.*)\n",
        err,
    )
    assert named is not None, err
    rank, step, log = named.groups()
    assert (int(step), Path(log)) == (last_step(run), *run.logs.glob(f"fox-1_*/attempt_0/{rank}/stderr.log"))
    assert_intact(complete(run.checkpoints)[-1])

    shutil.rmtree(examples)
    shutil.copytree(folder / "intact", examples)
    steps = last_step(run) + 3
    done = launch_py(folder, "--resume", "runs/fox", f"train.steps={steps}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"{run.export}/fox.safetensors"
    assert last_step(run) == steps


@pytest.fixture
def small_disk(folder) -> Iterator[Path]:
    """A disk of 1.6 MiB at `runs`, with room for two checkpoints of 0.6 MiB and not for three."""
    disk = folder / "runs"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("a small disk can only be mounted by root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_a_periodic_checkpoint_and_ends_the_run_at_the_last_one(folder, small_disk, start):
    cache = f"data.cache={folder}/cache"
    filling = start("--headless", "preset.yaml", "train.steps=8", "checkpoint.every=2", cache, "--run-dir", "runs/fox")
    code, out, err = filling.end()
    run = filling.run
    full = "(OSError: [Errno 28] No space left on device); free disk space; the checkpoints before it are untouched"
    events = events_of(run)
    assert [event.message for event in events if isinstance(event, WarningEvent)] == [
        f"{run.checkpoints}/.step-000006: checkpoint of step 6 could not be written {full}"
    ]
    [error] = [event for event in events if isinstance(event, ErrorEvent)]
    assert (code, out[-1]) == (1, "failed")
    assert err == (
        f"error: rank {error.rank}, step 8: "
        f"OSError: {run.checkpoints}/.step-000008: checkpoint of step 8 could not be written {full}\n"
        "  what to do: free some disk space, then continue with --resume; finished checkpoints are intact\n"
        f"  log: {run.path / error.log}\n"
    )
    saved = complete(run.checkpoints)
    assert [checkpoint.name for checkpoint in saved] == ["step-000002", "step-000004"]
    for checkpoint in saved:
        assert_intact(checkpoint)

    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    done = launch_py(folder, "--resume", "runs/fox")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"{run.export}/fox.safetensors"


@pytest.mark.slow
def test_a_checkpoint_for_which_there_is_no_space_says_so_however_much_is_missing(small_disk):
    """What torch's writer raises depends on which of its writes fails."""
    state = make_state(width=150)
    full = r"could not be written \(OSError: \[Errno 28\] No space left on device.*free disk"
    for free in range(0, 256, 4):
        with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as other:
            while True:
                other.write(bytes(4096))
        other_size = (small_disk / "other").stat().st_size
        os.truncate(small_disk / "other", max(0, other_size - 1024 * free))
        saver = Checkpointer(small_disk / "checkpoints", alone(), 3)
        saver.save(Progress(1), state)
        with pytest.raises(OSError, match=full):
            saver.wait()


@pytest.mark.slow
def test_a_disk_that_something_else_fills_is_named_at_once_and_at_the_end(folder, small_disk, start):
    """Events, logs and error files lie on that disk too: only the terminal can still say it."""
    cache = f"data.cache={folder}/cache"
    filled = start("--headless", "preset.yaml", ENDLESS, "checkpoint.every=0", cache, "--run-dir", "runs/fox")
    run = filled.run
    filled.wait_for(StepEvent)
    with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as other:
        while True:
            other.write(bytes(4096))
    full = f"the disk of {run.path} is full (No space left on device)"
    said = f"warning: the run has written nothing for 10 s: {full}. What it reports is lost; free some disk space"
    size, since = 0, time.monotonic()
    while time.monotonic() < since + SILENT_S + 3:  # what was allocated is still written into
        if size != run.events_file.stat().st_size:
            size, since = run.events_file.stat().st_size, time.monotonic()
        time.sleep(0.1)
    for number in range(2):
        filled.rank(number).terminate()
    code, out, err = filled.end()
    assert code == 1, err
    assert said in out, "\n".join(out)[-1500:]
    assert f"{full}\n  what to do: free some disk space, then continue with --resume" in err


@pytest.mark.slow
def test_a_run_whose_folder_is_moved_away_ends_with_all_its_processes(folder, start):
    moved = start("--headless", "preset.yaml", ENDLESS, "--run-dir", "runs/fox")
    run = moved.run
    moved.wait_for(StepEvent)
    launch = Launch.read(run)
    family = [psutil.Process(launch.pid), *psutil.Process(launch.pid).children(recursive=True)]
    assert len(family) >= 3
    run.path.rename(folder / "elsewhere")
    code, _, err = moved.end()
    assert (code, err) == (
        1,
        f"error: {run.path}: the run folder was deleted or moved away\n"
        "  what to do: its processes were ended; start it anew, or move the folder back and continue with --resume\n",
    )
    psutil.wait_procs(family, timeout=5)
    assert [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow
def test_a_run_that_nobody_watches_ends_with_its_folder(folder, start):
    """As one that the page has started, or whose terminal was closed."""
    watched = start("--headless", "preset.yaml", ENDLESS, "--run-dir", "runs/fox")
    watched.wait_for(StepEvent)
    launch = Launch.read(watched.run)
    family = [psutil.Process(launch.pid), *psutil.Process(launch.pid).children(recursive=True)]
    watched.kill_launcher()
    watched.run.path.rename(folder / "elsewhere")
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []


def make_read_only(folder: Path) -> None:
    """From now on nothing can be made or changed by a path below the folder; files that are open stay so."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)


@pytest.mark.slow
def test_a_run_folder_that_turns_read_only_loses_no_checkpoint_and_the_run_ends_well_afterwards(folder, start):
    reference = launch_py(folder, "--headless", "preset.yaml", "train.steps=300", "--run-dir", "runs/reference")
    assert reference.returncode == 0
    every = ["train.steps=300", "checkpoint.every=20", f"data.cache={folder}/cache"]
    running = start("--headless", "preset.yaml", *every, "--run-dir", "runs/fox")
    run = running.run
    running.wait_for(CheckpointEvent)
    make_read_only(run.path)
    try:
        code, _, err = running.end()
    finally:
        subprocess.run(["umount", "--lazy", run.path], check=True)
    assert code == 1
    assert "[Errno 30] Read-only file system" in err
    assert "make it writable, then continue with --resume; finished checkpoints are intact" in err
    warnings = [event.message for event in events_of(run) if isinstance(event, WarningEvent)]
    assert any("make the folder writable; the checkpoints before it are untouched" in message for message in warnings)
    assert last_step(run) == 300  # it trained on
    saved = complete(run.checkpoints)[-1]
    assert_intact(saved)

    done = launch_py(folder, "--resume", "runs/fox")
    assert (done.returncode, done.stderr) == (0, "")
    ends = [load_file(folder / "runs" / name / "export" / "fox.safetensors") for name in ("fox", "reference")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
