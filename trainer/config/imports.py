"""How to import large packages quickly. Imports nothing of them itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

OPTIONAL = ("aqlm", "awq", "bitsandbytes", "deepspeed", "eetq", "gptqmodel", "hqq", "sklearn", "torchao")
"""Packages that peft, diffusers and transformers import wherever they are installed, for layers that are not used here.
bitsandbytes alone takes longer than peft without it."""


@contextmanager
def garbage_ignored() -> Iterator[None]:
    """For imports, which leave no garbage: to look for it again and again takes a fifth of their time.

    What is there at the end is never collected: not for imports after training, when a model may wait to be freed.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def optional_packages_hidden() -> Iterator[None]:
    """Inside, packages of OPTIONAL that were not imported before look as if they were not installed.

    Libraries that are imported inside go on without them; our own code imports them later, where it uses them.
    """
    hidden = [name for name in OPTIONAL if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: importlib's mark of what is not found
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
