"""scale: a factor for each output of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainer.adapters.base import Kind, Reader, Shapes, Tensors
from trainer.adapters.engine import ADAPTER, BaseTunerLayer
from trainer.adapters.replace import Layer, Make
from trainer.config.sections import AdapterSection, ScaleAdapter


class Scaled(nn.Module, BaseTunerLayer):
    """y + s * (y - bias) for the base's output y, with trained s."""

    adapter_layer_names = ("scales",)

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.base_layer = layer
        self.scales = nn.ParameterDict({ADAPTER: nn.Parameter(torch.empty(layer.out_features))})

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        if self.disable_adapters:
            return result
        bias = self.base_layer.bias
        plain = result if bias is None else result - bias
        return result + (self.scales[ADAPTER] * plain).to(result.dtype)


class ScaleKind(Kind):
    """(1 + s) W, row by row. Tensors: s (out,)."""

    name = "scale"
    sections = (ScaleAdapter,)
    parameters: ClassVar = {"s": f"scales.{ADAPTER}"}
    zero = frozenset({"s"})
    adds = False
    lycoris: ClassVar = {"s": "output_scales"}

    def maker(
        self, cfg: AdapterSection, layers: Mapping[str, Layer], ranks: Mapping[str, int]
    ) -> tuple[Make, tuple[str, ...]]:
        return lambda name, layer: Scaled(layer), ()

    def reason_against(self, layer: Layer, cfg: AdapterSection) -> str:
        return "scale changes linear layers only"

    def merge(self, weight: Tensor, tensors: Tensors, scale: float) -> None:
        weight *= 1 + tensors["s"].float().view(-1, 1)

    def weight_size(self, shapes: Shapes) -> tuple[int, ...]:
        return tuple(shapes["s"])

    def settings(self, shapes: Shapes) -> str:
        return "adapter.type: scale"


class ScaleReader(Reader):
    kind = "scale"
    styles = ({"output_scales": "s"},)
    complete = (("s",),)
    vectors = ("s",)
    is_scaled = False

    def size(self, tensors: Tensors) -> tuple[int, None]:
        return len(tensors["s"]), None


KIND, READER = ScaleKind(), ScaleReader()
