"""A model as tensors, without modules: the base's on disk, and what training made of them, one at a time."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from trainer.adapters.formats import Naming
from trainer.adapters.layer import LayerAdapter
from trainer.adapters.state import TrainedAdapter
from trainer.config import NoAdapter, RunConfig
from trainer.families.base import ModelFamily
from trainer.weights import WeightFiles, read_tensor


def naming(family: ModelFamily) -> Naming:
    """What writing and reading adapter files takes of a family."""
    layouts = {component: family.layout(component) for component in family.components}
    return Naming(family.kohya_prefixes, family.kohya_by_path, layouts, family.diffusers_adapters)


def layer_shapes(family: ModelFamily) -> dict[str, tuple[int, ...]]:
    """{layer with its component: shape of its weight} of the linear layers and convolutions of the live components."""
    return {
        f"{component}.{name}": tuple(module.weight.shape)
        for component in family.live
        for name, module in family.build(component).named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def component_of(layer: str) -> str:
    """`transformer` of `transformer.proj_out`."""
    return layer.partition(".")[0]


class BaseWeights:
    """The tensors of a family's components on disk; nothing is kept."""

    def __init__(self, family: ModelFamily) -> None:
        self._family = family
        self._files: dict[str, WeightFiles] = {}

    def names(self, component: str) -> tuple[str, ...]:
        """All tensors of a component, by their names in the module."""
        return tuple(self._files_of(component).entries)

    def tensor(self, component: str, name: str) -> Tensor:
        """One tensor, in the type it is stored in."""
        return read_tensor(self._files_of(component).entries[name])

    def layer(self, name: str) -> Tensor:
        """The weight of a layer, named with its component: `transformer.proj_out`."""
        component, _, inside = name.partition(".")
        return self.tensor(component, f"{inside}.weight")

    def shapes(self, component: str) -> dict[str, tuple[int, ...]]:
        """{name: shape} of all tensors of a component."""
        return {name: entry.shape for name, entry in self._files_of(component).entries.items()}

    def _files_of(self, component: str) -> WeightFiles:
        if component not in self._files:
            self._files[component] = self._family.weights(component)
        return self._files[component]


class TrainedModel:
    """Every tensor as trained: from `weights`, or the base's, with the layer's adapter merged in fp32."""

    def __init__(self, cfg: RunConfig, base: BaseWeights, weights: Mapping[str, Tensor]) -> None:
        self._base = base
        self._weights = weights
        self.layers: Mapping[str, LayerAdapter] = (
            {} if isinstance(cfg.adapter, NoAdapter) else TrainedAdapter(weights, cfg.adapter, base.layer)
        )

    def tensor(self, component: str, name: str) -> Tensor:
        """A tensor of a component, by its name in the module, in the type it is stored or merged in."""
        whole = f"{component}.{name}"
        if whole in self._weights:
            return self._weights[whole]
        tensor = self._base.tensor(component, name)
        layer = whole.removesuffix(".weight")
        merges = layer != whole and layer in self.layers
        return self.layers[layer].merged(tensor) if merges else tensor
