"""Start values of an adapter's parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.rng import generator

ZERO = {"lora_B", "lora_magnitude_vector", "hada_w2_b", "lokr_w2", "lokr_w2_b", "oft_blocks"}
"""Parameters that start at zero: one factor of each product, so that the adapter starts as a no-op."""


def initial_value(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return the start value of one adapter parameter.

    Zero for the names in `ZERO`. The others start as in peft, Kaiming-uniform with a = sqrt(5): uniform within
    1 / sqrt(fan_in). LyCORIS does the same for lora and lokr; its loha draws w1_b and w2_a from N(0, 1) and w1_a from
    N(0, 0.1^2), which with a small alpha, as is usual there, learns no faster than this.

    Args:
        name: The parameter's name in the model.
        shape: The parameter's shape.
        seed: The run's seed.

    Returns:
        The whole tensor, fp32, the same on every rank and for any world size.
    """
    if not ZERO.isdisjoint(name.split(".")):
        return torch.zeros(*shape)
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return (torch.rand(*shape, generator=generator(seed, "adapter", name)) * 2 - 1) * bound
