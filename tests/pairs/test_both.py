"""Every config of models of both runs, or is refused before it starts."""

import pytest

from tests.pairs.shares import in_shares, wrong


@pytest.mark.slow
@in_shares
def test_every_config_runs_or_is_refused_before_it_starts(share: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert wrong("both", share, tmp_path_factory) == []
