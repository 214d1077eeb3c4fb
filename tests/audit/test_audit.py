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
    good, wrong = Check("flux1", "loss", 1e-6, lambda _: 2e-7), Check("sd3", "loss", 1.0, lambda _: float("nan"))
    assert audit({"Losses": [good]}, tmp_path / "good.md") == 0
    assert audit({"Losses": [good, wrong]}, tmp_path / "AUDIT.md") == 1
    assert "sd3, loss: nan / 1 is beyond its limit" in capsys.readouterr().out.splitlines()
    assert "| flux1 | 2e-07 / 1e-06 |\n| sd3 | **nan / 1** |\n" in (tmp_path / "AUDIT.md").read_text()
