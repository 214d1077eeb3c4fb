"""GPUs for the plan: memory, speed and bandwidth. Detected, or named as `4x24gb`.

Speeds are those of `cards`. The share that a training step reaches, and the speeds of links, are assumptions (see
DECISIONS 91).
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from trainer.plan.cards import Speed, namesake_of, shares, speed_of
from trainer.system.amounts import GB, MIB
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu, support
from trainer.system.gpus.visible import visible

Source = Literal["measured here", "measured", "scaled", "assumed"]


@dataclass(frozen=True)
class MeasuredStep:
    """A step that one rank did by itself on a kind of GPU.

    Attributes:
        flops: Its floating-point operations.
        seconds: How long it took.
        is_compiled: Whether the blocks were compiled.
        is_here: Whether it was a run of this machine.
    """

    flops: float
    seconds: float
    is_compiled: bool = False
    is_here: bool = False


LIKE = 3.0
"""Measured steps are like another one of at most this many times their operations, or as small a part."""
PER_GROUP = 1.2
"""Steps whose operations differ by less than about this factor count as one, with their median speed."""


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
        speed_of: What its speed was assumed from, because it is not known; empty if it is.
        measured: Steps on this kind of GPU. Those of this machine win over others.
    """

    name: str
    memory: int
    tflops: float
    share: float
    bandwidth: float
    link: float
    host_link: float
    speed_of: str = ""
    measured: tuple[MeasuredStep, ...] = ()

    def speed(self, flops: float, is_compiled: bool) -> tuple[float, Source] | None:
        """Return the operations per second that a step of `flops` reaches, and how that is known; None without
        measured steps.

        Large steps reach more: between two measured ones the speed follows a line in logarithms, beyond the last it
        stays. All plans for a card are thus compared by one measure, whatever their size.
        """
        steps = [step for step in self.measured if step.is_compiled == is_compiled]
        # What this machine has measured is worth more than what others have.
        steps = [step for step in steps if step.is_here] or steps
        groups: defaultdict[int, list[MeasuredStep]] = defaultdict(list)
        for step in steps:
            groups[round(math.log(step.flops, PER_GROUP))].append(step)
        # Steps of about one size are one point: the median of a group is not moved by a slow run.
        points = sorted(
            (
                median(math.log(step.flops) for step in group),
                median(math.log(step.flops / step.seconds) for step in group),
            )
            for group in groups.values()
        )
        if not points:
            return None
        at = math.log(flops)
        is_like = min(abs(place - at) for place, _ in points) <= math.log(LIKE)
        source: Source = "scaled" if not is_like else "measured here" if steps[0].is_here else "measured"
        return math.exp(_between(points, at)), source


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate; the first and the last value hold beyond. points: (place, value), by place."""
    after = bisect([place for place, _ in points], at)
    if after in (0, len(points)):
        return points[min(after, len(points) - 1)][1]
    (left, low), (right, high) = points[after - 1], points[after]
    return low + (high - low) * (at - left) / (right - left)


def _card(name: str, memory: int, speed: Speed, of: str = "") -> Card:
    computing, bandwidth = shares(name)
    return Card(
        name,
        memory,
        speed.tflops * computing,
        speed.share,
        speed.bandwidth * bandwidth * GB,
        speed.link * GB,
        speed.host_link * GB,
        of,
    )


MEMORY = {
    "3060": ("RTX 3060", 12288),
    "3090": ("RTX 3090", 24576),
    "4060ti": ("RTX 4060 Ti", 16380),
    "4070": ("RTX 4070", 12282),
    "4080": ("RTX 4080", 16376),
    "4090": ("RTX 4090", 24564),
    "5070ti": ("RTX 5070 Ti", 16303),
    "5080": ("RTX 5080", 16303),
    "5090": ("RTX 5090", 32607),
    "a10": ("A10", 23028),
    "a10g": ("A10G", 23028),
    "a40": ("A40", 46068),
    "a100-40gb": ("A100 SXM4 40GB", 40960),
    "a100-80gb": ("A100 SXM4 80GB", 81920),
    "a6000": ("RTX A6000", 49140),
    "6000ada": ("RTX 6000 Ada", 49140),
    "pro6000": ("RTX PRO 6000 Blackwell", 97887),
    "l4": ("L4", 23034),
    "l40": ("L40", 46068),
    "l40s": ("L40S", 46068),
    "h100": ("H100", 81559),
    "h200": ("H200", 143771),
    "b200": ("B200", 183359),
}
"""{name for `--gpus`: (model as in `cards`, MiB that its driver reports)}"""


def _example(size: str, name: str) -> Card:
    model, mib = MEMORY[name]
    speed = speed_of(model)
    assert speed is not None
    return _card(f"{size} ({model})", mib * MIB, speed)


CARDS = {
    "12gb": _example("12 GB", "4070"),
    "16gb": _example("16 GB", "4080"),
    "24gb": _example("24 GB", "4090"),
    "32gb": _example("32 GB", "5090"),
    "48gb": _example("48 GB", "l40s"),
    "80gb": _example("80 GB", "h100"),
    "141gb": _example("141 GB", "h200"),
}
"""{name for `--gpus`: GPU}. Another GPU of the same memory may be slower."""
NETWORK = 25 * GB
"""Bytes per second that a rank receives from another machine: 200 Gbit/s per GPU."""
NAMED = re.compile(r"(?:(?P<count>\d{1,4})\s*x\s*)?(?P<card>\w[\w\s-]*)", re.IGNORECASE | re.ASCII)
MAKERS = re.compile(r"nvidia|geforce|rtx|blackwell|sxm\d?|\s|-")
"""Words of a card's name that people write or leave out."""


@dataclass(frozen=True)
class Hardware:
    """Equal GPUs. count: number on each machine; None for as many as the config has."""

    card: Card
    count: int | None = None


def named(text: str) -> Hardware:
    """Parse a text like `4x24gb`, `8xh100` or `80gb`. Raises InputError for other texts."""
    found = NAMED.fullmatch(text.strip())
    if not found or found["count"] == "0":
        raise InputError(f"--gpus: '{text}' is not a number of GPUs, as 4x24gb or 8xh100")
    written = MAKERS.sub("", found["card"].lower())
    models = {MAKERS.sub("", name): model for name, model in MEMORY.items()}
    if written not in CARDS and written not in models:
        raise InputError(
            f"--gpus: '{found['card']}' is neither a memory, {', '.join(CARDS)}, nor a card that is known here, "
            f"{', '.join(MEMORY)}; name the nearest memory"
        )
    if written in CARDS:
        card = CARDS[written]
    else:
        model, mib = models[written]
        card = like(model, mib * MIB)
    return Hardware(card, int(found["count"]) if found["count"] else None)


def detected() -> Hardware | None:
    """Return the GPUs that runs started here may use, or None without any. Raises InputError as `visible`."""
    return of_machine(visible())


def of_machine(listed: Sequence[Gpu]) -> Hardware | None:
    """Treat the GPUs as equal to the one with the least memory, and of those to the slowest. Returns None without GPUs.

    MIG slices count where no whole GPU is listed, as one: a run trains on one of them. GPUs that torch has no code for
    do not count next to others: runs leave them out.
    """
    usable = support.usable(listed, support.installed()) or listed
    known = [gpu for gpu in usable if gpu.memory > 0]  # a GPU that shares the host's memory reports none
    whole = [gpu for gpu in known if not gpu.is_slice]
    cards = [like(gpu.name, gpu.memory * MIB) for gpu in whole or known]
    if not cards:
        return None
    return Hardware(min(cards, key=lambda card: (card.memory, card.tflops)), len(whole) or 1)


def like(name: str, memory: int) -> Card:
    """Return the GPU of this name with a memory in bytes.

    Where `cards` does not know it, a laptop's card is taken to be half as fast as the desktop's of that name, another
    one as fast as the one in CARDS with the nearest memory.
    """
    if speed := speed_of(name):
        return _card(name, memory, speed)
    if speed := namesake_of(name):
        half = replace(speed, tflops=speed.tflops / 2, bandwidth=speed.bandwidth / 2)
        return _card(name, memory, half, f"half that of {speed.words}")
    near = min(CARDS.values(), key=lambda card: abs(card.memory - memory))
    return replace(near, name=name, memory=memory, speed_of=f"that of {near.name}, which has the nearest memory")
