"""Adapter tensors under the names that other programs read, always at scale 1."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.config import LoraAdapter

PEFT_NAME = ".default."


def diffusers_adapter(
    weights: Mapping[str, Tensor], cfg: LoraAdapter, prefix: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """{`<prefix><layer>.lora_A.weight`: tensor}, with alpha / rank folded into lora_B.

    No alpha is written: diffusers rejects dotted alpha keys for some families, and ComfyUI ignores the metadata that
    diffusers reads. prefix: as `transformer.`.
    """
    scale = cfg.scale_numerator / cfg.rank
    return {
        prefix + name.replace(PEFT_NAME, "."): (tensor * scale if ".lora_B." in name else tensor).to(dtype).contiguous()
        for name, tensor in weights.items()
    }


def layer_update(weights: Mapping[str, Tensor], cfg: LoraAdapter) -> dict[str, tuple[Tensor, Tensor]]:
    """{layer: (up, down)}: what the adapter adds to the layer's weight is up @ down, scale included."""
    scale = cfg.scale_numerator / cfg.rank
    suffix = f".lora_A{PEFT_NAME}weight"
    return {
        name.removesuffix(suffix): (weights[name.replace(".lora_A.", ".lora_B.")] * scale, down)
        for name, down in weights.items()
        if name.endswith(suffix)
    }
