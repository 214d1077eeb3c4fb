"""Causal language models of transformers: building, loss over packed documents, and generation."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.parts.language.document_attention import is_first
from trainer.models.parts.language.language_configs import causal_class
from trainer.models.parts.progress import counted
from trainer.rng import SampleRng
from trainer.system.errors import InputError, not_one_of

ATTENTIONS = ("sdpa", "eager")
"""Implementations of attention in transformers, the one that is taken first where the class has it."""


def build_language_model(config: Any, attention: str = "auto") -> Any:
    """Build the model on the meta device, fp32.

    Args:
        config: transformers' config of any text model.
        attention: The value of `model.options.attention`.

    Raises:
        ValueError: transformers has no causal language model of this config, or its class lacks the attention.
    """
    with torch.device("meta"):
        return construct(config, attention)


def construct(config: Any, attention: str) -> Any:
    """Do the same as `build_language_model`, on the device of the caller."""
    kind = causal_class(config)
    if kind is None:
        raise ValueError(f"transformers has no causal language model for a {type(config).__name__}")
    if kind.config_class is not type(config) and type(config.get_text_config()) is kind.config_class:
        config = config.get_text_config()
    tried = ATTENTIONS if attention == "auto" else (attention,)
    for name in tried:
        try:
            # A config of its own: transformers notes the attention in it.
            return kind._from_config(copy.deepcopy(config), attn_implementation=name, dtype=torch.float32)
        except ValueError as error:
            if name == tried[-1] or "does not support" not in str(error):
                raise
    raise AssertionError(tried)


def computed_buffers(config: Any, attention: str = "auto") -> dict[str, Tensor]:
    """Buffers that a model computes on construction and no file holds, as rotary frequencies: by name, on the CPU.

    The model is constructed again, with its parameters on the meta device.

    Args:
        config: transformers' config.
        attention: As for `build_language_model`.
    """
    with parameters_on_meta():
        model = construct(config, attention)
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, modules lose their parameters' memory as they get them, and keep their buffers."""
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            self._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def block_names(model: Any, named: str | None = None) -> tuple[str, ...]:
    """Class names of the modules that are sharded one by one.

    Args:
        model: The model.
        named: The user's names, comma-separated; None takes the classes that the model itself declares unsplittable, or
            else those of its longest list.

    Raises:
        InputError: No module has one of the names.
    """
    kinds = {type(module).__name__ for module in model.modules()}
    if named is None:
        declared = kinds.intersection(model._no_split_modules or ())
        return tuple(sorted(declared or _listed(model)))
    names = tuple(name.strip() for name in named.split(",") if name.strip())
    for name in names:
        if name not in kinds:
            raise InputError(f"model.options.blocks: {not_one_of(name, sorted(kinds))}")
    return names


def _listed(model: nn.Module) -> set[str]:
    """Classes of the modules in the list that has the most weights, where a model declares no blocks."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    largest = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=())
    return {type(module).__name__ for module in largest if next(module.parameters(), None) is not None}


def restarting_positions(documents: Tensor) -> Tensor:
    """Each token's position in its document, (B, L). documents: (B, L) index of the document of each token.

    Where positions restart, transformers' attention stays within a document, also with sliding windows.
    """
    steps = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return steps - torch.where(is_first(documents), steps, 0).cummax(dim=1).values


@torch.no_grad()
def continue_text(
    model: Any,
    tokens: Tensor,
    count: int,
    temperature: float,
    ends: Collection[int],
    rng: SampleRng,
    is_cached: bool = True,
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
        is_cached: Whether keys and values are kept; else every token costs a pass over the whole text.

    Returns:
        (up to `count`,) ids, without the one that ends the text.
    """
    cache = text_cache(model) if is_cached else None
    arguments: dict[str, Any] = {"use_cache": False} if cache is None else {**cache, "use_cache": True}
    if "logits_to_keep" in forward_parameters(model):
        arguments["logits_to_keep"] = 1
    text, inputs, ids = tokens[None], tokens[None], []
    draws = rng.generators("text")
    # Never ended early: ranks that share a sharded model would wait for this one's calls.
    for _ in counted(range(count)):
        logits = model(input_ids=inputs, **arguments).logits[0, -1]
        drawn = draw_token(logits.float(), temperature, draws[0]).view(1, 1)
        text = torch.cat([text, drawn], dim=1)
        inputs = text if cache is None else drawn
        ids.append(int(drawn))
    length = next((number for number, token in enumerate(ids) if token in ends), count)
    return torch.tensor(ids[:length], dtype=tokens.dtype)


def text_cache(model: Any) -> dict[str, Any] | None:
    """Make an empty cache of keys and values as the argument that takes it; None for a class without such an argument.

    transformers 5.24 renamed the argument to `cache`.
    """
    from transformers import DynamicCache

    names = [name for name in ("cache", "past_key_values") if name in forward_parameters(model)]
    return {names[0]: DynamicCache(config=model.config)} if names else None


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a model's `forward`, by name.

    Sharding makes a class of its own, which inherits `forward`; mixed precision replaces the method of the module.
    """
    return inspect.signature(type(model).forward).parameters


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
