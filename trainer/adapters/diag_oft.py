"""diag-oft: each block of a layer's outputs is rotated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.adapters.base import Shape, Shapes, Tensors
from trainer.adapters.orthogonal import Rotated, Rotation, RotationReader, block_size, turn_groups
from trainer.adapters.replace import Layer, weight_shape
from trainer.config.sections import BlockAdapter, DiagOftAdapter


class DiagOft(Rotated):
    """Each block of b outputs is rotated by its transposed matrix. oft_blocks: (n, b, b), n * b = out."""

    def turn_rows(self, rows: Tensor, excess: Tensor) -> Tensor:
        return turn_groups(rows.view(*excess.shape[:2], -1), excess.mT).flatten(0, 1)


class DiagOftKind(Rotation):
    """R W with R of blocks along the diagonal. Tensors: blocks (n, b, b)."""

    name = "diag-oft"
    sections = (DiagOftAdapter,)

    def layer(self, layer: Layer, shape: Shape) -> DiagOft:
        return DiagOft(layer, shape)

    def shapes(self, layers: Mapping[str, Layer], cfg: BlockAdapter) -> dict[str, tuple[int, ...]]:
        """(n, b, b); b is the smallest divisor of the layer's outputs that is at least the requested block size."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, layer in layers.items():
            outputs, _ = weight_shape(layer)
            size = block_size(name, outputs, [b for b in range(2, outputs + 1) if outputs % b == 0], cfg.block_size)
            shapes[name] = (outputs // size, size, size)
        return shapes

    def turned(self, rows: Tensor, turns: Tensor) -> Tensor:
        """Rotate each block of b rows by its transposed matrix. turns: (n, b, b)."""
        n, b, _ = turns.shape
        return torch.einsum("nkm,nk...->nm...", turns, rows.reshape(n, b, *rows.shape[1:])).flatten(0, 1)

    def settings(self, shapes: Shapes) -> str:
        return f"adapter.block_size: {shapes['blocks'][-1]}"

    def lycoris_refusal(self, tensors: Tensors) -> tuple[str, str] | None:
        count, size, _ = tensors["blocks"].shape
        if size <= count:
            return None
        why = "with larger blocks than it has blocks: LyCORIS takes the smaller of the two for the block size"
        return why, "auto, comfyui, or a smaller adapter.block_size"


class DiagOftReader(RotationReader):
    kind = "diag-oft"

    def is_of(self, tensors: Tensors) -> bool:
        return tensors["blocks"].dim() != 4


KIND, READER = DiagOftKind(), DiagOftReader()
