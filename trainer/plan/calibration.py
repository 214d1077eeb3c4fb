"""Calibrates plans with the memory measured in runs on this machine. No torch.

A run on GPUs adds a line to `plans/measured.jsonl` in the folder shared by runs. Plans for the same kind of GPU take
the memory of the allocator and the driver from the newest of these lines instead of assuming it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trainer.config.files import make_private_if_new
from trainer.plan.hardware import Card
from trainer.plan.phases import Reserve

NEWEST = 20
"""Number of lines that count, the newest of a kind of GPU."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a rank after some steps.

    Attributes:
        gpu: Name of the GPU.
        ranks: Number of ranks of the run.
        planned: Planned bytes of tensors.
        allocated: Most bytes of tensors.
        reserved: Most bytes reserved by the allocator.
        used: Bytes of the device in use by all processes.
        seconds: Seconds of a step.
    """

    gpu: str
    ranks: int
    planned: float
    allocated: int
    reserved: int
    used: int
    seconds: float


_MEASURED = TypeAdapter(Measured)


def keep(cache: Path, measured: Measured) -> None:
    """Append a measurement, for later plans. cache: folder shared by runs."""
    file = _file(cache)
    make_private_if_new(cache)
    file.parent.mkdir(exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(measured)) + "\n")


def reserve_of(cache: Path, card: Card | None) -> Reserve:
    """Return the memory of allocator and driver on this kind of GPU, measured or, without measurements, assumed."""
    lines = [one for one in _read(_file(cache)) if card and one.gpu == card.name][-NEWEST:]
    if not lines:
        return Reserve()
    share = statistics.median(one.reserved / one.allocated - 1 for one in lines)
    alone = [one.used - one.reserved for one in lines if one.ranks == 1]
    several = [one.used - one.reserved for one in lines if one.ranks > 1]
    context = int(statistics.median(alone)) if alone else Reserve().context
    communication = int(statistics.median(several)) - context if several else Reserve().communication
    return Reserve(max(0.0, share), max(0, context), max(0, communication), is_measured=True)


def _file(cache: Path) -> Path:
    return cache / "plans" / "measured.jsonl"


def _read(file: Path) -> Iterator[Measured]:
    """Yield whole lines; skip a line that was cut off by the end of a process."""
    if not file.is_file():
        return
    for line in file.read_bytes().splitlines():
        try:
            yield _MEASURED.validate_json(line)
        except ValidationError:
            continue
