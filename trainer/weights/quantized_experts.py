"""The frozen experts of a mixture in 4 or 8 bits, in the format of `quantization`.

transformers holds all experts of a layer in two tensors, (experts, rows, numbers of a row). As bytes these are
(experts, rows, row bytes), which FSDP2 shards by whole experts. See DECISIONS 169.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.weights.quantization import Format, decode_records, is_traced

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names that transformers' classes give the two tensors: the first of a class is one of the first two."""
_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed")
"""Attributes that transformers' `use_experts_implementation` sets on a class whose forward can be replaced."""


class QuantExperts(nn.Module):
    """The experts of a layer whose weights are stored as bytes: `{name}_records`, (experts, rows, row bytes).

    Only as a base of a class that `quantize_experts` makes, whose other base is transformers' own.

    Attributes:
        format: Of both weights.
        shapes: {name of a weight: (experts, rows, numbers of a row)}.
    """

    format: Format
    shapes: Mapping[str, tuple[int, ...]]
    num_experts: int
    act_fn: nn.Module
    post_expert_norm: nn.Module
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what a token's experts answer, as transformers' `grouped_mm` does.

        Args:
            hidden_states: (tokens, width).
            top_k_index: (tokens, k), the experts that each token is sent to.
            top_k_weights: (tokens, k).
        """
        k = top_k_index.shape[-1]
        experts, order = top_k_index.flatten().sort()
        count = torch.zeros(self.num_experts, dtype=torch.int32, device=experts.device)
        ends = count.index_add_(0, experts, torch.ones_like(experts, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        first, last = self.shapes
        y = self._multiply(hidden_states[order // k], first, experts, ends)
        y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
        y = self._multiply(y, last, experts, ends)
        if self.has_post_expert_norm:
            y = self.post_expert_norm(y)
        y = y * top_k_weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return y[back].view(len(top_k_index), k, -1).sum(dim=1).to(hidden_states.dtype)

    def _multiply(self, x: Tensor, name: str, experts: Tensor, ends: Tensor) -> Tensor:
        records, width = getattr(self, f"{name}_records"), self.shapes[name][-1]
        if len(experts) < self.num_experts:  # as for one token of an answer: a group for each, the others stay bytes
            records, ends = records[experts], torch.arange(1, len(experts) + 1, dtype=ends.dtype, device=ends.device)
        y: Tensor = _grouped(x, records, ends, self.format.name, width, bool(self.is_transposed))
        return y + getattr(self, f"{name}_bias")[experts] if self.has_bias else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}format={self.format.name}"


def is_quantizable(module: nn.Module) -> bool:
    """Whether a module is the fused experts of a layer, of a class whose forward pass transformers replaces too."""
    return all(hasattr(module, flag) for flag in _FLAGS) and len(_weights(module)) == 2


def _weights(module: nn.Module) -> dict[str, Tensor]:
    own = dict(module.named_parameters(recurse=False))
    return {name: own[name] for name in WEIGHTS if name in own and own[name].dim() == 3}


def fused_experts(model: nn.Module) -> list[str]:
    """Names of the weights that hold the experts of a layer in one tensor of numbers."""
    return [
        name
        for name, weight in model.named_parameters()
        if "expert" in name and weight.dim() == 3 and weight.is_floating_point()
    ]


def quantize_experts(module: nn.Module, format: Format) -> None:
    """Make a module that `is_quantizable` a `QuantExperts`, in place; on the meta device without values.

    Raises ValueError for a weight that is not finite.
    """
    weights, kind = _weights(module), cast("Any", type(module))
    records = {name: _records(weight, format) for name, weight in weights.items()}
    module.__class__ = _class_of(kind)
    assert isinstance(module, QuantExperts)
    module.format, module.shapes = format, {name: weight.shape for name, weight in weights.items()}
    for name, made in records.items():
        delattr(module, name)
        module.register_parameter(f"{name}_records", nn.Parameter(made, requires_grad=False))


def _records(weight: Tensor, format: Format) -> Tensor:
    if not weight.is_meta:
        return encode_experts(format, weight.detach(), None)
    return torch.empty(*weight.shape[:2], format.row_bytes(weight.shape[2]), dtype=torch.uint8, device="meta")


@cache
def _class_of(experts: Any) -> type[nn.Module]:
    return type(f"Quant{experts.__name__}", (QuantExperts, experts), {})


def encode_experts(format: Format, weight: Tensor, scale_of_fp8: float | None) -> Tensor:
    """Encode rows of some experts: (experts, rows, numbers of a row) -> records (experts, rows, row bytes).

    The arguments and errors are those of `Format.encode`.
    """
    return format.encode(weight.flatten(0, 1), scale_of_fp8).view(*weight.shape[:2], -1)


def quantized_experts(model: nn.Module) -> dict[str, QuantExperts]:
    """The modules of experts that are stored as bytes, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantExperts)}


def _grouped(x: Tensor, records: Tensor, ends: Tensor, format: str, width: int, is_transposed: bool) -> Tensor:
    """Multiply each token with the weight of its expert. Only the bytes are kept: backward decodes them again.

    Args:
        x: (tokens, inputs), sorted by expert.
        records: (experts, rows, row bytes).
        ends: (experts,), int32: how many tokens are before the end of each expert's.
        format: Name of the format.
        width: Numbers of a row.
        is_transposed: Whether the weight of an expert is (inputs, outputs).
    """
    multiply: Callable[..., Tensor] = _grouped_operator if is_traced(x) else _Grouped.apply
    return multiply(x, records, ends, format, width, is_transposed)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, records: Tensor, ends: Tensor, format: str, width: int, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(records, ends)
        ctx.how = format, width, is_transposed
        return _product(x, records, ends, format, width, is_transposed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[0]
        of_x = _gradient_of_x(gradient.contiguous(), *ctx.saved_tensors, *ctx.how) if needed else None
        return of_x, None, None, None, None, None


def _product(x: Tensor, records: Tensor, ends: Tensor, format: str, width: int, is_transposed: bool) -> Tensor:
    weight = _decode(records, format, width, x.dtype)
    return F.grouped_mm(x, weight if is_transposed else weight.transpose(1, 2), offs=ends)


def _gradient_of_x(
    gradient: Tensor, records: Tensor, ends: Tensor, format: str, width: int, is_transposed: bool
) -> Tensor:
    """The gradient of x."""
    weight = _decode(records, format, width, gradient.dtype)
    return F.grouped_mm(gradient, weight.transpose(1, 2) if is_transposed else weight, offs=ends)


def _decode(records: Tensor, format: str, width: int, dtype: torch.dtype) -> Tensor:
    """All experts of a layer: (experts, rows, width)."""
    return decode_records(records.flatten(0, 1), format, width, dtype).view(*records.shape[:2], width)


# The same where operations are traced, as in `quantization`.


@torch.library.custom_op("shardstudio::experts", mutates_args=())
def _grouped_operator(x: Tensor, records: Tensor, ends: Tensor, format: str, width: int, is_transposed: bool) -> Tensor:
    return _product(x, records, ends, format, width, is_transposed)


@_grouped_operator.register_fake
def _(x: Tensor, records: Tensor, ends: Tensor, format: str, width: int, is_transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], width if is_transposed else records.shape[1])


@torch.library.custom_op("shardstudio::experts_backward", mutates_args=())
def _grouped_backward(
    gradient: Tensor, records: Tensor, ends: Tensor, format: str, width: int, is_transposed: bool
) -> Tensor:
    return _gradient_of_x(gradient, records, ends, format, width, is_transposed)


@_grouped_backward.register_fake
def _(gradient: Tensor, records: Tensor, ends: Tensor, format: str, width: int, is_transposed: bool) -> Tensor:
    return gradient.new_empty(gradient.shape[0], records.shape[1] if is_transposed else width)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, records, ends, *ctx.how = inputs
    ctx.save_for_backward(records, ends)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    of_x = _grouped_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.how) if ctx.needs_input_grad[0] else None
    return of_x, None, None, None, None, None


_grouped_operator.register_autograd(_gradients, setup_context=_keep)
