"""Adapters: layers added beside the layers they change, injected before the model is sharded.

peft is the engine. An adapter takes a module and name patterns; it knows no family.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Sequence

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from trainer.adapters.dropout import SampleDropout
from trainer.config import InputError, LoraAdapter
from trainer.rng import generator

ADAPTER = "default"  # peft's name of the one adapter there is; part of parameter names inside the model, not of files


def inject(model: nn.Module, cfg: LoraAdapter, targets: Sequence[str], family: str) -> list[str]:
    """Freeze the model and add the adapter. Returns the names of the changed layers.

    targets: the family's own patterns, used where `adapter.targets` is empty.  family: for messages.
    New parameters are fp32 and on the meta device. Raises InputError naming the nearest layer for a pattern that
    matches none.
    """
    model.requires_grad_(False)
    layers = match_layers(model, cfg.targets or targets, "adapter.targets", family)
    ranks = {
        name: rank
        for pattern, rank in cfg.rank_pattern.items()
        for name in match_layers(model, (pattern,), "adapter.rank_pattern", family)
    }
    scale = cfg.scale_numerator / cfg.rank
    peft_config = LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.scale_numerator,
        lora_dropout=cfg.dropout,
        target_modules=layers,
        rank_pattern={_exactly(name): rank for name, rank in ranks.items()},
        # alpha / rank is one number for the whole adapter, whatever a layer's own rank.
        alpha_pattern={_exactly(name): scale * rank for name, rank in ranks.items()},
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        inject_adapter_in_model(peft_config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    for name, layer in adapted_layers(model).items():
        for parameter in layer.lora_A.parameters():
            parameter.data = parameter.data.float()
        for parameter in layer.lora_B.parameters():
            parameter.data = parameter.data.float()
        if cfg.dropout:
            layer.lora_dropout[ADAPTER] = SampleDropout(cfg.dropout, name)
    return layers


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """The layers that carry an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def match_layers(model: nn.Module, patterns: Sequence[str], field: str, family: str) -> list[str]:
    """Names of the linear and convolution layers that a pattern matches: as a regular expression on the whole name,
    or as the end of it (`attn.to_q`).

    Raises InputError for a pattern that is no regular expression or matches nothing.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    matched: set[str] = set()
    for pattern in patterns:
        found = [name for name in layers if _matches(name, pattern, field)]
        if not found:
            raise InputError(f"{field}: '{pattern}' matches no layer of {family}; {_nearest(pattern, layers)}")
        matched.update(found)
    return [name for name in layers if name in matched]


def initial_value(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Start value of one adapter parameter: the whole tensor, fp32, the same on every rank and for any world size.

    lora_A as peft draws it (Kaiming-uniform with a = sqrt(5): uniform within 1 / sqrt(fan_in)), lora_B zero, so that
    the adapter starts as a no-op.
    """
    if ".lora_B." in name:
        return torch.zeros(*shape)
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return (torch.rand(*shape, generator=generator(seed, "adapter", name)) * 2 - 1) * bound


def dropouts(model: nn.Module) -> list[SampleDropout]:
    """The dropout layers of the adapter: each must be told the samples of the next forward."""
    return [module for module in model.modules() if isinstance(module, SampleDropout)]


def _matches(name: str, pattern: str, field: str) -> bool:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise InputError(f"{field}: '{pattern}' is not a regular expression ({error})") from error
    return expression.fullmatch(name) is not None or name == pattern or name.endswith(f".{pattern}")


def _nearest(pattern: str, layers: Sequence[str]) -> str:
    """The layer name nearest to a pattern, at the pattern's depth: 'attn.to_q' for 'attn.to_qq'."""
    depth = pattern.count(".") + 1
    endings = [".".join(name.split(".")[-depth:]) for name in layers]
    near = difflib.get_close_matches(pattern, sorted(set(endings)), 1, cutoff=0.0)
    if not near:
        return "the model has no linear layers"
    return f"nearest: '{near[0]}' ({endings.count(near[0])} layers)"


def _exactly(name: str) -> str:
    return f"^{re.escape(name)}$"
