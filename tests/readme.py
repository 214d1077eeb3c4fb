"""The documents, and their tables that a command writes, between `<!-- name -->` and `<!-- end of name -->`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def documents() -> Iterator[Path]:
    """The documents of the repository, sorted; not what runs, builds and installed packages leave beside them."""
    yield from sorted(ROOT.glob("*.md"))
    for room in ("app", "notebooks", "presets", "tests", "trainer"):
        yield from sorted(file for file in (ROOT / room).rglob("*.md") if "node_modules" not in file.parts)


def prose() -> str:
    """Return the documents of the program and its rooms as one text, without those of `tests/`, which are tables."""
    return "\n".join(
        document.read_text(encoding="utf-8") for document in documents() if ROOT / "tests" not in document.parents
    )


def readme(room: str) -> Path:
    """The README of a room, as `trainer/adapters`."""
    return ROOT / room / "README.md"


def section(room: str, name: str) -> str:
    """What stands between the marks, without the line break at its end."""
    return _place(readme(room), name)[0].rstrip("\n")


def write_section(room: str, name: str, content: str) -> None:
    """Replace what stands between the marks."""
    file = readme(room)
    place = _place(file, name)
    text = place.string
    new = f"{text[: place.start()]}{content}\n{text[place.end() :]}"
    file.write_text(new, encoding="utf-8")
    print(f"{file}: {'unchanged' if new == text else 'written'}")


def _place(file: Path, name: str) -> re.Match[str]:
    text = file.read_text(encoding="utf-8")
    found = list(re.finditer(rf"(?s)(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", text))
    assert len(found) == 1, f"{file}: {len(found)} tables between <!-- {name} --> and its end"
    return found[0]
