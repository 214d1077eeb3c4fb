"""Notes on a run: kept in its folder, and never lost to another window."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.runs import notes
from app.runs.notes import Notes
from tests.runs import run_config
from trainer.run.folder import RunDir
from trainer.system.errors import InputError


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", run_config(tmp_path), tmp_path / "runs" / "one")


def test_notes_are_a_file_of_the_run_folder(run: RunDir):
    empty = notes.read(run)
    assert empty.text == ""
    saved = notes.save(run, "Ears too round at 500.\nNächstes: Rang 32 🦊", empty.version)
    assert saved.is_saved
    assert (run.path / "notes.md").read_text(encoding="utf-8") == "Ears too round at 500.\nNächstes: Rang 32 🦊"
    assert notes.read(run) == saved.notes


def test_a_newer_text_is_not_overwritten_and_is_shown(run: RunDir):
    seen = notes.read(run)
    (run.path / "notes.md").write_text("from an editor")
    answer = notes.save(run, "from the page", seen.version)
    assert (answer.is_saved, answer.notes) == (False, Notes.of("from an editor"))
    assert notes.save(run, "from the page", answer.notes.version).is_saved
    assert notes.read(run).text == "from the page"


def test_two_windows_that_saved_the_same_text_agree(run: RunDir):
    seen = notes.read(run)
    notes.save(run, "the same", seen.version)
    assert notes.save(run, "the same", seen.version).is_saved


@pytest.mark.parametrize(("text", "problem"), [("\ud83e", "half a character"), ("x" * 100_001, "shorten them")])
def test_a_text_that_cannot_be_kept_is_refused(run: RunDir, text: str, problem: str):
    with pytest.raises(InputError, match=problem):
        notes.save(run, text, notes.read(run).version)
    assert not (run.path / "notes.md").exists()


def test_notes_that_lead_out_of_the_run_folder_are_not_read(run: RunDir, tmp_path: Path):
    (tmp_path / "secret").write_text("a secret")
    (run.path / "notes.md").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="not a file of one"):
        notes.read(run)
