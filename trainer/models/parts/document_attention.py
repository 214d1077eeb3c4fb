"""Attention within the documents of packed rows, without a mask of all pairs of a row's tokens.

transformers makes a mask where several documents share a row: of L x L for each row, from which each layer makes a bias
of its own, with kernels that compute all pairs. Here attention is given where documents begin. On CUDA one kernel reads
that; elsewhere each document is attended to by itself.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "within_documents"
"""As transformers knows it. No mask is registered by this name, so that transformers makes none, and does not ask the
device for the positions either."""
MASKED = "sdpa"
"""transformers' own, whose results these are."""


class _Current:
    """Where the documents begin in the rows of the pass that runs: (documents + 1,) int32, in all rows one after the
    other, with the end of the last. Recompute in backward reads it again."""

    begins: Tensor | None = None


def document_begins(documents: Tensor) -> Tensor:
    """Return where documents begin in rows one after the other, with the end of the last: (documents + 1,) int32.

    Args:
        documents: (B, L) index of the document of each token; the padding of a row counts as one. On the CPU.
    """
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, torch.tensor([documents.numel()])]).int()


def attend_within(model: Any, begins: Tensor | None) -> None:
    """Let the next passes of a model of transformers attend within documents, or as transformers does.

    Args:
        model: A model that has transformers' sdpa attention.
        begins: As `document_begins` returns them, on the model's device; None for transformers' own attention.
    """
    _Current.begins = begins
    wanted = MASKED if begins is None else NAME
    if model.config._attn_implementation == wanted:
        return
    _register()
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        if config._attn_implementation in (MASKED, NAME):
            config._attn_implementation = wanted


def can_attend(device: torch.device, dtype: torch.dtype, is_compiled: bool) -> bool:
    """Whether rows are attended to by documents: on CUDA the kernel takes no fp32, and on a CPU the number and lengths
    of documents would be part of what is compiled."""
    return not is_compiled if device.type == "cpu" else dtype == torch.bfloat16


def within_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to earlier tokens of the same document. The arguments are transformers'.

    Args:
        query: (B, H, L, D).
        key, value: (B, H or fewer, L, D).
        sliding_window: Tokens that one sees, itself included; None for all.

    Returns:
        ((B, L, H, D), None).
    """
    begins = _Current.begins
    assert begins is not None
    if attention_mask is not None or kwargs.get("position_bias") is not None or dropout:
        raise ValueError(f"{type(module).__name__} makes a mask of its own, or drops out attention")
    rows, heads, length, _ = query.shape
    if query.device.type == "cpu":
        items = enumerate(zip(query, key, value, strict=True))
        found = [_row(*tensors, begins, at * length, scaling, sliding_window) for at, tensors in items]
        return torch.stack(found).transpose(1, 2).contiguous(), None
    key, value = _repeated(key, heads), _repeated(value, heads)
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    window = -1 if sliding_window is None else sliding_window - 1
    attended = varlen(query, key, value, begins, length, scaling, window)
    return attended.view(rows, length, heads, -1), None


def varlen(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, longest: int, scale: float | None, before: int
) -> Tensor:
    """CUDA's kernel for documents one after the other.

    Args:
        query, key, value: (tokens, H, D), bf16.
        begins: As in `document_begins`.
        longest: Length that no document exceeds.
        scale: Factor of the scores; None for 1 / sqrt(D).
        before: Tokens before itself that a token sees; -1 for all.

    Returns:
        (tokens, H, D).
    """
    from torch.nn.attention.varlen import varlen_attn

    window = before, 0
    attended = varlen_attn(query, key, value, begins, begins, longest, longest, scale=scale, window_size=window)
    assert isinstance(attended, Tensor)
    return attended


def _row(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, first: int, scale: float | None, window: int | None
) -> Tensor:
    """Attend within each document of a row, (H, L, D). first: number of the row's first token."""
    end = first + query.shape[1]
    places = [place - first for place in begins.tolist() if first <= place <= end]
    parts = []
    for begin, until in pairwise(places):
        q, k, v = (tensor[None, :, begin:until] for tensor in (query, key, value))
        mask = _band(until - begin, window) if window is not None and until - begin > window else None
        is_causal, is_grouped = mask is None, key.shape[0] != query.shape[0]
        parts.append(
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped)[0]
        )
    return torch.cat(parts, dim=1)


def _band(length: int, window: int) -> Tensor:
    """(length, length) whether a token sees another: itself and the window - 1 before it."""
    ones = torch.ones(length, length, dtype=torch.bool)
    return ones.tril() & ones.triu(1 - window)


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """(B, heads, L, D), where several heads share a key and a value."""
    count = heads // tensor.shape[1]
    return tensor if count == 1 else tensor.repeat_interleave(count, dim=1)


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, within_documents)
