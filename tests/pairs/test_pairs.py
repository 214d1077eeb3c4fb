"""Every config of the covering arrays, in shares."""

from __future__ import annotations

import pytest

from tests.pairs.choices import KINDS
from tests.pairs.search import Search
from tests.pairs.trials import WRONG

pytestmark = pytest.mark.slow
SHARES = 12


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    return Search(tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", range(1, SHARES + 1))
def test_every_config_runs_or_is_refused_before_it_starts(search: Search, kind: str, share: int) -> None:
    assert [trial for trial in search.trials(kind, share, SHARES) if trial.outcome in WRONG] == []
