"""What is installed is what passed the tests."""

from __future__ import annotations

import datetime
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.lock import LOCK, age, content

PROJECT = tomllib.loads((LOCK.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = dict(line.split("==") for line in LOCK.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))


def test_each_requirement_has_a_pin_within_its_range() -> None:
    pins = {canonicalize_name(name): pin for name, pin in PINS.items()}
    extras = [one for group in PROJECT["optional-dependencies"].values() for one in group]
    needed = [Requirement(text) for text in (*PROJECT["dependencies"], *extras)]
    named = [one for one in needed if one.name != "shardstudio"]
    assert [str(one) for one in named if pins.get(canonicalize_name(one.name), "") not in one.specifier] == []


def test_a_lock_has_the_versions_that_are_installed() -> None:
    written = content(Path(sys.executable), datetime.date(2026, 11, 28))
    head, _, rest = written.partition("\nannotated")
    assert head.startswith("# Versions that passed the tests on 2026-11-28 with Python 3.")
    assert f"\nnumpy=={version('numpy')}\n" in rest
    assert re.search(r"\ntorch==2\.\d+\.\d+\n", rest)
    assert "shardstudio" not in rest


def test_the_age_of_a_lock_is_said() -> None:
    found = age("# Versions that passed the tests on 2026-11-28 with Python 3.11.7.", datetime.date(2026, 12, 10))
    assert (
        found
        == "packages as in requirements.lock, whose versions passed the tests 12 days ago; `make lock` renews them"
    )
    assert age("", datetime.date(2026, 12, 10)) == "requirements.lock has no date; `make lock` renews it"
