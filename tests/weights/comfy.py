"""Layers as ComfyUI stores them, and the numbers that it reads of them, by its published rules.

The rules are those of ComfyUI (comfy/ops.py, comfy/utils.py) and of comfy-kitchen 0.2.40, whose own numbers these were
compared with: equal bits, but for ConvRot, whose matrix product rounds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SCALED_FP8 = "scaled_fp8"
FORMS: Mapping[str, Mapping[str, Any]] = {
    SCALED_FP8: {},
    "fp8": {"format": "float8_e4m3fn", "full_precision_matrix_mult": True},
    "fp8-e5m2": {"format": "float8_e5m2"},
    "int8": {"format": "int8_tensorwise"},
    "int8-rows": {"format": "int8_tensorwise"},
    "int8-rotated": {"format": "int8_tensorwise", "convrot": True},
}
"""{form: what ComfyUI writes of a layer}. The oldest one has no description, but other names."""


def stored(layer: str, weight: Tensor, form: str, group: int = 256) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer in a file, and the weight that they stand for, fp32.

    Args:
        group: Numbers that are rotated together: a power of four.
    """
    weight = weight.float()
    turn = torch.ones(1, 1, dtype=torch.float64)
    if form == "int8-rotated":
        four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
        while len(turn) < group:
            turn = torch.kron(turn, four / 2)
        weight = (weight.double().view(len(weight), -1, group) @ turn.T).view(weight.shape).float()
    by_row = form in ("int8-rows", "int8-rotated")
    largest = weight.abs().amax(dim=1, keepdim=True) if by_row else weight.abs().max()
    dtype = torch.int8 if form.startswith("int8") else torch.float8_e5m2 if form == "fp8-e5m2" else torch.float8_e4m3fn
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = largest / most
    levels = (weight / scale).clamp(-most, most)
    codes = levels.round().to(torch.int8) if dtype == torch.int8 else levels.to(dtype)
    back = codes.double().view(len(weight), -1, len(turn)) @ turn  # exact: halves of sums of small integers
    name = "scale_weight" if form == SCALED_FP8 else "weight_scale"
    return {f"{layer}.weight": codes, f"{layer}.{name}": scale}, back.view(weight.shape).float() * scale


def description(form: str, group: int = 256) -> dict[str, Any]:
    """What ComfyUI writes of a layer."""
    return {**FORMS[form], **({"convrot_groupsize": group} if form == "int8-rotated" else {})}


def described(layer: str, form: str, group: int = 256) -> dict[str, Tensor]:
    """The description as a tensor of the layer."""
    return {f"{layer}.comfy_quant": note(description(form, group))} if form != SCALED_FP8 else {}


def note(content: object) -> Tensor:
    """JSON as a tensor of bytes."""
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)
