"""Random numbers that depend on their purpose, never on the rank that draws them.

A generator is seeded from (run seed, name or global sample index, purpose). 1, 2 and 4 ranks therefore draw the same
noise, timesteps, dropout and initial adapters, and a resumed run draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trainer.system.pinned import pin, send


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts: equal parts give equal seeds, on every machine and torch version."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded from the parts. CPU, so that the numbers do not depend on the accelerator."""
    return torch.Generator().manual_seed(derived_seed(*parts))


@dataclass(frozen=True)
class Draw:
    """The numbers drawn for each item: standard normal ones of a shape, or one in [0, 1) where that is None."""

    purpose: str
    shape: tuple[int, ...] | None = None

    def numbers(self, source: torch.Generator) -> Tensor:
        """The fp32 numbers of one item."""
        return torch.rand((), generator=source) if self.shape is None else torch.randn(*self.shape, generator=source)


@dataclass(frozen=True)
class SampleRng:
    """The random numbers of some samples of a run.

    Attributes:
        seed: The run's seed.
        indices: Global sample index (optimizer step x batch size + position) of each item, in the order of the batch.
        device: Where the numbers go; they are always drawn on the CPU.
        drawn: Numbers that were drawn before.
        asked: Gets what is drawn here.
    """

    seed: int
    indices: Sequence[int]
    device: torch.device | str = "cpu"
    drawn: Mapping[Draw, Tensor] = field(default_factory=dict)
    asked: set[Draw] | None = None

    def ahead(self, asked: set[Draw]) -> SampleRng:
        """The same generator with the draws that earlier passes used already made.

        Args:
            asked: Draws of passes that are like this one; gets what this one asks.
        """
        drawn = {draw: pin(self._draw(draw), self.device) for draw in tuple(asked)}
        return replace(self, drawn=drawn, asked=asked)

    def of(self, number: int) -> SampleRng:
        """The random numbers of one item alone. number: its position in the batch."""
        return SampleRng(self.seed, (self.indices[number],), self.device)

    def generators(self, purpose: str) -> list[torch.Generator]:
        """One CPU generator per item, for any number of draws."""
        return [generator(self.seed, index, purpose) for index in self.indices]

    def normal(self, purpose: str, shape: Sequence[int]) -> Tensor:
        """Draw standard normal fp32 numbers, (B, *shape)."""
        return self._numbers(Draw(purpose, tuple(shape)))

    def uniform(self, purpose: str) -> Tensor:
        """Draw one fp32 number in [0, 1) per item, (B,)."""
        return self._numbers(Draw(purpose))

    def _numbers(self, draw: Draw) -> Tensor:
        if self.asked is not None:
            self.asked.add(draw)
        drawn = self.drawn[draw] if draw in self.drawn else self._draw(draw)
        return send(drawn, self.device)

    def _draw(self, draw: Draw) -> Tensor:
        return torch.stack([draw.numbers(source) for source in self.generators(draw.purpose)])
