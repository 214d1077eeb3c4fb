"""What the READMEs say of plans."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plan.common import NOWHERE
from tests.plan.fits import fits_table
from tests.plan.needs import rows
from tests.readme import readme, section
from trainer.config.load import load_config
from trainer.plan.hardware import CARDS
from trainer.plan.search.fixes import planned

ROOT = Path(__file__).parents[2]
ROWS = rows()


@pytest.mark.slow
def test_the_table_of_what_fits_where_is_what_the_plan_says() -> None:
    assert section("presets", "fits") == fits_table(), "write it again: python -m tests.plan.fits"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[3 : row.index("]")])
def test_no_preset_is_too_large_for_the_gpus_that_the_readme_names(row: str) -> None:
    named = re.match(r"\| \[([\w.-]+)\]\(.+?\) \| \d+ of (\d+) GB", row)
    assert named is not None
    found = planned(load_config(ROOT / "presets" / f"{named[1]}.yaml").config, CARDS[f"{named[2]}gb"], NOWHERE)
    assert found is not None
    assert found.verdict in ("fits", "tight")


def test_the_plan_that_is_shown_is_what_the_command_prints() -> None:
    text = readme("trainer/plan").read_text(encoding="utf-8")
    shown = re.search(r"\$ \.venv/bin/python (launch\.py --plan .+)\n((?s:.+?))```", text)
    assert shown is not None
    done = subprocess.run(
        [sys.executable, *shown[1].split()], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == shown[2]
