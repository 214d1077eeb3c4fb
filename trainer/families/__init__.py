"""The model families, one module each. Importing this package imports no torch and no family."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from trainer.config import InputError, family_names

if TYPE_CHECKING:
    from trainer.families.base import ModelFamily

names = family_names


def get(name: str) -> type[ModelFamily]:
    """The family class of module `name`. Raises InputError naming the families there are."""
    if name not in names():
        raise InputError(f"model.family: '{name}' is not one of {', '.join(names())}")
    module = importlib.import_module(f"trainer.families.{name}")
    family: type[ModelFamily] = module.FAMILY
    return family
