"""lokr: an update that is the Kronecker product of two matrices, each whole or a low-rank product."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.adapters.base import RankKind, Reader, Shape, Shapes, Tensors, shapes_of
from trainer.adapters.engine import (
    ADAPTER,
    LoKrConfig,
    LoKrLayer,
    PeftConfig,
    factorization,
)
from trainer.adapters.replace import Added, Layer, apply, apply_pointwise, weight_shape
from trainer.adapters.targets import counted
from trainer.config.sections import AdapterSection, LokrAdapter
from trainer.system.errors import InputError


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


def small_factor(width: int, largest: int) -> int:
    """Return the largest divisor of `width` up to its square root, and up to `largest` where that is above 0."""
    bound = math.isqrt(width) if largest < 1 else min(largest, math.isqrt(width))
    return next(size for size in range(bound, 0, -1) if width % size == 0)


class Lokr(Added, LoKrLayer):  # type: ignore[misc]
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


class LokrKind(RankKind):
    """W + scale * kron(w1, w2).

    Tensors: w1 (a, b) or w1_a @ w1_b; w2 (c, d[, kh, kw]) or w2_a @ w2_b with shape (c, d * kh * kw); a * c = out,
    b * d = in. An update of two whole factors has no rank and is not scaled, as in LyCORIS.
    """

    name = "lokr"
    sections = (LokrAdapter,)
    lycoris: ClassVar = {name: f"lokr_{name}" for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")}
    peft: ClassVar = lycoris
    parameters: ClassVar = {tensor: f"{name}.{ADAPTER}" for tensor, name in lycoris.items()}
    zero = frozenset({"w2", "w2_b"})
    scaled = ("w1", "w1_a")
    any_rank = True
    kept_exact = ("lokr_w1",)  # each number of the first factor scales a block of the update

    def layer(self, layer: Layer, cfg: LokrAdapter, rank: int, scale: float, dropout: nn.Module) -> Lokr:
        split = Split.of(layer, cfg, rank)
        return Lokr(layer, split, rank, 1.0 if split.is_whole else scale, dropout)

    def notes(self, layers: Mapping[str, Layer], cfg: LokrAdapter, ranks: Mapping[str, int]) -> tuple[str, ...]:
        """Name the layers in which the requested rank has no effect."""
        whole = [name for name, layer in layers.items() if Split.of(layer, cfg, ranks[name]).second_whole]
        if cfg.full_matrix or not whole:
            return ()
        where = f"{counted(whole)}, as '{whole[0]}'"
        return (
            f"adapter.rank: has no effect in {where}: they are so small that all of their second factor is trained",
        )

    def scale(self, cfg: AdapterSection, tensors: Tensors) -> float:
        assert isinstance(cfg, LokrAdapter)
        return 1.0 if "w1" in tensors and "w2" in tensors else cfg.scale

    def update(self, tensors: Tensors, scale: float) -> Tensor:
        first, second = (_factor(tensors, name) for name in ("w1", "w2"))
        return torch.kron(scale * first, second.flatten(1))

    def weight_size(self, shapes: Shapes) -> tuple[int, int]:
        (a, b), (c, d) = (_factor_size(shapes, name) for name in ("w1", "w2"))
        return a * c, b * d

    def settings(self, shapes: Shapes) -> str:
        settings = [f"adapter.factor: {max(_factor_size(shapes, 'w1'))}"]
        ranks = [shapes[name][0] for name in ("w1_b", "w2_b") if name in shapes]
        settings.append(f"adapter.rank: {ranks[0]}" if ranks else "adapter.full_matrix: true")
        settings += ["adapter.decompose_both: true"] if "w1_a" in shapes else []
        return ", ".join(settings)

    def alpha(self, tensors: Tensors) -> int:
        return _rank(tensors) or 1

    def lycoris_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        if "w2" in tensors and "w1_a" in tensors:
            # LyCORIS does not support a low-rank first factor with a whole second one.
            tensors = {"w1": _factor(tensors, "w1"), "w2": tensors["w2"]}
        return super().lycoris_tensors(tensors)

    def peft_config(
        self, layers: Sequence[Tensors], sizes: Callable[[], Sequence[Shape]], shared: dict[str, Any]
    ) -> PeftConfig:
        both = any("w1_a" in tensors for tensors in layers)
        factor = _peft_factor(layers, sizes())
        return LoKrConfig(alpha=shared["r"], decompose_both=both, decompose_factor=factor, **shared)

    def peft_rank(self, tensors: Tensors) -> int:
        """peft keeps a factor whole when the rank is at least half its size."""
        return _rank(tensors) or max(_factor_size(shapes_of(tensors), "w2"))

    def exact_rank(self, tensors: Tensors) -> int:
        shapes = shapes_of(tensors)
        return math.prod(
            shapes[f"{name}_b"][0] if f"{name}_b" in shapes else min(_factor_size(shapes, name))
            for name in ("w1", "w2")
        )

    def exact_lora(self, tensors: Tensors, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """kron(A B, C D) = kron(A, C) kron(B, D)"""
        left, right = zip(*(_as_product(tensors, name) for name in ("w1", "w2")), strict=True)
        return torch.kron(*right), torch.kron(*left)


def _factor(tensors: Tensors, name: str) -> Tensor:
    if name in tensors:
        return tensors[name].detach().float()
    left, right = (tensors[f"{name}_{part}"].detach().float() for part in "ab")
    return left @ right


def _factor_size(shapes: Shapes, name: str) -> tuple[int, int]:
    """Return rows and columns of a factor, the kernel flattened into the columns."""
    if name in shapes:
        return shapes[name][0], math.prod(shapes[name][1:])
    return shapes[f"{name}_a"][0], shapes[f"{name}_b"][1]


def _rank(tensors: Tensors) -> int | None:
    """Return the rank; None when both factors are whole."""
    return next((tensors[name].shape[0] for name in ("w2_b", "w1_b") if name in tensors), None)


def _as_product(tensors: Tensors, name: str) -> tuple[Tensor, Tensor]:
    """Write a factor as a product of two matrices with the smallest possible inner dimension. See DECISIONS 64."""
    if f"{name}_a" in tensors:
        return tensors[f"{name}_a"].float(), tensors[f"{name}_b"].float()
    whole = tensors[name].float().flatten(1)
    rows, columns = whole.shape
    return (torch.eye(rows), whole) if rows <= columns else (whole, torch.eye(columns))


def _peft_factor(layers: Sequence[Tensors], sizes: Sequence[Shape]) -> int:
    """Return the single factor from which peft computes the split of all layers.

    It is the first factor's size in the layers whose sizes it divides. Raises InputError when there is none.
    """
    splits: set[tuple[int, int]] = set()
    for tensors, size in zip(layers, sizes, strict=True):
        splits.update(zip(size[:2], _factor_size(shapes_of(tensors), "w1"), strict=True))
    factor: int
    for factor in (-1, *sorted({first for _, first in splits})):
        if all(factorization(size, factor)[0] == first for size, first in splits):
            return factor
    raise InputError(
        "export.format: peft cannot carry a lokr adapter whose layers are split by different factors; "
        "use auto, comfyui, lycoris"
    )


class LokrReader(Reader):
    kind = "lokr"
    styles = (
        {
            "lokr_w1": "w1",
            "lokr_w1_a": "w1_a",
            "lokr_w1_b": "w1_b",
            "lokr_w2": "w2",
            "lokr_w2_a": "w2_a",
            "lokr_w2_b": "w2_b",
        },
    )
    complete = (("w1", "w2"), ("w1", "w2_a", "w2_b"), ("w1_a", "w1_b", "w2"), ("w1_a", "w1_b", "w2_a", "w2_b"))
    products = (("w1_a", "w1_b"), ("w2_a", "w2_b"))
    kernels = ("w2",)

    def rank(self, tensors: Tensors) -> int | None:
        """LyCORIS does not scale a lokr of two whole factors."""
        return next((tensors[name].shape[0] for name in ("w2_b", "w1_b") if name in tensors), None)

    def size(self, tensors: Tensors) -> tuple[int, int]:
        (a, b), (c, d) = (
            (tensors[name].shape[0], tensors[name][0].numel())
            if name in tensors
            else (tensors[f"{name}_a"].shape[0], tensors[f"{name}_b"].shape[1])
            for name in ("w1", "w2")
        )
        return a * c, b * d


KIND, READER = LokrKind(), LokrReader()
