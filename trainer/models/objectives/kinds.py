"""The objectives: what a step may minimize. A further one is a file of this folder and a line here."""

from __future__ import annotations

from trainer.config.schema import RunConfig
from trainer.models.base import ModelFamily
from trainer.models.objectives.base import Objective
from trainer.models.objectives.preferences import ImagePreferences, TextPreferences

OBJECTIVES: tuple[type[Objective], ...] = (TextPreferences, ImagePreferences, Objective)
"""The first that answers for a run is its objective; the last one answers for all."""


def make(cfg: RunConfig, family: ModelFamily) -> Objective:
    """Return the objective of a run."""
    return next(kind for kind in OBJECTIVES if kind.suits(type(family)) and kind.is_wanted(cfg))(cfg)


def fields_of(family: type[ModelFamily]) -> frozenset[str]:
    """Fields of the section `objective` that a family and its objectives read; others must keep their defaults."""
    return family.objective_fields.union(*(kind.fields for kind in OBJECTIVES if kind.suits(family)))
