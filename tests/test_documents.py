"""The documents keep their sizes and say what is there; DECISIONS.md and the code name each other."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.readme import ROOT, documents
from tests.rooms import ROOMS

CITATION = re.compile(r"DECISIONS (\d+(?:(?:, | and )\d+)*)")
"""A citation of one decision or several, as `See DECISIONS 12, 34.`"""
MOST_BYTES = {
    "DECISIONS.md": 50_000,
    "README.md": 9_500,
    "tests/TRUST.md": 5_000,
    "tests/benchmarks/RESULTS.md": 30_000,
}
"""Limits of documents; a room's README has MOST_OF_A_ROOM."""
MOST_OF_A_ROOM = 8_000
MANY = 10
TOP_LEVEL = {
    *(".ci", ".gitignore", ".pre-commit-config.yaml", "Makefile", "pyproject.toml", "requirements.lock", "launch.py"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "DECISIONS.md", "LICENSE", "README.md", "SECURITY.md"),
    *("app", "notebooks", "presets", "tests", "trainer"),
}


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


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def neighbours(room: str) -> str:
    """Return the sentence of a room's README about its imports, from the list that the code is held to."""
    users = [user for user, imported in ROOMS.items() if room in imported.split()]
    both = [", ".join(f"`{name}`" for name in names) or "nothing" for names in (users, ROOMS[room].split())]
    return f"Imported by {'most rooms' if len(users) > MANY else both[0]}. Imports {both[1]}."


def test_a_citation_names_one_decision_or_several() -> None:
    assert numbers_in("See DECISIONS 12. (DECISIONS 3, 45 and 6) DECISIONS.md, 7") == [12, 3, 45, 6]


def test_every_number_of_a_decision_exists_once() -> None:
    assert [number for number, count in Counter(decisions()).items() if count > 1] == []


def test_every_citation_names_a_decision_that_exists() -> None:
    known = {*decisions()}
    files = [*code(), *documents()]
    cited = ((file, number) for file in files for number in numbers_in(file.read_text(encoding="utf-8")))
    assert [f"{file.relative_to(ROOT)}: {number}" for file, number in cited if number not in known] == []


def test_every_decision_is_cited_by_the_code_that_it_explains() -> None:
    cited = {number for file in code() for number in numbers_in(file.read_text(encoding="utf-8"))}
    assert sorted({*decisions()} - cited) == []


def test_documents_keep_their_sizes() -> None:
    rooms = {str(file.relative_to(ROOT)): MOST_OF_A_ROOM for file in documents() if file.name == "README.md"}
    sizes = {name: ((ROOT / name).stat().st_size, most) for name, most in (rooms | MOST_BYTES).items()}
    assert {name: size for name, (size, most) in sizes.items() if size > most} == {}


def test_links_between_documents_lead_to_a_file_and_a_heading() -> None:
    broken = []
    for document in documents():
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    assert broken == []


def test_a_room_says_who_imports_it_and_what_it_imports() -> None:
    files = {room: ROOT / ("app" if room == "app" else f"trainer/{room}") / "README.md" for room in ROOMS}
    texts = {room: " ".join(file.read_text(encoding="utf-8").split()) for room, file in files.items() if file.exists()}
    assert [neighbours(room) for room, text in texts.items() if neighbours(room) not in text] == []


def test_every_command_of_trust_exists() -> None:
    text = (ROOT / "tests" / "TRUST.md").read_text(encoding="utf-8")
    targets = {*re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))}
    commands = re.findall(r"(?m)^\| [^|]+ \| `([^`]+)` \|", text)
    assert len(commands) > 15
    for command in commands:
        program, *words = command.split()
        if program == "make":
            assert {*words} <= targets, command
        elif program == "pytest":
            assert (ROOT / words[0]).exists(), command
        else:
            module = ROOT.joinpath(*words[1].split("."))
            assert words[0] == "-m" and (module.with_suffix(".py").exists() or (module / "__main__.py").exists()), (
                command
            )


def test_a_command_of_the_makefile_that_is_asked_for_help_starts_nothing() -> None:
    named = {*re.findall(r"-m (tests\.[\w.]+)", (ROOT / "Makefile").read_text(encoding="utf-8"))}
    assert len(named) > 15
    for name in named - {"tests.exports", "tests.notebooks", "tests.lock"}:  # these take seconds
        module = ROOT.joinpath(*name.split("."))
        [file] = [file for file in (module.with_suffix(".py"), module / "__main__.py") if file.exists()]
        assert re.search(r"takes_no_arguments\(__doc__\)|ArgumentParser\(", file.read_text(encoding="utf-8")), name


def test_trust_has_one_record_of_the_slow_half() -> None:
    text = (ROOT / "tests" / "TRUST.md").read_text(encoding="utf-8")
    assert len(re.findall(r"(?s)<!-- slow half -->\n.+?\n<!-- end of slow half -->", text)) == 1


def test_nothing_else_is_tracked_at_the_top_level() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    # A copy without git, as that of planted faults, holds tracked files alone.
    tracked = {name.partition("/")[0] for name in listed.split("\0") if name}
    assert not tracked or tracked == TOP_LEVEL


def test_the_hooks_before_a_commit_are_the_checks_of_make_check() -> None:
    found = re.search(r"(?m)^check:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert found is not None
    checks = [line.strip().replace("$(BIN)", ".venv/bin") for line in found[1].splitlines()]
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert [hook["entry"] for hook in hooks] == checks
    assert all(hook["language"] == "system" and hook["always_run"] and not hook["pass_filenames"] for hook in hooks)
