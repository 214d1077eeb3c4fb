"""Every method trains on several ranks what it trains on one, in pairs of values; `make parity` runs all cells."""

from __future__ import annotations

import pytest

from tests.distributed.matrix import (
    FAMILIES,
    FORMATS,
    METHODS,
    ON_BF16,
    OTHERS,
    QUANTIZED,
    SAVING,
    SAVINGS,
    STRATEGIES,
    Cell,
    Matrix,
    quantized_cells,
    saving_cells,
)
from tests.pairs.array import covering

THOROUGH = ("dora", "boft")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


def check(matrix: Matrix, cells: list[Cell]) -> None:
    found = matrix.differences(cells)
    assert {str(cell): value for cell, value in found.items() if not value <= cell.tolerance} == {}


# One rule over all families: the others, whose many units two cores exchange one by one, are in `make test-all`.
@pytest.mark.parametrize(
    "family",
    ["flux2", *(pytest.param(family, marks=pytest.mark.slow) for family in (*FAMILIES, *OTHERS) if family != "flux2")],
)
def test_every_method_trains_on_two_ranks_what_it_trains_on_one(matrix: Matrix, family: str) -> None:
    check(matrix, [Cell(method, family, "full", 2) for method in METHODS])


@pytest.mark.parametrize(
    ("ranks", "family"),
    [(2, "flux2"), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(4, "flux2"), (2, "sdxl"), (4, "sdxl")])],
)
def test_every_strategy_trains_what_one_process_trains(matrix: Matrix, ranks: int, family: str) -> None:
    check(matrix, [Cell("lora", family, strategy, ranks) for strategy in STRATEGIES[ranks]])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "family"), [(2, "flux2"), (2, "sdxl"), (4, "flux2"), (4, "sdxl")])
def test_every_strategy_trains_a_dora_and_a_boft_as_one_process_does(matrix: Matrix, ranks: int, family: str) -> None:
    check(matrix, [Cell(method, family, strategy, ranks) for method in THOROUGH for strategy in STRATEGIES[ranks]])


@pytest.mark.slow
def test_rotations_and_dora_on_a_bf16_base_train_on_two_ranks_what_they_train_on_one(matrix: Matrix) -> None:
    check(matrix, [Cell(method, "flux2", "full", 2, "bf16") for method in ON_BF16])


def test_adapters_on_quantized_bases_train_on_two_ranks_what_they_train_on_one(matrix: Matrix) -> None:
    bases = zip(("lora", "dora", "loha"), FORMATS, strict=True)
    check(matrix, [Cell(method, "flux2", "full", 2, base=base) for method, base in bases])


@pytest.mark.slow
@pytest.mark.parametrize("base", FORMATS)
def test_every_adapter_trains_on_quantized_bases_under_every_strategy_what_one_process_trains(
    matrix: Matrix, base: str
) -> None:
    check(matrix, [cell for cell in quantized_cells(covering(*QUANTIZED)) if cell.base == base])


@pytest.mark.slow
@pytest.mark.parametrize("saving", SAVINGS)
def test_every_adapter_trains_with_less_memory_what_it_trains_otherwise(matrix: Matrix, saving: str) -> None:
    check(matrix, [cell for cell in saving_cells(covering(*SAVING)) if cell.saving == saving])
