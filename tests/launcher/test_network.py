"""What a run listens on: from its start to its export it is reached from its own machine only."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.commands import LAUNCH, TIMEOUT_S, preset_folder
from tests.launcher.test_nodes import PORT, TWO_NODES, Pair
from tests.namespaces import FIRST, Machine, two_machines
from trainer.run.events import EventReader, ExportEvent
from trainer.run.folder import RunDir

KNOCK = """
import socket, sys
for port in map(int, sys.argv[2:]):
    with socket.socket() as client:
        client.settimeout(2)
        print(port, client.connect_ex((sys.argv[1], port)))
"""
"""Try ports of an address: 0 is a connection."""
MEASURE = """
import sys
from pathlib import Path
from trainer.run import process
from trainer.launcher.jobs import variants
from trainer.config.load import load_config
config = load_config(Path("preset.yaml"), ["train.steps=3", "sample.every=0"])
run = variants.create(config, {"whole": ["parallel.strategy=ddp"]}, Path("runs"))
variants.start(run)
print(run.path, process.wait(run, 400))
"""
STAGES = "stages=[{name: a, set: {train.steps: 1}}, {name: b, set: {train.steps: 1}}]"


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines; each knows its own name by the address that the other one reaches, as most in a network do."""
    with two_machines() as machines:
        for machine in machines:
            hosts = f"127.0.0.1 localhost\n{machine.address} {socket.gethostname()}\n"
            (Path("/etc/netns") / machine.namespace / "hosts").write_text(hosts)
        yield machines


@dataclass
class Watched:
    """A command on the first machine, watched until it ends. listened: `address:port` of every listener.

    connected: ports that the second machine could connect to.  looks: how often it was looked.
    """

    code: int
    said: str
    looks: int = 0
    listened: set[str] = field(default_factory=set)
    connected: set[str] = field(default_factory=set)

    @property
    def open_to_others(self) -> set[str]:
        """The listeners that are not on loopback."""
        hosts = {place: place.rpartition(":")[0].partition("%")[0].strip("[]") for place in self.listened}
        return {place for place, host in hosts.items() if host == "*" or not ip_address(host).is_loopback}


def listeners(machine: Machine) -> set[str]:
    """`address:port` of all that listens there now."""
    found = subprocess.run(machine.command("ss", "-Hltn"), capture_output=True, text=True, check=True).stdout
    return {line.split()[3] for line in found.splitlines()}


def watched(machines: tuple[Machine, Machine], folder: Path, *argv: object) -> Watched:
    """Run a command on the first machine to its end, and look every tenth of a second at what listens there."""
    first, second = machines
    output = (folder / "output.txt").open("w+")
    with subprocess.Popen(first.command(*argv), cwd=folder, stdout=output, stderr=subprocess.STDOUT) as process:
        seen = Watched(0, "")
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None:
            assert time.monotonic() < deadline
            places = listeners(first)
            if new := {place.rpartition(":")[2] for place in places - seen.listened}:
                knock = second.command(sys.executable, "-c", KNOCK, first.address, *new)
                answers = subprocess.run(knock, capture_output=True, text=True, check=True).stdout.splitlines()
                seen.connected |= {line.split()[0] for line in answers if line.endswith(" 0")}
            seen.listened |= places
            seen.looks += 1
            time.sleep(0.1)
        seen.code = process.wait()
    output.seek(0)
    seen.said = output.read()
    output.close()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("changes", [("parallel.max_restarts=1",), (STAGES,)], ids=["one stage", "two stages"])
def test_a_run_on_one_machine_is_reached_from_nowhere_else_from_start_to_export(tmp_path, machines, changes):
    folder = preset_folder(tmp_path)
    argv = (sys.executable, LAUNCH, "--headless", "preset.yaml", *changes, "--run-dir", "runs/one")
    seen = watched(machines, folder, *argv)
    assert (seen.open_to_others, seen.connected) == (set(), set())
    run = RunDir(folder / "runs" / "one")
    assert (seen.code, run.report.is_file()) == (0, True), seen.said
    assert any(isinstance(event, ExportEvent) for event in EventReader(run.events_file).read())
    assert len(seen.listened) >= 2, "gloo of both ranks was seen"
    assert seen.looks > 20


@pytest.mark.slow
def test_trials_are_reached_from_nowhere_else_either(tmp_path, machines):
    folder = preset_folder(tmp_path)
    program = folder / "measure.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(LAUNCH.parent)!r})\n{MEASURE}")
    seen = watched(machines, folder, sys.executable, program)
    assert (seen.open_to_others, seen.connected) == (set(), set())
    assert seen.said.split()[-1] == "finished", seen.said
    assert len(seen.listened) >= 2


@pytest.mark.slow
def test_of_several_machines_only_the_rendezvous_listens_on_networks_that_join_no_nodes(tmp_path, machines):
    folder = preset_folder(tmp_path)
    for number, machine in enumerate(machines):
        for words in (
            "link add other type veth peer name far",
            f"address add 10.88.0.{number + 1}/24 dev other",
            "link set other up",
        ):
            subprocess.run(["ip", "-n", machine.namespace, *words.split()], check=True)
        # Each knows itself by the address that joins no nodes.
        hosts = f"127.0.0.1 localhost\n10.88.0.{number + 1} {socket.gethostname()}\n{machines[0].address} {FIRST}\n"
        (Path("/etc/netns") / machine.namespace / "hosts").write_text(hosts)
    seen: list[set[str]] = [set(), set()]
    with Pair(folder, machines, "--headless", "preset.yaml", *TWO_NODES, "--run-dir", "runs/two") as pair:
        while pair.first.poll() is None:
            for places, machine in zip(seen, machines, strict=True):
                places |= listeners(machine)
            time.sleep(0.1)
        (code, _, err), (joined, said) = pair.end()
    assert (code, err, joined) == (0, "", 0), said
    on = [{place.rpartition(":")[0] for place in places} for places in seen]
    assert on == [{"*", machines[0].address}, {machines[1].address}]
    assert {place for place in seen[0] if place.startswith("*")} == {f"*:{PORT}"}
