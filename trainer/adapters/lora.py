"""lora and locon: a low-rank update added to each layer's output. See DECISIONS 185."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.adapters.base import RankKind, Reader, Shape, Shapes, Tensors
from trainer.adapters.engine import ADAPTER, Conv2d, Linear, LoraConfig, LoraLayer, PeftConfig
from trainer.adapters.replace import AddsInPlace, Layer
from trainer.config.sections import AdapterSection, LoconAdapter, LoraAdapter, LowRankAdapter


def lora_layer(layer: Layer, rank: int, scale: float, dropout: nn.Module) -> LoraLayer:
    """Make peft's own layer. The factors of a convolution are two convolutions: one with its kernel, and 1 x 1."""
    kind = LoraLinear if isinstance(layer, nn.Linear) else Conv2d
    return configured(kind(layer, ADAPTER, LoraConfig(), r=rank), scale, dropout)


class LoraLinear(AddsInPlace, Linear):  # type: ignore[misc]
    """peft's layer, which passes over the wide output twice in place of six times: the scale is on the side of the
    rank, and the second product adds into the output of the base, where `adds_in_place` allows it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged or args or kwargs:
            found: Tensor = super().forward(x, *args, **kwargs)
            return found
        result: Tensor = self.base_layer(x)
        up = self.lora_B[ADAPTER].weight
        dropout = self.lora_dropout[ADAPTER]
        narrow = self.scaling[ADAPTER] * self.lora_A[ADAPTER](dropout(x.to(up.dtype)))
        # Recompute keeps the base's output where dropout is between, so that it must not be changed.
        is_ours = self.adds_in_place and isinstance(dropout, nn.Identity) and result.dtype == narrow.dtype
        if is_ours and result.is_contiguous() and not torch.compiler.is_compiling():
            added: Tensor = _Added.apply(result, narrow, up)  # type: ignore[no-untyped-call]
            return added
        return result + F.linear(narrow, up).to(result.dtype)


class _Added(torch.autograd.Function):
    """result + narrow @ up^T, written over `result`: the output of a linear layer, which backward does not need.

    torch's own operation in place would copy the whole gradient in backward, as such an output is a view.

    Shapes: result (..., out), narrow (..., r), up (out, r).
    """

    @staticmethod
    def forward(ctx: Any, result: Tensor, narrow: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(narrow, up)
        # Detached: what is returned must not be known as the input itself.
        added = result.detach()
        added.view(-1, added.shape[-1]).addmm_(narrow.reshape(-1, narrow.shape[-1]), up.T)
        return added

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        narrow, up = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_narrow = (rows @ up).view(narrow.shape) if ctx.needs_input_grad[1] else None
        of_up = rows.T @ narrow.reshape(-1, narrow.shape[-1]) if ctx.needs_input_grad[2] else None
        return gradient, of_narrow, of_up


def configured(layer: LoraLayer, scale: float, dropout: nn.Module) -> LoraLayer:
    """Give one of peft's layers its scale and our dropout."""
    layer.scaling[ADAPTER] = scale
    layer.lora_dropout[ADAPTER] = dropout
    return layer


class LoraKind(RankKind):
    """W + scale * up @ down, for a weight of shape (out, in) or (out, in, kh, kw).

    Tensors: down (r, in[, kh, kw]), up (out, r[, 1, 1]).
    """

    name = "lora"
    sections: ClassVar[tuple[type[AdapterSection], ...]] = (LoraAdapter, LoconAdapter)
    parameters: ClassVar = {"down": f"lora_A.{ADAPTER}.weight", "up": f"lora_B.{ADAPTER}.weight"}
    zero = frozenset({"up"})
    scaled = ("up",)
    lycoris: ClassVar = {"down": "lora_down.weight", "up": "lora_up.weight"}
    peft: ClassVar = {"down": "lora_A.weight", "up": "lora_B.weight"}

    def layer(self, layer: Layer, cfg: LowRankAdapter, rank: int, scale: float, dropout: nn.Module) -> LoraLayer:
        return lora_layer(layer, rank, scale, dropout)

    def saves_no_activations(self, module: nn.Module) -> bool:
        if not isinstance(module, LoraLayer) or module.use_dora[ADAPTER]:
            return False
        return isinstance(module.lora_dropout[ADAPTER], nn.Identity)

    def scale(self, cfg: AdapterSection, tensors: Tensors) -> float:
        assert isinstance(cfg, LowRankAdapter)
        return cfg.scale_at(tensors["down"].shape[0])

    def update(self, tensors: Tensors, scale: float) -> Tensor:
        up, down = (tensors[name].detach().float().flatten(1) for name in ("up", "down"))
        return (scale * up) @ down

    def weight_size(self, shapes: Shapes) -> tuple[int, int]:
        return shapes["up"][0], math.prod(shapes["down"][1:])

    def settings(self, shapes: Shapes) -> str:
        rank = shapes["down"][0]
        if len(shapes["down"]) == 4:
            return f"adapter.conv_rank: {rank}"
        return f"adapter.rank: {rank}, or adapter.rank_pattern for this layer"

    def alpha(self, tensors: Tensors) -> int:
        return tensors["down"].shape[0]

    def peft_config(
        self, layers: Sequence[Tensors], sizes: Callable[[], Sequence[Shape]], shared: dict[str, Any]
    ) -> PeftConfig:
        return LoraConfig(lora_alpha=shared["r"], **shared)

    def joined(self, parts: Sequence[tuple[int, Tensors | None]], halves_swapped: bool) -> dict[str, Tensor]:
        """Stack the downs and put the ups along the diagonal, with zeros for layers without one."""
        ups = [tensors["up"].flatten(1) if tensors else torch.zeros(outputs, 0) for outputs, tensors in parts]
        up: Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
        if halves_swapped:
            up = torch.cat(up.chunk(2)[::-1])
        down = torch.cat([tensors["down"] for _, tensors in parts if tensors])
        return {"down": down, "up": as_kernel(up, down.dim())}


def as_kernel(up: Tensor, dim: int) -> Tensor:
    """Give (out, r) as many dims as the layer's weight: (out, r[, 1, 1])."""
    return up.view(*up.shape, *[1] * (dim - 2))


class LoraReader(Reader):
    kind = "lora"
    styles = (
        {"lora_A.weight": "down", "lora_B.weight": "up"},
        {"lora_down.weight": "down", "lora_up.weight": "up"},
    )
    complete: ClassVar[tuple[tuple[str, ...], ...]] = (("down", "up"),)
    products = (("up", "down"),)
    kernels = ("down", "up")
    by_rows: ClassVar[tuple[str, ...]] = ("up",)

    def rank(self, tensors: Tensors) -> int:
        return tensors["down"].shape[0]

    def size(self, tensors: Tensors) -> tuple[int, int]:
        return tensors["up"].shape[0], tensors["down"][0].numel()

    def part(self, tensors: Tensors) -> dict[str, Tensor] | None:
        """All parts share `down`: ranks that serve other parts only are left out, and so is a part without ranks."""
        used = tensors["up"].flatten(1).any(dim=0)
        return {"down": tensors["down"][used], "up": tensors["up"][:, used]} if used.any() else None

    def fitted(self, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
        """Some files have 1 x 1 kernels for linear layers."""
        down = tensors["down"].reshape(-1, *shape[1:])
        up = tensors["up"].reshape(shape[0], -1, *[1] * (len(shape) - 2))
        return {**tensors, "down": down, "up": up}


KIND, READER = LoraKind(), LoraReader()
