"""loha and lokr: updates that are an element-wise or a Kronecker product of two factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.adapters.engine import LoHaLayer, LoKrLayer, LycorisLayer
from trainer.adapters.kinds import ADAPTER
from trainer.adapters.replace import Layer, apply, apply_pointwise, weight_shape
from trainer.adapters.targets import counted
from trainer.config.sections import LokrAdapter


class _Product(LycorisLayer):  # type: ignore[misc]
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


class Loha(_Product, LoHaLayer):  # type: ignore[misc]
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


@dataclass(frozen=True)
class Split:
    """lokr's factors of one weight (a * c, b * d * kernel): w1 (a, b), w2 (c, d * kernel), each whole or a product."""

    a: int
    b: int
    c: int
    d: int
    first_whole: bool
    second_whole: bool

    @property
    def is_whole(self) -> bool:
        """Whether both factors are whole: the update has no rank and is not scaled."""
        return self.first_whole and self.second_whole

    @classmethod
    def of(cls, layer: Layer, cfg: LokrAdapter, rank: int) -> Split:
        """Choose sizes as LyCORIS does: a factor stays whole where its rank would be half its size or more."""
        outputs, inputs = weight_shape(layer)
        if isinstance(layer, nn.Conv2d):
            inputs = layer.in_channels
        a, b = small_factor(outputs, cfg.factor), small_factor(inputs, cfg.factor)
        c, d = outputs // a, inputs // b
        first_whole = cfg.full_matrix or not cfg.decompose_both or 2 * rank >= max(a, b)
        return cls(a, b, c, d, first_whole, cfg.full_matrix or 2 * rank >= max(c, d))


def whole_notes(layers: Mapping[str, Layer], cfg: LokrAdapter, ranks: Mapping[str, int]) -> tuple[str, ...]:
    """Return the note for the log about layers in which the requested rank has no effect."""
    whole = [name for name, layer in layers.items() if Split.of(layer, cfg, ranks[name]).second_whole]
    if cfg.full_matrix or not whole:
        return ()
    return (f"adapter.rank: has no effect in {counted(whole)}, as '{whole[0]}': half the second factor's size or more",)


def small_factor(width: int, largest: int) -> int:
    """Return the largest divisor of `width` up to its square root, and up to `largest` where that is above 0."""
    bound = math.isqrt(width) if largest < 1 else min(largest, math.isqrt(width))
    return next(size for size in range(bound, 0, -1) if width % size == 0)


class Lokr(_Product, LoKrLayer):  # type: ignore[misc]
    """The update is scale * kron(w1, w2) x, factor by factor: the dense matrix is never built.

    scale: must be 1 where `split.is_whole`, as in LyCORIS.
    """

    def __init__(self, layer: Layer, split: Split, rank: int, scale: float, dropout: nn.Module) -> None:
        LoKrLayer.__init__(self, layer)
        kernel = layer.kernel_size if isinstance(layer, nn.Conv2d) else ()
        shape = ((split.a, split.c), (split.b, split.d), *kernel)
        self.create_adapter_parameters(ADAPTER, rank, shape, split.first_whole, split.second_whole, False)
        self.scaling[ADAPTER] = scale
        self.dropout = dropout
        self._split = split

    def _get_delta_activations(self, adapter_name: str, x: Tensor) -> Tensor:
        layer, split = self.base_layer, self._split
        first = self._first(adapter_name)
        inner = self.lokr_w2[adapter_name].flatten(1) if split.second_whole else self.lokr_w2_b[adapter_name]
        x = self.dropout(x.to(first.dtype))
        # For w2 each of the b groups of d features is an item of its own.
        linear = isinstance(layer, nn.Linear)
        items = x.reshape(-1, split.d) if linear else x.reshape(-1, split.d, *x.shape[2:])
        items = apply(layer, inner, items)
        items = items.view(-1, split.b, *items.shape[1:])
        items = torch.tensordot(first, items, dims=([1], [1])).transpose(0, 1)
        if not split.second_whole:
            items = apply_pointwise(layer, self.lokr_w2_a[adapter_name], items.flatten(0, 1))
        # The width is given: where there are no rows, torch cannot infer it.
        width = split.a * split.c
        return items.reshape(*x.shape[:-1], width) if linear else items.reshape(x.shape[0], width, *items.shape[-2:])

    def _first(self, adapter_name: str) -> Tensor:
        """Return scale * w1, (a, b)."""
        if self._split.first_whole:
            first: Tensor = self.lokr_w1[adapter_name]
        else:
            first = self.lokr_w1_a[adapter_name] @ self.lokr_w1_b[adapter_name]
        return self.scaling[adapter_name] * first
