"""Roots: the root of each image's error, so that a large error counts less."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.models.base import ImageFamily, ModelFamily, MultimodalFamily
from trainer.models.objectives.base import Batch, Loss, Objective
from trainer.rng import SampleRng


class Roots(Objective):
    """Sum of the roots of the errors. metrics: `squares`, the mean error."""

    fields = frozenset({"roots"})
    metrics = ("squares",)

    @classmethod
    def suits(cls, family: type[ModelFamily]) -> bool:
        return issubclass(family, ImageFamily) and not issubclass(family, MultimodalFamily)

    @classmethod
    def is_wanted(cls, cfg: RunConfig) -> bool:
        return cfg.objective.roots

    def loss(self, family: ModelFamily, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        errors, weight = family.loss(model, batch, rng).errors, batch["weight"]
        assert errors is not None
        measured = torch.stack([(errors.detach() * weight).sum(), weight.sum()]).view(1, 2)
        return Loss((errors.sqrt() * weight).sum(), weight.sum(), metrics=measured)
