"""The notebooks about models that do not only draw run from their first cell to their last."""

from __future__ import annotations

import pytest

from tests.notebooks.lessons import check


@pytest.mark.slow
@pytest.mark.parametrize("name", ["08_language_models", "09_drawing_and_answering"])
def test_the_notebook_runs_and_shows_what_it_promises(name, tmp_path, record_property):
    check(name, tmp_path, record_property)
