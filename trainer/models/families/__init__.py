"""The model families, one module each. Importing this package imports no torch and no family."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import families
from trainer.config.errors import InputError, RuleError
from trainer.config.imports import light_imports
from trainer.config.schema import RunConfig
from trainer.config.sections import family_names
from trainer.models import distilled

if TYPE_CHECKING:
    from trainer.models.base import ModelFamily

names = family_names


def get(name: str) -> type[ModelFamily]:
    """The family class of module `name`. Raises InputError that lists the families for another name."""
    if name not in names():
        raise InputError(f"model.family: '{name}' is not one of {', '.join(names())}")
    with light_imports():
        module = importlib.import_module(f"trainer.models.families.{name}")
    family: type[ModelFamily] = module.FAMILY
    return family


def make(cfg: RunConfig, cache: Path) -> ModelFamily:
    """Make the family of a run.

    Args:
        cfg: The config.
        cache: Folder shared by runs, where tiny models are written.

    Raises:
        InputError: `model.path` does not hold such a model, or the config uses options that the family does not have.
    """
    family = get(cfg.model.family)(cfg.model, cfg.objective, cache / "models")
    family.follow(cfg)
    problems = (*families.refused(cfg), *distilled.refused(cfg.model, family.folder))
    if problems:
        raise RuleError(problems)
    _check_sample_size(cfg.sample.size, family.size_multiple)
    return family


def _check_sample_size(size: tuple[int, int], multiple: int) -> None:
    if any(side % multiple for side in size):
        width, height = (max(1, round(side / multiple)) * multiple for side in size)
        raise InputError(
            f"sample.size: {size[0]} x {size[1]} is not in multiples of {multiple} pixels; use {width} x {height}"
        )
