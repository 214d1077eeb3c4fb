"""How to import large packages quickly. Imports nothing of them itself. See DECISIONS 188."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

OPTIONAL = ("aqlm", "awq", "bitsandbytes", "deepspeed", "eetq", "gptqmodel", "hqq", "sklearn", "torchao")
"""Packages that peft, diffusers and transformers import wherever they are installed, for layers that are not used here.
bitsandbytes alone takes longer than peft without it."""
FOLDER_READER = "create_import_structure_from_path"
"""The function with which transformers reads the source files of all its models, to know what each defines."""
_bounded = functools.lru_cache


@contextmanager
def quick_imports() -> Iterator[None]:
    """For imports of torch and of what imports it.

    Imports create no garbage, but the collector costs a fifth of their time. Objects that exist at the end are never
    collected: not for imports after training, when a model may wait to be freed.
    """
    gc.disable()
    try:
        yield
    finally:
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
    functools.lru_cache = _cache_of_folders
    try:
        yield
    finally:
        functools.lru_cache = _bounded
        for name in hidden:
            del sys.modules[name]


def _cache_of_folders(maxsize: int | Callable[..., Any] | None = 128, typed: bool = False) -> Any:
    """`functools.lru_cache`, without a limit for FOLDER_READER: transformers goes through its 480 folders twice, and
    would have forgotten all but 128 when it comes to the second time, which takes 0.4 s."""
    if isinstance(maxsize, FunctionType) and maxsize.__name__ == FOLDER_READER:
        return _bounded(None)(maxsize)
    return _bounded(maxsize, typed)
