"""Adapters with random tensors for every layer a family's adapters change by default, on a base of random weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from peft.tuners.lokr.layer import factorization
from torch import Tensor, nn

from trainer.adapters.formats.reader import read_adapter
from trainer.adapters.formats.writer import AdapterFile, Naming, adapter_files
from trainer.adapters.layer import LayerAdapter
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models import families
from trainer.models.base import ModelFamily
from trainer.models.state_dict import naming
from trainer.rng import generator

KINDS: Mapping[str, str] = {
    "lora": "lora",
    "locon": "lora",
    "dora": "dora",
    "loha": "loha",
    "lokr": "lokr",
    "lokr decomposed": "lokr",
    "lokr whole": "lokr",
    "diag-oft": "diag-oft",
    "boft": "boft",
    "boft in 2 stages": "boft",
}
"""{adapter: its kind}"""
WITH_CONVS = ("locon", "loha", "lokr", "lokr decomposed", "lokr whole")
SCALE = 0.5


@dataclass(frozen=True)
class Example:
    """A family's tiny model with random weights. layers: the linear ones and convolutions that adapters change."""

    family: ModelFamily

    @cached_property
    def naming(self) -> Naming:
        return naming(self.family)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights of all linear layers and convolutions of all components."""
        return {
            f"{component}.{name}": tuple(module.weight.shape)
            for component in self.family.components
            for name, module in self.family.build(component).named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d)
        }

    def weight(self, name: str) -> Tensor:
        """A layer's weight: rows of about length 1."""
        shape = self.shapes[name]
        return torch.randn(shape, generator=generator("weight", name)) / torch.Size(shape[1:]).numel() ** 0.5

    def layer(self, adapter: str, name: str) -> LayerAdapter:
        return layer_adapter(adapter, name, self.weight(name))

    def targets(self, convs: bool) -> list[str]:
        patterns = [self.family.adapter_targets] + ([self.family.conv_targets] if convs else [])
        return [
            name
            for name in self.shapes
            if any(
                re.fullmatch(pattern, name.partition(".")[2])
                for by_component in patterns
                for pattern in by_component.get(name.partition(".")[0], ())
            )
        ]

    def adapter(self, adapter: str, components: tuple[str, ...] | None = None) -> dict[str, LayerAdapter]:
        """{layer: adapter}, of the denoiser if no components are named."""
        chosen = components or self.family.components[:1]
        return {
            name: layer_adapter(adapter, name, self.weight(name))
            for name in self.targets(convs=adapter in WITH_CONVS)
            if name.partition(".")[0] in chosen
        }

    def files(
        self, layers: Mapping[str, LayerAdapter], format: str, dtype: torch.dtype = torch.float32
    ) -> list[AdapterFile]:
        return adapter_files(layers, format, self.naming, self.weight, dtype)

    def read(self, file: Path) -> dict[str, LayerAdapter]:
        return read_adapter(file, self.shapes, self.naming, self.weight)

    def model(self) -> nn.ModuleDict:
        """All components with the weights of `weight` and nothing else."""
        model = nn.ModuleDict({name: self.family.build(name).to_empty(device="cpu") for name in self.family.components})
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
            for name in self.shapes:
                model.get_submodule(name).weight.copy_(self.weight(name))
        return model.requires_grad_(False).eval()

    def error(self, found: Mapping[str, Tensor], layers: Mapping[str, LayerAdapter]) -> float:
        """Worst ||found - merged|| / ||merged - base|| over the layers. found: {layer: weight with the adapter}."""
        assert found.keys() == layers.keys()
        return max(
            relative(found[name], layer.merged(self.weight(name)), self.weight(name)) for name, layer in layers.items()
        )


def relative(found: Tensor, merged: Tensor, base: Tensor) -> float:
    return float((found.float() - merged).norm() / (merged - base).norm())


@cache
def cached_example(name: str, cache_folder: Path) -> Example:
    config = ModelConfig(family=name, path="tiny")
    return Example(families.get(name)(config, ObjectiveConfig(), cache_folder))


def layer_adapter(adapter: str, name: str, weight: Tensor) -> LayerAdapter:
    """An update of about the size of the weight."""
    numbers = generator("adapter", adapter, name)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers)

    kind = KINDS[adapter]
    rank = 6 if name.endswith("to_q") else 4
    out, inputs, kernel = weight.shape[0], weight[0].numel(), weight.shape[2:]
    match kind:
        case "lora" | "dora":
            tensors = {
                "down": random(rank, *weight.shape[1:]) / inputs**0.5,
                "up": random(out, rank, *[1] * len(kernel)) / rank**0.5,
            }
            if kind == "dora":
                tensors["magnitude"] = weight.flatten(1).norm(dim=1) * (1 + 0.3 * random(out).clamp(-2, 2))
        case "loha":
            tensors = {f"{w}_a": random(out, rank) for w in ("w1", "w2")}
            tensors |= {"w1_b": random(rank, inputs) / inputs**0.5, "w2_b": random(rank, inputs)}
        case "lokr":
            return LayerAdapter(kind, _lokr(adapter, weight, random), SCALE)
        case "diag-oft":
            return LayerAdapter(kind, {"blocks": 0.1 * random(out // 4, 4, 4)})
        case "boft":
            block = next(b for b in range(4, out + 1, 2) if out % b == 0 and (out // b).bit_count() == 1)
            stages = 2 if adapter == "boft in 2 stages" else (out // block).bit_length()
            return LayerAdapter(kind, {"blocks": 0.1 * random(stages, out // block, block, block)})
    return LayerAdapter(kind, tensors, SCALE)


def _lokr(adapter: str, weight: Tensor, random) -> dict[str, Tensor]:
    """As peft would split the layer with factor 4."""
    rank, kernel = 2, weight.shape[2:]
    (a, c), (b, d) = (factorization(size, 4) for size in weight.shape[:2])
    scale = weight[0].numel() ** -0.5
    tensors = {"w1": random(a, b)}
    if adapter == "lokr decomposed" and rank < max(a, b) / 2:
        tensors = {"w1_a": random(a, rank), "w1_b": random(rank, b)}
    if adapter == "lokr whole" or rank >= max(c, d) / 2:
        return tensors | {"w2": random(c, d, *kernel) * scale}
    return tensors | {"w2_a": random(c, rank), "w2_b": random(rank, d * kernel.numel()) * scale}


def saved(files: list[AdapterFile], folder: Path) -> list[Path]:
    """Write files to an empty folder."""
    folder.mkdir(parents=True)
    paths = [file.path(folder, "adapter") for file in files]
    for file, path in zip(files, paths, strict=True):
        file.write(path, {})
    return paths
