"""Chooses the layers that an adapter changes, and their ranks or blocks, before anything is built."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainer.adapters.base import Kind
from trainer.adapters.replace import Layer, weight_shape
from trainer.config.sections import AdapterSection, ConvAdapter, RankAdapter
from trainer.system.errors import InputError


@dataclass(frozen=True)
class Targets:
    """The layers that a family recommends to change.

    Attributes:
        linear: {component: patterns of linear layers}.
        conv: {component: patterns of convolutions}.
        halves_swapped: Patterns of layers that adapters of whole rows (`Kind.whole_rows`) must leave alone.
        never_trained: Patterns of parameters that would get no gradient.
        others: Patterns of modules that are trained in another way, or not at all.
    """

    linear: Mapping[str, Sequence[str]]
    conv: Mapping[str, Sequence[str]]
    halves_swapped: Sequence[str]
    never_trained: Sequence[str] = ()
    others: Sequence[str] = ()


@dataclass(frozen=True)
class Chosen:
    """The chosen layers.

    Attributes:
        layers: {name: layer} to change, in model order.
        notes: Sentences about requested layers that are left out.
    """

    layers: dict[str, Layer]
    notes: tuple[str, ...]


def choose_layers(model: nn.ModuleDict, cfg: AdapterSection, kind: Kind, targets: Targets, family: str) -> Chosen:
    """Choose the layers that `adapter.targets` names, or else those that the family recommends.

    Raises:
        InputError: A pattern matches nothing, or the adapter cannot change any layer.
    """
    layers = _layers(model)
    named = match(layers, cfg.targets, "adapter.targets", family)
    names = named or _family_layers(layers, cfg, targets)
    for component in model:
        if all(name.partition(".")[0] != component for name in names):
            why = "names no layer" if named else f"{family} recommends no layers"
            raise InputError(
                f"adapter.targets: {why} of {component}, which is to be trained by the adapter; "
                f"name some, or set model.train.{component}: frozen"
            )
    left_out: dict[str, list[str]] = defaultdict(list)
    owners = _owners(model)
    for name in names:
        reason = _reason_against(name, layers[name], cfg, kind, targets) or _reason_if_shared(
            name, layers[name], owners
        )
        if not named and not reason and not _fits(name, layers[name], cfg, kind):
            reason = f"it has one output, which {cfg.type} of this size does not fit"
        if reason:
            left_out[reason].append(name)
    notes = tuple(
        f"adapter.targets: {counted(found)} left out, as '{found[0]}': {reason}" for reason, found in left_out.items()
    )
    dropped = {name for found in left_out.values() for name in found}
    if len(dropped) == len(names):
        raise InputError("; ".join(notes) + "; no layer remains, so name others")
    return Chosen({name: layers[name] for name in names if name not in dropped}, notes)


def match_layers(model: nn.Module, patterns: Sequence[str], field: str, family: str) -> list[str]:
    """Return the names of the linear layers and convolutions that match a pattern.

    A pattern is a regular expression for the whole name, with or without the component, or the end of a name
    (`attn.to_q`).

    Raises:
        InputError: A pattern is not a regular expression or matches nothing.
    """
    return match(_layers(model), patterns, field, family)


def match(names: Iterable[str], patterns: Sequence[str], field: str, family: str) -> list[str]:
    """Do the same as `match_layers` on names of layers; keep their order."""
    layers = list(names)
    matched: set[str] = set()
    for pattern in patterns:
        found = [name for name in layers if _matches(name, pattern, field)]
        if not found:
            raise InputError(f"{field}: '{pattern}' matches no layer of {family}; {_nearest(pattern, layers)}")
        matched.update(found)
    return [name for name in layers if name in matched]


def _layers(model: nn.Module) -> dict[str, Layer]:
    """Return linear layers and convolutions, by name. Not grouped convolutions: no family has them in its blocks."""
    return {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    }


def is_linear(module: nn.Module) -> bool:
    """Whether a module only multiplies by its weight. A router of experts may be a `Linear` that also selects.

    See DECISIONS 57.
    """
    if not isinstance(module, nn.Linear):
        return False
    weights = dict(module.named_parameters(recurse=False))
    if type(module).forward is nn.Linear.forward or "weight" not in weights:  # a layer stored in fewer bits
        return True
    empty = {name: torch.empty_like(weight, device="meta") for name, weight in weights.items()}
    try:
        found = functional_call(module, empty, torch.empty(3, module.in_features, device="meta"))
    except RuntimeError:
        return False
    return isinstance(found, Tensor) and found.shape == (3, module.out_features)


def _family_layers(layers: Iterable[str], cfg: AdapterSection, targets: Targets) -> list[str]:
    tables = [targets.linear]
    if isinstance(cfg, ConvAdapter) and cfg.rank_of_convolutions is not None:
        tables.append(targets.conv)

    def is_recommended(name: str) -> bool:
        component, _, inside = name.partition(".")
        patterns = (pattern for table in tables for pattern in table.get(component, ()))
        return any(re.fullmatch(pattern, inside) for pattern in patterns)

    return [name for name in layers if not _is_other(name, targets) and is_recommended(name)]


def _is_other(name: str, targets: Targets) -> bool:
    inside = name.partition(".")[2]
    return any(re.fullmatch(rf"({pattern})(\..+)?", inside) for pattern in targets.others)


def _reason_against(name: str, layer: Layer, cfg: AdapterSection, kind: Kind, targets: Targets) -> str:
    inside = name.partition(".")[2]
    if any(re.fullmatch(pattern, f"{inside}.weight") for pattern in targets.never_trained):
        return "nothing in this kind of training reads its result"
    if _is_other(name, targets):
        return "model.train or adapter.modules_to_save trains it in another way, or not at all"
    if kind.whole_rows and any(re.fullmatch(pattern, inside) for pattern in targets.halves_swapped):
        return f"original files swap the halves of its rows, which {cfg.type} does not survive"
    if isinstance(layer, nn.Linear):
        return ""
    if isinstance(cfg, ConvAdapter) and cfg.rank_of_convolutions is None:
        return "convolutions need adapter.conv_rank"
    return kind.reason_against(layer, cfg)


def _fits(name: str, layer: Layer, cfg: AdapterSection, kind: Kind) -> bool:
    """Return False for a layer of one output, such as the gate of a shared expert, that no field names."""
    if weight_shape(layer)[0] > 1 or kind.any_rank:
        return True
    return isinstance(cfg, RankAdapter) and (
        cfg.rank == 1 or any(_matches(name, pattern, "adapter.rank_pattern") for pattern in cfg.rank_pattern)
    )


def _owners(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return {parameter: names of the modules that have it}."""
    owners: dict[Tensor, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter].append(name)
    return owners


def _reason_if_shared(name: str, layer: Layer, owners: Mapping[Tensor, Sequence[str]]) -> str:
    others = [owner for owner in owners[layer.weight] if owner != name]
    return f"{others[0]} shares its weight and would change with it" if others else ""


def layer_ranks(layers: Mapping[str, Layer], cfg: AdapterSection, kind: Kind) -> dict[str, int]:
    """Return each layer's rank: by `adapter.rank_pattern`, else the rank for convolutions or for linear layers. {} for
    an adapter without a rank.

    Raises:
        InputError: A pattern matches none of the layers, or a rank is larger than a layer.
    """
    if not isinstance(cfg, RankAdapter):
        return {}
    ranks = {name: _own_rank(layer, cfg) for name, layer in layers.items()}
    for pattern, rank in cfg.rank_pattern.items():
        field = "adapter.rank_pattern"
        ranks |= dict.fromkeys(match(layers, (pattern,), field, "the adapter"), (f"{field}.{pattern}", rank))
    if not kind.any_rank:
        _check_ranks(layers, ranks)
    return {name: rank for name, (_, rank) in ranks.items()}


def _own_rank(layer: Layer, cfg: RankAdapter) -> tuple[str, int]:
    """Return (field of the config, rank)."""
    if isinstance(layer, nn.Linear) or not isinstance(cfg, ConvAdapter) or cfg.conv_rank is None:
        return "adapter.rank", cfg.rank
    return "adapter.conv_rank", cfg.conv_rank


def _check_ranks(layers: Mapping[str, Layer], ranks: Mapping[str, tuple[str, int]]) -> None:
    """Refuse the rank that is too large for the smallest layer."""
    largest = {name: min(weight_shape(layer)) for name, layer in layers.items()}
    too_large = [name for name, (_, rank) in ranks.items() if rank > largest[name]]
    if not too_large:
        return
    name = min(too_large, key=lambda name: largest[name])
    field, rank = ranks[name]
    outputs, inputs = weight_shape(layers[name])
    raise InputError(
        f"{field}: {rank} is too large for '{name}', whose weight is {outputs} x {inputs}; at most {largest[name]}. "
        "Lower it, or give such layers their own in adapter.rank_pattern"
    )


def counted(names: Collection[str]) -> str:
    """Return '1 layer' or '3 layers'."""
    return f"{len(names)} layer{'s' if len(names) > 1 else ''}"


def _matches(name: str, pattern: str, field: str) -> bool:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise InputError(f"{field}: '{pattern}' is not a regular expression ({error})") from error
    inside = name.partition(".")[2]
    return any(expression.fullmatch(text) for text in (name, inside)) or name == pattern or name.endswith(f".{pattern}")


def _nearest(pattern: str, layers: Sequence[str]) -> str:
    """Name the layer nearest to a pattern, at the pattern's depth: 'attn.to_q' for 'attn.to_qq'."""
    depth = pattern.count(".") + 1
    endings = [".".join(name.split(".")[-depth:]) for name in layers]
    near = difflib.get_close_matches(pattern, sorted(set(endings)), 1, cutoff=0.0)
    if not near:
        return "the model has no linear layers"
    found = [ending for ending in endings if ending == near[0]]
    return f"nearest: '{near[0]}' ({counted(found)})"
