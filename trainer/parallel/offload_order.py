"""Which blocks keep their frozen weights in host memory, and when each of them is on the device. No torch: the plan
plays the same order (`trainer.plan.simulate.timeline`).

Of the offloaded blocks, the one at work and the next are on the device. The copy of the next one begins with the work
of the one before, and is hidden behind that and the resident blocks in between. Copies that begin earlier would take
the memory that is to be saved. See DECISIONS 179.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


def offloaded_blocks(wanted: int | float | str, blocks: int) -> tuple[int, ...]:
    """Choose the blocks that are offloaded, spread evenly over the order in which they run.

    Args:
        wanted: The value of `parallel.offload_blocks`: a number of blocks, or a share of them, rounded up. A word that
            was not decided yet counts as 0.
        blocks: Blocks with frozen weights.

    Returns:
        Their numbers in order, all of them where more are wanted than there are.
    """
    if isinstance(wanted, str):
        return ()
    # Without the correction 0.28 x 25 blocks would be 8: in binary the product is a little above 7.
    count = math.ceil(wanted * blocks - 1e-9) if isinstance(wanted, float) else wanted
    count = min(count, blocks)
    return tuple((2 * index + 1) * blocks // (2 * count) for index in range(count))


@dataclass(frozen=True)
class Moves:
    """Offloaded blocks by number, in the order in which it is done: first some are freed, then others copied."""

    frees: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()


class BlockResidency:
    """Decides which offloaded blocks are on the device: the one at work and the next in its direction.

    After forward the next is the last block itself, because backward begins with it, and after backward the first,
    because the next forward does: neither is copied again. Any other order of work, as in a pass that skips blocks,
    costs copies that nothing hides, and is right all the same.

    Args:
        count: Number of offloaded blocks.
        is_needed_again: Whether backward reads their weights; not where FSDP keeps them gathered.

    Attributes:
        present: Offloaded blocks on the device.
    """

    def __init__(self, count: int, is_needed_again: bool) -> None:
        self._count, self._is_needed_again = count, is_needed_again
        self._next: int | None = None
        self.present: set[int] = set()

    def begin(self, block: int, direction: Direction, trains: bool = True, busy: Collection[int] = ()) -> Moves:
        """Begin to use a block.

        Args:
            block: Number among the offloaded blocks.
            direction: Direction of the pass.
            trains: Whether backward follows a forward.
            busy: Other blocks that are still in use.
        """
        self._next = self._after(block, direction, trains)
        wanted = [block] if self._next is None else [block, self._next]
        frees = sorted(self.present - {*wanted, *busy})
        copies = [other for other in dict.fromkeys(wanted) if other not in self.present]
        self.present = (self.present - set(frees)) | set(copies)
        return Moves(tuple(frees), tuple(copies))

    def end(self, block: int) -> bool:
        """End the use of a block. Returns whether it is freed."""
        if block not in self.present or block == self._next:
            return False
        self.present.remove(block)
        return True

    def clear(self) -> None:
        """Forget what is on the device, as after an error."""
        self.present.clear()
        self._next = None

    def _after(self, block: int, direction: Direction, trains: bool) -> int | None:
        if self._count == 1:  # it would stay for ever
            return None
        if direction == "backward":
            return max(block - 1, 0)
        if block + 1 < self._count:
            return block + 1
        return block if trains and self._is_needed_again else 0
