"""Configs of models of both run, or are refused before they start."""

import pytest

from tests.pairs.shares import in_shares, wrong


@pytest.mark.slow
@in_shares
def test_configs_run_or_are_refused_before_they_start(share: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert wrong("both", share, tmp_path_factory) == []
