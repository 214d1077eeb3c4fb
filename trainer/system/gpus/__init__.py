"""The machine's GPUs as nvidia-smi reports them: no torch, no context on a GPU.

`visible` says which of them a run may use, `support` whether the installed torch can.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.system.errors import InputError

TIMEOUT_S = 60
FIELDS: tuple[str, ...] = (
    "name",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "uuid",
    "driver_version",
    "compute_cap",
    "mig.mode.current",
)
NO_GPUS = "No devices were found"
"""Output of nvidia-smi where a driver is installed and no GPU can be seen."""
SLICE_SHARE = 0.95
"""Share of a MIG slice's nominal memory that a process can use; the least that NVIDIA lists for any profile."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or a MIG slice of one; a number the driver does not report is -1, a text empty.

    Attributes:
        index: nvidia-smi's. Slices are numbered after the last GPU.
        memory: MiB.
        memory_used: MiB.
        busy: Percent of the last moment.
        celsius: Temperature.
        uuid: How CUDA_VISIBLE_DEVICES names it unambiguously.
        compute_cap: Compute capability, such as 8.6.
        is_slice: Whether it is a MIG slice.
        card: Index and UUID of the GPU that a slice is of.
    """

    index: int
    name: str
    memory: int
    memory_used: int
    busy: int
    celsius: int
    uuid: str = ""
    driver_version: str = ""
    compute_cap: str = ""
    is_slice: bool = False
    card: tuple[int, str] = (-1, "")

    @property
    def capability(self) -> tuple[int, ...]:
        """The compute capability as numbers; empty if the driver does not report it."""
        return version_of(self.compute_cap)


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, which can be compared; empty for a text that does not begin with one."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def exist() -> bool:
    """Whether an NVIDIA driver is installed."""
    return shutil.which("nvidia-smi") is not None


def read() -> list[Gpu]:
    """The GPUs in nvidia-smi's order, none without a driver. MIG slices stand in place of the GPU they divide.

    Raises InputError with nvidia-smi's own message.
    """
    if not exist():
        return []
    found, divided = parse(*_query())
    return with_slices(found, divided, ask("-L")) if divided else found


def _query() -> tuple[str, tuple[str, ...]]:
    """The table of the GPUs, and its fields: all of FIELDS that this driver knows."""
    fields = FIELDS
    while True:
        try:
            return ask(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"), fields
        except InputError as error:
            if NO_GPUS in str(error):
                return "", fields
            unknown = re.search(r'Field "(.+?)" is not a valid field', str(error))
            if not unknown or unknown[1] not in fields:
                raise
            fields = tuple(field for field in fields if field != unknown[1])


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


def parse(text: str, fields: Sequence[str] = FIELDS) -> tuple[list[Gpu], set[int]]:
    """Parse a CSV table of `fields`. Returns the GPUs, and the indices of those that are divided into MIG slices."""
    found, divided = [], set()
    for index, line in enumerate(text.replace(NO_GPUS, "").strip().splitlines()):
        cells = dict(zip(fields, (cell.strip() for cell in line.split(",")), strict=False))
        memory, used, busy, celsius = (_number(cells.get(field, "")) for field in FIELDS[1:5])
        uuid, driver, capability = (_text(cells.get(field, "")) for field in FIELDS[5:8])
        found.append(Gpu(index, cells["name"], memory, used, busy, celsius, uuid, driver, capability))
        if cells.get("mig.mode.current") == "Enabled":
            divided.add(index)
    return found, divided


def _number(cell: str) -> int:
    """The number, or -1 for [N/A] and the like."""
    return int(float(cell)) if cell.replace(".", "", 1).isdigit() else -1


def _text(cell: str) -> str:
    """The text, or nothing for [N/A] and the like."""
    return "" if cell.startswith("[") else cell


MIG_NAME = re.compile(r"MIG (?:(?P<compute>\d+)c\.)?(?P<parts>\d+)g\.(?P<gb>\d+)gb")
"""A slice in the names that nvidia-smi and CUDA give it, such as `MIG 3g.40gb`."""
_CARD_LINE = re.compile(r"GPU (\d+): ")
_SLICE_LINE = re.compile(r"\s+(MIG \S+)\s+Device\s+\d+: \(UUID: ([^)]+)\)")


def with_slices(found: Sequence[Gpu], divided: set[int], listing: str) -> list[Gpu]:
    """Put MIG slices in place of the GPUs that they divide.

    Args:
        found: GPUs.
        divided: Indices of those in MIG mode. One without slices is of no use.
        listing: Output of `nvidia-smi -L`.
    """
    whole = [gpu for gpu in found if gpu.index not in divided]
    slices = enumerate(_slices(found, listing), len(found))
    return [*whole, *(replace(part, index=index) for index, part in slices)]


def _slices(found: Sequence[Gpu], listing: str) -> Iterator[Gpu]:
    card = None
    for line in listing.splitlines():
        if on := _CARD_LINE.match(line):
            card = next((gpu for gpu in found if gpu.index == int(on[1])), None)
        elif card and (part := _SLICE_LINE.match(line)):
            size = MIG_NAME.match(part[1])
            memory = int(int(size["gb"]) * 1024 * SLICE_SHARE) if size else -1
            name = f"{card.name} {part[1]}"
            of_slice = replace(card, name=name, memory=memory, memory_used=-1, busy=-1, uuid=part[2])
            yield replace(of_slice, is_slice=True, card=(card.index, card.uuid))


LINKS_FROM_FAST_TO_SLOW = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")


def slowest_link(matrix: str) -> str:
    """The slowest link in the matrix of `nvidia-smi topo -m`; empty with fewer than 2 GPUs."""
    rows = [line.split() for line in matrix.splitlines() if line.startswith("GPU")]
    links = [cell for row in rows for cell in row[1 : len(rows) + 1] if cell != "X"]
    return max(links, key=_slowness, default="")


def _slowness(link: str) -> int:
    return next((at for at, kind in enumerate(LINKS_FROM_FAST_TO_SLOW) if link.startswith(kind)), -1)
