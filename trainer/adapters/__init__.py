"""Adapters: layers that wrap the layers they change, injected before the model is sharded.

peft provides the layer classes. An adapter takes a module and name patterns and knows nothing about model families.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.adapters.dropout import Rows, SampleDropout
from trainer.adapters.engine import ADAPTER, BaseTunerLayer
from trainer.adapters.kinds import KINDS, initial_value, kind_of
from trainer.adapters.replace import AddsInPlace, replace_layers
from trainer.adapters.targets import Targets, choose_layers, is_linear, layer_ranks, match_layers
from trainer.adapters.targets import match as match_names
from trainer.config.sections import AdapterSection

__all__ = [
    "ADAPTER",
    "Injected",
    "Targets",
    "adapted_layers",
    "add_apart",
    "at_strength",
    "dropouts",
    "initial_value",
    "inject",
    "is_linear",
    "match_layers",
    "match_names",
    "saves_no_activations",
    "set_samples",
    "switched_off",
]


@dataclass(frozen=True)
class Injected:
    """The changes that an adapter made to a model.

    Attributes:
        layers: Names of the changed layers.
        parameters: {name: shape} of the new parameters.
        notes: Sentences for the log about choices made per layer.
    """

    layers: tuple[str, ...]
    parameters: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...]


def inject(model: nn.ModuleDict, cfg: AdapterSection, targets: Targets, family: str) -> Injected:
    """Add the adapter to the components of `model`, and freeze their own parameters.

    New parameters are fp32 and on the meta device.

    Args:
        model: {component: module}.
        cfg: The adapter's section of the config.
        targets: The layers that the family recommends.
        family: The family's name, for messages.

    Raises:
        InputError: A pattern matches no layer, or a rank or block size does not fit a layer. The message names the
            layer and what would work; the model is unchanged.
    """
    before = {name for name, _ in model.named_parameters()}
    kind = kind_of(cfg)
    chosen = choose_layers(model, cfg, kind, targets, family)
    make, notes = kind.maker(cfg, chosen.layers, layer_ranks(chosen.layers, cfg, kind))
    replace_layers(model, chosen.layers, make)
    added = {name: p for name, p in model.named_parameters() if name.replace(".base_layer.", ".") not in before}
    assert all(parameter.dtype == torch.float32 for parameter in added.values())
    return Injected(tuple(chosen.layers), {name: tuple(p.shape) for name, p in added.items()}, chosen.notes + notes)


def adapted_layers(model: nn.Module) -> dict[str, BaseTunerLayer]:
    """Return {name: layer} of the layers that carry an adapter of any kind."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what its base computes; neither weights nor what is trained change.

    Every layer's forward reads the flag of peft's layers. peft's own `enable_adapters` also freezes the parameters,
    which the optimizer and the sharded model hold.
    """
    layers = adapted_layers(model).values()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def at_strength(model: nn.Module, strength: float) -> Iterator[None]:
    """Inside, each adapted layer computes with W + strength * (W' - W) in place of W', its adapted weight.

    W is the layer's own weight. Image generators take the strength of an adapter file in the same way. At 1 nothing
    changes.
    """

    def scaled(layer: Any, inputs: Any, named: Any, output: Tensor) -> Tensor:
        own: Tensor = layer.base_layer(*inputs, **named)
        return own + strength * (output - own)

    layers = adapted_layers(model).values() if strength != 1 else ()
    hooks = [layer.register_forward_hook(scaled, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def saves_no_activations(model: nn.Module) -> set[nn.Module]:
    """Return the adapted layers, and parts of them, in which autograd saves only the inputs."""
    return {module for module in model.modules() if any(kind.saves_no_activations(module) for kind in KINDS.values())}


def add_apart(model: nn.Module) -> None:
    """Let no adapter write over the output of its base, for a model whose blocks are to be compiled."""
    for module in model.modules():
        if isinstance(module, AddsInPlace):
            module.adds_in_place = False


def dropouts(model: nn.Module) -> list[SampleDropout]:
    """Return the dropout layers of the adapter; each forward needs `set_samples` before it."""
    return [module for module in model.modules() if isinstance(module, SampleDropout)]


def set_samples(
    dropouts: Collection[SampleDropout],
    seed: int,
    indices: Sequence[int],
    owners: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
) -> None:
    """Set the samples of the next forward on the dropout layers.

    Args:
        dropouts: The layers.
        seed: The run's seed.
        indices: Global index of each sample, in the order of the batch.
        owners: `ModelFamily.sample_rows` of the batch.
        device: The model's device.
    """
    rows = {pattern: Rows.of(of_rows, len(indices), device) for pattern, of_rows in owners.items()}
    for dropout in dropouts:
        inside = dropout.name.partition(".")[2]
        matching = (found for pattern, found in rows.items() if re.fullmatch(pattern, inside))
        dropout.set_samples(seed, indices, next(matching, None))
