"""The interface of an adapter: `Kind`, how it is trained, merged and written; `Reader`, how its files are read.

A kind is one file of this folder with an instance of each, listed in `kinds.py`. The two share no names and no
formulas, because every export is read again: what `Kind` writes under a wrong name `Reader` must not understand.
`tests/test_architecture.py` holds the files to that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.adapters.dropout import SampleDropout
from trainer.adapters.engine import BaseTunerLayer, PeftConfig
from trainer.adapters.replace import Layer, Make
from trainer.config.sections import AdapterSection, RankAdapter

SHORTEST = math.sqrt(torch.finfo(torch.float32).tiny)
"""Smallest length of a row that is divided by: the factor of a row of zeros is finite, and the row stays zero."""

Tensors = Mapping[str, Tensor]
"""{tensor: value} of one layer's adapter."""
Shape = Sequence[int]
Shapes = Mapping[str, Shape]
"""{tensor: its shape} of one layer's adapter."""
Weight = Callable[[], Tensor]
"""Returns the weight of the adapter's layer, (out, in). Called only where it is needed."""


class Kind(ABC):
    """One kind of adapter: its layers, its parameters, its formula, and the tensors of its files.

    Attributes:
        name: In messages, and of its layers' adapters (`LayerAdapter.kind`).
        sections: Sections of the config that train it.
        parameters: {tensor: the parameter's name below its layer}.
        zero: Tensors that start at zero, so that the adapter starts without an effect.
        scaled: Tensors that take a factor of the update: the one of them that the adapter has. Empty where it has none.
        adds: Whether the update is the same whatever the weight to which it is added.
        whole_rows: Whether its effect on a row of the weight depends on the whole row, so that it cannot follow halves
            of rows that are swapped.
        any_rank: Whether it takes a rank that is larger than a layer.
        lycoris: {tensor: its name in LyCORIS' and kohya's files}.
        peft: {tensor: its name in peft's and diffusers' files}; empty where they cannot carry the kind.
        kept_exact: How the names of small tensors begin that are fp32 in every file.
        is_corrected: Whether ComfyUI needs other values than LyCORIS (`corrected`).
    """

    name: ClassVar[str]
    sections: ClassVar[tuple[type[AdapterSection], ...]]
    parameters: ClassVar[Mapping[str, str]]
    zero: ClassVar[frozenset[str]]
    scaled: ClassVar[tuple[str, ...]] = ()
    adds: ClassVar[bool] = True
    whole_rows: ClassVar[bool] = False
    any_rank: ClassVar[bool] = False
    lycoris: ClassVar[Mapping[str, str]]
    peft: ClassVar[Mapping[str, str]] = {}
    kept_exact: ClassVar[tuple[str, ...]] = ()
    is_corrected: ClassVar[bool] = False

    # In the model

    @abstractmethod
    def maker(
        self, cfg: AdapterSection, layers: Mapping[str, Layer], ranks: Mapping[str, int]
    ) -> tuple[Make, tuple[str, ...]]:
        """Return the function that makes each layer, and notes for the log.

        Args:
            cfg: The adapter's section of the config.
            layers: {name: layer} to change.
            ranks: {name: rank}; empty for an adapter without a rank.

        Raises:
            InputError: A size does not fit a layer; the message names it and what would work.
        """

    def reason_against(self, layer: Layer, cfg: AdapterSection) -> str:
        """Return why this layer, a convolution, cannot be changed; empty where it can."""
        return ""

    def saves_no_activations(self, module: nn.Module) -> bool:
        """Whether autograd saves only the inputs of a module of this kind. module: any of the model."""
        return False

    def initial_value(self, tensor: str, shape: Shape, numbers: torch.Generator) -> Tensor:
        """Return the start value of a parameter that is not one of `zero`, fp32.

        As in peft, Kaiming-uniform with a = sqrt(5): uniform within 1 / sqrt(fan_in).
        """
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        return (torch.rand(*shape, generator=numbers) * 2 - 1) * bound

    def scale(self, cfg: AdapterSection, tensors: Tensors) -> float:
        """Return the factor of a layer's update."""
        return 1.0

    def from_parameters(self, parameters: Tensors, weight: Weight) -> Tensors:
        """Return the layer's tensors from its trained parameters, by tensor."""
        return parameters

    def to_parameters(self, tensors: Tensors, weight: Weight) -> Tensors:
        """Return the layer's parameters, by tensor, from its tensors; the reverse of `from_parameters`."""
        return tensors

    # As numbers

    @abstractmethod
    def merge(self, weight: Tensor, tensors: Tensors, scale: float) -> None:
        """Put the adapter into a weight, in place.

        Args:
            weight: (out, in * kernel), fp32.
            tensors: The layer's tensors.
            scale: Factor of the update.
        """

    def update(self, tensors: Tensors, scale: float) -> Tensor:
        """Return what is added to the weight, (out, ...), fp32.

        Raises:
            ValueError: The kind adds nothing.
        """
        raise ValueError(f"{self.name} rotates a weight and adds nothing to it")

    @abstractmethod
    def weight_size(self, shapes: Shapes) -> tuple[int, ...]:
        """Return (out, in * kernel) of the layer that tensors of these shapes fit; (out,) where any inputs fit."""

    @abstractmethod
    def settings(self, shapes: Shapes) -> str:
        """Return the settings that give a run an adapter of these shapes, for a message."""

    # In files; tensors are at scale 1

    def alpha(self, tensors: Tensors) -> int:
        """Return the alpha that means scale 1: the rank; 0 where a file must have the key and it means nothing."""
        return 0

    def lycoris_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return {end of the name in the file: tensor}, without alpha, in the shapes that LyCORIS builds."""
        return {name: tensors[tensor] for tensor, name in self.lycoris.items() if tensor in tensors}

    def lycoris_refusal(self, tensors: Tensors) -> tuple[str, str] | None:
        """Return why LyCORIS itself, unlike ComfyUI, cannot read this adapter, and what to use; None where it can."""
        return None

    def peft_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return {end of the name in the file: tensor} for peft and diffusers."""
        return {name: tensors[tensor] for tensor, name in self.peft.items() if tensor in tensors}

    def peft_config(
        self, layers: Sequence[Tensors], sizes: Callable[[], Sequence[Shape]], shared: dict[str, Any]
    ) -> PeftConfig:
        """Return the config with which peft builds the layers in the shapes of their tensors.

        Args:
            layers: The layers' tensors.
            sizes: Returns the shapes of the layers' weights, in the same order.
            shared: Fields of all kinds for the config's constructor; `r` is rank and alpha of most layers.

        Raises:
            InputError: No config builds them.
        """
        raise NotImplementedError

    def peft_rank(self, tensors: Tensors) -> int:
        """Return the layer's rank for peft."""
        return self.alpha(tensors)

    def corrected(self, tensors: Tensors, weight: Tensor) -> dict[str, Tensor]:
        """Return {end of the name: tensor} of what ComfyUI needs in other values than LyCORIS."""
        return {}

    def exact_rank(self, tensors: Tensors) -> int | None:
        """Return the rank of the lora that equals the adapter; None where there is none or none is needed."""
        return None

    def exact_lora(self, tensors: Tensors, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return (down, up) of that lora as matrices. shape: of the layer's weight."""
        raise NotImplementedError

    def joined(self, parts: Sequence[tuple[int, Tensors | None]], halves_swapped: bool) -> Tensors:
        """Return one adapter for layers whose rows are stacked. parts: (outputs, tensors) of each; None: no adapter."""
        raise NotImplementedError


def shapes_of(tensors: Tensors) -> dict[str, torch.Size]:
    """Return {tensor: its shape}."""
    return {name: tensor.shape for name, tensor in tensors.items()}


class RankKind(Kind):
    """A kind whose size is a rank; its section is a `RankAdapter`."""

    def maker(
        self, cfg: AdapterSection, layers: Mapping[str, Layer], ranks: Mapping[str, int]
    ) -> tuple[Make, tuple[str, ...]]:
        assert isinstance(cfg, RankAdapter)

        def make(name: str, layer: Layer) -> BaseTunerLayer:
            dropout = SampleDropout(cfg.dropout, name) if cfg.dropout else nn.Identity()
            return self.layer(layer, cfg, ranks[name], cfg.scale_at(ranks[name]), dropout)

        return make, self.notes(layers, cfg, ranks)

    @abstractmethod
    def layer(self, layer: Layer, cfg: Any, rank: int, scale: float, dropout: nn.Module) -> BaseTunerLayer:
        """Make a layer. cfg: the kind's own section."""

    def notes(self, layers: Mapping[str, Layer], cfg: Any, ranks: Mapping[str, int]) -> tuple[str, ...]:
        """Return notes for the log."""
        return ()

    def scale(self, cfg: AdapterSection, tensors: Tensors) -> float:
        assert isinstance(cfg, RankAdapter)
        return cfg.scale

    def merge(self, weight: Tensor, tensors: Tensors, scale: float) -> None:
        weight += self.update(tensors, scale).flatten(1)


class Reader(ABC):
    """How one kind's tensors are known in files of this and other programs.

    Attributes:
        kind: The kind's name.
        styles: {end of a key: tensor}, for each way to name them. A file may mix them.
        complete: Sets of tensors that make an adapter.
        products: Pairs of tensors that are multiplied: the first has as many columns as the second has rows.
        equal: (tensor, tensor, dim) that must have the same size.
        kernels: Tensors that may have more than two dims, for a convolution.
        vectors: Tensors of one number per output of the layer.
        by_rows: Tensors with a row per output of the layer, for a kind that can be split by rows.
        is_scaled: Whether alpha / rank is a factor of the update.
    """

    kind: ClassVar[str]
    styles: ClassVar[tuple[Mapping[str, str], ...]]
    complete: ClassVar[tuple[tuple[str, ...], ...]]
    products: ClassVar[tuple[tuple[str, str], ...]] = ()
    equal: ClassVar[tuple[tuple[str, str, int], ...]] = ()
    kernels: ClassVar[tuple[str, ...]] = ()
    vectors: ClassVar[tuple[str, ...]] = ()
    by_rows: ClassVar[tuple[str, ...]] = ()
    is_scaled: ClassVar[bool] = True

    @property
    def ends(self) -> dict[str, str]:
        """{end of a key: tensor} of all styles."""
        return {end: tensor for style in self.styles for end, tensor in style.items()}

    def is_of(self, tensors: Tensors) -> bool:
        """Whether tensors with ends of this kind are an adapter of it, and not of a later one in `kinds.READERS`."""
        return True

    def named(self, layer: str, tensors: Tensors) -> dict[str, Tensor]:
        """Return the tensors that the kind's formula takes, from those of the file.

        Raises:
            InputError: They mean something that this program does not have. layer: its name in the file.
        """
        return dict(tensors)

    def has_form(self, tensor: str, shape: Shape) -> bool:
        """Whether a tensor may have such a shape."""
        return len(shape) == (1 if tensor in self.vectors else 2) or (len(shape) > 2 and tensor in self.kernels)

    def rank(self, tensors: Tensors) -> int | None:
        """Return the rank by which alpha is divided; None where the update is not scaled."""
        return None

    @abstractmethod
    def size(self, tensors: Tensors) -> tuple[int, int | None]:
        """Return rows and columns of the weight that the adapter fits; None where any number of columns fits."""

    def bounded(self, tensors: Tensors, alpha: float) -> dict[str, Tensor]:
        """Return the tensors of an adapter that is not scaled, as its alpha bounds them."""
        return dict(tensors)

    def part(self, tensors: Tensors) -> dict[str, Tensor] | None:
        """Return what is left of one of several layers that a file has as one; None where it does nothing."""
        return dict(tensors)

    def fitted(self, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
        """Return the tensors with as many dims as the layer's weight, whose shape is given."""
        return dict(tensors)

    def may_be_corrected(self, ends: Collection[str]) -> bool:
        """Whether tensors with these ends of keys are those of `Kind.corrected`, in a file that was corrected."""
        return False

    def uncorrected(self, tensors: Tensors, weight: Tensor, turned: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a file that was corrected for ComfyUI (`Kind.corrected`).

        Args:
            tensors: Those of the file.
            weight: The layer's weight, (out, in * kernel), fp32.
            turned: The weight plus the update.
        """
        return dict(tensors)
