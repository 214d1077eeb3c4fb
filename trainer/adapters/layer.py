"""The adapter of one layer as tensors, with its kind's single formula that applies it to the layer's weight.

Merging, exporting, reading files and verifying all go through `LayerAdapter`; the modules that train are in the kinds'
files, and tests compare them with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.adapters.kinds import KINDS


@dataclass(frozen=True)
class LayerAdapter:
    """One layer's adapter, whole, on the CPU, in any floating type.

    Attributes:
        kind: `Kind.name`; `lora` also for locon.
        tensors: Those of the kind, whose docstring has their shapes.
        scale: Factor of the update (alpha / rank); 1 for rotations and whole lokr factors.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    scale: float = 1.0

    def merged(self, weight: Tensor) -> Tensor:
        """Return the layer's weight with the adapter in it, fp32, of the shape of `weight`."""
        # In place where possible: a layer of the largest models has 1.4 GB of fp32 weights.
        new = weight.detach().to(torch.float32, copy=True).flatten(1)
        KINDS[self.kind].merge(new, self.tensors, self.scale)
        return new.view(weight.shape)

    def update(self) -> Tensor:
        """Return what is added to the weight, (out, ...), fp32; by a dora before it scales the rows.

        Raises:
            ValueError: The kind is a rotation.
        """
        return KINDS[self.kind].update(self.tensors, self.scale)
