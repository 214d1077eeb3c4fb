"""A copy of the code in which a recipe is carried out, and the files that the recipe names. See DECISIONS 215."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("trainer", "app", "presets", "launch.py")
TIMEOUT_S = 500


def toy(name: str) -> str:
    """The text of a toy's file."""
    return (Path(__file__).parent / "toys" / name).read_text(encoding="utf-8")


def listed(recipe: str, **names: str) -> set[str]:
    """Return the files that a recipe of `trainer/RECIPES.md` names in backticks in its paragraph that begins `Files:`.

    Args:
        recipe: The recipe's heading.
        names: What stands for `<name>` in a path, and for other words in angle brackets.
    """
    text = (ROOT / "trainer" / "RECIPES.md").read_text(encoding="utf-8")
    [section] = re.findall(rf"^## {re.escape(recipe)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    [paragraph] = re.findall(r"^Files:.*?(?=\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    return {re.sub(r"<(\w+)>", lambda word: names[word[1]], path) for path in re.findall(r"`([^`]*/[^`]*)`", paragraph)}


class Copy:
    """The code in a folder of its own. Compiled modules are copied too: they are valid, as times are kept."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        for name in CODE:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, folder / name)

    def add(self, file: str, text: str) -> None:
        assert not (self.path / file).exists(), file
        (self.path / file).write_text(text, encoding="utf-8")

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace a text that the file has once."""
        text = (self.path / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
        (self.path / file).write_text(text.replace(old, new), encoding="utf-8")

    def changed(self) -> set[str]:
        """Return the files that differ from those of the project, that are new, or that are gone."""
        ours, theirs = (_files(root) for root in (self.path, ROOT))
        return {name for name in ours | theirs if _content(self.path / name) != _content(ROOT / name)}

    def python(self, *arguments: object) -> str:
        """Run Python on the copy's code and return what it prints."""
        done = self._run(arguments)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def refusal(self, *arguments: object) -> str:
        """Run what fails and return its errors."""
        done = self._run(arguments)
        assert done.returncode == 1, done.stdout
        return done.stderr

    def _run(self, arguments: tuple[object, ...]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.path,
            env={**os.environ, "PYTHONPATH": str(self.path)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )


def _files(root: Path) -> set[str]:
    found = (file for name in CODE for file in ((root / name).rglob("*") if (root / name).is_dir() else [root / name]))
    return {str(file.relative_to(root)) for file in found if file.is_file() and file.parent.name != "__pycache__"}


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
