"""Which tokens of a row see each other in a class of transformers, tried on a tiny copy with random weights.

See DECISIONS 157.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.parts.language.chunked_loss import ROUTERS
from trainer.models.parts.language.document_attention import MASKED, attend_within, begins_mask, document_begins
from trainer.models.parts.language.next_token import (
    build_language_model,
    construct,
    forward_parameters,
    restarting_positions,
    text_cache,
)
from trainer.models.parts.language.tiny_configs import tiny_config

log = logging.getLogger(__name__)
LENGTHS = (7, 9)
"""Tokens of the two documents of the row."""
FIRST_TOKEN, MOST_TOKENS = 5, 200
SHARPER = 3.0
"""Factor of the random weights: as transformers draws them, attention is nearly uniform."""
LARGEST = 20_000_000
"""Parameters of a copy that is worth a try."""
TOLERANCE = 1e-4
"""Least difference of logits that is not rounding."""
WINDOW = 4
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "sliding_window_size")
"""Fields with the tokens that one sees, where these are not all before it."""


@dataclass(frozen=True)
class Sight:
    """The tokens that a token attends to.

    Attributes:
        later: Whether a token sees those after it, or how many they are.
        others: Whether a document sees those before it in its row, where positions restart with each.
        uncalled: Linear layers, by `layer_pattern`, that the class never calls: it does not use them, or multiplies by
            their weights itself, past any adapter and any coding.
        is_cached: Whether transformers' cache of keys and values gives the logits that the whole text gives.
    """

    later: bool
    others: bool
    uncalled: frozenset[str] = frozenset()
    is_cached: bool = True


def sight(config: Any, attention: str) -> Sight | None:
    """Try a tiny copy of a model on the CPU; takes some tenths of a second.

    Args:
        config: transformers' config.
        attention: The value of `model.options.attention`.

    Returns:
        None where no tiny copy can be made, or it does not run.
    """
    try:
        # Warnings of the library about this copy, and its random numbers, must not reach the run.
        with torch.random.fork_rng(devices=()), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            return _try(_copy(config, attention))
    except Exception as error:  # noqa: BLE001 - whatever a class of a library does with sizes it was not made for
        log.info(f"{type(config).__name__}: no tiny copy could be tried ({type(error).__name__}: {error})")
        return None


def computes_within(config: Any) -> bool:
    """Whether a class computes by documents (`document_attention`) what it computes with its own mask.

    Gradients too, and where a window is shorter than a document.

    Args:
        config: transformers' config.
    """
    try:
        with torch.random.fork_rng(devices=()), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            fields = config.to_dict()
            changes: dict[str, Any] = {name: WINDOW for name in WINDOWS if fields.get(name)}
            # A model that is asked for its routers' logits counts the mask's tokens.
            changes |= {name: False for name in (ROUTERS,) if name in fields}
            model = _copy(config, MASKED, **changes)
            documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).repeat(2, 1)
            tokens = torch.randint(FIRST_TOKEN, MOST_TOKENS, documents.shape)
            inputs = {"input_ids": tokens, "use_cache": False, **position_ids(model, documents)}
            found: list[tuple[Tensor, Tensor]] = []
            for mask in ({}, {"attention_mask": begins_mask(document_begins(documents))}):
                if mask:
                    attend_within(model)
                logits = model(**inputs, **mask).logits.float()
                logits.square().mean().backward()
                grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
                found.append((logits.detach(), torch.cat(grads)))
                model.zero_grad()
    except Exception as error:  # noqa: BLE001 - whatever a class of a library does with attention it does not know
        log.info(f"{type(config).__name__}: no tiny copy could attend by documents ({type(error).__name__}: {error})")
        return False
    (masked, expected), (within, gradients) = found
    return not _differ(masked, within) and gradients.shape == expected.shape and not _differ(expected, gradients)


def layer_pattern(name: str) -> str:
    """The name of a layer with the numbers of lists left out."""
    return re.sub(r"\.\d+(?=\.|$)", ".#", name)


def _copy(config: Any, attention: str, **changes: Any) -> Any:
    tiny = tiny_config(config, **changes)
    size = sum(parameter.numel() for parameter in build_language_model(tiny, attention).parameters())
    if size > LARGEST:
        raise ValueError(f"it would have {size} parameters")
    model = construct(tiny, attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SHARPER)
    return model


def _try(model: Any) -> Sight | None:
    documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    tokens = torch.randint(FIRST_TOKEN, MOST_TOKENS, documents.shape)
    first, called = LENGTHS[0], set[str]()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, layer in layers.items():
        layer.register_forward_hook(partial(_note, called, layer_pattern(name)))
    # Two documents in one row are compared with the same row whose last token differs, which shows whether attention
    # looks ahead, and with each document alone, which shows whether it looks into the other one.
    changed = tokens.clone()
    changed[0, -1] += 1
    logits = [
        model(input_ids=row, use_cache=False, **position_ids(model, of)).logits[0].float()
        for row, of in (
            (tokens, documents),
            (changed, documents),
            (tokens[:, :first], documents[:, :first]),
            (tokens[:, first:], documents[:, first:]),
        )
    ]
    if not all(found.isfinite().all() for found in logits):
        return None
    packed, other_end, first_alone, last_alone = logits
    uncalled = frozenset(map(layer_pattern, layers)) - called
    later = _differ(packed[:-1], other_end[:-1]) or _differ(packed[:first], first_alone)
    others = _differ(packed[first:], last_alone)
    return Sight(later, others, uncalled, _is_cached(model, tokens[:, :first]))


def _is_cached(model: Any, tokens: Tensor) -> bool:
    try:
        cache = text_cache(model)
        if cache is None:
            return False
        whole = model(input_ids=tokens, use_cache=False).logits[0, -1].float()
        model(input_ids=tokens[:, :-1], use_cache=True, **cache)
        last = model(input_ids=tokens[:, -1:], use_cache=True, **cache).logits[0, -1].float()
    except Exception as error:  # noqa: BLE001 - a class that needs a cache of its own
        log.info(f"{type(model).__name__} does not use a DynamicCache ({type(error).__name__}: {error})")
        return False
    return not _differ(whole, last)


def _note(called: set[str], name: str, *_: Any) -> None:
    called.add(name)


def position_ids(model: nn.Module, documents: Tensor) -> Mapping[str, Tensor]:
    """The argument by which a model learns where documents begin; empty for models without it.

    Args:
        model: A model of transformers, sharded or not.
        documents: (B, L) index of the document of each token.
    """
    parameters = forward_parameters(model)
    takes = "position_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"position_ids": restarting_positions(documents)} if takes else {}


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() > TOLERANCE * max(1.0, float(one.abs().max())))
