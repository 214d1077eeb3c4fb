"""loha: an update that is the product of two low-rank matrices, element by element. See DECISIONS 51."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.adapters.base import RankKind, Reader, Shape, Shapes, Tensors
from trainer.adapters.engine import ADAPTER, LoHaConfig, LoHaLayer, PeftConfig
from trainer.adapters.replace import Added, Layer, apply, apply_pointwise, weight_shape
from trainer.config.sections import LohaAdapter


class Loha(Added, LoHaLayer):  # type: ignore[misc]
    """The update is scale * ((w1_a @ w1_b) * (w2_a @ w2_b)) x."""

    def __init__(self, layer: Layer, rank: int, scale: float, dropout: nn.Module) -> None:
        LoHaLayer.__init__(self, layer)
        outputs, inputs = weight_shape(layer)
        self.create_adapter_parameters(ADAPTER, rank, (outputs, inputs))
        self.scaling[ADAPTER] = scale
        self.dropout = dropout
        self.is_dense = rank**2 * (outputs + inputs) >= outputs * inputs

    def _get_delta_activations(self, adapter_name: str, x: Tensor) -> Tensor:
        parameters = (self.hada_w1_a, self.hada_w1_b, self.hada_w2_a, self.hada_w2_b)
        factors = self.scaling[adapter_name], *(parameter[adapter_name] for parameter in parameters)
        x = self.dropout(x.to(factors[1].dtype))
        if not self.is_dense:
            return low_rank_product(self.base_layer, x, *factors)
        # Recomputed in backward, so that no dense weight is kept from forward.
        update: Tensor = checkpoint(
            dense_product, self.base_layer, x, *factors, use_reentrant=False, preserve_rng_state=False
        )
        return update


def low_rank_product(
    layer: Layer, x: Tensor, scale: float, w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor
) -> Tensor:
    """Compute loha's update as a matrix of rank r^2, whose factors are products of columns and of rows."""
    up = ((scale * w1_a).unsqueeze(2) * w2_a.unsqueeze(1)).flatten(1)
    down = (w1_b.unsqueeze(1) * w2_b.unsqueeze(0)).flatten(0, 1)
    return apply_pointwise(layer, up, apply(layer, down, x))


def dense_product(
    layer: Layer, x: Tensor, scale: float, w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor
) -> Tensor:
    """Compute loha's update by the whole matrix: less work where r^2 is near the layer's own width."""
    return apply(layer, (scale * w1_a @ w1_b) * (w2_a @ w2_b), x)


class LohaKind(RankKind):
    """W + scale * (w1_a @ w1_b) * (w2_a @ w2_b), element by element.

    Tensors: w1_a, w2_a (out, r), w1_b, w2_b (r, in * kh * kw). LyCORIS starts w1_b and w2_a from N(0, 1) and w1_a from
    N(0, 0.1^2), which with a small alpha, as is usual there, learns no faster than what they start from here.
    """

    name = "loha"
    sections = (LohaAdapter,)
    lycoris: ClassVar = {name: f"hada_{name}" for name in ("w1_a", "w1_b", "w2_a", "w2_b")}
    peft: ClassVar = lycoris
    parameters: ClassVar = {tensor: f"{name}.{ADAPTER}" for tensor, name in lycoris.items()}
    zero = frozenset({"w2_b"})
    scaled = ("w1_a",)

    def layer(self, layer: Layer, cfg: LohaAdapter, rank: int, scale: float, dropout: nn.Module) -> Loha:
        return Loha(layer, rank, scale, dropout)

    def saves_no_activations(self, module: nn.Module) -> bool:
        """A dense product makes its matrix again in backward by itself."""
        return isinstance(module, Loha) and module.is_dense and isinstance(module.dropout, nn.Identity)

    def update(self, tensors: Tensors, scale: float) -> Tensor:
        factors = {name: tensor.detach().float() for name, tensor in tensors.items()}
        first, second = (factors[f"{w}_a"] @ factors[f"{w}_b"] for w in ("w1", "w2"))
        return first.mul_(second).mul_(scale)

    def weight_size(self, shapes: Shapes) -> tuple[int, int]:
        return shapes["w1_a"][0], shapes["w1_b"][1]

    def settings(self, shapes: Shapes) -> str:
        return f"adapter.rank: {shapes['w1_b'][0]}, or adapter.rank_pattern for this layer"

    def alpha(self, tensors: Tensors) -> int:
        return tensors["w1_b"].shape[0]

    def peft_config(
        self, layers: Sequence[Tensors], sizes: Callable[[], Sequence[Shape]], shared: dict[str, Any]
    ) -> PeftConfig:
        return LoHaConfig(alpha=shared["r"], **shared)

    def exact_rank(self, tensors: Tensors) -> int:
        return tensors["w1_b"].shape[0] * tensors["w2_b"].shape[0]

    def exact_lora(self, tensors: Tensors, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """(w1_a w1_b) * (w2_a w2_b) is a sum over pairs of ranks, each an outer product."""
        factors = {name: tensor.float() for name, tensor in tensors.items()}
        up = torch.einsum("oi,oj->oij", factors["w1_a"], factors["w2_a"]).flatten(1)
        return torch.einsum("in,jn->ijn", factors["w1_b"], factors["w2_b"]).flatten(0, 1), up


class LohaReader(Reader):
    kind = "loha"
    styles = ({"hada_w1_a": "w1_a", "hada_w1_b": "w1_b", "hada_w2_a": "w2_a", "hada_w2_b": "w2_b"},)
    complete = (("w1_a", "w1_b", "w2_a", "w2_b"),)
    products = (("w1_a", "w1_b"), ("w2_a", "w2_b"))
    equal = (("w1_a", "w2_a", 0), ("w1_b", "w2_b", 1))
    by_rows = ("w1_a", "w2_a")

    def rank(self, tensors: Tensors) -> int:
        return tensors["w2_b"].shape[0]

    def size(self, tensors: Tensors) -> tuple[int, int]:
        return tensors["w1_a"].shape[0], tensors["w1_b"].shape[1]


KIND, READER = LohaKind(), LohaReader()
