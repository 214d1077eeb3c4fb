"""Layers replaced, through peft, by layers that carry an adapter, and what all such layers share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from trainer.config.errors import InputError

ADAPTER = "default"  # peft's name of the one adapter there is; part of parameter names inside the model, not of files

Layer = nn.Linear | nn.Conv2d
Make = Callable[[str, Layer], BaseTunerLayer]
"""(a layer's name, the layer) -> the layer that takes its place and holds it as `base_layer`."""


@dataclass
class _Replacement(PeftConfig):  # type: ignore[misc]
    target_modules: Collection[str] = ()
    make: Make | None = None


class _Tuner(BaseTuner):  # type: ignore[misc]
    """peft's injection with the choice of layers made before: names are exact, and each layer is made for its name."""

    prefix = "adapter_"
    tuner_layer_cls = BaseTunerLayer

    @staticmethod
    def _check_target_module_exists(peft_config: _Replacement, key: str) -> bool:
        return key in peft_config.target_modules

    def _create_and_replace(
        self,
        peft_config: _Replacement,
        adapter_name: str,
        target: Layer,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **_: Any,
    ) -> None:
        assert peft_config.make is not None
        layer = peft_config.make(current_key, target)
        if not isinstance(target.weight, nn.Parameter):
            layer.merge = partial(_refuse_to_merge, current_key)
        self._replace_module(parent, target_name, layer, target)


def _refuse_to_merge(name: str, *_: Any, **__: Any) -> None:
    """In the place of peft's, which would change a copy of the weight and then leave the adapter out."""
    raise InputError(
        f"{name}: its weight is stored in fewer bits, and an adapter cannot be merged into that; export the run with "
        "export.what merged, which merges it into the original weights"
    )


def replace_layers(model: nn.Module, names: Collection[str], make: Make) -> None:
    """Put `make(name, layer)` in the place of each named layer, with new parameters on the meta device, and freeze
    all other parameters of the model."""
    _Tuner(model, _Replacement(target_modules=names, make=make), ADAPTER, low_cpu_mem_usage=True)


def weight_shape(layer: Layer) -> tuple[int, int]:
    """(outputs, inputs): the shape of the layer's weight with its kernel flattened, whether it has data or not."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    height, width = layer.kernel_size
    return layer.out_channels, layer.in_channels * height * width


def apply(layer: Layer, weight: Tensor, x: Tensor) -> Tensor:
    """What the layer would make of x with another weight, (any outputs, any inputs[ * kh * kw]), and no bias."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight)
    kernel = weight.view(weight.shape[0], -1, *layer.kernel_size)
    return F.conv2d(x, kernel, None, layer.stride, layer.padding, layer.dilation)


def apply_pointwise(layer: Layer, weight: Tensor, x: Tensor) -> Tensor:
    """A matrix (outputs, inputs) on the features of what the layer returns: its last dim, or a picture's channels."""
    return F.linear(x, weight) if isinstance(layer, nn.Linear) else F.conv2d(x, weight[:, :, None, None])
