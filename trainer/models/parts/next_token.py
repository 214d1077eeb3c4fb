"""Causal language models of transformers: built from a config, given packed documents, and their loss."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config.errors import InputError, not_one_of
from trainer.models.objectives import Loss
from trainer.rng import SampleRng


def build_language_model(config: Any) -> Any:
    """The model on the meta device, fp32. config: transformers' own, of any model for text."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=False
        )


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a model computes when it is made and no file holds, as rotary frequencies, by name, on the CPU.

    model: on the meta device, which has lost them. Raises InputError for a module that cannot be made again.
    """
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        lost = sorted(module._non_persistent_buffers_set)
        if not lost:
            continue
        values = _made_again(name, module)
        found |= {f"{name}.{buffer}": values[buffer] for buffer in lost}
    return found


def block_names(model: Any, named: str | None = None) -> tuple[str, ...]:
    """Class names of the modules that are sharded one by one.

    named: as the user gives them, separated by commas; None takes those that the model itself says must not be split.
    Raises InputError for a name that no module has.
    """
    kinds = {type(module).__name__ for module in model.modules()}
    if named is None:
        return tuple(sorted(kinds.intersection(model._no_split_modules or ())))
    names = tuple(name.strip() for name in named.split(",") if name.strip())
    for name in names:
        if name not in kinds:
            raise InputError(f"model.options.blocks: {not_one_of(name, sorted(kinds))}")
    return names


def restarting_positions(documents: Tensor) -> Tensor:
    """(B, L): each token's place in its document. documents: (B, L) numbers of the documents packed into each row.

    transformers' attention stays inside a document where positions begin again, for sliding windows too.
    """
    steps = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return steps - torch.where(begins, steps, 0).cummax(dim=1).values


def next_token_loss(logits: Tensor, tokens: Tensor, learned: Tensor, weight: Tensor) -> Loss:
    """Cross-entropy of each learned token, given those before it in its document.

    logits: (B, L, vocabulary).  tokens: (B, L).  learned: (B, L) whether a token is predicted; never the first of a
    document.  weight: (B,) of the rows, 0 for padding. The loss of a step is one mean over all learned tokens of all
    ranks and passes, however many each row has.
    """
    weights = learned[:, 1:] * weight[:, None]
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return Loss((losses * weights.flatten()).sum(), weights.sum())


@torch.no_grad()
def continue_text(model: Any, tokens: Tensor, count: int, temperature: float, end: int, rng: SampleRng) -> Tensor:
    """(up to `count`,) token ids that follow `tokens`, without `end`, the end of the text.

    tokens: (L,), at least one, on the model's device.  temperature: of the distribution that is drawn from; 0 takes the
    likeliest.  rng: of this text. The model is called `count` times whenever the text ends, so that ranks that share a
    sharded model stay together.
    """
    from transformers import DynamicCache

    # transformers 5.24 gave it this name. Sharding makes a class of its own, which inherits `forward`.
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    cache, given, found = {name: DynamicCache(config=model.config)}, tokens[None], []
    draws = rng.generators("text")
    for _ in range(count):
        logits = model(input_ids=given, **cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        given = drawn_token(logits.float(), temperature, draws[0]).view(1, 1)
        found.append(int(given))
    length = found.index(end) if end in found else count
    return torch.tensor(found[:length], dtype=tokens.dtype)


def drawn_token(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token id, (). logits: (vocabulary,).  temperature: 0 takes the likeliest.

    The random number is drawn on the CPU, the same for every accelerator.
    """
    if temperature == 0:
        return logits.argmax()
    quantile = torch.rand((), generator=generator, dtype=torch.float64).to(logits.device)
    shares = (logits.double() / temperature).softmax(0).cumsum(0)
    return (shares < quantile * shares[-1]).sum().clamp(max=len(logits) - 1)


def _made_again(name: str, module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module made a second time, not on the meta device."""
    if "config" in inspect.signature(type(module).__init__).parameters:
        made: nn.Module = type(module)(config=module.config)
        return dict(made.named_buffers())
    if "scalar_embed_scale" in vars(module):  # Gemma's embedding
        return {"embed_scale": torch.tensor(module.scalar_embed_scale)}
    lost = ", ".join(sorted(module._non_persistent_buffers_set))
    raise InputError(
        f"model.path: {name} ({type(module).__name__}) computes {lost} when it is made, in a way this program does not "
        "know; models of this kind cannot be trained yet"
    )
