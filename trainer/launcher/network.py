"""Nodes of a run: their numbers, addresses and ports. Nothing here starts anything."""

from __future__ import annotations

import errno
import os
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil

from trainer.config.errors import InputError
from trainer.config.sections import ParallelConfig
from trainer.launcher.schedulers import FIRST_NODE

ELSEWHERE = ("192.0.2.1", 9)
"""An address that is no machine's (RFC 5737): the way to it is the way out. Nothing is ever sent there."""


def dealt_node_rank() -> int | None:
    """The number that a scheduler gave this node, None without one.

    Kubeflow's runtime for torch sets PET_NODE_RANK, as torchrun's own option. SLURM sets SLURM_NODEID, which counts
    nodes; SLURM_PROCID counts tasks, and is the same only while each node has one.
    """
    names = (name for name in ("PET_NODE_RANK", "SLURM_NODEID") if name in os.environ)
    return next((int(os.environ[name]) for name in names), None)


def node_environment(parallel: ParallelConfig) -> dict[str, str]:
    """How the ranks are reached: of one node not by a store of torchrun, which would listen on all networks.

    Of several nodes by a network interface: gloo takes the address of the machine's own name, which is 127.0.0.1 in
    many containers and 127.0.1.1 on Debian. NCCL passes over such addresses by itself.
    """
    if parallel.nodes == 1:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    interface = _interface_towards(*host_and_port(parallel))
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


def host_and_port(parallel: ParallelConfig) -> tuple[str, int]:
    host, _, port = str(parallel.rendezvous).rpartition(":")
    return host.strip("[]"), int(port)


def must_be_joined(parallel: ParallelConfig) -> bool:
    """Whether a person starts the other nodes of a run: there are some, and no scheduler does."""
    return parallel.nodes > 1 and dealt_node_rank() is None


def require_free_port(parallel: ParallelConfig) -> None:
    """Raises InputError when `parallel.rendezvous` is no place of this machine, or one that another program holds.

    The machine that starts a run is its first node. torchrun would wait there for the machine of that name, or take
    that program for the first node. A job of a cluster learns its first node only when it runs.
    """
    if parallel.nodes == 1 or parallel.rendezvous == FIRST_NODE:
        return
    host, port = host_and_port(parallel)
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
