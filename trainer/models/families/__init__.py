"""The model families, one module each. Importing this package imports no torch and no family."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import families
from trainer.config.schema import RunConfig
from trainer.config.sections import family_names
from trainer.models import distilled, editing, recognition
from trainer.system.errors import InputError, Problem, RuleError
from trainer.system.imports import light_imports

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
    problems = tuple(families.refused(cfg))
    if problems:
        raise RuleError(problems)
    family = get(cfg.model.family)(cfg.model, cfg.objective, cache / "models")
    family.follow(cfg)
    problems = (*recognition.unread(cfg, family.folder), *distilled.refused(cfg.model, family.folder))
    problems += (*editing.refused(cfg, family.folder), *_large_samples(cfg, family))
    if problems:
        raise RuleError(problems)
    return family


def _large_samples(cfg: RunConfig, family: ModelFamily) -> tuple[Problem, ...]:
    """Samples that are larger than this model takes, though others of its family do."""
    problems = families.wrong_sizes(cfg, family.longest_side, family.size_multiple) if cfg.sample.every else ()
    return tuple(problem for problem in problems if problem.field == "sample.size")
