"""The state of the machine's GPUs, read from nvidia-smi: no torch, no context on a GPU."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from trainer.config.errors import InputError

TIMEOUT_S = 60
FIELDS = ("name", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu")


@dataclass(frozen=True)
class Gpu:
    """One GPU; a number the driver does not report is -1.

    Attributes:
        memory: MiB.
        memory_used: MiB.
        busy: Percent of the last moment.
        celsius: Temperature.
    """

    index: int
    name: str
    memory: int
    memory_used: int
    busy: int
    celsius: int


def exist() -> bool:
    """Whether an NVIDIA driver is installed."""
    return shutil.which("nvidia-smi") is not None


def read() -> list[Gpu]:
    """The GPUs in nvidia-smi's order, none without a driver. Raises InputError with nvidia-smi's own message."""
    if not exist():
        return []
    return parse(ask(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"))


def links() -> str:
    """The slowest kind of link between two GPUs, as nvidia-smi abbreviates it (NV4, PIX, SYS); empty with fewer than 2.

    Raises InputError with nvidia-smi's own message.
    """
    return slowest_link(ask("topo", "-m"))


def ask(*arguments: str) -> str:
    """Run nvidia-smi and return its output. Raises InputError with the first line when it fails."""
    argv = ["nvidia-smi", *arguments]
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"nvidia-smi does not answer: {error}") from error
    if answer.returncode:
        first = (answer.stdout + answer.stderr).strip().split("\n")[0]
        raise InputError(f"nvidia-smi says: {first}")
    return answer.stdout


def parse(text: str) -> list[Gpu]:
    """Parse a CSV table of FIELDS."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.strip().splitlines()]
    return [Gpu(index, row[0], *(_number(cell) for cell in row[1:])) for index, row in enumerate(rows)]


def _number(cell: str) -> int:
    """The number, or -1 for [N/A] and the like."""
    return int(float(cell)) if cell.replace(".", "", 1).isdigit() else -1


LINKS_FROM_FAST_TO_SLOW = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")


def slowest_link(matrix: str) -> str:
    """The slowest link in the matrix of `nvidia-smi topo -m`; empty with fewer than 2 GPUs."""
    rows = [line.split() for line in matrix.splitlines() if line.startswith("GPU")]
    links = [cell for row in rows for cell in row[1 : len(rows) + 1] if cell != "X"]
    return max(links, key=_slowness, default="")


def _slowness(link: str) -> int:
    return next((at for at, kind in enumerate(LINKS_FROM_FAST_TO_SLOW) if link.startswith(kind)), -1)
