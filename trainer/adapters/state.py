"""Conversion between the parameters of a model in training and `LayerAdapter`, which everything else works with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from trainer.adapters.base import Shape
from trainer.adapters.kinds import kind_of
from trainer.adapters.layer import LayerAdapter
from trainer.config.sections import AdapterSection
from trainer.system.errors import InputError

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""{layer: (down, up)} of a lora."""
BaseWeight = Callable[[str], Tensor]
"""A layer's name -> its weight without the adapter, (out, in). Called only where the adapter depends on it."""


class TrainedAdapter(Mapping[str, LayerAdapter]):
    """The adapter in trained parameters: {layer, component first: its tensors}, read on access.

    Args:
        weights: By parameter name; parameters of other parts of the model are ignored.
        cfg: The adapter's section of the config.
        base: Returns a layer's weight.
        initial: What a lora started from and its base lacks (`adapter.init: pissa`): each layer is then the lora of
            twice the rank which adds the difference to the whole base.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        cfg: AdapterSection,
        base: BaseWeight,
        initial: Factors | None = None,
    ) -> None:
        self._weights, self._cfg, self._base = weights, cfg, base
        self._kind, self._initial = kind_of(cfg), initial or {}
        self._names: dict[str, dict[str, str]] = defaultdict(dict)
        for parameter in weights:
            for tensor, ending in self._kind.parameters.items():
                if parameter.endswith(f".{ending}"):
                    self._names[parameter.removesuffix(f".{ending}")][tensor] = parameter

    def __getitem__(self, layer: str) -> LayerAdapter:
        if layer not in self._names:
            raise KeyError(layer)
        parameters = {tensor: self._weights[parameter] for tensor, parameter in self._names[layer].items()}
        tensors = self._kind.from_parameters(parameters, lambda: self._base(layer))
        scale = self._kind.scale(self._cfg, tensors)
        if layer in self._initial:
            down, up = self._initial[layer]
            # B A - B0 A0 as (B - B0) A + B0 (A - A0): what a format rounds off is then small against the update, not
            # against the singular values, which are far larger.
            tensors = {
                "down": torch.cat([tensors["down"], tensors["down"] - down]),
                "up": torch.cat([tensors["up"] - up, up], dim=1),
            }
        return LayerAdapter(self._kind.name, tensors, scale)

    def __contains__(self, layer: object) -> bool:
        return layer in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def parameters_of(
    layer: str, found: LayerAdapter, cfg: AdapterSection, shapes: Mapping[str, Shape], base: BaseWeight
) -> dict[str, Tensor]:
    """Convert a layer's adapter that was read from a file to this run's parameters.

    Args:
        layer: The layer's name, component first.
        found: The adapter in the file.
        cfg: This run's adapter.
        shapes: {name: shape} of all parameters of this run's adapter.
        base: Returns a layer's weight.

    Returns:
        {parameter: value}.

    Raises:
        InputError: The file's adapter is of another kind or size, or this run's adapter does not change the layer. The
            message names the layer, both shapes and the setting that fits.
    """
    kind = kind_of(cfg)
    names = {tensor: f"{layer}.{ending}" for tensor, ending in kind.parameters.items()}
    wanted = {tensor: tuple(shapes[name]) for tensor, name in names.items() if name in shapes}
    if found.kind != kind.name:
        raise InputError(
            f"adapter.start: '{layer}' is {found.kind} in the file, but adapter.type is {cfg.type}; "
            f"set adapter.type: {found.kind}"
        )
    if not wanted:
        raise InputError(f"adapter.start: '{layer}' has an adapter in the file only; name it in adapter.targets")
    there = {tensor: tuple(value.shape) for tensor, value in found.tensors.items()}
    if there != wanted:
        fits_model = kind.weight_size(there) == kind.weight_size(wanted)
        raise InputError(
            f"adapter.start: '{layer}' has {_listed(there)} in the file, but {_listed(wanted)} in this run; "
            + (f"set {kind.settings(there)}" if fits_model else "the file belongs to another model")
        )
    tensors = {tensor: value.float() for tensor, value in found.tensors.items()}
    # alpha / rank of the file may be another one than this run's: the tensors take in the ratio, so that the update
    # stays the same.
    for tensor in kind.scaled:
        if tensor in tensors:
            tensors[tensor] = tensors[tensor] * (found.scale / kind.scale(cfg, tensors))
    return {names[tensor]: value for tensor, value in kind.to_parameters(tensors, lambda: base(layer)).items()}


def _listed(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {' x '.join(str(size) for size in shape)}" for name, shape in sorted(shapes.items()))
