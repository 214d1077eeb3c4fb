"""The kinds of adapters. A further one is a file of this folder and a line here, and its section in the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.adapters import boft, diag_oft, dora, loha, lokr, lora
from trainer.adapters.base import Kind, Reader
from trainer.config.sections import AdapterSection
from trainer.rng import generator

_LISTED: tuple[tuple[Kind, Reader], ...] = (
    (lora.KIND, lora.READER),
    (dora.KIND, dora.READER),
    (loha.KIND, loha.READER),
    (lokr.KIND, lokr.READER),
    (diag_oft.KIND, diag_oft.READER),
    (boft.KIND, boft.READER),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind, _ in _LISTED}
READERS: tuple[Reader, ...] = tuple(reader for _, reader in _LISTED)
"""The first one that knows all tensors of a layer in a file reads them."""
_BY_SECTION = {section: kind for kind in KINDS.values() for section in kind.sections}


def kind_of(cfg: AdapterSection) -> Kind:
    """Return the kind that a section trains."""
    return _BY_SECTION[type(cfg)]


def initial_value(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return the start value of one adapter parameter: zero for one factor of each product, else random numbers.

    Args:
        name: The parameter's name in the model.
        shape: The parameter's shape.
        seed: The run's seed.

    Returns:
        The whole tensor, fp32, the same on every rank and for any world size.
    """
    ends = ((kind, tensor, end) for kind in KINDS.values() for tensor, end in kind.parameters.items())
    kind, tensor = next((kind, tensor) for kind, tensor, end in ends if name.endswith(f".{end}"))
    if tensor in kind.zero:
        return torch.zeros(*shape)
    return kind.initial_value(tensor, shape, generator(seed, "adapter", name))
