"""Machines with GPUs, as their nvidia-smi describes them, for machines without any."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer.system.gpus import FIELDS, support
from trainer.system.gpus.support import Build

CU130, CU128 = Build("2.13.0+cu130", cuda="13.0"), Build("2.10.0+cu128", cuda="12.8")
CPU = Build("2.13.0+cpu")

TOOL = """#!{python} -S
import json, sys
machine = json.load(open({file!r}))
query = next((word for word in sys.argv if word.startswith("--query-gpu=")), "")
fields = query.partition("=")[2].split(",")
if unknown := [field for field in fields if field in machine["unknown"]]:
    print(f'Field "{{unknown[0]}}" is not a valid field to query.\\n')
    sys.exit(2)
if sys.argv[1] == "-L":
    print(machine["listing"])
elif sys.argv[1] == "topo":
    print(machine["links"])
elif not machine["cards"]:
    print("No devices were found")
    sys.exit(6)
else:
    for card in machine["cards"]:
        print(", ".join(card[field] for field in fields))
"""


@dataclass(frozen=True)
class Machine:
    """What nvidia-smi answers.

    Attributes:
        cards: Cells of FIELDS, comma-separated, one line for each card.
        listing: Answer to -L.
        unknown: Fields that this driver does not know.
    """

    cards: str
    listing: str = ""
    unknown: tuple[str, ...] = ()
    links: str = " GPU0 GPU1\nGPU0 X NV4\nGPU1 NV4 X"

    def rows(self) -> list[dict[str, str]]:
        """{field: cell} of each card."""
        lines = (line.strip() for line in self.cards.strip().splitlines())
        return [dict(zip(FIELDS, (cell.strip() for cell in line.split(",")), strict=True)) for line in lines if line]


TWO_H100 = Machine("""
    NVIDIA H100 80GB HBM3, 81559, 4, 0, 31, GPU-aaaa1111-0000-1111-2222-333344445555, 580.65.06, 9.0, Disabled
    NVIDIA H100 80GB HBM3, 81559, 4, 97, 64, GPU-bbbb1111-0000-1111-2222-333344445555, 580.65.06, 9.0, Disabled
""")
MIXED = Machine("""
    NVIDIA GeForce RTX 3060, 12288, 310, 3, 44, GPU-cccc1111-0000-1111-2222-333344445555, 580.65.06, 8.6, [N/A]
    NVIDIA GeForce RTX 4090, 24564, 10, 0, 35, GPU-dddd1111-0000-1111-2222-333344445555, 580.65.06, 8.9, [N/A]
""")
OLD_DRIVER = Machine(
    "NVIDIA A100-SXM4-40GB, 40536, 0, 0, 30, GPU-eeee1111-0000-1111-2222-333344445555, 450.51.06, 8.0, [N/A]",
    unknown=("compute_cap", "mig.mode.current"),
)
TURING = Machine("Tesla T4, 15360, 0, 0, 38, GPU-ffff1111-0000-1111-2222-333344445555, 580.65.06, 7.5, [N/A]")
BESIDE_A_DISPLAY_ADAPTER = Machine("""
    NVIDIA GeForce GT 1030, 2048, 300, 2, 40, GPU-0d1d1111-0000-1111-2222-333344445555, 580.65.06, 6.1, [N/A]
    NVIDIA GeForce RTX 3090, 24576, 0, 0, 35, GPU-39391111-0000-1111-2222-333344445555, 580.65.06, 8.6, [N/A]
""")
SLICED = Machine(
    """
    NVIDIA A100-SXM4-80GB, 81920, 87, [N/A], 29, GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, 580.65.06, 8.0, Enabled
    """,
    listing="""GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.40gb     Device  0: (UUID: MIG-7f0bd2a1-9f0c-5f3a-8d11-0a1b2c3d4e5f)
  MIG 3g.40gb     Device  1: (UUID: MIG-8a1ce3b2-9f0c-5f3a-8d11-0a1b2c3d4e5f)
""",
)
HIDDEN = Machine("")


def install(machine: Machine, folder: Path, patch: pytest.MonkeyPatch, build: Build | None = CU130) -> None:
    """Let this process, and those it starts, find the machine's nvidia-smi. build: of the torch that it finds."""
    answers = {"cards": machine.rows(), "unknown": machine.unknown, "listing": machine.listing, "links": machine.links}
    file, tool = folder / "machine.json", folder / "nvidia-smi"
    file.write_text(json.dumps(answers))
    tool.write_text(TOOL.format(python=sys.executable, file=str(file)))
    tool.chmod(0o755)
    patch.setenv("PATH", str(folder), prepend=os.pathsep)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pretend(build, patch)


def pretend(build: Build | None, patch: pytest.MonkeyPatch, libcuda: int = 0) -> None:
    """Let this process find another torch. libcuda: CUDA version of the driver's library; 0 for none."""
    patch.setattr(support, "installed", lambda: build)
    patch.setattr(support, "libcuda_version", lambda: libcuda)


def uuids(machine: Machine) -> Sequence[str]:
    return [row["uuid"] for row in machine.rows()]
