"""The trainer's figures lie within the limits of references that share no code with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.__main__ import MODULES, audit
from tests.audit.check import Check

CHECKS = [
    pytest.param(check, id=f"{check.subject}-{check.name}", marks=() if check.is_quick else pytest.mark.slow)
    for module in MODULES
    for check in module.CHECKS
]


@pytest.mark.parametrize("check", CHECKS)
def test_the_trainer_differs_from_the_reference_by_no_more_than_the_limit(check: Check, tmp_path: Path) -> None:
    assert check.measure(tmp_path) <= check.limit


def test_a_figure_beyond_its_limit_is_named_and_ends_the_audit_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [
        Check("flux1", "loss", 1e-6, lambda folder: 2e-7),
        Check("flux1", "text", 2e-6, lambda folder: 0.0),
        Check("sd3", "loss", 1e-5, lambda folder: 1.5),
        Check("sd3", "sample", 1.0, lambda folder: float("nan")),
    ]
    results = tmp_path / "AUDIT.md"
    assert audit({"Losses": checks}, results) == 1
    assert audit({"Losses": checks[:2]}, tmp_path / "good.md") == 0
    named = [line for line in capsys.readouterr().out.splitlines() if line.endswith("is beyond its limit")]
    assert named == [
        "sd3, loss: 1.5 / 1e-05 is beyond its limit",
        "sd3, sample: nan / 1 is beyond its limit",
    ]
    assert results.read_text().split("\n\n")[2:] == [
        "## Losses",
        "| | loss | text | sample |\n"
        "|---|---|---|---|\n"
        "| flux1 | 2e-07 / 1e-06 | 0 / 2e-06 |  |\n"
        "| sd3 | **1.5 / 1e-05** |  | **nan / 1** |\n",
    ]
