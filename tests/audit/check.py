"""One comparison of the trainer with an independent reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """A figure that must not exceed its limit.

    subject: the family or adapter, a row of the table.  name: what is compared, a column.  limit: the largest
    difference allowed.  measure: given an empty folder for files, returns the largest difference found.
    is_quick: part of `make test`.
    """

    subject: str
    name: str
    limit: float
    measure: Callable[[Path], float]
    is_quick: bool = False
