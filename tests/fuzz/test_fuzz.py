"""The first values that `make fuzz` would put to every door."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import TARGETS
from tests.fuzz.target import Count, Target, attack

EXAMPLES = {"configs": 60, "weight files": 60, "run folders": 40, "caches": 60, "data sets": 60, "requests": 60}
"""Values for each, a few seconds altogether."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_generated_values_are_answered_in_time_and_refused_in_sentences(target: Target, tmp_path: Path) -> None:
    count = Count()
    folder = tmp_path / "door"
    folder.mkdir()
    with target.prepare(folder) as answer:
        attack(answer, target, EXAMPLES[target.name], 0, tmp_path / "value", count)
    assert count.values >= EXAMPLES[target.name] // 2
