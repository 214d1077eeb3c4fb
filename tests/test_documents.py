"""The documents keep their sizes, and DECISIONS.md and the code name each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.readme import ROOT

CITATION = re.compile(r"DECISIONS (\d+(?:(?:, | and )\d+)*)")
"""A citation of one decision or several, as `See DECISIONS 12, 34.`"""
MOST_BYTES = {"DECISIONS.md": 50_000, "tests/benchmarks/RESULTS.md": 30_000}
"""Limits of documents that are read as a whole."""


def numbers_in(text: str) -> list[int]:
    """Return the numbers of the decisions that a text cites."""
    return [int(number) for cited in CITATION.findall(text) for number in re.findall(r"\d+", cited)]


def decisions() -> list[int]:
    """Return the numbers in the headings of DECISIONS.md."""
    text = (ROOT / "DECISIONS.md").read_text(encoding="utf-8")
    return [int(number) for number in re.findall(r"(?m)^## (\d+)\. ", text)]


def code() -> Iterator[Path]:
    """The Python files and scripts of the page that may cite a decision; not this file, whose numbers are examples."""
    yield ROOT / "launch.py"
    for room in ("app", "notebooks", "tests", "trainer"):
        files = (file for ending in ("py", "js", "css") for file in (ROOT / room).rglob(f"*.{ending}"))
        yield from sorted(file for file in files if file != Path(__file__))


def test_a_citation_names_one_decision_or_several() -> None:
    assert numbers_in("See DECISIONS 12. (DECISIONS 3, 45 and 6) DECISIONS.md, 7") == [12, 3, 45, 6]


def test_every_number_of_a_decision_exists_once() -> None:
    assert [number for number, count in Counter(decisions()).items() if count > 1] == []


def test_every_citation_names_a_decision_that_exists() -> None:
    known = {*decisions()}
    cited = ((file, number) for file in code() for number in numbers_in(file.read_text(encoding="utf-8")))
    assert [f"{file.relative_to(ROOT)}: {number}" for file, number in cited if number not in known] == []


def test_every_decision_is_cited_by_the_code_that_it_explains() -> None:
    cited = {number for file in code() for number in numbers_in(file.read_text(encoding="utf-8"))}
    assert sorted({*decisions()} - cited) == []


def test_documents_keep_their_sizes() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in MOST_BYTES}
    assert {name: size for name, size in sizes.items() if size > MOST_BYTES[name]} == {}
