"""Two machines train one run: they meet, they agree with one machine, and they survive a cut cable."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.commands import LAUNCH, TIMEOUT_S, launch_py, preset_folder
from tests.namespaces import FIRST, Machine, two_machines
from tests.runs import difference
from trainer.run.events import CheckpointEvent, ErrorEvent, EventReader, RankReader, StatusEvent
from trainer.run.folder import RunDir
from trainer.run.manifest import complete
from trainer.run.process import terminate

PORT = 29400
COLLECTIVE_S = 20
"""`parallel.timeout` where a cable is cut."""
CUT_OFF = rf"nothing moved for {COLLECTIVE_S // 10}\d s: .*ranks 2, 3 on \S+ does not answer"
"""What the first machine says of the second when it is gone."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a preset and its dataset."""
    return preset_folder(tmp_path)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as machines:
        yield machines


class Pair:
    """One run on two machines. Two ranks each; the second is told by the first what to type."""

    def __init__(
        self, folder: Path, machines: tuple[Machine, Machine], *arguments: str, own_disk: bool = False
    ) -> None:
        self.run = RunDir(folder / "runs" / "two")
        first = machines[0].command(sys.executable, LAUNCH, *arguments)
        self.first = subprocess.Popen(first, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.first.stdout is not None
        line = self.first.stdout.readline()
        assert line.startswith("on each other node: "), (line, self.first.communicate())
        typed = shlex.split(line.removeprefix("on each other node: "))
        hint = self.first.stdout.readline()
        if own_disk:
            typed += hint.partition("add: ")[2].split()
            # An empty disk where the runs lie on the first machine.
            typed = [
                "unshare",
                "--mount",
                "sh",
                "-c",
                'mount -t tmpfs tmpfs "$0" && exec "$@"',
                str(folder / "runs"),
                *typed,
            ]
        second = machines[1].command(*typed)
        self.second = subprocess.Popen(second, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exception: object) -> None:
        terminate(self.run)
        for process in (self.first, self.second):
            process.kill()
            process.communicate()

    def end(self, timeout_s: float = TIMEOUT_S) -> tuple[tuple[int, str, str], tuple[int, str]]:
        """Wait for both. Returns code, output and errors of the first, code and output of the second."""
        out, err = self.first.communicate(timeout=timeout_s)
        said, _ = self.second.communicate(timeout=timeout_s)
        return (self.first.returncode, out, err), (self.second.returncode, said)

    def wait_for(self, kind: type) -> None:
        reader, deadline = EventReader(self.run.events_file), time.monotonic() + TIMEOUT_S
        while not any(isinstance(event, kind) for event in reader.read()):
            assert self.first.poll() is None, self.first.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)


TWO_NODES = ("parallel.nodes=2", "parallel.devices=2", f"parallel.rendezvous={FIRST}:{PORT}")


def weights_of_one_machine(folder: Path, *overrides: str) -> dict:
    """The exported weights of the same run on four ranks of this machine."""
    done = launch_py(folder, "--headless", "preset.yaml", *overrides, "parallel.devices=4", "--run-dir", "runs/one")
    assert (done.returncode, done.stderr) == (0, "")
    return load_file(folder / "runs" / "one" / "export" / "fox.safetensors")


@pytest.mark.slow
def test_two_machines_come_to_the_weights_of_one(folder, machines):
    changes = ("train.steps=3", "train.batch_size=4", "export.dtype=fp32")
    started = ("--headless", "preset.yaml", *changes, *TWO_NODES, "--run-dir", "runs/two")
    with Pair(folder, machines, *started) as pair:
        (code, out, err), (joined, said) = pair.end()
    assert (code, err) == (0, "")
    assert (joined, said.splitlines()[-1]) == (0, "done; node 0 reports how the run ended")
    assert out.splitlines()[-1] == f"{pair.run.export}/fox.safetensors"
    weights = load_file(pair.run.export / "fox.safetensors")
    assert difference(weights, weights_of_one_machine(folder, *changes)) <= 1e-6


@pytest.mark.slow
def test_a_machine_that_does_not_see_the_run_folder_trains_and_resumes_as_well(folder, machines):
    changes = ("train.batch_size=4", "export.dtype=fp32", "checkpoint.every=2")
    started = ("--headless", "preset.yaml", *changes, "train.steps=3", *TWO_NODES, "--run-dir", "runs/two")
    with Pair(folder, machines, *started, own_disk=True) as pair:
        (code, _, err), (joined, said) = pair.end()
    assert (code, err, joined) == (0, "", 0), said
    saved = complete(pair.run.checkpoints)
    assert [checkpoint.name for checkpoint in saved] == ["step-000002", "step-000003"]
    assert {f"__{rank}_0.distcp" for rank in range(4)} < {file.name for file in saved[-1].iterdir()}
    assert all(RankReader(pair.run.rank_file(rank)).read() for rank in range(4))
    with Pair(folder, machines, "--resume", "runs/two", "train.steps=6", own_disk=True) as pair:
        (code, _, err), (joined, said) = pair.end()
    assert (code, err, joined) == (0, "", 0), said
    events = EventReader(pair.run.events_file).read()
    assert any("resumed from step-000003" in event.message for event in events if isinstance(event, StatusEvent))
    weights = load_file(pair.run.export / "fox.safetensors")
    assert difference(weights, weights_of_one_machine(folder, *changes, "train.steps=6")) <= 1e-6
    assert not list(pair.run.path.glob("remote-*"))  # they lay on the other disk


@pytest.mark.slow
def test_a_cut_cable_ends_the_run_in_time_and_it_goes_on_once_the_cable_is_back(folder, machines, record_property):
    changes = ("train.steps=60", "train.batch_size=4", "export.dtype=fp32", "checkpoint.every=5")
    limit = f"parallel.timeout={COLLECTIVE_S}"
    started = ("--headless", "preset.yaml", *changes, limit, *TWO_NODES, "--run-dir", "runs/two")
    with Pair(folder, machines, *started) as pair:
        pair.wait_for(CheckpointEvent)
        machines[1].cut_off()
        cut = time.monotonic()
        (code, out, err), (joined, said) = pair.end(timeout_s=4 * COLLECTIVE_S)
        seconds = time.monotonic() - cut
    assert (code, out.splitlines()[-1], joined) == (1, "failed", 1), (out, err, said)
    assert re.search(CUT_OFF, err), err
    assert "what to do" in err
    assert COLLECTIVE_S <= seconds < 3 * COLLECTIVE_S
    record_property("seconds from the cut to the end", round(seconds, 1))
    [error] = [event for event in EventReader(pair.run.events_file).read() if isinstance(event, ErrorEvent)]
    assert 5 <= error.step < 60

    machines[1].connect()
    with Pair(folder, machines, "--resume", "runs/two") as pair:
        (code, _, err), (joined, said) = pair.end()
    assert (code, err, joined) == (0, "", 0), said
    events = EventReader(pair.run.events_file).read()
    assert any("resumed from step-0000" in event.message for event in events if isinstance(event, StatusEvent))
    weights = load_file(pair.run.export / "fox.safetensors")
    assert difference(weights, weights_of_one_machine(folder, *changes)) <= 1e-6
