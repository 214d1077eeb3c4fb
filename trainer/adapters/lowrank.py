"""lora, locon and dora: a low-rank update added to each layer's output."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.adapters.engine import Conv2d, Linear, LoraConfig, LoraLayer, LoraVariant
from trainer.adapters.kinds import ADAPTER
from trainer.adapters.layer import SHORTEST
from trainer.adapters.replace import Layer


def lora_layer(layer: Layer, rank: int, scale: float, dropout: nn.Module) -> LoraLayer:
    """Make peft's own layer. The factors of a convolution are two convolutions: one with its kernel, and 1 x 1."""
    kind = LoraLinear if isinstance(layer, nn.Linear) else Conv2d
    return _with(kind(layer, ADAPTER, LoraConfig(), r=rank), scale, dropout)


class LoraLinear(Linear):  # type: ignore[misc]
    """peft's layer, which passes over the wide output twice in place of six times: the scale is on the side of the
    rank, and the second product adds into the output of the base.

    Attributes:
        adds_in_place: Whether it may. Compiled, it is a plain sum, and so it must be in a block that torch leaves
            uncompiled: torch's selective checkpointing, which then runs, keeps the output of the base.
    """

    adds_in_place = True

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


def dora_layer(layer: Layer, rank: int, scale: float, dropout: nn.Module) -> LoraLayer:
    """Make peft's layer with the magnitudes of `RowLengths`. layer: a linear layer."""
    return _with(_DoraLinear(layer, ADAPTER, LoraConfig(use_dora=True), r=rank), scale, dropout)


def _with(layer: LoraLayer, scale: float, dropout: nn.Module) -> LoraLayer:
    layer.scaling[ADAPTER] = scale
    layer.lora_dropout[ADAPTER] = dropout
    return layer


class RowLengths(nn.Module):
    """The trained row lengths of dora, as differences from the row lengths of the base's weight.

    Under bf16 compute parameters are rounded to bf16: whole lengths would be off by up to 0.4 %, and the adapter would
    not start as a no-op.

    Attributes:
        weight: (out,).
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs))

    def forward(self, base: Layer, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """Return g - 1, where g scales each row of V = W + scale * up @ down to its trained length.

        The length of V is a constant in backward (DoRA, arXiv 2402.09353, sec. 4.3). V itself is never built:
        |V|^2 = |W|^2 + 2 scale <up, W down^T> + scale^2 <up, up G> row by row, with G = down down^T.

        Args:
            base: The layer with W, (out, in), which is decoded here where it is stored in fewer bits.
            down: (r, in).
            up: (out, r).
            scale: Factor of the update.

        Returns:
            (out,), fp32.
        """
        with torch.no_grad():
            weight = base.weight
            length = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
            rows, gram = scale * up.float(), down.float() @ down.float().T
            grown = (rows * (2 * (weight @ down.to(weight.dtype).T).float() + rows @ gram)).sum(dim=1)
            new = (length.square() + grown).clamp_min(SHORTEST**2).sqrt()
            # |W| - |V| without the cancellation.
            shorter = -grown / (length + new)
        excess: Tensor = (shorter + self.weight.float()) / new
        return excess


class _Dora(LoraVariant):  # type: ignore[misc]
    @staticmethod
    def init(module: Linear, adapter_name: str, **_: Any) -> None:
        module.lora_magnitude_vector[adapter_name] = RowLengths(module.out_features)

    @staticmethod
    def forward(module: Linear, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scale = module.scaling[active_adapter]
        base = module.get_base_layer()
        excess = module.lora_magnitude_vector[active_adapter](base, down.weight, up.weight, scale)
        update: Tensor = up(scale * down(module.lora_dropout[active_adapter](x)))
        result = result + update.to(result.dtype)
        unbiased = result if base.bias is None else result - base.bias
        # g * y as y + (g - 1) * y: bf16 keeps 8 significant bits, and those of g - 1 are finer than those of g near 1.
        return torch.addcmul(result, excess.to(result.dtype), unbiased)


class _DoraLinear(Linear):  # type: ignore[misc]
    @property
    def lora_variants(self) -> dict[tuple[str, ...], type[LoraVariant]]:
        return {("use_dora",): _Dora}
