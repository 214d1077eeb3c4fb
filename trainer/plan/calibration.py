"""What runs on this machine took, and what plans learn from it. No torch.

A run on GPUs adds a line to `plans/measured.jsonl` in the folder shared by runs. Plans for the same kind of GPU take
the allocator's share and what the driver takes from the newest of these lines instead of assuming them.
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
"""Lines that count: the last of a kind of GPU."""


@dataclass(frozen=True)
class Measured:
    """A rank after some steps. gpu: its name.  ranks: of the run.  planned: bytes of tensors.

    allocated, reserved: the most there were.  used: of the device, by everybody on it.  seconds: of a step.
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
    """Write a measurement down, for plans to come."""
    file = _file(cache)
    make_private_if_new(cache)
    file.parent.mkdir(exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(measured)) + "\n")


def reserve_of(cache: Path, card: Card | None) -> Reserve:
    """What allocator and driver take on this kind of GPU, as measured; assumed where nothing was."""
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
    """Whole lines; one that was cut off by the end of a process is passed over."""
    if not file.is_file():
        return
    for line in file.read_bytes().splitlines():
        try:
            yield _MEASURED.validate_json(line)
        except ValidationError:
            continue
