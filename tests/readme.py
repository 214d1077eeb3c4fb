"""Tables of the README that a command writes: each stands between `<!-- name -->` and `<!-- end of name -->`."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def section(name: str) -> str:
    """What stands between the marks, without the line break at its end."""
    return _place(name, README.read_text(encoding="utf-8"))[0].rstrip("\n")


def write_section(name: str, content: str) -> None:
    """Replace what stands between the marks."""
    text = README.read_text(encoding="utf-8")
    place = _place(name, text)
    new = f"{text[: place.start()]}{content}\n{text[place.end() :]}"
    README.write_text(new, encoding="utf-8")
    print(f"{README}: {'unchanged' if new == text else 'written'}")


def _place(name: str, text: str) -> re.Match[str]:
    found = list(re.finditer(rf"(?s)(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", text))
    assert len(found) == 1, f"{README}: {len(found)} tables between <!-- {name} --> and its end"
    return found[0]
