"""How to import large packages quickly. Imports nothing of them itself. See DECISIONS 188."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import FrameType, FunctionType, ModuleType
from typing import Any

log = logging.getLogger(__name__)

OPTIONAL = ("aqlm", "awq", "bitsandbytes", "deepspeed", "eetq", "gptqmodel", "hqq", "sklearn", "torchao")
"""Packages that peft, diffusers and transformers import wherever they are installed, for layers that are not used here.
bitsandbytes alone takes longer than peft without it."""
FOLDER_READER = "create_import_structure_from_path"
"""The function with which transformers reads the source files of all its models, to know what each defines."""
_bounded, _packages, _module = functools.lru_cache, importlib.metadata.packages_distributions, inspect.getmodule


@contextmanager
def quick_imports() -> Iterator[None]:
    """For imports of torch and of what imports it.

    Imports create no garbage, but the collector costs a fifth of their time. Objects that exist at the end are never
    collected: not for imports after training, when a model may wait to be freed.

    torch asks who registers an operator, and pydantic where a class is defined. Python goes through the files of all
    modules to answer that, which takes 0.15 s in total; inside, the code that is running says it.
    """
    gc.disable()
    inspect.getmodule = _module_of
    try:
        yield
    finally:
        inspect.getmodule = _module
        gc.freeze()
        gc.enable()


@contextmanager
def light_imports() -> Iterator[None]:
    """For imports of peft, diffusers and transformers: inside, they import less, and read fewer files.

    Packages of OPTIONAL that were not imported before look as if they were not installed. Libraries that are imported
    inside go on without them; our own code imports them later, where it uses them.
    """
    hidden = [name for name in OPTIONAL if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: importlib's mark of what is not found
    functools.lru_cache, importlib.metadata.packages_distributions = _cache_of_folders, _Packages
    try:
        yield
    finally:
        functools.lru_cache, importlib.metadata.packages_distributions = _bounded, _packages
        for name in hidden:
            del sys.modules[name]


def _module_of(object: object, _filename: str | None = None) -> ModuleType | None:
    """`inspect.getmodule`, which for code that is running is the module of its globals."""
    if isinstance(object, FrameType):
        module = sys.modules.get(object.f_globals.get("__name__", ""))
        if isinstance(module, ModuleType) and vars(module) is object.f_globals:
            return module
    return _module(object, _filename)


class _Packages(Mapping[str, list[str]]):
    """`importlib.metadata.packages_distributions`, found when it is first looked into: that takes 0.15 s, and diffusers
    asks for it in any case, but looks only for a few packages that are installed under other names. Empty where a
    damaged package keeps Python from finding it: diffusers would not catch that so late."""

    @cached_property
    def _found(self) -> Mapping[str, list[str]]:
        try:
            return _packages()
        except Exception as error:  # noqa: BLE001 - whatever a damaged package raises
            log.debug("the packages of distributions are not known: %s", error)
            return {}

    def __getitem__(self, package: str) -> list[str]:
        return self._found[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _cache_of_folders(maxsize: int | Callable[..., Any] | None = 128, typed: bool = False) -> Any:
    """`functools.lru_cache`, without a limit for FOLDER_READER: transformers goes through its 480 folders twice, and
    would have forgotten all but 128 when it comes to the second time, which takes 0.4 s."""
    if isinstance(maxsize, FunctionType) and maxsize.__name__ == FOLDER_READER:
        return _bounded(None)(maxsize)
    return _bounded(maxsize, typed)
