"""Recipe "Add a tracker": a toy made of the files that it names gets every line of a run, also over its resumption."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.copies import TOYS, Copy, listed
from tests.runs import make_pictures

FIELD = '''\
    trackio: bool = False
    lines: bool = option(False, title="Toy lines")
    """Also write what the run reports into lines.jsonl."""
'''
PRESET = """\
name: toy
model: {family: flux2, path: tiny}
data: {path: pictures, resolution: 64}
train: {steps: 2, batch_size: 2, precision: fp32}
sample: {every: 2, prompts: [a fox], size: [64, 48], steps: 1}
parallel: {device: cpu, devices: 2, strategy: full}
trackers: {lines: true}
"""
LISTED = """
from app.form.fit_proof import SHORT
from app.form.form_answers import FIELDS
from trainer.config.sections import TrackersConfig
from trainer.metrics import trackers

print(FIELDS["trackers.lines"]["label"], "trackers.lines=false" in SHORT, trackers.missing(TrackersConfig(lines=True)))
"""
ENDED_WITHIN_S = 60


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """The code with the toy, added as the recipe says."""
    copy = Copy(tmp_path)
    sections = "trainer/config/sections.py"
    copy.edit(sections, "    trackio: bool = False\n", FIELD)
    copy.edit(sections, '"trackio": "trackio"}', '"trackio": "trackio", "lines": ""}')
    copy.add("trainer/metrics/trackers/lines.py", (TOYS / "tracker.py").read_text(encoding="utf-8"))
    copy.python("-m", "trainer.config.load")
    return copy


def lines(copy: Copy, number_of_ends: int) -> list[dict[str, Any]]:
    """What the tracker wrote, as soon as it has ended so many times: it outlives the run that it follows."""
    file, deadline = copy.path / "run" / "lines.jsonl", time.monotonic() + ENDED_WITHIN_S
    while True:
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
        if sum("failed" in line for line in found) == number_of_ends:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def test_a_new_tracker_changes_the_files_of_its_recipe_and_no_others_and_the_form_lists_it(copy: Copy) -> None:
    assert copy.changed() == listed("Add a tracker", name="lines")
    assert copy.python("-c", LISTED) == "Toy lines True []\n"


@pytest.mark.slow
def test_a_new_tracker_gets_steps_samples_and_states_once_over_a_run_and_its_resumption(copy: Copy) -> None:
    make_pictures(copy.path / "pictures", count=4)
    copy.add("toy.yaml", PRESET)
    copy.python("launch.py", "--headless", "toy.yaml", "--run-dir", "run")
    assert lines(copy, 1)[-1] == {"failed": False}
    copy.python("launch.py", "--resume", "run", "train.steps=4")
    found = lines(copy, 2)
    assert [line["step"] for line in found if "loss" in line] == [1, 2, 3, 4]
    pictures = [line for line in found if "prompt" in line]
    assert pictures == [{"step": step, "prompt": "a fox", "size": [64, 48]} for step in (0, 2, 4)]
    assert [line["state"] for line in found if "state" in line].count("finished") == 2
    assert "lines: true" in (copy.path / "run" / "report.html").read_text(encoding="utf-8")
