"""The loss of one pass, and the objective that computes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from trainer.config.schema import RunConfig
from trainer.rng import SampleRng

if TYPE_CHECKING:
    from trainer.models.base import ModelFamily
    from trainer.models.build import BuiltModel

Example = dict[str, Tensor]
"""One encoded sample, on the CPU, without batch dim. The family documents the keys."""
Batch = dict[str, Tensor]
"""Stacked examples. The family documents the keys; "weight" (B,) is the weight of each item, 0 for padding."""
Items = tuple[Sequence[Example], Sequence[float], SampleRng]
"""Examples that share a batch key, the weight of each and their random numbers."""


@dataclass(frozen=True)
class Loss:
    """The loss of one pass.

    The loss of a step is the sum of `total` over all ranks and passes divided by the sum of `weight`: an item with a
    smaller weight moves the model less, whatever else is in its batch. For a family with `loss_weights` it is the sum
    of weight x mean over its losses, each mean the sum of the first column of `parts` divided by that of the second.

    Attributes:
        total: Sum of weighted item losses, a scalar with gradient.
        weight: Number of items without padding, a scalar.
        parts: (number of losses, 2) for a family with several losses: sum of each loss and number of its items or
            tokens, both without the weight of the loss. The sums have gradients. None for other families.
        errors: (B,) error of each item before its weight, with gradient, for models of images.
        metrics: (number of metrics, 2) for an objective that measures more than its loss: sum of each metric and number
            of its items.
        tokens: Number of tokens in the loss, where `weight` counts something else.
    """

    total: Tensor
    weight: Tensor
    parts: Tensor | None = None
    errors: Tensor | None = None
    metrics: Tensor | None = None
    tokens: Tensor | None = None

    def parts_with(self, shares: Tensor) -> Tensor:
        """The sum of the losses of `parts`, a scalar with gradient. shares: (number of losses,) weight of each sum."""
        assert self.parts is not None, "a family with loss_weights returns parts"
        return self.parts[:, 0] @ shares


def perplexity_of(loss: float) -> float:
    """Perplexity, exp(loss): the number of equally likely tokens. loss: mean cross-entropy of a token."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def squared_error(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared error of each item, in fp32 for inputs of any type.

    Args:
        prediction: (B, C, ..., h, w).
        target: (B, C, ..., h, w).
        mask: (B, h, w) weights of the pixels. The mean is still over all pixels, so that an image with a small mask
            counts less than one without a mask.

    Returns:
        (B,).
    """
    assert prediction.shape == target.shape, "an error of other shapes would be broadcast"
    errors = (prediction.float() - target.float()).square()
    if mask is not None:
        assert mask.shape == (errors.shape[0], *errors.shape[-2:])
        errors = errors * mask.view(mask.shape[0], *[1] * (errors.dim() - 3), *mask.shape[1:])
    return errors.flatten(1).mean(dim=1)


def total_loss(errors: Tensor, weight: Tensor) -> Loss:
    """Sum the weighted errors of the items.

    Args:
        errors: (B,).
        weight: (B,), 0 for padding.
    """
    return Loss(total=(errors * weight).sum(), weight=weight.count_nonzero(), errors=errors)


def per_item(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (B,) to (B, 1, ...), to multiply a tensor of items."""
    return values.view(-1, *[1] * (like.dim() - 1))


class Objective:
    """The objective of a step: the family's own loss, or that of a subclass.

    Args:
        cfg: The run's config.
    """

    fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of the section `objective` that it reads, in addition to those of the family."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of what is measured in addition to the loss, in the order of `Loss.metrics`."""
    images_per_example: ClassVar[int] = 1
    """Number of images that are trained on with an example of a model of images."""

    def __init__(self, cfg: RunConfig) -> None:
        self._cfg = cfg.objective

    @classmethod
    def suits(cls, family: type[ModelFamily]) -> bool:
        """Whether models of a family can be trained so."""
        return True

    @classmethod
    def is_wanted(cls, cfg: RunConfig) -> bool:
        """Whether a config asks for this objective."""
        return True

    def warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        """Sentences about this config to show before training; the run starts anyway."""
        return ()

    def check(self, built: BuiltModel) -> None:
        """Raise InputError for a model that cannot be trained so."""

    def items(self, examples: Sequence[Example], weights: Sequence[float], rng: SampleRng) -> Items:
        """The items of one forward pass over these examples."""
        return examples, weights, rng

    def loss(self, family: ModelFamily, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        """The loss of a batch of `items`; arguments as those of `ModelFamily.loss`."""
        return family.loss(model, batch, rng)
