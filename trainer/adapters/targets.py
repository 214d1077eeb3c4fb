"""Chooses the layers that an adapter changes, and their ranks or blocks, before anything is built."""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainer.adapters.replace import Layer, weight_shape
from trainer.config.sections import (
    AdapterSection,
    BoftAdapter,
    ConvAdapter,
    DiagOftAdapter,
    DoraAdapter,
    LoconAdapter,
    LokrAdapter,
    RankAdapter,
)
from trainer.system.errors import InputError

WHOLE_ROWS = (DoraAdapter, DiagOftAdapter, BoftAdapter)
"""Adapters whose effect on a row of a weight depends on the whole row: they cannot follow rows that are swapped."""


@dataclass(frozen=True)
class Targets:
    """The layers that a family recommends to change.

    Attributes:
        linear: {component: patterns of linear layers}.
        conv: {component: patterns of convolutions}.
        halves_swapped: Patterns of layers that adapters of whole rows must leave alone.
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


def choose_layers(model: nn.ModuleDict, cfg: AdapterSection, targets: Targets, family: str) -> Chosen:
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
        reason = _reason_against(name, layers[name], cfg, targets) or _reason_if_shared(name, layers[name], owners)
        if not named and not reason and not _fits(name, layers[name], cfg):
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
    """Whether a module only multiplies by its weight. A router of experts may be a `Linear` that also selects."""
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
    if isinstance(cfg, ConvAdapter) and _conv_rank(cfg) is not None:
        tables.append(targets.conv)

    def is_recommended(name: str) -> bool:
        component, _, inside = name.partition(".")
        patterns = (pattern for table in tables for pattern in table.get(component, ()))
        return any(re.fullmatch(pattern, inside) for pattern in patterns)

    return [name for name in layers if not _is_other(name, targets) and is_recommended(name)]


def _is_other(name: str, targets: Targets) -> bool:
    inside = name.partition(".")[2]
    return any(re.fullmatch(rf"({pattern})(\..+)?", inside) for pattern in targets.others)


def _reason_against(name: str, layer: Layer, cfg: AdapterSection, targets: Targets) -> str:
    inside = name.partition(".")[2]
    if any(re.fullmatch(pattern, f"{inside}.weight") for pattern in targets.never_trained):
        return "nothing in this kind of training reads its result"
    if _is_other(name, targets):
        return "model.train or adapter.modules_to_save trains it in another way, or not at all"
    if isinstance(cfg, WHOLE_ROWS) and any(re.fullmatch(pattern, inside) for pattern in targets.halves_swapped):
        return f"original files swap the halves of its rows, which {cfg.type} does not survive"
    if isinstance(layer, nn.Linear):
        return ""
    if isinstance(cfg, DoraAdapter):
        return "dora changes linear layers only"
    if isinstance(cfg, ConvAdapter) and _conv_rank(cfg) is None:
        return "convolutions need adapter.conv_rank"
    return ""


def _fits(name: str, layer: Layer, cfg: AdapterSection) -> bool:
    """Return False for a layer of one output, such as the gate of a shared expert, that no field names."""
    if weight_shape(layer)[0] > 1 or isinstance(cfg, LokrAdapter):
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


def layer_ranks(layers: Mapping[str, Layer], cfg: RankAdapter) -> dict[str, int]:
    """Return each layer's rank: by `adapter.rank_pattern`, else the rank for convolutions or for linear layers.

    Raises:
        InputError: A pattern matches none of the layers, or a rank is larger than a layer. lokr accepts any rank: its
            factors are then whole.
    """
    ranks = {name: _own_rank(layer, cfg) for name, layer in layers.items()}
    for pattern, rank in cfg.rank_pattern.items():
        field = "adapter.rank_pattern"
        ranks |= dict.fromkeys(match(layers, (pattern,), field, "the adapter"), (f"{field}.{pattern}", rank))
    if not isinstance(cfg, LokrAdapter):
        _check_ranks(layers, ranks)
    return {name: rank for name, (_, rank) in ranks.items()}


def _own_rank(layer: Layer, cfg: RankAdapter) -> tuple[str, int]:
    """Return (field of the config, rank)."""
    if isinstance(layer, nn.Linear) or not isinstance(cfg, ConvAdapter) or cfg.conv_rank is None:
        return "adapter.rank", cfg.rank
    return "adapter.conv_rank", cfg.conv_rank


def _conv_rank(cfg: ConvAdapter) -> int | None:
    return cfg.rank if isinstance(cfg, LoconAdapter) and cfg.conv_rank is None else cfg.conv_rank


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


def diag_oft_shapes(layers: Mapping[str, Layer], cfg: DiagOftAdapter) -> dict[str, tuple[int, ...]]:
    """Return the shape (n, b, b) of each layer's blocks.

    b is the smallest divisor of the layer's outputs that is at least the requested block size.

    Raises:
        InputError: The requested block size is larger than the layer.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in layers.items():
        outputs, _ = weight_shape(layer)
        size = _block_size(name, outputs, [b for b in range(2, outputs + 1) if outputs % b == 0], cfg.block_size)
        shapes[name] = (outputs // size, size, size)
    return shapes


def boft_shapes(layers: Mapping[str, Layer], cfg: BoftAdapter) -> dict[str, tuple[int, ...]]:
    """Return the shape (stages, n, b, b) of each layer's blocks.

    b is the smallest even number, at least the requested block size, for which n is a power of two. There are as many
    stages as requested, or else as many as connect every output with every other: log2(n) + 1.

    Raises:
        InputError: No b fits a layer, or a layer has fewer stages than requested.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in layers.items():
        outputs, _ = weight_shape(layer)
        powers = [2**p for p in range(outputs.bit_length())]
        sizes = sorted(outputs // n for n in powers if outputs % (2 * n) == 0)
        size = _block_size(name, outputs, sizes, cfg.block_size)
        n = outputs // size
        most = int(math.log2(n)) + 1
        if cfg.num_stages is not None and cfg.num_stages > most:
            raise InputError(
                f"adapter.num_stages: {cfg.num_stages} is too many for '{name}': its {outputs} outputs in blocks of "
                f"{size} have {most}; lower it or adapter.block_size, or leave it empty for as many as each layer has"
            )
        shapes[name] = (cfg.num_stages or most, n, size, size)
    return shapes


def block_notes(shapes: Mapping[str, tuple[int, ...]], requested: int) -> tuple[str, ...]:
    """Return notes for the log about layers with larger blocks than requested."""
    other: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, shape in shapes.items():
        size = shape[-1]
        if size != requested:
            other[size, shape[-3] * size].append(name)
    return tuple(
        f"adapter.block_size: {size} instead of {requested} in {counted(names)} with {outputs} outputs, as '{names[0]}'"
        for (size, outputs), names in sorted(other.items())
    )


def counted(names: Collection[str]) -> str:
    """Return '1 layer' or '3 layers'."""
    return f"{len(names)} layer{'s' if len(names) > 1 else ''}"


def _block_size(name: str, outputs: int, sizes: Sequence[int], requested: int) -> int:
    """Return the smallest of the sizes that is at least the requested one."""
    fitting = [size for size in sizes if size >= requested]
    if fitting:
        return fitting[0]
    if not sizes:
        raise InputError(
            f"adapter.block_size: '{name}' has {outputs} outputs, which no block size divides; "
            "leave it out in adapter.targets"
        )
    raise InputError(
        f"adapter.block_size: {requested} is too large for '{name}' with {outputs} outputs; "
        f"the nearest that work are {', '.join(str(size) for size in sizes[-3:])}"
    )


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
