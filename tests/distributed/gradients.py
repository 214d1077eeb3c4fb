"""Gradients as one process would have them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """By parameter, gathered where they are sharded; without those that have none. Collective then."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in found.items()
        if gradient is not None
    }
