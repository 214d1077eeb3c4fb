"""Every notebook is a pair in step, without outputs, small, and explains before it shows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import jupytext
import nbformat
import pytest

from app.form.draft import GROUPS
from tests.notebooks import pairs
from tests.notebooks.execution import PARAMETERS, exercises
from tests.notebooks.lessons import LESSONS
from tests.notebooks.pairs import NOTEBOOKS, EditedError, from_script, scripts, write

MOST_CELLS, MOST_LINES = 20, 25
"""Of code: what is longer belongs into a module."""
NAMES = [script.stem for script in scripts()]


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_is_what_its_script_says(name):
    file = NOTEBOOKS / f"{name}.ipynb"
    written = nbformat.writes(from_script(file.with_suffix(".py"))) + "\n"
    assert file.read_text(encoding="utf-8") == written, "run make notebooks"


def test_every_notebook_is_a_pair_and_is_run_by_the_tests():
    assert sorted(file.stem for file in NOTEBOOKS.glob("*.ipynb")) == NAMES == sorted(LESSONS)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_that_a_notebook_names_is_one_of_the_form(name):
    text = " ".join((NOTEBOOKS / f"{name}.py").read_text(encoding="utf-8").replace("# ", "").split())
    assert set(re.findall(r"group \*([^*]+)\*", text)) <= GROUPS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_notebook_has_a_kernel_and_no_outputs(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert dict(notebook.metadata) == pairs.METADATA
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


@pytest.mark.parametrize("name", NAMES)
def test_the_code_is_short_and_each_cell_of_it_follows_a_text(name):
    cells = from_script(NOTEBOOKS / f"{name}.py").cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert len(code) <= MOST_CELLS
    assert [cell.source for cell in code if len(cell.source.splitlines()) > MOST_LINES] == []
    kinds = [cell.cell_type for cell in cells]
    assert kinds[0] == "markdown"
    assert ("code", "code") not in pairwise(kinds)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_come_first_and_there_are_exercises(name):
    notebook = from_script(NOTEBOOKS / f"{name}.py")
    first, *others = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert first.metadata.get("tags") == [PARAMETERS]
    assert "RUNS = notebook.RUNS" in first.source
    assert not any(cell.metadata for cell in others)
    checks = sum(cell.source.count("notebook.exercise(") for cell in others)
    assert exercises(notebook) == checks == len(LESSONS[name].answers) >= 2


SCRIPT = """\
# %% [markdown]
# Text

# %%
1 + 1

# %%
1 + 1
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pairs, "KEPT", tmp_path / "kept")
    script = tmp_path / "08_new.py"
    script.write_text(SCRIPT)
    write(script)
    return script


def edited(script: Path, change: str) -> nbformat.NotebookNode:
    """As JupyterLab saves the notebook with another text in its second cell, and its output."""
    file = script.with_suffix(".ipynb")
    notebook = nbformat.read(file, as_version=4)
    notebook.cells[1].source = change
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="3\n")]
    nbformat.write(notebook, file)
    return notebook


def test_a_change_of_one_cell_is_a_change_of_one_cell(script):
    before = [cell.id for cell in from_script(script).cells]
    script.write_text(SCRIPT.replace("# Text", "# Another text"))
    after = [cell.id for cell in from_script(script).cells]
    assert after[1:] == before[1:]
    assert len({*before, *after}) == 4, "two equal cells have two ids"


def test_what_was_edited_in_jupyter_is_not_written_over(script):
    edited(script, "2 + 1")
    before = script.with_suffix(".ipynb").read_bytes()
    with pytest.raises(EditedError, match=r"08_new.ipynb: was edited in Jupyter, .* `jupytext --to py:percent"):
        write(script)
    assert script.with_suffix(".ipynb").read_bytes() == before


def test_what_jupyter_saved_into_both_files_is_written_and_the_outputs_are_kept_aside(script):
    script.write_text(SCRIPT.replace("1 + 1", "2 + 1", 1))
    edited(script, "2 + 1")
    assert nbformat.read(write(script), as_version=4).cells[1].outputs == []
    [kept] = (script.parent / "kept").iterdir()
    assert nbformat.read(kept, as_version=4).cells[1].outputs[0].text == "3\n"


def test_jupytext_keeps_the_script_as_it_is_written_here(tmp_path):
    """What the contents manager of JupyterLab does when a notebook is saved."""
    for file in (NOTEBOOKS / "jupytext.toml", *NOTEBOOKS.glob("01*")):
        shutil.copy(file, tmp_path)
    notebook = tmp_path / "01_quickstart.ipynb"
    subprocess.run([sys.executable, "-m", "jupytext", "--to", "py:percent", notebook], check=True, capture_output=True)
    assert notebook.with_suffix(".py").read_text() == (NOTEBOOKS / "01_quickstart.py").read_text()
    assert jupytext.reads(notebook.with_suffix(".py").read_text(), "py:percent").cells
