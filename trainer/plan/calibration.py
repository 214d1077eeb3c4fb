"""Calibrates plans with what was measured in runs. No torch.

A run on GPUs adds a line to `plans/measured.jsonl` in the folder shared by runs, and so does `make gpu-check`. Plans
for the same kind of GPU take the memory of the allocator and the driver, and the speed of steps like theirs, from the
newest of these lines instead of assuming them. Speeds of a few kinds of GPU come with the program. See DECISIONS 175.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import overload

from pydantic import TypeAdapter

from trainer.config.schema import RunConfig
from trainer.plan.cards import speed_of
from trainer.plan.hardware import Card, MeasuredStep
from trainer.plan.simulate.phases import Reserve
from trainer.system.errors import InputError
from trainer.system.files import make_private_if_new, opened_to_append, parsed

SHIPPED = {
    "H100": (
        MeasuredStep(79.7e12, 0.294),
        MeasuredStep(114.6e12, 0.408),
        MeasuredStep(79.7e12, 0.204, is_compiled=True),
        MeasuredStep(114.6e12, 0.267, is_compiled=True),
        MeasuredStep(893.5e12, 2.21),
    ),
    "H200": (
        MeasuredStep(79.7e12, 0.224),
        MeasuredStep(114.6e12, 0.339),
        MeasuredStep(79.7e12, 0.167, is_compiled=True),
        MeasuredStep(114.6e12, 0.222, is_compiled=True),
        MeasuredStep(167.9e12, 0.334, is_compiled=True),
        MeasuredStep(180.6e12, 0.343, is_compiled=True),
        MeasuredStep(180.9e12, 0.453, is_compiled=True),
        MeasuredStep(609.7e12, 1.256, is_compiled=True),
    ),
}
"""{words of a card in `cards`: steps measured on it}. A LoRA of rank 16, one image of 1024 px: FLUX.2 klein-4B without
and with recompute; on the H100 dev's rank 0 of 4 alone; on the H200 klein-9B, dev at 512 px, Qwen-Image and dev
(tests/benchmarks/RESULTS.md, GPU). Those of the H100 were measured while each step waited for the device five times."""
FORMAT = 1
"""Version of a line of `measured.jsonl`; lines of another are skipped."""
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
        flops: Floating-point operations of a step; 0 where they do not tell a GPU's speed (`tells_speed`).
        is_compiled: Whether the blocks were compiled.
    """

    gpu: str
    ranks: int
    planned: float
    allocated: int
    reserved: int
    used: int
    seconds: float
    flops: float = 0.0
    is_compiled: bool = False


_MEASURED = TypeAdapter(Measured)


def keep(cache: Path, measured: Measured) -> None:
    """Append a measurement, for later plans.

    Args:
        cache: Folder shared by runs.
        measured: The measurement.

    Raises:
        InputError: The file is a link, or has a second name.
    """
    file = _file(cache)
    make_private_if_new(cache)
    file.parent.mkdir(exist_ok=True)
    with open(opened_to_append(file, 0o666), "a", encoding="utf-8") as lines:  # a cache may be shared with a group
        lines.write(json.dumps({"format": FORMAT, **asdict(measured)}) + "\n")


def tells_speed(cfg: RunConfig, strategy: str) -> bool:
    """Whether the steps of a run say how fast a GPU computes: they do nothing else, such as decoding or gathering.

    Args:
        cfg: The run's config.
        strategy: That it has, which may be decided from `auto`.
    """
    offloads = cfg.parallel.cpu_offload or cfg.parallel.offload_blocks != 0
    only_computes = cfg.quantize.format == "none" and strategy == "none" and not offloads
    return only_computes and cfg.train.precision == "bf16"


@overload
def calibrate(cache: Path, card: Card) -> tuple[Card, Reserve]: ...
@overload
def calibrate(cache: Path, card: Card | None) -> tuple[Card | None, Reserve]: ...
def calibrate(cache: Path, card: Card | None) -> tuple[Card | None, Reserve]:
    """Return the GPU with the speed of steps that were measured on its kind, and the memory of allocator and driver.

    Args:
        cache: Folder shared by runs.
        card: As it is assumed to be.
    """
    if card is None:
        return None, Reserve()
    lines = [one for one in _read(_file(cache)) if one.gpu == card.name][-NEWEST:]
    # Several ranks wait for each other, which says nothing of a GPU's own speed.
    steps = [MeasuredStep(one.flops, one.seconds, one.is_compiled, True) for one in lines if one.ranks == 1]
    speed = speed_of(card.name)
    shipped = SHIPPED.get(speed.words, ()) if speed else ()
    return replace(card, measured=(*(step for step in steps if step.flops), *shipped)), _reserve(lines)


def _reserve(lines: Sequence[Measured]) -> Reserve:
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
    """Yield whole lines; skip a line that was cut off by the end of a process, or is of another version."""
    if not file.is_file():
        return
    for line in file.read_bytes().splitlines():
        with suppress(InputError):
            yield parsed(file, line, _MEASURED, reads=FORMAT)
