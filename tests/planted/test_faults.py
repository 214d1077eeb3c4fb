"""The planted faults still fit the code: each changes one place, which still compiles."""

from __future__ import annotations

import pytest

from tests.planted.faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place_of_a_file_that_still_compiles(fault: Fault) -> None:
    near = [ROOT / test for test in fault.near]
    assert all((test.suffix == ".py" and test.exists()) or any(test.rglob("test_*.py")) for test in near)
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    compile(fault.in_text(text), fault.file, "exec")
