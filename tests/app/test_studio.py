"""What the page knows: the draft, presets, starts that happen once, a queue that goes on after trouble."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from app.form import draft as form
from app.form.draft import Draft
from app.runs import run_table, run_trash
from app.studio import Studio
from tests.app.browser import recorded
from tests.runs import make_pictures, write_preset
from trainer.run import process
from trainer.system.errors import InputError


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    return Studio(tmp_path / "runs")


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    folder = make_pictures(tmp_path / "pictures", count=2)
    return write_preset(tmp_path / "own.yaml", folder)


def test_the_first_draft_is_the_quickstart_and_a_kept_one_outlives_the_page(studio: Studio):
    assert studio.draft() == Draft(studio.presets()["quickstart"])
    draft = Draft(studio.presets()["quickstart"], {"train.steps": 7})
    studio.save_draft(draft)
    assert Studio(studio.runs).draft() == draft


@pytest.mark.parametrize(
    "kept",
    [
        "",
        "[]",
        '{"preset": "gone", "values": {}}',
        '{"preset": "quickstart"}',
        '{"preset": "quickstart", "values": {"": 1}}',
    ],
)
def test_a_draft_that_cannot_be_read_is_the_quickstart_again(studio: Studio, kept: str):
    (studio.runs / "drafts").mkdir(parents=True)
    (studio.runs / "drafts" / "draft.json").write_text(kept)
    assert studio.draft() == Draft(studio.presets()["quickstart"])
    assert studio.draft_problem.startswith("The saved form cannot be read: ")


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "-dash", "a/b"])
def test_a_name_that_leads_elsewhere_is_neither_a_preset_nor_a_run(studio: Studio, name: str):
    checked = form.check(studio.draft())
    with pytest.raises(InputError):
        studio.save_preset(checked, name)
    with pytest.raises(InputError):
        studio.run(name)


@pytest.mark.parametrize("name", ["my best run", "\u00fcn\u00ef \U0001f98a", "a,b", "50% & <b>"])
def test_a_run_whose_folder_was_renamed_by_hand_is_still_a_run(studio: Studio, name: str):
    recorded(studio.runs, name)
    assert studio.run(name).path == studio.runs / name


def test_many_clicks_at_once_start_one_run(studio: Studio, preset: Path):
    found = []
    clicks = [threading.Thread(target=lambda: found.append(studio.start(Draft(preset)))) for _ in range(4)]
    for click in clicks:
        click.start()
    for click in clicks:
        click.join()
    assert len({run.path for run in found}) == 1
    assert len(studio.find_runs()) == 1
    process.terminate(found[0])
    process.wait(found[0], 20)
    run_trash.delete(found[0])  # a click after that is meant
    again = studio.start(Draft(preset))
    assert again.path != found[0].path and again.path.is_dir()
    process.terminate(again)


def test_gpus_of_a_waiting_run_are_numbers(studio: Studio, preset: Path):
    with pytest.raises(InputError, match="GPUs: 'first' is not a list of numbers"):
        studio.enqueue(Draft(preset), "first")
    assert studio.enqueue(Draft(preset), " 0, 2 ").gpus == (0, 2)
    assert studio.enqueue(Draft(preset), "").gpus == ()


def test_what_is_wrong_with_a_draft_is_found_before_it_waits(studio: Studio, preset: Path):
    with pytest.raises(InputError, match="no folder '/none'"):
        studio.enqueue(Draft(preset, {"data.path": "/none"}), "")
    assert studio.queue.waiting() == []


def test_a_damaged_entry_of_the_queue_is_put_aside_by_the_page(studio: Studio):
    damaged = studio.runs / "queue" / "waiting" / "000001.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    worker = studio.run_queue()
    deadline = time.monotonic() + 10
    while not studio.queue.taken():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert f"{damaged}: damaged (" in studio.queue.taken()[0].error
    assert worker.is_alive() and studio.queue_problem == ""


def test_a_queue_that_cannot_be_worked_off_says_why_and_goes_on_when_it_can(studio: Studio):
    damaged = studio.runs / "queue" / "waiting"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("a file in place of a folder")
    worker = studio.run_queue()
    deadline = time.monotonic() + 10
    while not studio.queue_problem:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert worker.is_alive()
    damaged.unlink()
    while studio.queue_problem:
        assert time.monotonic() < deadline + 10
        time.sleep(0.05)


def test_damaged_tags_are_named_and_left_as_they_are(studio: Studio):
    studio.runs.mkdir()
    file = studio.runs / "tags.json"
    file.write_text("{")
    assert run_table.Summaries(studio).all() == []
    assert run_table.tags_problem(studio.runs).startswith(f"{file}: damaged (")
    with pytest.raises(InputError, match=r"tags\.json: damaged \(.*\); repair or remove it"):
        run_table.change_tags(studio.runs, ["one"], "good")
    assert file.read_text() == "{"
