"""GPUs for the plan: memory, speed and bandwidth. Detected, or named as `4x24gb`.

Speeds are those of the makers' data sheets for bf16 with fp32 sums, without sparsity. The share that a training step
reaches, and the speeds of links, are assumptions: no GPU was measured (see DECISIONS.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.config.amounts import GB, MIB
from trainer.config.errors import InputError
from trainer.metrics import gpus
from trainer.metrics.gpus import Gpu


@dataclass(frozen=True)
class Card:
    """One GPU.

    Attributes:
        name: Name to show.
        memory: Bytes, as reported by the driver.
        tflops: bf16 matrix products, 10^12 operations per second.
        share: Share of `tflops` that training reaches.
        bandwidth: Bytes per second of the GPU's own memory.
        link: Bytes per second that a rank receives from other ranks on the same machine.
        host_link: Bytes per second to and from host memory.
    """

    name: str
    memory: int
    tflops: float
    share: float
    bandwidth: float
    link: float
    host_link: float


CARDS = {
    "12gb": Card("12 GB (RTX 4070)", 12282 * MIB, 58, 0.43, 504 * GB, 11 * GB, 20 * GB),
    "16gb": Card("16 GB (RTX 4080)", 16376 * MIB, 97, 0.43, 717 * GB, 11 * GB, 20 * GB),
    "24gb": Card("24 GB (RTX 4090)", 24564 * MIB, 165, 0.43, 1008 * GB, 11 * GB, 20 * GB),
    "32gb": Card("32 GB (RTX 5090)", 32607 * MIB, 209, 0.43, 1792 * GB, 22 * GB, 40 * GB),
    "48gb": Card("48 GB (L40S)", 46068 * MIB, 362, 0.35, 864 * GB, 11 * GB, 20 * GB),
    "80gb": Card("80 GB (H100)", 81559 * MIB, 989, 0.40, 3350 * GB, 360 * GB, 40 * GB),
    "141gb": Card("141 GB (H200)", 143771 * MIB, 989, 0.40, 4800 * GB, 360 * GB, 40 * GB),
}
"""{name for `--gpus`: GPU}. A laptop's or an older GPU of the same memory is slower."""
NETWORK = 25 * GB
"""Bytes per second that a rank receives from another machine: 200 Gbit/s per GPU."""
NAMED = re.compile(r"(?:(?P<count>\d{1,4})x)?(?P<card>\d+gb)", re.IGNORECASE)


@dataclass(frozen=True)
class Hardware:
    """Equal GPUs. count: number on each machine; None for as many as the config has."""

    card: Card
    count: int | None = None


def named(text: str) -> Hardware:
    """Parse a text like `4x24gb` or `80gb`. Raises InputError for other texts."""
    found = NAMED.fullmatch(text.strip())
    if not found or found["count"] == "0":
        raise InputError(f"--gpus: '{text}' is not a number of GPUs and their memory, as 4x24gb or 1x80gb")
    if found["card"].lower() not in CARDS:
        raise InputError(f"--gpus: '{found['card']}' is not one of {', '.join(CARDS)}")
    return Hardware(CARDS[found["card"].lower()], int(found["count"]) if found["count"] else None)


def detected() -> Hardware | None:
    """Return this machine's GPUs, or None without a driver. Raises InputError with nvidia-smi's error."""
    return of_machine(gpus.read())


def of_machine(listed: Sequence[Gpu]) -> Hardware | None:
    """Treat the GPUs that nvidia-smi lists as equal to the one with the least memory. Returns None without GPUs."""
    if not listed:
        return None
    smallest = min(listed, key=lambda gpu: gpu.memory)
    return Hardware(like(smallest.name, smallest.memory * MIB), len(listed))


def like(name: str, memory: int) -> Card:
    """Return a GPU of this name and memory in bytes, as fast as the one in CARDS with the nearest memory."""
    near = min(CARDS.values(), key=lambda card: abs(card.memory - memory))
    return replace(near, name=name, memory=memory)
