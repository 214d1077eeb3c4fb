"""Causal language models of transformers: building, loss over packed documents, and generation."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config.errors import InputError, not_one_of
from trainer.models.objectives import Loss
from trainer.rng import SampleRng


def build_language_model(config: Any) -> Any:
    """Build the model on the meta device, fp32. config: transformers' config of any text model."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=False
        )


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a model computes on construction and no file holds, as rotary frequencies: by name, on the CPU.

    Args:
        model: The model on the meta device, which has lost the values.

    Raises:
        InputError: A module cannot be built a second time.
    """
    buffers: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        lost = sorted(module._non_persistent_buffers_set)
        if not lost:
            continue
        values = _rebuilt_buffers(name, module)
        buffers |= {f"{name}.{buffer}": values[buffer] for buffer in lost}
    return buffers


def block_names(model: Any, named: str | None = None) -> tuple[str, ...]:
    """Class names of the modules that are sharded one by one.

    Args:
        model: The model.
        named: The user's names, comma-separated; None takes the classes that the model itself declares unsplittable.

    Raises:
        InputError: No module has one of the names.
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
    """Each token's position in its document, (B, L). documents: (B, L) index of the document of each token.

    Where positions restart, transformers' attention stays within a document, also with sliding windows.
    """
    steps = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return steps - torch.where(begins, steps, 0).cummax(dim=1).values


def next_token_loss(logits: Tensor, tokens: Tensor, learned: Tensor, weight: Tensor) -> Loss:
    """Cross-entropy of each learned token, given the tokens before it in its document.

    The loss of a step is one mean over all learned tokens of all ranks and passes, however many each row has.

    Args:
        logits: (B, L, vocabulary).
        tokens: (B, L).
        learned: (B, L) whether a token is predicted; never the first of a document.
        weight: (B,) weight of the rows, 0 for padding.
    """
    weights = learned[:, 1:] * weight[:, None]
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return Loss((losses * weights.flatten()).sum(), weights.sum())


@torch.no_grad()
def continue_text(
    model: Any, tokens: Tensor, count: int, temperature: float, ends: Collection[int], rng: SampleRng
) -> Tensor:
    """Generate token ids that follow `tokens`.

    The model is called `count` times wherever the text ends, so that ranks that share a sharded model stay together.

    Args:
        model: The language model.
        tokens: (L,), at least one, on the model's device.
        count: Number of tokens to generate.
        temperature: Temperature of the distribution; 0 takes the likeliest token.
        ends: Ids that end the text.
        rng: Random numbers of this text.

    Returns:
        (up to `count`,) ids, without the one that ends the text.
    """
    from transformers import DynamicCache

    # transformers 5.24 renamed the argument to `cache`. Sharding makes a class of its own, which inherits `forward`.
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    cache, inputs, ids = {name: DynamicCache(config=model.config)}, tokens[None], []
    draws = rng.generators("text")
    for _ in range(count):
        logits = model(input_ids=inputs, **cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        inputs = draw_token(logits.float(), temperature, draws[0]).view(1, 1)
        ids.append(int(inputs))
    length = next((number for number, token in enumerate(ids) if token in ends), count)
    return torch.tensor(ids[:length], dtype=tokens.dtype)


def draw_token(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Draw one token id, (). The random number is drawn on the CPU, so that it is equal for every accelerator.

    Args:
        logits: (vocabulary,).
        temperature: Temperature of the distribution; 0 takes the likeliest token.
        generator: Source of the random number, on the CPU.
    """
    if temperature == 0:
        return logits.argmax()
    quantile = torch.rand((), generator=generator, dtype=torch.float64).to(logits.device)
    shares = (logits.double() / temperature).softmax(0).cumsum(0)
    return (shares < quantile * shares[-1]).sum().clamp(max=len(logits) - 1)


def _rebuilt_buffers(name: str, module: nn.Module) -> dict[str, Tensor]:
    """Build a module a second time, not on the meta device, and return its buffers."""
    if "config" in inspect.signature(type(module).__init__).parameters and "config" in vars(module):
        rebuilt: nn.Module = type(module)(config=module.config)
        return dict(rebuilt.named_buffers())
    if "scalar_embed_scale" in vars(module):  # Gemma's embedding
        return {"embed_scale": torch.tensor(module.scalar_embed_scale)}
    lost = ", ".join(sorted(module._non_persistent_buffers_set))
    raise InputError(
        f"model.path: {name} ({type(module).__name__}) computes {lost} when it is made, in a way this program does not "
        "know; models of this kind cannot be trained yet"
    )
