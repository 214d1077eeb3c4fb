"""The covering array, and the first runs of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.pairs.array import Array, Row, covering, ordered, pairs, pairs_of
from tests.pairs.choices import KINDS
from tests.pairs.search import Search
from tests.runs import alone

CHOICES = {"a": ["0", "1", "2"], "b": ["0", "1", "2", "3"], "c": ["0", "1"], "d": ["0", "1", "2"]}


def refuse(row: Row) -> str | None:
    """a 1 needs d 2; b 3 goes with no c but 0."""
    if row.get("a") == "1" and row.get("d") != "2":
        return "a needs d"
    return "b without c" if row.get("b") == "3" and row.get("c") == "1" else None


def test_every_pair_occurs_in_a_row_or_is_refused() -> None:
    array = Array(CHOICES, refuse)
    rows = list(array.rows())
    assert all(row.keys() == CHOICES.keys() and refuse(row) is None for row in rows)
    assert set(pairs(CHOICES)) == {pair for row in rows for pair in pairs_of(row)} | array.refused.keys()
    assert array.refused == {
        ordered(("a", "1"), ("d", "0")): "a needs d",
        ordered(("a", "1"), ("d", "1")): "a needs d",
        ordered(("b", "3"), ("c", "1")): "b without c",
    }
    assert len(rows) <= 16, "4 x 3 pairs of the largest choices need 12"


def examine(row: Row) -> str | None:
    """a 0 does not go with c 1, but where b is 2."""
    return "a with c" if row["a"] == "0" and row["c"] == "1" and row["b"] != "2" else None


def test_of_a_row_that_is_refused_when_it_is_examined_the_values_that_matter_are_not_tried_again() -> None:
    array = Array(CHOICES, refuse, examine)
    rows = list(array.rows())
    assert all(examine(row) is None for row in rows)
    assert set(pairs(CHOICES)) == {pair for row in rows for pair in pairs_of(row)} | array.refused.keys()
    assert {ordered(("a", "0"), ("c", "1")), ordered(("a", "0"), ("b", "0"))}.isdisjoint(array.refused)
    assert all(
        cause.items() <= example.items() for (cause, _), example in zip(array.causes, array.examples, strict=True)
    )
    assert {why for _, why in array.causes} == {"a with c"}
    assert all(cause.keys() == {"a", "b", "c"} for cause, _ in array.causes)


def test_a_seed_makes_the_same_rows_again() -> None:
    first, again, other = (list(Array(CHOICES, refuse, seed=seed).rows()) for seed in (1, 1, 2))
    assert first == again != other


def test_axes_of_a_table_of_tests_are_covered_in_every_pair_of_their_values() -> None:
    axes = ("full", "ddp"), ("lora", "dora", None), (1, 2, 4)
    rows = covering(*axes)
    assert len(rows) <= 10, "3 x 3 pairs need 9"
    for one, other in itertools.combinations(range(3), 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(axes[one], axes[other]))


def here(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function on the one rank of this process."""
    assert count == 1
    return [function(alone(), *arguments)]


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    return Search(tmp_path_factory.mktemp("pairs"), on_ranks=here)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_the_first_config_that_one_rank_trains_soon_runs(search: Search, kind: str) -> None:
    quick = {"compile": "off", "format": "auto", "options": "default", "base": "none", "adapter's targets": "default"}
    one = search.kinds[kind]
    array = Array({name: list(values) for name, values in one.choices.items()}, one.refusal)
    rows = (row for row in array.rows() if all(row.get(name, value) == value for name, value in quick.items()))
    trial = search.trial(kind, next(row for row in rows if row["strategy"] in ("none", "auto")), kind)
    assert trial.outcome == "ran", str(trial)
