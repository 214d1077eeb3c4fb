"""Dropout whose mask belongs to a sample, not to a rank. See DECISIONS 56."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.rng import derived_seed
from trainer.system.pinned import send


@dataclass(frozen=True)
class Rows:
    """Positions of the samples' rows in a tensor that holds the rows of all samples.

    Attributes:
        counts: (samples,) number of rows of each sample, on the CPU.
        order: (rows,) index of each row of the tensor when the rows are sorted by sample.
        dims: Dimensions of the tensor in front of its features; 1 for a matrix.
    """

    counts: Tensor
    order: Tensor
    dims: int = 1

    @classmethod
    def of(cls, owners: Tensor, count: int, device: torch.device | str = "cpu") -> Rows:
        """Compute the positions from the sample of each row.

        Args:
            owners: Number of the sample of each row, in the shape of the tensor without its features, on the CPU.
            count: Number of samples.
            device: Device of `order`.
        """
        rows = owners.flatten()
        order = rows.argsort(stable=True).argsort()
        return cls(rows.bincount(minlength=count), send(order, device), owners.dim())


class SampleDropout(nn.Module):
    """Inverted dropout whose mask comes from (seed, global sample index, layer name).

    The same sample gets the same mask on any rank, for any world size, after a resume, and when activation
    checkpointing runs the layer a second time. In eval mode it does nothing.
    """

    def __init__(self, probability: float, name: str) -> None:
        super().__init__()
        self.p = probability
        self.name = name
        self._seeds, self._ones = torch.empty(2, 0, dtype=torch.int64)
        self._rows: Rows | None = None

    def set_samples(self, seed: int, indices: Sequence[int], rows: Rows | None = None) -> None:
        """Set the samples of the next forward.

        Args:
            seed: The run's seed.
            indices: Global index of each sample, in the order of the batch.
            rows: The samples' rows, if the layer receives a tensor with the rows of all samples.
        """
        self._seeds = torch.tensor([derived_seed(seed, index, "dropout", self.name) for index in indices])
        self._ones = torch.ones_like(self._seeds)  # here: inside a compiled block it would be a kernel of its own
        self._rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """Drop numbers of x: (B * n, ...), n items of a sample after those of the one before, as windows of a text are,
        or (rows, ..., features) with the rows of all samples in the shape of `Rows`.
        """
        if not self.training:
            return x
        rows = self._rows
        draws = self._by_item(x) if rows is None or x.dim() != rows.dims + 1 else self._by_row(x, rows)
        return x * (draws >= self.p).to(x.dtype) / (1 - self.p)

    def _by_item(self, x: Tensor) -> Tensor:
        items, samples = x.shape[0], len(self._seeds)
        if not samples or items % samples:
            raise RuntimeError(f"{self.name}: dropout of {items} items, but {samples} samples are set")
        counts = self._ones if items == samples else self._ones * (items // samples)
        draws: Tensor = uniform(x.detach(), self._seeds, counts)
        return draws

    def _by_row(self, x: Tensor, rows: Rows) -> Tensor:
        flat = x.detach().flatten(0, -2)
        if len(rows.order) != len(flat):
            raise RuntimeError(f"{self.name}: dropout of {len(flat)} rows, but the samples have {len(rows.order)}")
        draws: Tensor = uniform(flat, self._seeds, rows.counts)
        return draws[rows.order].view(x.shape)


@torch.library.custom_op("shardstudio::uniform", mutates_args=())
def uniform(x: Tensor, seeds: Tensor, counts: Tensor) -> Tensor:
    """Uniform fp32 numbers in [0, 1) in the shape and on the device of x, one sample after the other.

    One operation for torch.compile, which cannot follow a generator and would compile anew for every seed.

    Args:
        x: (rows, ...).
        seeds: (samples,) int64, on the CPU.
        counts: (samples,) rows of each sample, on the CPU; `rows` in all.
    """
    draws = []
    for seed, count in zip(seeds.tolist(), counts.tolist(), strict=True):
        # On the accelerator's own generator: drawing all tokens of a layer on the CPU would cost more than the layer.
        source = torch.Generator(x.device).manual_seed(seed)
        draws.append(torch.rand((count, *x.shape[1:]), generator=source, device=x.device))
    return torch.cat(draws)


@uniform.register_fake
def _(x: Tensor, seeds: Tensor, counts: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)
