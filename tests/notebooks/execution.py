"""Runs a notebook as JupyterLab's "Run All" does, with other parameters and with answers to its exercises."""

from __future__ import annotations

import html
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.notebooks.pairs import NOTEBOOKS
from trainer.run.folder import RunDir
from trainer.run.process import terminate

PARAMETERS = "parameters"
CELL_TIMEOUT_S = 400
ANSWER = re.compile(r"^(answer_\d+) = \.\.\..*$", re.MULTILINE)


@dataclass(frozen=True)
class Answers:
    """To one exercise, as Python that may use what the cells before it made."""

    right: str
    wrong: str


@dataclass(frozen=True)
class Executed:
    """A notebook with its outputs, as it is saved. text: all that its cells show."""

    notebook: NotebookNode
    text: str
    seconds: float

    def save(self, file: Path) -> int:
        """Returns the size in bytes."""
        file.write_text(nbformat.writes(self.notebook), encoding="utf-8")
        return file.stat().st_size


def execute(
    name: str, folder: Path, parameters: Mapping[str, object] = {}, answers: Sequence[Answers] = ()
) -> Executed:
    """Run a notebook from its first cell to its last, in an empty folder, with its runs in `folder/runs`.

    answers: one for each exercise, of which the wrong one is given first; none leaves the exercises as they are.
    Raises CellExecutionError with the cell that failed. Runs that still go on then are ended.
    """
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    runs, here = folder / "runs", folder / "notebooks"
    here.mkdir()
    set_parameters(notebook, {"RUNS": runs, **parameters})
    if answers:
        notebook.cells = [answered for cell in notebook.cells for answered in _answered(cell, answers)]
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources=_in_folder(here))
    began = time.monotonic()
    try:
        client.execute(env=_environment(folder))
    finally:
        for file in runs.glob("*/launch.json"):
            terminate(RunDir(file.parent))
    return Executed(notebook, "\n".join(map(shown, notebook.cells)), time.monotonic() - began)


def shown(cell: NotebookNode) -> str:
    """The text a cell shows, that of tables and figures without their markup."""
    return "\n".join(map(_text, cell.get("outputs", ())))


def set_parameters(notebook: NotebookNode, parameters: Mapping[str, object]) -> None:
    """Give other values to names, at the end of the cell that is tagged for it."""
    cell = next(cell for cell in notebook.cells if PARAMETERS in cell.metadata.get("tags", ()))
    lines = ["from pathlib import Path", *(f"{name} = {_python(value)}" for name, value in parameters.items())]
    cell.source = "\n".join([cell.source, *lines])


def exercises(notebook: NotebookNode) -> int:
    """How many questions a notebook asks."""
    return len(ANSWER.findall("\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")))


def _text(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return str(output.text)
    data: Mapping[str, str] = output.get("data", {})
    if "text/html" in data:
        return html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", data["text/html"], flags=re.S)))
    return data.get("text/markdown") or data.get("text/plain", "")


def _python(value: object) -> str:
    return f"Path({str(value)!r})" if isinstance(value, Path) else repr(value)


def _answered(cell: NotebookNode, answers: Sequence[Answers]) -> list[NotebookNode]:
    """The cell with the wrong answer and again with the right one, or the cell itself where it asks nothing."""
    asked = ANSWER.search(cell.source) if cell.cell_type == "code" else None
    if not asked:
        return [cell]
    name = asked[1]
    given = answers[int(name.removeprefix("answer_")) - 1]
    return [
        nbformat.v4.new_code_cell(ANSWER.sub(lambda _: f"{name} = {answer}", cell.source, count=1))  # noqa: B023
        for answer in (given.wrong, given.right)
    ]


def _in_folder(folder: Path) -> dict[str, Any]:
    return {"metadata": {"path": str(folder)}}


def _environment(folder: Path) -> dict[str, str]:
    """No network, one thread, and no profile of whoever runs the tests."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "jupyter"),
    }
