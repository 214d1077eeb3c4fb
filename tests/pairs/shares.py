"""Shares of the covering arrays: a file of tests for each kind, so that two processes share them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.pairs.search import Search
from tests.pairs.trials import WRONG

SHARES = 12
in_shares = pytest.mark.parametrize("share", (1, 5, 9))
"""A quarter of the configs: all of them take an hour of two cores, and are tried by `make pairs`."""


def wrong(kind: str, share: int, folder: pytest.TempPathFactory) -> list[object]:
    """Return the trials of a share whose config crashed, was refused too late, or trained something else."""
    found = _search(folder.getbasetemp() / "pairs").trials(kind, share, SHARES)
    return [trial for trial in found if trial.outcome in WRONG]


@cache
def _search(folder: Path) -> Search:
    folder.mkdir()
    return Search(folder)
