"""The loss that keeps the routers of a mixture of experts from sending all tokens to a few experts.

See DECISIONS 200.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
"""Names of the field of a config with the number of experts that a token is sent to."""


def experts_per_token(model: Any) -> int | None:
    """How many experts of each layer a token is sent to; None for a model whose routers transformers does not balance.

    model: A causal language model of transformers.
    """
    fields = model.config.to_dict()
    found = [fields[name] for name in PER_TOKEN if isinstance(fields.get(name), int)]
    return int(found[0]) if found and "router_aux_loss_coef" in vars(model) else None


def configured_weight(config: Any) -> float:
    """The weight of the loss that the config itself asks for: 0 unless it lets the model return the routers' logits."""
    fields = config.to_dict()
    return float(fields.get("router_aux_loss_coef") or 0.0) if fields.get("output_router_logits") else 0.0


def balance_loss(logits: Sequence[Tensor], top_k: int, inside: Tensor) -> Tensor:
    """The load-balancing loss of each row, (B,): it is top_k where all experts are used equally, and more else.

    Within a row it is over all layers and tokens together: experts * sum over experts of (share of the tokens that are
    sent to it) * (mean of its probability). A row by itself makes it independent of ranks and of the size of a pass.
    Source: Switch Transformer (arXiv 2101.03961), equations 4 to 6, with top_k experts as in transformers.

    Args:
        logits: Of each layer, (B * L, experts) or (B, L, experts).
        top_k: Experts that a token is sent to.
        inside: (B, L) whether a token counts; padding does not.
    """
    rows, length = inside.shape
    counted = inside.to(torch.float32)[..., None]
    sent = probable = torch.zeros((), device=inside.device)
    for layer in logits:
        probabilities = layer.view(rows, length, -1).float().softmax(dim=-1)
        chosen = probabilities.topk(top_k, dim=-1).indices
        sent = sent + (torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0) * counted).sum(dim=1)
        probable = probable + (probabilities * counted).sum(dim=1)
    tokens = counted.sum(dim=1).clamp_min(1) * len(logits)
    experts = logits[0].shape[-1]
    return experts * (sent / tokens * (probable / tokens)).sum(dim=-1)
