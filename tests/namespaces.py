"""Machines for tests: network namespaces of this one, each with an address of its own, joined by a cable."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FIRST = "node0"
"""The name of the first machine, on both."""


@dataclass(frozen=True)
class Machine:
    """One of two. namespace: its network's name.  address: by which the other one reaches it."""

    namespace: str
    address: str

    def command(self, *argv: object) -> list[str]:
        """A command line that runs there. Files and processes are those of this machine."""
        return ["ip", "netns", "exec", self.namespace, *map(str, argv)]

    def cut_off(self) -> None:
        """Pull the cable out."""
        _ip("-n", self.namespace, "link", "set", "cable", "down")

    def connect(self) -> None:
        """Put the cable in."""
        _ip("-n", self.namespace, "link", "set", "cable", "up")


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines with a cable between them, and no other network.

    Each knows itself by a loopback address, as Debian installs it: what it tells others of itself must be another.

    Raises RuntimeError with the remedy where the system does not allow it: a test that needs them must not be
    passed over in silence.
    """
    machines = tuple(Machine(f"shardstudio-{os.getpid()}-{number}", f"10.77.0.{number + 1}") for number in range(2))
    try:
        for machine in machines:
            _ip("netns", "add", machine.namespace)
        first, second = (machine.namespace for machine in machines)
        _ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for machine in machines:
            _ip("-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", "cable")
            _ip("-n", machine.namespace, "link", "set", "lo", "up")
            machine.connect()
            _ip("-n", machine.namespace, "route", "add", "default", "dev", "cable")
            _write_hosts(machine, machines[0])
        yield machines[0], machines[1]
    finally:
        for machine in machines:
            subprocess.run(["ip", "netns", "delete", machine.namespace], check=False, capture_output=True)
            shutil.rmtree(_etc(machine), ignore_errors=True)


def _write_hosts(machine: Machine, first: Machine) -> None:
    """`ip netns exec` puts this file over /etc/hosts."""
    own = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}"
    _etc(machine).mkdir(parents=True)
    hosts = f"{own} {FIRST}\n" if machine == first else f"{own}\n{first.address} {FIRST}\n"
    (_etc(machine) / "hosts").write_text(hosts)


def _etc(machine: Machine) -> Path:
    return Path("/etc/netns") / machine.namespace


def _ip(*arguments: str) -> None:
    if shutil.which("ip") is None:
        raise RuntimeError("two machines need the command ip: apt-get install iproute2, or make network")
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"ip {' '.join(arguments)}: {done.stderr.strip()}; two machines need network namespaces: run the tests as "
            "root, in a container with --cap-add=NET_ADMIN --cap-add=SYS_ADMIN"
        )
