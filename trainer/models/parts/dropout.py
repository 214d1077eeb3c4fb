"""Dropout that a published config asks for, and that the base is trained without."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANDOM = re.compile(r"drop|jitter")
"""Part of the names of fields that make a forward random in training: hidden_dropout, attn_pdrop, layerdrop, ..."""
HEADS = re.compile(r"classif|summary")
"""Part of those that belong to a head of a classifier, which no model here has."""


def asked_dropout(config: Mapping[str, Any]) -> dict[str, float]:
    """{field: share} of the fields that ask for dropout. config: a component's; fields of its parts are dotted."""
    found: dict[str, float] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{field}": share for field, share in asked_dropout(value).items()}
        elif RANDOM.search(str(name)) and not HEADS.search(str(name)) and _is_share(value):
            found[str(name)] = float(value)
    return found


def dropout_warning(file: Path, asked: Mapping[str, float]) -> str:
    """A sentence for the user. file: the config.  asked: `asked_dropout` of it, not empty."""
    fields = ", ".join(f"{name} {share:g}" for name, share in asked.items())
    return (
        f"{file} asks for dropout in training ({fields}); the base is trained without it, because its masks would "
        "not repeat when a block is recomputed, after a resume and on another number of ranks"
    )


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
