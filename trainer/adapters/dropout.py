"""Dropout that belongs to a sample, not to a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.rng import derived_seed


class SampleDropout(nn.Module):
    """Inverted dropout whose mask comes from (seed, global sample index, layer name).

    The same sample gets the same mask on any rank, for any world size, after a resume, and when activation
    checkpointing runs the layer a second time. In eval mode it does nothing.
    """

    def __init__(self, probability: float, name: str) -> None:
        super().__init__()
        self.p = probability
        self._name = name
        self._seeds: tuple[int, ...] = ()

    def set_samples(self, seed: int, indices: Sequence[int]) -> None:
        """Choose the samples of the next forward, in the order of its batch."""
        self._seeds = tuple(derived_seed(seed, index, "dropout", self._name) for index in indices)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, ...), one item per chosen sample."""
        if not self.training:
            return x
        if len(self._seeds) != x.shape[0]:
            raise RuntimeError(f"{self._name}: dropout of {x.shape[0]} items, but {len(self._seeds)} samples are set")
        draws = torch.stack([self._draw(seed, x) for seed in self._seeds])
        return x * (draws >= self.p).to(x.dtype) / (1 - self.p)

    def _draw(self, seed: int, x: Tensor) -> Tensor:
        # On the accelerator's own generator: drawing all tokens of a layer on the CPU would cost more than the layer.
        source = torch.Generator(x.device).manual_seed(seed)
        return torch.rand(x.shape[1:], generator=source, device=x.device)
