"""Attention within the documents of packed rows, without a mask of all pairs of a row's tokens.

transformers makes a mask where several documents share a row: of L x L for each row, from which each layer makes a bias
of its own, with kernels that compute all pairs. Here the mask says where documents begin instead. On CUDA one kernel
reads that, if it takes heads of their width; elsewhere each document is attended to by itself. See DECISIONS 186.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "within_documents"
"""As transformers knows it. With any other mask it is transformers' own `sdpa`."""
MASKED = "sdpa"
WIDEST = 256
"""Numbers of a head that CUDA's kernel takes at most."""


def is_first(documents: Tensor) -> Tensor:
    """Whether a token is the first of its document in its row, (B, L). documents: (B, L) index of each one's."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins


def document_begins(documents: Tensor) -> Tensor:
    """Return where documents begin in rows one after the other, with the end of the last: (documents + 1,) int32.

    Args:
        documents: (B, L) index of the document of each token; the padding of a row counts as one. On the CPU.
    """
    starts = is_first(documents).flatten().nonzero().flatten()
    return torch.cat([starts, torch.tensor([documents.numel()])]).int()


def attend_within(model: Any) -> None:
    """Let a model of transformers that has sdpa attention take `begins_mask` as its mask."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, within_documents)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        if config._attn_implementation == MASKED:
            config._attn_implementation = NAME


def begins_mask(begins: Tensor) -> Tensor:
    """Return what a model of `attend_within` takes as "attention_mask" for packed rows.

    transformers hands a mask of four dims to every layer as it is, and does not ask the device for the positions.

    Args:
        begins: As `document_begins` returns them.
    """
    return begins.view(1, 1, 1, -1)


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
        attention_mask: A `begins_mask`; any other is left to transformers.
        sliding_window: Tokens that one sees, itself included; None for all.

    Returns:
        ((B, L, H, D), None).
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window=sliding_window, **kwargs
        )
        return found
    if kwargs.get("position_bias") is not None or dropout:
        raise ValueError(f"{type(module).__name__} has a bias by position, or drops out attention")
    begins = attention_mask.flatten()
    rows, heads, length, _ = query.shape
    # torch's kernel for rows of several lengths is CUDA's alone; a CPU attends document by document.
    if query.device.type == "cpu":
        attended = by_document(query, key, value, begins, scaling, sliding_window)
        return attended.transpose(1, 2).contiguous(), None
    key, value = _repeated(key, heads), _repeated(value, heads)
    if not takes_heads(query.shape[-1], value.shape[-1]):
        attended = by_mask(query, key, value, begins, scaling, sliding_window)
        return attended.transpose(1, 2).contiguous(), None
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    window = -1 if sliding_window is None else sliding_window - 1
    attended = varlen(query, key, value, begins, length, scaling, window)
    return attended.view(rows, length, heads, -1), None


def takes_heads(width: int, of_value: int) -> bool:
    """Whether CUDA's kernel takes heads of queries and values with so many numbers. Those of DeepSeek-V3 differ."""
    return width == of_value <= WIDEST and width % 8 == 0


def by_mask(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Attend with a mask of all pairs of a row's tokens, which is made without asking the device.

    Args:
        query, key, value: (B, H, L, D); value may have another D.
        begins: As in `document_begins`.
        scale: Factor of the scores; None for 1 / sqrt(D).
        window: Tokens that one sees, itself included; None for all.

    Returns:
        (B, H, L, D of value).
    """
    rows, _, length, _ = query.shape
    tokens = torch.arange(rows * length, device=begins.device, dtype=begins.dtype)
    documents = torch.searchsorted(begins, tokens, right=True).view(rows, length)
    place = tokens[:length]
    before = place[:, None] - place
    seen = (documents[:, :, None] == documents[:, None]) & (before >= 0)
    if window is not None:
        seen &= before < window
    return F.scaled_dot_product_attention(query, key, value, seen[:, None], scale=scale)


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


def by_document(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Attend within each document by itself. The arguments are those of `by_mask`, but heads may share a key and a
    value. Returns (B, H, L, D of value)."""
    length, is_grouped = query.shape[2], key.shape[1] != query.shape[1]
    parts: list[list[Tensor]] = [[] for _ in query]
    for begin, until in pairwise(begins.tolist()):
        row, first, count = begin // length, begin % length, until - begin  # no document goes on in the next row
        q, k, v = (tensor[row : row + 1, :, first : first + count] for tensor in (query, key, value))
        mask = _band(count, window) if window is not None and count > window else None
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
        )
        parts[row].append(attended)
    return torch.cat([torch.cat(row, dim=2) for row in parts])


def _band(length: int, window: int) -> Tensor:
    """(length, length) whether a token sees another: itself and the window - 1 before it."""
    ones = torch.ones(length, length, dtype=torch.bool)
    return ones.tril() & ones.triu(1 - window)


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """(B, heads, L, D), where several heads share a key and a value."""
    count = heads // tensor.shape[1]
    return tensor if count == 1 else tensor.repeat_interleave(count, dim=1)
