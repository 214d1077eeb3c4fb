"""What transformers with the blocks of FLUX.1 share: layers, their original names, and positions."""

from __future__ import annotations

import torch
from torch import Tensor

TARGETS = (
    r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
    r"transformer_blocks\.\d+\.(ff|ff_context)\.net\.(0\.proj|2)",
    r"single_transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v)|proj_mlp|proj_out)",
)
"""The linear layers of the blocks, but for modulation."""
ATTENTION = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.norm.query_norm": ("attn.norm_q",),
    "img_attn.norm.key_norm": ("attn.norm_k",),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",),
    "txt_attn.norm.key_norm": ("attn.norm_added_k",),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
}
"""{module of a double block's attention in the original files: diffusers' modules whose rows it holds}."""
DOUBLE = {
    **ATTENTION,
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
}
"""The same of a whole double block."""
SINGLE = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "norm.query_norm": ("attn.norm_q",),
    "norm.key_norm": ("attn.norm_k",),
}
"""The same of a whole single block."""


def image_ids(height: int, width: int, number: int = 0) -> Tensor:
    """Positions (number, row, column) of an image's tokens: (h * w, 3). number: 0 for the noisy image, 1 for the one
    before the edit."""
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cartesian_prod(zero + number, torch.arange(height), torch.arange(width))
