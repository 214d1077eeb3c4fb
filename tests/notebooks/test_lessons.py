"""Every notebook runs from its first cell to its last."""

from __future__ import annotations

import pytest

from tests.notebooks.lessons import LESSONS, check


@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS)
def test_the_notebook_runs_and_shows_what_it_promises(name, tmp_path, record_property):
    check(name, tmp_path, record_property)
