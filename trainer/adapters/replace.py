"""Layers replaced by layers that carry an adapter, and what all such layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.adapters.engine import ADAPTER, BaseTunerLayer, LycorisLayer
from trainer.system.errors import InputError

Layer = nn.Linear | nn.Conv2d
Make = Callable[[str, Layer], BaseTunerLayer]
"""(a layer's name, the layer) -> the layer that replaces it and holds it as `base_layer`."""


def replace_layers(model: nn.Module, layers: Mapping[str, Layer], make: Make) -> None:
    """Replace each named layer by `make(name, layer)`, with new parameters on the meta device, and freeze all other
    parameters of the model."""
    model.requires_grad_(False)
    for name, layer in layers.items():
        with torch.device("meta"):
            replacement = make(name, layer)
        replacement.set_adapter(ADAPTER)
        if not isinstance(layer.weight, nn.Parameter):
            replacement.merge = partial(_refuse_to_merge, name)
        model.set_submodule(name, replacement)


def _refuse_to_merge(name: str, *_: Any, **__: Any) -> None:
    """Replaces peft's method, which would change a copy of the weight and then leave the adapter out."""
    raise InputError(
        f"{name}: its weight is stored in fewer bits, and an adapter cannot be merged into that; export the run with "
        "export.what merged, which merges it into the original weights"
    )


def weight_shape(layer: Layer) -> tuple[int, int]:
    """Return (outputs, inputs), the shape of the layer's weight with its kernel flattened. Its data is not needed."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    height, width = layer.kernel_size
    return layer.out_channels, layer.in_channels * height * width


def apply(layer: Layer, weight: Tensor, x: Tensor) -> Tensor:
    """Return the layer's output for x with another weight, (any outputs, any inputs[ * kh * kw]), and no bias."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight)
    kernel = weight.view(weight.shape[0], -1, *layer.kernel_size)
    return F.conv2d(x, kernel, None, layer.stride, layer.padding, layer.dilation)


def apply_pointwise(layer: Layer, weight: Tensor, x: Tensor) -> Tensor:
    """Multiply the features of the layer's output, its last dim or an image's channels, by a matrix
    (outputs, inputs)."""
    return F.linear(x, weight) if isinstance(layer, nn.Linear) else F.conv2d(x, weight[:, :, None, None])


class AddsInPlace:
    """Mark of a layer that may write its update over the output of its base.

    Attributes:
        adds_in_place: Whether it may. Compiled, it is a plain sum, and so it must be in a block that torch leaves
            uncompiled: torch's selective checkpointing, which then runs, keeps the output of the base.

    See DECISIONS 190.
    """

    adds_in_place = True


class Added(LycorisLayer):  # type: ignore[misc]
    """A layer whose output gets an update added. dropout: on the update's input only."""

    base_layer: Layer
    scaling: dict[str, float]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        if self.disable_adapters:
            return result
        return result + self._get_delta_activations(ADAPTER, x).to(result.dtype)

    def _get_delta_activations(self, adapter_name: str, x: Tensor) -> Tensor:
        """Return the update, in the type of the parameters."""
        raise NotImplementedError
