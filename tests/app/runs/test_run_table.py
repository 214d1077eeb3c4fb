"""The table of runs: what a row says, what is read again, and what an answer leaves out."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.runs import notes, run_table
from app.runs.monitor import Follower
from app.runs.run_table import Changes, Summaries
from app.studio import Studio
from tests.app.browser import recorded
from tests.runs import write
from trainer.run.events import ErrorEvent, SampleEvent, StatusEvent, ValidationEvent
from trainer.run.folder import RunDir
from trainer.run.process import MAX_SILENCE_S
from trainer.system.index import Index
from trainer.view.report import write_report


def test_a_row_says_what_came_of_a_run(studio: Studio):
    run = recorded(studio.runs, "fox", adapter={"type": "lokr", "rank": 8}, quantize__format="int8")
    write(run, ValidationEvent(step=30, loss=0.01), ValidationEvent(step=35, loss=math.nan))
    (row,) = Summaries(studio).all()
    assert (row.name, row.state, row.step, row.num_steps) == ("fox", "finished", 40, 40)
    assert (row.model, row.adapter) == ("Tiny model (flux2)", "LoKr 8, int8")
    assert row.best == (0.01, 30)
    assert len(row.curve) == 40
    assert row.curve[0] == pytest.approx(1.0, abs=1e-3)
    assert list(row.curve) == sorted(row.curve, reverse=True)
    assert row.sample == "samples/step-000040-0.png"
    assert (row.eta_s, row.reason, row.problem, row.is_stuck) == (None, "", "", False)


def test_the_curve_of_a_stopped_run_ends_where_the_run_did(studio: Studio):
    recorded(studio.runs, "half", [StatusEvent(state="stopped", step=40)], train__steps=40)
    run = RunDir(studio.runs / "half")
    run.config_file.write_text(run.config_file.read_text().replace("steps: 40", "steps: 80", 1))
    (row,) = Summaries(studio).all()
    assert (row.num_steps, len(row.curve)) == (80, run_table.CURVE_POINTS // 2)


def test_a_run_without_an_adapter_trains_all_weights_and_a_rotation_has_its_block_size(studio: Studio):
    recorded(studio.runs, "all", adapter={"type": "none"})
    recorded(studio.runs, "boft", adapter={"type": "boft", "block_size": 4})
    assert {row.name: row.adapter for row in Summaries(studio).all()} == {"all": "All weights", "boft": "BOFT 4"}


def test_why_a_run_failed_and_the_words_of_a_text_model_are_in_its_row(studio: Studio):
    text = SampleEvent(step=41, prompt="a", index=0, path="samples/1.txt", text="Once upon a time")
    recorded(studio.runs, "sad", [text, ErrorEvent(message="CUDA out of\nmemory"), StatusEvent(state="failed")])
    (row,) = Summaries(studio).all()
    assert (row.reason, row.sample, row.text) == ("CUDA out of memory", "", "Once upon a time")


def test_pauses_and_the_time_until_somebody_noticed_the_end_do_not_count_as_duration(studio: Studio):
    run = RunDir.create(studio.runs, recorded(studio.runs, "base").config(), studio.runs / "paused")
    write(run, StatusEvent(state="starting", time=1000.0), StatusEvent(state="stopped", time=1060.0))
    write(run, StatusEvent(state="starting", time=90_000.0), StatusEvent(state="training", time=90_030.0))
    assert Follower(run).view().duration_s == 90
    write(run, ErrorEvent(message="power cut", time=900_000.0), StatusEvent(state="failed", time=900_000.0))
    assert Follower(run).view().duration_s == 90 + MAX_SILENCE_S


def test_an_answer_has_only_what_changed_since_the_one_before(studio: Studio):
    for name in ("a", "b", "c"):
        recorded(studio.runs, name)
    summaries = Summaries(studio)
    first = settled(summaries)
    assert (first.is_whole, names(first), first.gone) == (True, {"a", "b", "c"}, ())
    assert summaries.changes(first.token) == Changes(first.token, False, (), (), 0)
    run_table.change_tags(studio.runs, ["b"], "good")
    shutil.rmtree(studio.runs / "c")
    second = summaries.changes(first.token)
    assert [(row.name, row.tags) for row in second.rows] == [("b", ("good",))]
    assert (second.is_whole, second.gone) == (False, ("c",))
    assert summaries.changes(second.token).rows == ()
    other = Summaries(studio).changes(second.token)
    assert (other.is_whole, names(other)) == (True, {"a", "b"}), "a token of a process that ended"


def test_a_run_that_is_started_again_is_read_again(studio: Studio):
    run, other = recorded(studio.runs, "one"), recorded(studio.runs, "two")
    summaries = Summaries(studio)
    token = settled(summaries).token
    for again in (run, other):
        write(again, StatusEvent(state="stopped", step=12))
    run.launch_file.write_text('{"pid": 4194303, "create_time": 1.0, "argv": ["x"], "since_boot": 1.0}')
    assert [(row.name, row.state) for row in summaries.changes(token).rows] == [("one", "stopped")]
    assert {row.state for row in summaries.all()} == {"stopped"}, "what else changed is looked for now and then"


def test_a_run_that_is_renamed_says_so_in_the_next_answer_and_in_its_report(studio: Studio):
    run = recorded(studio.runs, "fox-20261124-211219-aebff6")
    summaries = Summaries(studio)
    first = settled(summaries)
    assert [(row.title, row.id) for row in first.rows] == [("fox", "20261124-211219-aebff6")]
    for name in ("My <b>fox</b> 🦊", "", "Second"):
        notes.give_title(run, name)
    assert [(row.title, row.id) for row in summaries.changes(first.token).rows] == [("Second", run.path.name)]
    assert [row.title for row in Summaries(studio).all()] == ["Second"]
    assert "<h1>Second</h1>" in write_report(run).read_text(encoding="utf-8")


def test_what_is_not_read_in_time_is_read_by_the_next_calls(studio: Studio):
    for name in ("new", "old"):
        recorded(studio.runs, name)
    os.utime(studio.runs / "old" / "logs", (1, 1))
    summaries = Summaries(studio)
    first = summaries.changes(budget_s=-1)
    assert [(row.name, row.state) for row in first.rows] == [("new", "unread"), ("old", "unread")]
    assert first.num_unread == 2
    second = summaries.changes(first.token)
    assert ({row.state for row in second.rows}, second.num_unread) == ({"finished"}, 0)


def test_rows_and_sizes_are_kept_on_disk_for_the_next_process(studio: Studio):
    recorded(studio.runs, "kept")
    mine = settled(Summaries(studio)).rows
    wait_for(lambda: bool(Index(studio.runs / "drafts").all(run_table.SIZES)))
    again = Summaries(studio).changes(budget_s=-1)
    assert (again.rows, again.num_unread) == (mine, 0)
    assert mine[0].size == sum(file.stat().st_size for file in (studio.runs / "kept").rglob("*") if file.is_file())


@pytest.mark.parametrize("row", [b"", b"{[", b"[[1], {}]"])
def test_a_row_that_a_stranger_wrote_is_read_anew_from_its_run(studio: Studio, row: bytes):
    recorded(studio.runs, "one")
    for kind in (run_table.ROWS, run_table.SIZES):
        Index(studio.runs / "drafts").put(kind, {"one": row})
    assert [row.state for row in Summaries(studio).all()] == ["finished"]


def test_of_a_deleted_run_no_row_is_kept_on_disk(studio: Studio):
    recorded(studio.runs, "kept")
    recorded(studio.runs, "gone")

    def rows() -> set[bytes]:  # by an index of its own: one that found no file does not look again
        return {name for name, row in Index(studio.runs / "drafts").all(run_table.ROWS).items() if row}

    settled(Summaries(studio))
    wait_for(lambda: rows() == {b"kept", b"gone"})
    shutil.rmtree(studio.runs / "gone")
    settled(Summaries(studio))
    wait_for(lambda: rows() == {b"kept"})


def test_a_damaged_run_has_a_row_with_its_sentence_until_it_is_mended(studio: Studio):
    run = recorded(studio.runs, "hurt")
    text = run.config_file.read_text()
    run.config_file.write_text("{[")
    summaries = Summaries(studio)
    (row,) = summaries.all()
    assert row.state == "damaged"
    assert row.problem.startswith("config.yaml:1: not YAML")
    run.config_file.write_text(text)
    (row,) = summaries.all()
    assert (row.state, row.problem) == ("finished", "")


def test_a_folder_whose_name_is_not_utf8_has_a_row_that_says_so_and_harms_no_other(studio: Studio):
    recorded(studio.runs, "good")
    shutil.copytree(studio.runs / "good", os.fsdecode(os.fsencode(studio.runs) + b"/bad\xff"))
    summaries = Summaries(studio)
    rows = {row.name: (row.state, row.problem) for row in summaries.all()}
    assert rows == {
        "good": ("finished", ""),
        "bad\udcff": ("damaged", "The name of this folder is not UTF-8: rename it."),
    }
    assert summaries._counter is not None
    summaries._counter.join()
    assert [name for name, row in Index(studio.runs / "drafts").all(run_table.ROWS).items() if row] == [b"good"]


def test_a_sample_is_a_file_of_its_run(studio: Studio):
    run = recorded(studio.runs, "one")
    summaries = Summaries(studio)
    summaries.all()
    assert summaries.sample("one") == run.samples / "step-000040-0.png"
    assert summaries.sample("another") is None


def test_tags_are_added_and_removed_for_several_runs_at_once(tmp_path: Path):
    run_table.change_tags(tmp_path, ["a"], "old, fox")
    run_table.change_tags(tmp_path, ["a", "b"], added="fox, v2", removed="old")
    assert run_table.read_tags(tmp_path) == {"a": ("fox", "v2"), "b": ("fox", "v2")}


def test_a_tag_with_a_comma_which_only_another_program_can_have_written_is_removed_too(tmp_path: Path):
    (tmp_path / "tags.json").write_text('{"a": ["x,y", "x", "z"]}')
    run_table.change_tags(tmp_path, ["a"], removed="x,y")
    assert run_table.read_tags(tmp_path) == {"a": ("z",)}


def settled(summaries: Summaries) -> Changes:
    """All rows, when every run is read and counted."""
    wait_for(lambda: all(row.size is not None for row in summaries.all()))
    return summaries.changes()


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def names(changes: Changes) -> set[str]:
    return {row.name for row in changes.rows}
