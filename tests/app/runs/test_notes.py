"""Notes on a run and its name: kept in its folder; notes are never lost to another window."""

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


@pytest.mark.parametrize(
    ("typed", "title", "id"),
    [
        ("Fox, rank 32 🦊👨‍👩‍👧", "Fox, rank 32 🦊👨‍👩‍👧", "fox-20261124-211219-aebff6"),
        ("  two\n lines\t and \x1b[31mred\u202e ", "two lines and [31mred", "fox-20261124-211219-aebff6"),
        ("<b>../../x</b>", "<b>../../x</b>", "fox-20261124-211219-aebff6"),
        ("x" * 200, "x" * 200, "fox-20261124-211219-aebff6"),
        ("fox", "fox", "20261124-211219-aebff6"),
        (" \n", "fox", "20261124-211219-aebff6"),
        ("\u200b\u2060\ufeff", "fox", "20261124-211219-aebff6"),
        ("\u3164", "fox", "20261124-211219-aebff6"),
    ],
)
def test_a_run_takes_any_name_and_its_folder_keeps_its_own(tmp_path: Path, typed: str, title: str, id: str):
    run = RunDir.create(tmp_path, run_config(tmp_path), tmp_path / "fox-20261124-211219-aebff6")
    assert (run.title, run.title_id) == ("fox", "20261124-211219-aebff6")
    notes.give_title(run, "another")
    notes.give_title(run, typed)
    assert (run.title, run.title_id, run.path.is_dir()) == (title, id, True)
    run.guard()


@pytest.mark.parametrize(
    ("typed", "refusal"),
    [("x" * 201, "name: 201 characters; shorten it to 200"), ("\ud83d", "name: holds \\ud83d, which is half")],
)
def test_a_name_that_no_screen_can_show_is_refused_in_words(run: RunDir, typed: str, refusal: str):
    with pytest.raises(InputError) as error:
        notes.give_title(run, typed)
    assert str(error.value).startswith(refusal)
    assert run.title == "one"


def test_a_strangers_name_is_one_short_line_of_its_own_folder(run: RunDir, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    run.title_file.symlink_to(secret)
    assert run.title == "one"
    run.title_file.unlink()
    for content, title in ((b"\xff" * 300, "\ufffd" * 200), (b"x" * 10_000, "one"), (b"a\r\nb", "a b"), (b"", "one")):
        run.title_file.write_bytes(content)
        assert run.title == title
    run.title_file.unlink()
    run.title_file.mkdir()
    assert run.title == "one"
