"""The rooms of the house and who imports whom: `python -m tests.rooms` prints and counts them.

A room is a package or a loose module directly below `trainer`, or one of `app`, `launch.py` and `notebooks`. An arrow
is a room that imports another one, however often. `tests/test_architecture.py` holds the code to ROOMS.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_ROOMS, MOST_ARROWS = 24, 120

ROOMS = {
    "config": "",
    "pinned": "",
    "rng": "pinned",
    "gpus": "config",
    "optim": "config",
    "run": "config",
    "weights": "config",
    "adapters": "config pinned rng run weights",
    "distributed": "config gpus run",
    "checkpoint": "config distributed run",
    "metrics": "config distributed run",
    "parallel": "config distributed weights",
    "models": "adapters config distributed metrics parallel pinned rng run weights",
    "data": "config distributed models rng run weights",
    "captioning": "config data distributed models run",
    "export": "adapters checkpoint config models rng run weights",
    "plan": "adapters config data distributed gpus models optim parallel rng run weights",
    "launcher": "checkpoint config data gpus metrics models plan run weights",
    "train": "adapters checkpoint config data distributed export metrics models optim parallel pinned plan rng run",
    "__main__": "config data distributed export metrics models run train",
    "benchmark": "__main__ config distributed launcher metrics optim parallel run train",
    "app": "benchmark config data gpus launcher models parallel plan run",
    "launch": "app",
    "notebooks": "adapters app checkpoint config data models parallel rng run weights",
}
"""{room: the rooms it imports}, from the ground up: a room imports only rooms above its own line."""


@dataclass(frozen=True)
class Module:
    """A source file. name: as it is imported; that of a package's `__init__.py` is the package's."""

    name: str
    text: str

    @property
    def room(self) -> str:
        """`data` for `trainer.data.cache`."""
        return room_of(self.name)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _all_nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    def nodes(self, *kinds: type) -> Iterator[ast.AST]:
        return (node for node in self._all_nodes if isinstance(node, kinds))

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, name) of every import anywhere in the file; `from a import b` is `a.b`."""
        for node in self.nodes(ast.Import, ast.ImportFrom):
            above = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((node.lineno, above + alias.name) for alias in node.names)

    def imported_rooms(self) -> Iterator[tuple[int, str]]:
        """(line, room) of every import from another room of the project."""
        for line, name in self.imports():
            if (room := room_of(name)) in ROOMS and room != self.room:
                yield line, room


def room_of(name: str) -> str:
    """The room of an imported name; of another project's, its package."""
    top, _, rest = name.partition(".")
    return rest.partition(".")[0] if top == "trainer" else top


def read_modules(*folders: str) -> dict[str, Module]:
    """Every source file in these folders of the project, and `launch.py`, by name."""
    files = [ROOT / "launch.py", *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return {name: Module(name, file.read_text(encoding="utf-8")) for name, file in zip(names, files, strict=True)}


def arrows(modules: Iterable[Module]) -> dict[str, set[str]]:
    """{room: the rooms that its modules import}"""
    found: dict[str, set[str]] = {}
    for module in modules:
        if module.room:  # the package `trainer` itself is empty
            found.setdefault(module.room, set()).update(room for _, room in module.imported_rooms())
    return found


def main() -> int:
    """Print the rooms. Returns 1 where there are more rooms or arrows than MOST_ROOMS and MOST_ARROWS."""
    found = arrows(read_modules("trainer", "app", "notebooks").values())
    for room, others in found.items():
        print(f"{room}: {' '.join(sorted(others))}")
    count = sum(map(len, found.values()))
    print(f"{len(found)} rooms of at most {MOST_ROOMS}, {count} arrows of at most {MOST_ARROWS}")
    return int(len(found) > MOST_ROOMS or count > MOST_ARROWS)


if __name__ == "__main__":
    sys.exit(main())
