"""Conversion between the parameters of a model in training and `LayerAdapter`, which everything else works with."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trainer.adapters.kinds import KINDS, Kind
from trainer.adapters.layer import LayerAdapter
from trainer.config.sections import AdapterSection, RankAdapter
from trainer.run.manifest import RECIPE
from trainer.system.errors import InputError

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""{layer: (down, up)} of a lora."""
BaseWeight = Callable[[str], Tensor]
"""A layer's name -> its weight without the adapter, (out, in). Called for dora only."""
Shape = Sequence[int]


class TrainedAdapter(Mapping[str, LayerAdapter]):
    """The adapter in trained parameters: {layer, component first: its tensors}, read on access.

    Args:
        weights: By parameter name; parameters of other parts of the model are ignored.
        cfg: The adapter's section of the config.
        base: Returns a layer's weight.
        recipe: Recipe of the run that trained them (`manifest.RECIPE`).
        initial: What a lora started from and its base lacks (`adapter.init: pissa`): each layer is then the lora of
            twice the rank which adds the difference to the whole base.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        cfg: AdapterSection,
        base: BaseWeight,
        recipe: int = RECIPE,
        initial: Factors | None = None,
    ) -> None:
        self._weights, self._cfg, self._base, self._recipe = weights, cfg, base, recipe
        self._initial = initial or {}
        self._names: dict[str, dict[str, str]] = defaultdict(dict)
        for parameter in weights:
            for tensor, ending in KINDS[kind_of(cfg)].parameters.items():
                if parameter.endswith(f".{ending}"):
                    self._names[parameter.removesuffix(f".{ending}")][tensor] = parameter

    def __getitem__(self, layer: str) -> LayerAdapter:
        if layer not in self._names:
            raise KeyError(layer)
        tensors = {tensor: self._weights[parameter] for tensor, parameter in self._names[layer].items()}
        kind = kind_of(self._cfg)
        if kind == "dora":
            tensors["magnitude"] = row_lengths(self._base(layer)) + tensors["magnitude"]
        scale = scale_of(self._cfg, tensors, self._recipe)
        if layer in self._initial:
            down, up = self._initial[layer]
            # B A - B0 A0 as (B - B0) A + B0 (A - A0): what a format rounds off is then small against the update, not
            # against the singular values, which are far larger.
            tensors = {
                "down": torch.cat([tensors["down"], tensors["down"] - down]),
                "up": torch.cat([tensors["up"] - up, up], dim=1),
            }
        return LayerAdapter(kind, tensors, scale)

    def __contains__(self, layer: object) -> bool:
        return layer in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def parameters_of(
    layer: str, found: LayerAdapter, cfg: AdapterSection, shapes: Mapping[str, Shape], base: BaseWeight
) -> dict[str, Tensor]:
    """Convert a layer's adapter that was read from a file to this run's parameters.

    Args:
        layer: The layer's name, component first.
        found: The adapter in the file.
        cfg: This run's adapter.
        shapes: {name: shape} of all parameters of this run's adapter.
        base: Returns a layer's weight.

    Returns:
        {parameter: value}.

    Raises:
        InputError: The file's adapter is of another kind or size, or this run's adapter does not change the layer. The
            message names the layer, both shapes and the setting that fits.
    """
    kind = kind_of(cfg)
    names = {tensor: f"{layer}.{ending}" for tensor, ending in KINDS[kind].parameters.items()}
    wanted = {tensor: tuple(shapes[name]) for tensor, name in names.items() if name in shapes}
    if found.kind != kind:
        raise InputError(
            f"adapter.start: '{layer}' is {found.kind} in the file, but adapter.type is {cfg.type}; "
            f"set adapter.type: {found.kind}"
        )
    if not wanted:
        raise InputError(f"adapter.start: '{layer}' has an adapter in the file only; name it in adapter.targets")
    there = {tensor: tuple(value.shape) for tensor, value in found.tensors.items()}
    if there != wanted:
        fits_model = _weight_size(kind, there) == _weight_size(kind, wanted)
        raise InputError(
            f"adapter.start: '{layer}' has {_listed(there)} in the file, but {_listed(wanted)} in this run; "
            + (f"set {_settings(kind, there)}" if fits_model else "the file belongs to another model")
        )
    tensors = {tensor: value.float() for tensor, value in found.tensors.items()}
    for tensor in KINDS[kind].scaled:
        if tensor in tensors:
            tensors[tensor] = tensors[tensor] * (found.scale / scale_of(cfg, tensors))
    if kind == "dora":
        tensors["magnitude"] = tensors["magnitude"] - row_lengths(base(layer))
    return {names[tensor]: value for tensor, value in tensors.items()}


def kind_of(cfg: AdapterSection) -> Kind:
    """Return the kind of one layer's adapter; locon is lora."""
    return "lora" if cfg.type == "locon" else cfg.type  # type: ignore[return-value]


def scale_of(cfg: AdapterSection, tensors: Mapping[str, Tensor], recipe: int = RECIPE) -> float:
    """Return the factor of a layer's update: alpha / rank, or alpha / sqrt(rank); 1 for rotations and, as in LyCORIS,
    for a lokr of two whole matrices.

    Args:
        cfg: The adapter's section of the config.
        tensors: The layer's tensors.
        recipe: Recipe of the run (`manifest.RECIPE`).
    """
    is_whole = "w1" in tensors and "w2" in tensors and recipe > 1
    if not isinstance(cfg, RankAdapter) or is_whole:
        return 1.0
    return cfg.scale_at(tensors["down"].shape[0] if "down" in tensors else cfg.rank)


def row_lengths(weight: Tensor) -> Tensor:
    """Return the length of each row, (out,), fp32."""
    lengths: Tensor = weight.detach().float().norm(dim=1)
    return lengths


def _listed(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {' x '.join(str(size) for size in shape)}" for name, shape in sorted(shapes.items()))


def _weight_size(kind: Kind, shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """Return (out, in * kernel) of the layer that tensors of these shapes fit; (out,) of a rotated layer."""
    match kind:
        case "lora" | "dora":
            return shapes["up"][0], math.prod(shapes["down"][1:])
        case "loha":
            return shapes["w1_a"][0], shapes["w1_b"][1]
        case "lokr":
            (a, b), (c, d) = (_factor_size(shapes, name) for name in ("w1", "w2"))
            return a * c, b * d
        case "diag-oft" | "boft":
            return (shapes["blocks"][-3] * shapes["blocks"][-1],)


def _factor_size(shapes: Mapping[str, Shape], name: str) -> tuple[int, int]:
    if name in shapes:
        return shapes[name][0], math.prod(shapes[name][1:])
    return shapes[f"{name}_a"][0], shapes[f"{name}_b"][1]


def _settings(kind: Kind, there: Mapping[str, Shape]) -> str:
    """Return the settings that give a run an adapter of these shapes."""
    match kind:
        case "lora" | "dora":
            return _rank_setting(there["down"][0], len(there["down"]) == 4)
        case "loha":
            return _rank_setting(there["w1_b"][0], False)
        case "lokr":
            return _lokr_settings(there)
        case "diag-oft":
            return f"adapter.block_size: {there['blocks'][-1]}"
        case "boft":
            return f"adapter.block_size: {there['blocks'][-1]} and adapter.num_stages: {there['blocks'][0]}"


def _rank_setting(rank: int, conv: bool) -> str:
    return f"adapter.conv_rank: {rank}" if conv else f"adapter.rank: {rank}, or adapter.rank_pattern for this layer"


def _lokr_settings(there: Mapping[str, Shape]) -> str:
    settings = [f"adapter.factor: {max(_factor_size(there, 'w1'))}"]
    ranks = [there[name][0] for name in ("w1_b", "w2_b") if name in there]
    settings.append(f"adapter.rank: {ranks[0]}" if ranks else "adapter.full_matrix: true")
    settings += ["adapter.decompose_both: true"] if "w1_a" in there else []
    return ", ".join(settings)
