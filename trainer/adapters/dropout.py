"""Dropout whose mask belongs to a sample, not to a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.pinned import send
from trainer.rng import derived_seed


@dataclass(frozen=True)
class Rows:
    """Positions of the samples' rows in a matrix that holds the rows of all samples.

    Attributes:
        counts: Number of rows of each sample.
        order: (rows,) index of each row of the matrix when the rows are sorted by sample.
    """

    counts: tuple[int, ...]
    order: Tensor

    @classmethod
    def of(cls, owners: Tensor, count: int, device: torch.device | str = "cpu") -> Rows:
        """Compute the positions from the sample of each row.

        Args:
            owners: (rows,) number of the sample of each row, on the CPU.
            count: Number of samples.
            device: Device of `order`.
        """
        order = owners.argsort(stable=True).argsort()
        return cls(tuple(owners.bincount(minlength=count).tolist()), send(order, device))


class SampleDropout(nn.Module):
    """Inverted dropout whose mask comes from (seed, global sample index, layer name).

    The same sample gets the same mask on any rank, for any world size, after a resume, and when activation
    checkpointing runs the layer a second time. In eval mode it does nothing.
    """

    def __init__(self, probability: float, name: str) -> None:
        super().__init__()
        self.p = probability
        self.name = name
        self._seeds: tuple[int, ...] = ()
        self._rows: Rows | None = None

    def set_samples(self, seed: int, indices: Sequence[int], rows: Rows | None = None) -> None:
        """Set the samples of the next forward.

        Args:
            seed: The run's seed.
            indices: Global index of each sample, in the order of the batch.
            rows: The samples' rows, if the layer receives a matrix with the rows of all samples.
        """
        self._seeds = tuple(derived_seed(seed, index, "dropout", self.name) for index in indices)
        self._rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """Drop numbers of x: (B, ...), one item per sample, or (rows, features) with the rows of all samples."""
        if not self.training:
            return x
        draws = self._by_item(x) if self._rows is None or x.dim() != 2 else self._by_row(x, self._rows)
        return x * (draws >= self.p).to(x.dtype) / (1 - self.p)

    def _by_item(self, x: Tensor) -> Tensor:
        if len(self._seeds) != x.shape[0]:
            raise RuntimeError(f"{self.name}: dropout of {x.shape[0]} items, but {len(self._seeds)} samples are set")
        return torch.stack([_draw(seed, x, x.shape[1:]) for seed in self._seeds])

    def _by_row(self, x: Tensor, rows: Rows) -> Tensor:
        if len(rows.order) != x.shape[0]:
            raise RuntimeError(f"{self.name}: dropout of {x.shape[0]} rows, but the samples have {len(rows.order)}")
        pairs = zip(self._seeds, rows.counts, strict=True)
        return torch.cat([_draw(seed, x, (count, x.shape[1])) for seed, count in pairs])[rows.order]


def _draw(seed: int, x: Tensor, shape: Sequence[int]) -> Tensor:
    # On the accelerator's own generator: drawing all tokens of a layer on the CPU would cost more than the layer.
    source = torch.Generator(x.device).manual_seed(seed)
    return torch.rand(*shape, generator=source, device=x.device)
