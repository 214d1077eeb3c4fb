"""The notebooks about a run and its checkpoints run from their first cell to their last."""

from __future__ import annotations

import pytest

from tests.notebooks.lessons import check


@pytest.mark.slow
@pytest.mark.parametrize("name", ["01_quickstart", "05_checkpoints"])
def test_the_notebook_runs_and_shows_what_it_promises(name, tmp_path, record_property):
    check(name, tmp_path, record_property)
