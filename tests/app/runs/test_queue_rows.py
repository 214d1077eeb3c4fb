"""Rows of the queue: which run a button means, and what the next start waits for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from app.runs import queue_rows
from tests.runs import run_config
from trainer.launcher.queue import Queue
from trainer.system.errors import InputError


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    queue = Queue(tmp_path / "runs")
    for name in ("first", "second"):
        queue.add(run_config(tmp_path, name=name), (0, 1) if name == "second" else ())
    return queue


def test_a_row_has_the_model_the_method_and_since_when_it_waits(queue: Queue):
    entry = queue.waiting()[1]
    row = queue_rows.row(entry)
    assert {name: row[name] for name in ("name", "model", "method", "gpus", "state", "queued_at", "problem")} == {
        "name": "second",
        "model": "Tiny model (flux2)",
        "method": "LoRA",
        "gpus": [0, 1],
        "state": "waiting",
        "queued_at": entry.queued_at,
        "problem": "",
    }


def test_the_row_of_a_config_that_no_longer_fits_says_so(queue: Queue):
    row = queue_rows.row(replace(queue.waiting()[0], config="model: {family: flux2}\nolder: 1\n"))
    assert "older: unknown field" in row["problem"] and row["model"] == ""


def test_a_window_with_an_old_order_acts_on_the_run_it_shows(queue: Queue):
    key = queue_rows.key(queue.waiting()[0])
    queue.move(1, 1)  # another window
    assert queue_rows.find(queue, key).name == "first"
    queue.remove(queue_rows.find(queue, key).number)
    with pytest.raises(InputError, match="does not wait any more"):
        queue_rows.find(queue, key)
    assert [entry.name for entry in queue.waiting()] == ["second"]


def test_what_the_first_run_waits_for_is_said(queue: Queue, tmp_path: Path):
    assert queue_rows.next_start(queue) == "first starts within a few seconds."
    queue.change(replace(queue.settings, is_paused=True))
    assert queue_rows.next_start(queue) == "Paused: no run is started until you resume the queue."
    shutil.rmtree(tmp_path / "runs")
    assert queue_rows.next_start(queue) == ""
