"""The notebooks about images and about many nodes run from their first cell to their last."""

from __future__ import annotations

import pytest

from tests.notebooks.lessons import check


@pytest.mark.slow
@pytest.mark.parametrize("name", ["07_your_own_images", "06_many_nodes"])
def test_the_notebook_runs_and_shows_what_it_promises(name, tmp_path, record_property):
    check(name, tmp_path, record_property)
