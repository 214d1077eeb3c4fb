"""The adapter of one layer as tensors, and the single formula per kind that applies it to the layer's weight.

Merging, exporting, reading files and verifying all go through `LayerAdapter`; the modules that train are elsewhere in
this package, and tests compare them with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.adapters.kinds import Kind

SHORTEST = math.sqrt(torch.finfo(torch.float32).tiny)
"""Smallest length of a row that is divided by: the factor of a row of zeros is finite, and the row stays zero."""
COLUMNS = 512
"""Columns of a weight that are rotated at a time: each stage makes copies, and small ones stay in the cache."""


@dataclass(frozen=True)
class LayerAdapter:
    """One layer's adapter, whole, on the CPU, in any floating type.

    Attributes:
        kind: `lora` also for locon.
        tensors: For a weight of shape (out, in) or (out, in, kh, kw), r the rank:

            lora, dora: down (r, in[, kh, kw]), up (out, r[, 1, 1]); magnitude (out,), the length of each row of the
                adapted weight.
            loha: w1_a, w2_a (out, r), w1_b, w2_b (r, in * kh * kw).
            lokr: w1 (a, b) or w1_a @ w1_b; w2 (c, d[, kh, kw]) or w2_a @ w2_b with shape (c, d * kh * kw);
                a * c = out, b * d = in.
            diag-oft: blocks (n, b, b), n * b = out.
            boft: blocks (stages, n, b, b), n * b = out.
        scale: Factor of the update (alpha / rank); 1 for rotations and whole lokr factors.
    """

    kind: Kind
    tensors: Mapping[str, Tensor]
    scale: float = 1.0

    def merged(self, weight: Tensor) -> Tensor:
        """Return the layer's weight with the adapter in it, fp32, of the shape of `weight`."""
        # In place where possible: a layer of the largest models has 1.4 GB of fp32 weights.
        new = weight.detach().to(torch.float32, copy=True).flatten(1)
        match self.kind:
            case "lora" | "loha" | "lokr":
                new += self.update().flatten(1)
            case "dora":
                new += self.update().flatten(1)
                new *= (self._fp32("magnitude") / new.norm(dim=1).clamp_min(SHORTEST)).view(-1, 1)
            case "diag-oft" | "boft":
                turn = rotated if self.kind == "diag-oft" else butterfly
                turns = rotation(self._fp32("blocks"))
                for columns in torch.split(new, COLUMNS, dim=1):
                    columns.copy_(turn(columns, turns))
        return new.view(weight.shape)

    def update(self) -> Tensor:
        """Return what a lora, loha or lokr adds to the weight, and a dora adds before it scales the rows.

        Returns:
            (out, ...), fp32.

        Raises:
            ValueError: The kind is a rotation.
        """
        match self.kind:
            case "lora" | "dora":
                return (self.scale * self._fp32("up").flatten(1)) @ self._fp32("down").flatten(1)
            case "loha":
                first, second = (self._fp32(f"{w}_a") @ self._fp32(f"{w}_b") for w in ("w1", "w2"))
                return first.mul_(second).mul_(self.scale)
            case "lokr":
                return kronecker(self.scale * self._factor("w1"), self._factor("w2"))
        raise ValueError(f"{self.kind} rotates a weight and adds nothing to it")

    def _factor(self, name: str) -> Tensor:
        if name in self.tensors:
            return self._fp32(name)
        return self._fp32(f"{name}_a") @ self._fp32(f"{name}_b")

    def _fp32(self, name: str) -> Tensor:
        return self.tensors[name].detach().float()


def kronecker(w1: Tensor, w2: Tensor) -> Tensor:
    """Return lokr's weight, its kernel flattened: (a, b) and (c, d[, kh, kw]) -> (a * c, b * d * kh * kw)."""
    return torch.kron(w1, w2.flatten(1))


def rotation(blocks: Tensor) -> Tensor:
    """Return orthogonal matrices (..., b, b), the Cayley transform of the skew parts of `blocks`.

    R = (I + Q) (I - Q)^-1 with Q = blocks - blocks^T, as in LyCORIS. In fp32: the solver supports no 16-bit type.
    """
    skew = (blocks - blocks.mT).float()
    identity = torch.eye(blocks.shape[-1], device=blocks.device)
    # The two factors commute, so the inverse may come first.
    turns: Tensor = torch.linalg.solve(identity - skew, identity + skew)
    return turns


def rotated(rows: Tensor, turns: Tensor) -> Tensor:
    """Rotate each block of b rows by its transposed matrix.

    Args:
        rows: (n * b, ...).
        turns: (n, b, b).
    """
    n, b, _ = turns.shape
    return torch.einsum("nkm,nk...->nm...", turns, rows.reshape(n, b, *rows.shape[1:])).flatten(0, 1)


def butterfly(rows: Tensor, turns: Tensor) -> Tensor:
    """Apply stages of block rotations, each over rows that lie further apart.

    Stage i takes b / 2 rows from each of two neighbouring groups of 2^i * b / 2 rows.
    Source: BOFT (arXiv 2311.06243), in the order of LyCORIS.

    Args:
        rows: (n * b, ...).
        turns: (stages, n, b, b).
    """
    _, n, b, _ = turns.shape
    for stage, turn in enumerate(turns):
        spread = 2**stage * b // 2
        # (groups, two halves, their rows) -> the rows of one rotation next to each other
        grouped = rows.reshape(-1, 2, spread, *rows.shape[1:]).transpose(1, 2).reshape(n, b, *rows.shape[1:])
        turned = torch.einsum("nmk,nk...->nm...", turn, grouped).flatten(0, 1)
        rows = turned.reshape(-1, spread, 2, *rows.shape[1:]).transpose(1, 2).flatten(0, 2)
    return rows
