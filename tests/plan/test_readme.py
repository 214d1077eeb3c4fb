"""What the README says of plans."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.plan.fits import fits_table
from tests.readme import README, section

ROOT = Path(__file__).parents[2]


def test_the_table_of_what_fits_where_is_what_the_plan_says() -> None:
    assert section("fits") == fits_table(), "write it again: python -m tests.plan.fits"


def test_the_plan_that_is_shown_is_what_the_command_prints() -> None:
    shown = re.search(r"\$ \.venv/bin/python (launch\.py --plan .+)\n((?s:.+?))```", README.read_text(encoding="utf-8"))
    assert shown is not None
    done = subprocess.run(
        [sys.executable, *shown[1].split()], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == shown[2]
