"""Faults that the tests must catch: one wrong place each, in code that matters. See DECISIONS 145.

faults.txt holds them, with an empty line between two: the name of a fault, its file and the tests that are run first
since they should find it, then the right lines after `-` and the wrong ones after `+`, as in a diff.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """Text that is changed for the worse.

    Attributes:
        name: What is wrong then.
        file: Path from the project's root.
        right: Text that stands in the file once.
        wrong: What takes its place.
        near: Tests that are run first.
    """

    name: str
    file: str
    right: str
    wrong: str
    near: tuple[str, ...]

    def plant(self, root: Path = ROOT) -> None:
        """Change the file below `root`."""
        path = root / self.file
        path.write_text(self.in_text(path.read_text(encoding="utf-8")), encoding="utf-8")

    def in_text(self, text: str) -> str:
        """The text of the file with the fault. Raises ValueError where `right` does not stand in it once."""
        if text.count(self.right) != 1:
            raise ValueError(f"{self.name}: {self.file} holds {self.right!r} {text.count(self.right)} times")
        return text.replace(self.right, self.wrong)


def _fault(block: str) -> Fault:
    name, place, *lines = block.splitlines()
    file, _, near = place.partition(": ")
    right, wrong = ("\n".join(line[1:] for line in lines if line[0] == mark) for mark in "-+")
    return Fault(name, file, right, wrong, tuple(f"tests/{test}" for test in near.split()))


_BLOCKS = Path(__file__).with_name("faults.txt").read_text(encoding="utf-8").strip().split("\n\n")
FAULTS = tuple(_fault(block) for block in _BLOCKS if not block.startswith("#"))
