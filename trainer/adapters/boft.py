"""boft: several stages of rotations of a layer's outputs, interleaved like a butterfly."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.adapters.base import Shape, Shapes, Tensors
from trainer.adapters.orthogonal import Rotated, Rotation, RotationReader, block_size, turn_groups
from trainer.adapters.replace import Layer, weight_shape
from trainer.config.sections import BlockAdapter, BoftAdapter
from trainer.system.errors import InputError

MERGED_ROWS = 72
"""Widest blocks of a product of boft's stages: one pass over the activations, and one copy of them kept for backward,
replaces three or four. Measured on layers of 512 to 4608 outputs and 512 tokens: forward and backward take 0.36 to 0.7
of the time of going stage by stage."""


class Boft(Rotated):
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


class BoftKind(Rotation):
    """Stages of rotations of W. Tensors: blocks (stages, n, b, b)."""

    name = "boft"
    sections = (BoftAdapter,)

    def layer(self, layer: Layer, shape: Shape) -> Boft:
        return Boft(layer, shape)

    def shapes(self, layers: Mapping[str, Layer], cfg: BlockAdapter) -> dict[str, tuple[int, ...]]:
        """(stages, n, b, b); b is the smallest even number, at least the requested block size, for which n is a power
        of two. There are as many stages as requested, or else as many as connect every output with every other:
        log2(n) + 1."""
        assert isinstance(cfg, BoftAdapter)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, layer in layers.items():
            outputs, _ = weight_shape(layer)
            powers = [2**p for p in range(outputs.bit_length())]
            sizes = sorted(outputs // n for n in powers if outputs % (2 * n) == 0)
            size = block_size(name, outputs, sizes, cfg.block_size)
            n = outputs // size
            most = int(math.log2(n)) + 1
            if cfg.num_stages is not None and cfg.num_stages > most:
                raise InputError(
                    f"adapter.num_stages: {cfg.num_stages} is too many for '{name}': its {outputs} outputs in blocks "
                    f"of {size} have {most}; lower it or adapter.block_size, or leave it empty for as many as each "
                    "layer has"
                )
            shapes[name] = (cfg.num_stages or most, n, size, size)
        return shapes

    def turned(self, rows: Tensor, turns: Tensor) -> Tensor:
        """Apply stages of block rotations, each over rows that lie further apart. turns: (stages, n, b, b).

        Stage i takes b / 2 rows from each of two neighbouring groups of 2^i * b / 2 rows.
        Source: BOFT (arXiv 2311.06243), in the order of LyCORIS.
        """
        _, n, b, _ = turns.shape
        for stage, turn in enumerate(turns):
            spread = 2**stage * b // 2
            # (groups, two halves, their rows) -> the rows of one rotation next to each other
            grouped = rows.reshape(-1, 2, spread, *rows.shape[1:]).transpose(1, 2).reshape(n, b, *rows.shape[1:])
            turned = torch.einsum("nmk,nk...->nm...", turn, grouped).flatten(0, 1)
            rows = turned.reshape(-1, spread, 2, *rows.shape[1:]).transpose(1, 2).flatten(0, 2)
        return rows

    def settings(self, shapes: Shapes) -> str:
        blocks = shapes["blocks"]
        return f"adapter.block_size: {blocks[-1]} and adapter.num_stages: {blocks[0]}"

    def lycoris_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        """Append zeros, which do not rotate, for the stages that were not trained: LyCORIS computes the number of
        stages, log2(n) + 1 for n blocks, and ignores the file's."""
        blocks = tensors["blocks"]
        stages, n, b, _ = blocks.shape
        missing = n.bit_length() - stages
        return super().lycoris_tensors({"blocks": torch.cat([blocks, blocks.new_zeros(missing, n, b, b)])})


class BoftReader(RotationReader):
    kind = "boft"

    def is_of(self, tensors: Tensors) -> bool:
        return tensors["blocks"].dim() == 4

    def has_form(self, tensor: str, shape: Shape) -> bool:
        """The stages can exchange rows between so many blocks."""
        if len(shape) != 4 or shape[-1] != shape[-2]:
            return False
        stages, n, b, _ = shape
        return n & (n - 1) == 0 and b % 2 == 0 and stages <= n.bit_length()


KIND, READER = BoftKind(), BoftReader()
