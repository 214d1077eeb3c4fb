"""The numbers of a step: added up on the device, and read once the device has computed them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.models.objectives.base import Loss

WEIGHT, NON_FINITE = 1, 3
"""Places in `Sums.row`."""


@dataclass
class Sums:
    """The losses of several passes of one rank, added up.

    Attributes:
        total, weight, tokens: As in `Loss`; a loss whose `tokens` are None has as many as its weight.
        parts: `Loss.parts`, then `Loss.metrics`.

    See DECISIONS 27.
    """

    total: Tensor
    weight: Tensor
    tokens: Tensor
    parts: Tensor

    @classmethod
    def zero(cls, num_parts: int, like: Tensor) -> Sums:
        """No pass yet. like: a tensor on the device and of the type of the sums."""
        total, weight, tokens = like.new_zeros(3)
        return cls(total, weight, tokens, like.new_zeros(num_parts, 2))

    def add(self, loss: Loss) -> None:
        self.total += loss.total.detach().to(self.total)
        self.weight += loss.weight.to(self.total)
        self.tokens += (loss.weight if loss.tokens is None else loss.tokens).to(self.total)
        measured = [part for part in (loss.parts, loss.metrics) if part is not None]
        if measured:
            self.parts += torch.cat(measured).detach().to(self.total)

    def row(self) -> Tensor:
        """The sums as fp64, to be added up over the ranks: total, weight, tokens, the number of totals that are not
        finite (and count as 0), then the parts; (4 + 2 * parts,)."""
        is_finite = self.total.isfinite()
        total = torch.where(is_finite, self.total, 0.0)
        sums = torch.stack([total, self.weight, self.tokens, (~is_finite).to(total)])
        return torch.cat([sums, self.parts.flatten()]).double()


class LateRead:
    """Numbers on the device, copied to the host behind the work that the device was given so far.

    Reading them as soon as they are asked for would stop the host until the device has nothing left to do, and the
    device would then wait for the host.

    Args:
        numbers: (N,) of any type.

    See DECISIONS 172.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._copied: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def is_ready(self) -> bool:
        """Whether reading does not wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[float]:
        """Wait for the numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers
