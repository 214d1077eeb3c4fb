"""Dropout in a published config. The base is trained without it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANDOM = re.compile(r"drop|jitter")
"""Part of the names of fields that make a forward random in training: hidden_dropout, attn_pdrop, layerdrop, ..."""
HEADS = re.compile(r"classif|summary")
"""Part of the names of fields for the head of a classifier, which no model here has."""


def configured_dropout(config: Mapping[str, Any]) -> dict[str, float]:
    """{field: share} of a component's fields that ask for dropout; nested fields are dotted."""
    shares: dict[str, float] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            shares |= {f"{name}.{field}": share for field, share in configured_dropout(value).items()}
        elif RANDOM.search(str(name)) and not HEADS.search(str(name)) and _is_share(value):
            shares[str(name)] = float(value)
    return shares


def dropout_warning(file: Path, shares: Mapping[str, float]) -> str:
    """The warning for the user.

    Args:
        file: The config.
        shares: Its `configured_dropout`, not empty.
    """
    fields = ", ".join(f"{name} {share:g}" for name, share in shares.items())
    return (
        f"{file} asks for dropout in training ({fields}); the base is trained without it, because its masks would "
        "not repeat when a block is recomputed, after a resume and on another number of ranks"
    )


def _is_share(value: object) -> bool:
    """Whether it drops anything; configs also hold counts and switches under such names."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
