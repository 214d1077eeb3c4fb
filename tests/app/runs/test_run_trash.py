"""Deleted runs: what they keep, what is refused, and what a stranger's trash may hold."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from app.data import trash
from app.form import draft as form
from app.form.draft import Draft
from app.runs import notes, run_table, run_trash
from app.runs.monitor import find_runs
from app.runs.run_table import Summaries
from app.studio import Studio
from app.web.answers import answering
from app.web.pages import runs
from tests.app.browser import recorded
from trainer.run.folder import TRASH, RunDir, freeing
from trainer.system.errors import InputError


def content(run: RunDir) -> dict[str, bytes]:
    return {str(file.relative_to(run.path)): file.read_bytes() for file in run.path.rglob("*") if file.is_file()}


def test_a_deleted_run_is_nowhere_and_comes_back_with_all_it_had(studio: Studio):
    run, other = recorded(studio.runs, "fox-20261124-211219-aebff6"), recorded(studio.runs, "other")
    notes.give_title(run, "My fox 🦊")
    notes.save(run, "round ears", notes.read(run).version)
    run_table.change_tags(studio.runs, [run.path.name], "good")
    before, size = content(run), run_table.size(run)
    summaries = Summaries(studio)
    assert freeing(studio.runs) == "free some space"
    name = run_trash.delete(run)
    assert [found.path for found in find_runs(studio.runs)] == [other.path]
    assert [row.name for row in summaries.all()] == ["other"]
    assert freeing(studio.runs).startswith("free some space (the deleted runs")
    [deleted] = run_trash.deletions(studio.runs)
    assert (deleted.name, deleted.run, deleted.title, deleted.size) == (name, run.path.name, "My fox 🦊", size)
    assert run_trash.restore(studio.runs, name) == run.path.name
    row = next(row for row in summaries.all() if row.name == run.path.name)
    assert (row.title, row.tags, notes.read(run).text) == ("My fox 🦊", ("good",), "round ears")
    assert content(run) == before
    assert (run_trash.deletions(studio.runs), list((studio.runs / TRASH).iterdir())) == ([], [])


def test_what_is_typed_over_the_settings_of_a_run_outlives_its_deletion(studio: Studio, living: set[str]):
    run = recorded(studio.runs, "fox", adapter__rank=3)
    studio.save_draft(Draft(run.config_file, {"train.steps": 7, "optim.lr": "much"}))
    before = form.check(studio.draft())
    window = answering([runs.calls(studio)])["runs_delete"]
    assert window({"runs": ["fox"]})["value"]["refused"] == ["fox: is running; stop it first"]
    assert studio.draft().preset == run.config_file
    living.clear()
    assert window({"runs": ["fox"]})["value"]["refused"] == []
    after = form.check(studio.draft())
    assert (studio.draft_problem, after.config, after.errors) == ("", before.config, before.errors)
    assert (after.config.adapter.rank, after.config.train.steps) == (3, 7)


def test_a_run_that_cannot_be_moved_stays_and_leaves_nothing_in_the_trash(studio: Studio, living: set[str]):
    run = recorded(studio.runs, "fox")
    with pytest.raises(InputError, match=r"^fox: is running; stop it first$"):
        run_trash.delete(run)
    living.clear()
    assert (run_trash.deletions(studio.runs), list((studio.runs / TRASH).iterdir())) == ([], [])
    shutil.rmtree(run.path)
    with pytest.raises(InputError, match="the run folder was deleted or moved away"):
        run_trash.delete(run)


def test_a_name_that_is_taken_meanwhile_is_refused_and_nothing_is_lost(studio: Studio):
    first = recorded(studio.runs, "fox")
    name = run_trash.delete(first)
    recorded(studio.runs, "fox", train__steps=3)
    with pytest.raises(InputError, match=r"fox: is there again; delete or move that one first\. Nothing was restored"):
        run_trash.restore(studio.runs, name)
    second = run_trash.delete(RunDir(studio.runs / "fox"))
    assert [deleted.name for deleted in run_trash.deletions(studio.runs)] == [second, name]
    run_trash.restore(studio.runs, name)
    assert RunDir(studio.runs / "fox").config().train.steps == 40
    assert run_trash.empty(studio.runs) == 1
    assert [path.name for path in studio.runs.glob(".deleted-*")] == []


def test_of_two_windows_that_restore_a_run_one_is_told_that_it_is_done(studio: Studio):
    name, said = run_trash.delete(recorded(studio.runs, "fox")), []

    def restore() -> None:
        try:
            said.append(run_trash.restore(studio.runs, name))
        except InputError as error:
            said.append(str(error))

    windows = [threading.Thread(target=restore) for _ in range(4)]
    for window in windows:
        window.start()
    for window in windows:
        window.join()
    assert sorted(said) == ["fox", *3 * [run_trash.GONE]]
    assert run_trash.empty(studio.runs) == 0


def test_only_what_the_question_named_is_removed_and_what_is_no_run(studio: Studio):
    first, second = (run_trash.delete(recorded(studio.runs, name)) for name in ("fox", "owl"))
    left = trash.begin(studio.runs.resolve())  # by a page that was killed
    assert answering([runs.calls(studio)])["runs_empty"]({"deletions": [first]}) == {"value": 2}
    assert [one.name for one in run_trash.deletions(studio.runs)] == [second]
    assert not (studio.runs / TRASH / left).exists()


def test_a_strangers_trash_leads_nowhere(studio: Studio, tmp_path: Path):
    run, home = recorded(studio.runs, "fox"), tmp_path / "home"
    shutil.copytree(run.path, home / "papers")
    bin_ = studio.runs / TRASH
    for number, inside in enumerate(("link", "cache", "file", "empty")):
        (bin_ / f"20260101T000000Z-{number}").mkdir(parents=True)
        place = bin_ / f"20260101T000000Z-{number}" / inside
        if inside == "link":
            place.symlink_to(home / "papers")
        elif inside == "cache":
            shutil.copytree(run.path, place)  # would be taken for the cache of all runs
        elif inside == "file":
            place.write_text("x")
    (bin_ / "20260101T000000Z-9").symlink_to(home)
    assert run_trash.deletions(studio.runs) == []
    for name in (*(f"20260101T000000Z-{number}" for number in (0, 1, 2, 3, 9)), "..", "../home", ""):
        with pytest.raises(InputError):
            run_trash.restore(studio.runs, name)
    assert run_trash.empty(studio.runs) == 4
    assert (home / "papers" / "config.yaml").is_file()
    shutil.rmtree(bin_)
    bin_.symlink_to(home)
    with pytest.raises(InputError, match="a link or file is in the place of the folder"):
        run_trash.delete(run)
    assert (run_trash.empty(studio.runs), run.path.is_dir()) == (0, True)
    assert trash.names(studio.runs) == []


def test_pages_that_empty_and_restore_at_once_say_no_more_than_what_is_so(studio: Studio, monkeypatch):
    """Two processes, whose locks do not hold each other: what one removes is gone for the other."""
    recorded(studio.runs, "one")
    name = run_trash.delete(studio.run("one"))
    remove = run_trash.process.remove
    monkeypatch.setattr(run_trash.process, "remove", lambda folder: (remove(folder), remove(folder)))
    assert run_trash.empty(studio.runs) == 1
    assert run_trash.deletions(studio.runs) == []
    run_trash.trash.forget(studio.runs.resolve(), name)  # as after a restore, when it was emptied meanwhile
