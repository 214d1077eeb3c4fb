"""diag-oft and boft: rotations of a layer's outputs, as in LyCORIS, on peft's tuner layers.

peft's own OFT and BOFT rotate the inputs, which no image generator can load. The rotation applies to W x without the
bias, since only W can be exported. Parameters are LyCORIS' `oft_blocks`; zero means no rotation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.adapters.engine import BaseTunerLayer
from trainer.adapters.kinds import ADAPTER
from trainer.adapters.replace import Layer

MERGED_ROWS = 72
"""Widest blocks of a product of boft's stages: one pass over the activations, and one copy of them kept for backward,
replaces three or four. Measured on layers of 512 to 4608 outputs and 512 tokens: forward and backward take 0.36 to 0.7
of the time of going stage by stage."""


def cayley_excess(blocks: Tensor) -> Tensor:
    """Return R - I for the rotations R = (I + Q) (I - Q)^-1 with Q = blocks - blocks^T, (..., b, b), in fp32.

    R - I = 2 Q (I - Q)^-1 is exact for small Q, where R itself loses digits: rounded to bf16, R is not orthogonal.
    """
    skew = (blocks - blocks.mT).float()
    identity = torch.eye(blocks.shape[-1], device=blocks.device)
    # The two factors commute, so the inverse may come first.
    excess: Tensor = torch.linalg.solve(identity - skew, 2 * skew)
    return excess


class _Rotated(nn.Module, BaseTunerLayer):  # type: ignore[misc]
    """A layer with rotated outputs. shape: of `oft_blocks`."""

    base_layer: Layer
    oft_blocks: nn.ParameterDict
    adapter_layer_names = ("oft_blocks",)

    def __init__(self, layer: Layer, shape: Sequence[int]) -> None:
        super().__init__()
        self.base_layer = layer
        self.oft_blocks = nn.ParameterDict({ADAPTER: nn.Parameter(torch.empty(*shape))})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        if self.disable_adapters:
            return result
        bias = self.base_layer.bias
        if bias is None:
            return self._turned(result)
        if isinstance(self.base_layer, nn.Conv2d):
            bias = bias[:, None, None]
        plain = result - bias
        return result + (self._turned(plain) - plain)

    def _turned(self, outputs: Tensor) -> Tensor:
        dim = -1 if isinstance(self.base_layer, nn.Linear) else 1
        features_first = outputs.movedim(dim, 0)
        rows = features_first.reshape(features_first.shape[0], -1)
        turned = self.turn_rows(rows, cayley_excess(self.oft_blocks[ADAPTER]))
        return turned.view(features_first.shape).movedim(0, dim).contiguous()

    def turn_rows(self, rows: Tensor, excess: Tensor) -> Tensor:
        """Rotate the outputs.

        Args:
            rows: (out, items).
            excess: From `cayley_excess`.
        """
        raise NotImplementedError


class DiagOft(_Rotated):
    """Each block of b outputs is rotated by its transposed matrix. oft_blocks: (n, b, b), n * b = out."""

    def turn_rows(self, rows: Tensor, excess: Tensor) -> Tensor:
        return turn_groups(rows.view(*excess.shape[:2], -1), excess.mT).flatten(0, 1)


class Boft(_Rotated):
    """Stages of block rotations over outputs that lie further and further apart. oft_blocks: (stages, n, b, b)."""

    def turn_rows(self, rows: Tensor, excess: Tensor) -> Tensor:
        stages, n, b, _ = excess.shape
        first = 0
        for run in merged_runs(stages, b):
            # A run of stages mixes `mixed` halves of blocks whose numbers differ by multiples of `apart`.
            mixed, apart = 2**run, 2**first
            shape = (2 * n // (mixed * apart), mixed, apart, b // 2, rows.shape[1])
            groups = rows.reshape(shape).transpose(1, 2).reshape(shape[0] * apart, mixed * b // 2, rows.shape[1])
            turned = turn_groups(groups, merged_excess(excess, first, run))
            rows = turned.view(shape[0], apart, mixed, b // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
            first += run
        return rows


def turn_groups(rows: Tensor, excess: Tensor) -> Tensor:
    """Return rows + excess @ rows, group by group.

    Args:
        rows: (groups, k, items).
        excess: (groups, k, k).
    """
    return torch.baddbmm(rows, excess.to(rows.dtype), rows)


def merged_runs(stages: int, b: int) -> list[int]:
    """Return how many stages to merge at a time, in order: as many as MERGED_ROWS allows, in about equal runs."""
    longest = max(run for run in range(1, stages + 1) if run == 1 or 2**run * b // 2 <= MERGED_ROWS)
    runs = -(-stages // longest)
    return [stages // runs + (i < stages % runs) for i in range(runs)]


def merged_excess(excess: Tensor, first: int, run: int) -> Tensor:
    """Return the product of `run` stages from `first` on, minus I, as one matrix per group of rows that they mix.

    Args:
        excess: (stages, n, b, b) of the single rotations.
        first: Number of the first stage.
        run: Number of stages.

    Returns:
        (groups, 2^run * b / 2, 2^run * b / 2).
    """
    _, n, b, _ = excess.shape
    size = 2**run * b // 2
    groups = n * b // size
    identity = torch.eye(size, device=excess.device)
    rows = identity.expand(groups, size, size)
    for stage in range(run):
        # A rotation's number within its stage has all binary digits of a block's number except the stage's own.
        numbers = (-1, 2 ** (run - 1 - stage), 2**stage, 2**first)
        turns = excess[first + stage].view(*numbers, b, b).movedim(3, 1).reshape(groups, -1, b, b)
        spread = 2**stage * b // 2
        halves = rows.reshape(groups, -1, 2, spread, size).transpose(2, 3).reshape(groups, -1, b, size)
        turned = halves + turns @ halves
        rows = turned.view(groups, -1, spread, 2, size).transpose(2, 3).reshape(groups, size, size)
    return rows - identity
