"""Parses `train.checkpointing` into a mode for each block. No torch."""

from __future__ import annotations

import re
from typing import Literal

Recompute = Literal["none", "selective", "full"]
"""The part of a block that backward recomputes: nothing, everything except linear layers and attention, or all."""
MODES: tuple[Recompute, ...] = ("full", "selective", "none")
_PART = re.compile(r"(?P<mode>full|selective|none)(?: (?P<count>[1-9]\d{0,5}))?")


def mixture(text: str) -> tuple[tuple[Recompute, int | None], ...] | None:
    """Parse how many blocks are recomputed in which way: "full 12, selective" is full in the first 12, else selective.

    Returns:
        ((mode, number of blocks; None for all others), ...), or None for another text: each mode at most once, only the
        last one without a number.
    """
    parts = [_PART.fullmatch(part.strip()) for part in text.split(",")]
    found: list[tuple[Recompute, int | None]] = []
    for part in parts:
        if part is None:
            return None
        mode = next(mode for mode in MODES if mode == part["mode"])
        found.append((mode, int(part["count"]) if part["count"] else None))
    is_clear = all(count for _, count in found[:-1]) and len({mode for mode, _ in found}) == len(found)
    return tuple(found) if is_clear else None


def modes_of(checkpointing: str | int, blocks: int) -> tuple[Recompute, ...]:
    """Return the mode of each block, in the order in which they run.

    Args:
        checkpointing: `train.checkpointing`, with `auto` decided.
        blocks: Number of blocks of all trained components.
    """
    if isinstance(checkpointing, int):
        return tuple("full" if number % checkpointing == 0 else "none" for number in range(blocks))
    parts = mixture(checkpointing)
    assert parts is not None, f"{checkpointing} is not decided"
    found: list[Recompute] = []
    for mode, count in parts:
        found += [mode] * (blocks if count is None else count)
    return tuple((found + ["none"] * blocks)[:blocks])


def checkpointing_of(amount: int, blocks: int) -> str:
    """Return the value of `train.checkpointing` for an amount of recompute.

    Args:
        amount: 0 keeps everything; up to `blocks`, so many blocks recompute what is cheap; beyond, so many more
            recompute everything, up to 2 x `blocks`.
        blocks: Number of blocks.
    """
    if amount == 0:
        return "none"
    if amount < blocks:
        return f"selective {amount}"
    if amount == blocks:
        return "selective"
    return f"full {amount - blocks}, selective" if amount < 2 * blocks else "full"
