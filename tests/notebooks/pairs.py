"""A notebook is a pair: NAME.py, which is written and reviewed, and NAME.ipynb, which JupyterLab opens.

See DECISIONS 125.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
KEPT = ROOT / "build" / "notebooks"
"""Where notebooks with outputs are kept before these are removed."""

METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}
"""Without it JupyterLab asks for a kernel each time."""


class EditedError(ValueError):
    """The .ipynb holds what the .py does not, and writing it anew would lose that."""


def scripts(folder: Path = NOTEBOOKS) -> list[Path]:
    """The .py of every pair, in their order."""
    return sorted(folder.glob("[0-9]*.py"))


def from_script(script: Path) -> NotebookNode:
    """The notebook as it is to be committed: without outputs, and equal for equal scripts."""
    notebook = jupytext.reads(script.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell, name in zip(notebook.cells, _ids(notebook.cells), strict=True):
        cell.id = name
        cell.metadata = nbformat.from_dict({"tags": cell.metadata.tags} if "tags" in cell.metadata else {})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def write(script: Path) -> Path:
    """Write the .ipynb of a .py. One with outputs is kept in KEPT first.

    Raises EditedError when its cells were changed since they were written and the .py does not hold the changes.
    """
    file, notebook = script.with_suffix(".ipynb"), from_script(script)
    if file.exists():
        old = nbformat.read(file, as_version=4)
        if sources(old) != sources(notebook) and _is_edited(old):
            raise EditedError(
                f"{file}: was edited in Jupyter, and {script.name} does not hold that; take it over with "
                f"`jupytext --to py:percent {file}`, or delete the .ipynb to keep what the .py says"
            )
        if any(cell.get("outputs") for cell in old.cells):
            KEPT.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, KEPT)
    draft = file.with_suffix(".draft")
    draft.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return draft.replace(file)


def sources(notebook: NotebookNode) -> list[tuple[str, str]]:
    """(kind, text) of each cell."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def _is_edited(notebook: NotebookNode) -> bool:
    """Whether a cell was added or changed since `write`. Jupyter gives random ids and keeps those of changed cells."""
    return [cell.id for cell in notebook.cells] != list(_ids(notebook.cells))


def _ids(cells: Sequence[NotebookNode]) -> Iterator[str]:
    """Of each cell by its text, so that a change is a change of one cell; of equal cells by their number too."""
    seen: dict[str, int] = {}
    for cell in cells:
        name = hashlib.sha256(f"{cell.cell_type} {cell.source}".encode()).hexdigest()[:12]
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"
