"""Network side of a run with several nodes: node numbers, addresses and ports. Starts no processes.

See DECISIONS 109.
"""

from __future__ import annotations

import errno
import os
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil

from trainer.config.sections import ParallelConfig
from trainer.launcher.schedulers import FIRST_NODE
from trainer.system.errors import InputError

OUTSIDE = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737), used to find the interface of the default route. Nothing is sent to
it."""


def scheduled_node_rank() -> int | None:
    """Return the number that a scheduler gave this node, or None without a scheduler.

    Kubeflow's torch runtime sets PET_NODE_RANK, as an option of torchrun. SLURM sets SLURM_NODEID, which counts nodes;
    SLURM_PROCID counts tasks, and equals it only with one task per node.
    """
    names = (name for name in ("PET_NODE_RANK", "SLURM_NODEID") if name in os.environ)
    return next((int(os.environ[name]) for name in names), None)


def node_environment(parallel: ParallelConfig) -> dict[str, str]:
    """Return the environment variables that decide how ranks reach each other.

    On one node, torchrun must not start its own store, which would listen on all networks. On several nodes, gloo is
    given a network interface: by default it takes the address of the machine's host name, which is 127.0.0.1 in many
    containers and 127.0.1.1 on Debian. NCCL skips such addresses by itself.
    """
    if parallel.nodes == 1:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    interface = _interface_towards(*host_and_port(parallel))
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def _interface_towards(host: str, port: int) -> str | None:
    """Return the network interface by which this machine reaches `host`, or None if it cannot reach it.

    On the first node, `host` is this machine. If its name resolves to a loopback address, the interface of the default
    route is returned instead, unless the user gave a loopback address.
    """
    address = _own_address(host, port)
    if address is not None and address.is_loopback and not _is_loopback(host):
        address = _own_address(*OUTSIDE) or address
    for name, addresses in psutil.net_if_addrs().items():
        if any(str(address) == one.address.partition("%")[0] for one in addresses):
            return name
    return "lo" if address is not None and address.is_loopback else None


def _own_address(host: str, port: int) -> IPv4Address | IPv6Address | None:
    """Return this machine's source address for packets to `host`, or None if there is no route. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:  # an unknown name, or no route: torchrun reports it
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_and_port(parallel: ParallelConfig) -> tuple[str, int]:
    """Split `parallel.rendezvous` into host and port. An IPv6 address loses its brackets."""
    host, _, port = str(parallel.rendezvous).rpartition(":")
    return host.strip("[]"), int(port)


def must_be_joined(parallel: ParallelConfig) -> bool:
    """Whether a person must start the other nodes: there are several nodes and no scheduler."""
    return parallel.nodes > 1 and scheduled_node_rank() is None


def require_free_port(parallel: ParallelConfig) -> None:
    """Check that this machine, as the first node of a run, can listen on `parallel.rendezvous`.

    Otherwise torchrun would wait for the machine of that name, or take another program on that port for the first node.
    Skipped for a cluster job that has not started, because its first node is not known yet.

    Raises:
        InputError: The address is not of this machine, or another program uses the port.
    """
    if parallel.nodes == 1 or parallel.rendezvous == FIRST_NODE:
        return
    host, port = host_and_port(parallel)
    field, endpoint = "parallel.rendezvous", parallel.rendezvous
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torchrun: a port just left is free
            probe.bind(address)
    except socket.gaierror as error:
        if must_be_joined(parallel):  # a scheduler may start the first node before its name is known
            raise InputError(
                f"{field}: {endpoint}: the host name {host} cannot be resolved here; give the name or address by which "
                "the other nodes reach this one"
            ) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"{field}: another program uses {endpoint}; end it or choose another port") from error
        if error.errno == errno.EADDRNOTAVAIL and must_be_joined(parallel):
            raise InputError(
                f"{field}: {endpoint} is not this machine; start the run there, and use --join here"
            ) from error
