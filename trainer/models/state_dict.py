"""A model as tensors without modules: the base's tensors on disk and the trained ones, read one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from trainer.adapters.formats.writer import Naming
from trainer.adapters.layer import LayerAdapter
from trainer.adapters.state import Factors, TrainedAdapter
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.models.base import ModelFamily
from trainer.weights.files import WeightFiles, read_tensor


def naming(family: ModelFamily) -> Naming:
    """The names that a family's adapter files use."""
    layouts = {component: family.layout(component) for component in family.components}
    return Naming(
        family.kohya_prefixes,
        family.kohya_by_path,
        layouts,
        family.diffusers_adapters,
        family.peft_fields,
        family.modules_in_peft,
    )


def component_of(layer: str) -> str:
    """The component of a layer: `transformer` for `transformer.proj_out`."""
    return layer.partition(".")[0]


class BaseWeights:
    """The tensors of a family's components on disk. Every call reads again; no tensor is kept in memory."""

    def __init__(self, family: ModelFamily) -> None:
        self._family = family
        self._files: dict[str, WeightFiles] = {}

    def tensor(self, component: str, name: str) -> Tensor:
        """One tensor, in the type it is stored in."""
        return read_tensor(self._files_of(component).entries[name])

    def layer(self, name: str) -> Tensor:
        """The weight of a layer. name: with its component, as `transformer.proj_out`."""
        component, _, inside = name.partition(".")
        return self.tensor(component, f"{inside}.weight")

    def layer_shapes(self, components: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """{layer with its component: shape of its weight} for linear layers, convolutions and embeddings."""
        return {
            f"{component}.{name.removesuffix('.weight')}": shape
            for component in components
            for name, shape in self.shapes(component).items()
            if name.endswith(".weight") and len(shape) in (2, 4)
        }

    def layer_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the weight that `layer` reads."""
        component, _, inside = name.partition(".")
        return self._files_of(component).entries[f"{inside}.weight"].shape

    def shapes(self, component: str) -> dict[str, tuple[int, ...]]:
        """{name: shape} of all tensors of a component."""
        return {name: entry.shape for name, entry in self._files_of(component).entries.items()}

    def _files_of(self, component: str) -> WeightFiles:
        if component not in self._files:
            self._files[component] = self._family.weights(component)
        return self._files[component]


class TrainedModel:
    """Every tensor as trained: from `weights`, or from the base with the layer's adapter merged in fp32.

    Args:
        cfg: The config of the run.
        base: The tensors of the base.
        weights: The trained tensors.
        initial: As for `TrainedAdapter`.
    """

    def __init__(
        self,
        cfg: RunConfig,
        base: BaseWeights,
        weights: Mapping[str, Tensor],
        initial: Factors | None = None,
    ) -> None:
        self._base = base
        self._weights = weights
        self.layers: Mapping[str, LayerAdapter] = (
            {} if isinstance(cfg.adapter, NoAdapter) else TrainedAdapter(weights, cfg.adapter, base.layer, initial)
        )

    def tensor(self, component: str, name: str) -> Tensor:
        """A tensor of a component by its name in the module, in its stored or merged type."""
        whole = f"{component}.{name}"
        if whole in self._weights:
            return self._weights[whole]
        tensor = self._base.tensor(component, name)
        layer = whole.removesuffix(".weight")
        merges = layer != whole and layer in self.layers
        return self.layers[layer].merged(tensor) if merges else tensor
