"""The rooms of the house and who imports whom: `python -m tests.rooms` prints and counts them. With `--functions` it
prints how the code is cut into functions.

A room is a package or a loose module directly below `trainer`, or one of `app`, `launch.py` and `notebooks`. An arrow
is a room that imports another one, however often. `tests/test_architecture.py` holds the code to ROOMS.

See DECISIONS 1.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_ROOMS, MOST_ARROWS, MOST_MODULES = 26, 130, 16

ROOMS = {
    "system": "",
    "rng": "system",
    "config": "system",
    "optim": "config system",
    "run": "config system",
    "view": "config run system",
    "weights": "config system",
    "adapters": "config rng system weights",
    "distributed": "config run system",
    "checkpoint": "config distributed run system",
    "metrics": "config distributed run system",
    "parallel": "config distributed system weights",
    "models": "adapters config distributed metrics parallel rng run system weights",
    "data": "config distributed models rng run system weights",
    "captioning": "config data distributed models run system",
    "export": "adapters checkpoint config data models rng run system weights",
    "plan": "adapters config distributed models optim parallel rng run system view weights",
    "launcher": "checkpoint config data export metrics models plan run system view weights",
    "train": "adapters checkpoint config data distributed export metrics models optim parallel plan rng run system "
    "view",
    "__main__": "train",
    "benchmark": "distributed launcher metrics optim parallel plan run train view",
    "app": "config data launcher plan run system view",
    "launch": "app",
    "notebooks": "adapters app checkpoint config data models plan rng run view weights",
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

    def nodes(self, *kinds: Any) -> Iterator[ast.AST]:
        return (node for node in self._all_nodes if isinstance(node, kinds))

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, name) of every import anywhere in the file; `from a import b` is `a.b`."""
        for node in self.nodes(ast.Import, ast.ImportFrom):
            above = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((node.lineno, above + alias.name) for alias in node.names)

    def imports_by_name(self) -> Iterator[str]:
        """Names that the file gives to `import_module`."""
        for node in self.nodes(ast.Call):
            is_import = ast.unparse(node.func).endswith("import_module")
            if is_import and node.args and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value

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


def folders(modules: Iterable[Module]) -> Counter[str]:
    """{package: its modules}, without `__init__.py` and what lies in folders of its own."""
    names = {module.name for module in modules}
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    return Counter(name.rpartition(".")[0] for name in names - packages if "." in name)


def circle(modules: Mapping[str, Module]) -> list[str]:
    """Modules that import each other in a circle, at their import or later; [] where there is none."""
    graph = {}
    for name, found in modules.items():
        names = [*(imported for _, imported in found.imports()), *found.imports_by_name()]
        graph[name] = {_module(imported, modules) for imported in names} - {name, ""}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _module(imported: str, modules: Mapping[str, Module]) -> str:
    """The module that holds an imported name: `trainer.data.cache` of `trainer.data.cache.Cache`."""
    while imported and imported not in modules:
        imported = imported.rpartition(".")[0]
    return imported


IS_FOR_TOOLS = re.compile(r"#\s*(type:|noqa|fmt:|pragma)")
"""Comments that tell a reader nothing, unless a reason follows them."""
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
SHORT, SMALL, LONG = 3, 4, 25
"""Lines: the body of a short function; that of a private one that wants a reason; a long function as a whole."""


PER_ITEM = ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp | ast.Lambda | ast.IfExp | ast.BoolOp


@dataclass(frozen=True)
class Function:
    """A function or method as it is written.

    Attributes:
        body: Lines of the body, without the docstring.
        is_small_for_one: Whether it is private, of a few lines, and could stand in the one place that calls it. One
            that is passed on needs a name, and so do statements that a part of an expression calls. A method of a class
            with bases may be another's hook.
    """

    module: str
    node: AnyFunction
    body: int
    is_small_for_one: bool
    has_comment: bool

    @property
    def lines(self) -> int:
        return (self.node.end_lineno or 0) - self.node.lineno + 1

    @property
    def is_long(self) -> bool:
        return self.lines >= LONG

    @property
    def is_silent(self) -> bool:
        """Whether it has no docstring."""
        return ast.get_docstring(self.node, clean=False) is None

    def __str__(self) -> str:
        return f"{self.module}:{self.node.lineno}: {self.node.name}"


def functions(module: Module) -> Iterator[Function]:
    """Every function of a file, also those inside others."""
    uses = Counter(map(_name, module.nodes(ast.Name, ast.Attribute)))
    calls = Counter(_name(node.func) for node in module.nodes(ast.Call))
    per_item = {
        _name(call.func) for node in module.nodes(PER_ITEM) for call in ast.walk(node) if isinstance(call, ast.Call)
    }
    hooks = {node for owner in module.nodes(ast.ClassDef) if owner.bases for node in owner.body}
    defined = Counter(node.name for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef))
    commented = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
        if token.type == tokenize.COMMENT and not IS_FOR_TOOLS.match(token.string)
    }
    for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        name, body = node.name, node.body[ast.get_docstring(node, clean=False) is not None :]
        lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
        is_private = name.startswith("_") and not name.endswith("__") and not node.decorator_list
        has_one_caller = uses[name] == calls[name] == defined[name] == 1
        is_expression = len(body) == 1 and isinstance(body[0], ast.Return)
        can_move = is_expression or (_is_straight(body) and name not in per_item)
        yield Function(
            module.name,
            node,
            lines,
            is_private and has_one_caller and can_move and lines <= SMALL and node not in hooks,
            not commented.isdisjoint(range(node.lineno, (node.end_lineno or 0) + 1)),
        )


def _is_straight(body: Sequence[ast.stmt]) -> bool:
    """Whether statements yield nothing and return at their end or not at all: they can stand before their caller's."""
    ends = [
        node for line in body for node in ast.walk(line) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)
    ]
    return ends in ([], body[-1:])


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def print_functions(modules: Iterable[Module]) -> None:
    """Print how the code is cut: short functions, small helpers with one caller, long functions and their comments."""
    found = [function for module in modules for function in functions(module)]
    short = sum(function.body <= SHORT for function in found)
    small = [function for function in found if function.is_small_for_one]
    silent = [function for function in small if function.is_silent]
    long = [function for function in found if function.is_long]
    commented = sum(function.has_comment for function in long)
    for function in small:
        print(f"{function}: {function.body} lines, one caller{', no docstring' if function in silent else ''}")
    for function in long:
        if not function.has_comment:
            print(f"{function}: {function.lines} lines without a comment")
    for function in sorted(found, key=lambda function: -function.lines)[:10]:
        print(f"{function}: {function.lines} lines")
    print(f"{short} of {len(found)} functions ({short / len(found):.0%}) have at most {SHORT} lines of body")
    print(
        f"{len(small)} private functions of at most {SMALL} lines could stand in their one caller: "
        f"{len(small) - len(silent)} with a docstring, {len(silent)} without"
    )
    print(f"{commented} of {len(long)} functions of {LONG} lines or more ({commented / len(long):.0%}) hold a comment")


def main() -> int:
    """Print the rooms, or with `--functions` how the code is cut.

    Returns 1 where there is more of rooms, arrows or modules in a folder than MOST_... allow."""
    parser = argparse.ArgumentParser(prog="python -m tests.rooms", description=__doc__)
    parser.add_argument("--functions", action="store_true", help="print how the code is cut into functions")
    if parser.parse_args().functions:
        print_functions(read_modules("trainer", "app").values())
        return 0
    modules = read_modules("trainer", "app", "notebooks").values()
    found = arrows(modules)
    for room, others in found.items():
        print(f"{room}: {' '.join(sorted(others))}")
    count = sum(map(len, found.values()))
    print(f"{len(found)} rooms of at most {MOST_ROOMS}, {count} arrows of at most {MOST_ARROWS}")
    counted = folders(module for module in modules if module.room != "notebooks")
    for folder, number in sorted(counted.items()):
        print(f"{folder}: {number} modules")
    print(f"at most {max(counted.values())} modules in a folder, of at most {MOST_MODULES}")
    return int(len(found) > MOST_ROOMS or count > MOST_ARROWS or max(counted.values()) > MOST_MODULES)


if __name__ == "__main__":
    sys.exit(main())
