"""Measures what an adapter can express: how close it comes to a given change of one linear layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.adapters import Targets, initial_value, inject
from trainer.config.sections import AdapterSection

STEPS = 200
LEARNING_RATE = 0.02


def remaining(adapter: AdapterSection, weight: Tensor, change: Tensor) -> float:
    """Return the share of a change that the adapter cannot make.

    The adapter is fitted by Adam to the layer with `weight + change`.

    Args:
        adapter: The adapter's section of a config.
        weight: (out, in) of one linear layer.
        change: (out, in).

    Returns:
        The remaining distance relative to the Frobenius norm of the change: 0 is exact, 1 is not better than doing
        nothing.
    """
    out, into = weight.shape
    layer = nn.Linear(into, out, bias=False)
    model = nn.ModuleDict({"net": nn.ModuleDict({"layer": layer})})
    with torch.no_grad():
        layer.weight.copy_(weight)
    added = inject(model, adapter, Targets({"net": ("layer",)}, {}, ()), "net").parameters
    parameters = _drawn(model, added)
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    # The output for the identity is the layer's whole weight, whatever the adapter computes on the way.
    eye = torch.eye(into)
    for _ in range(STEPS):
        distance = (model["net"]["layer"](eye).T - weight - change).square().sum()  # type: ignore[index]
        optimizer.zero_grad()
        distance.backward()
        optimizer.step()
        schedule.step()
    return float(distance.detach().sqrt() / change.norm())


def _drawn(model: nn.Module, added: Mapping[str, tuple[int, ...]]) -> list[nn.Parameter]:
    """Return the adapter's parameters, on the CPU, with the values that training begins with."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, shape in added.items():
            parameters[name].copy_(initial_value(name, shape, 0))
    return [parameters[name] for name in added]
