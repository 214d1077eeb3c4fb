"""Recipe "Add an optimizer": a toy made of the files that it names is planned, trains, resumes and exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.copies import TOYS, Copy, listed
from tests.runs import make_pictures

PRESET = """\
name: toy
model: {family: flux2, path: tiny}
data: {path: pictures, resolution: 64}
train: {steps: 4, batch_size: 2, precision: fp32}
optim: {type: heavy_ball, lr: 0.01}
parallel: {device: cpu, devices: 2, strategy: full}
"""
LISTED = """
from pathlib import Path
from app.form import draft
from trainer.plan.simulate.sizes import optimizer_bytes

checked = draft.check(draft.from_overrides(Path("presets/quickstart.yaml"), ["optim.type=heavy_ball"]))
[row] = [row for row in draft.rows(checked) if row.field == "optim.type"]
print(*row.choices, row.value, row.error, optimizer_bytes(checked.config))
"""
LOSSES = """
import sys
from trainer.run.events import EventReader, StepEvent

for run in sys.argv[1:]:
    steps = [event for event in EventReader(f"{run}/events.jsonl").read() if isinstance(event, StepEvent)]
    print({step.step: step.loss for step in steps})
"""
SAME = """
import sys
from safetensors.torch import load_file

one, other = map(load_file, sys.argv[1:])
print(one.keys() == other.keys(), all(one[name].equal(other[name]) for name in one))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """The code with the toy, added as the recipe says."""
    copy = Copy(tmp_path)
    sections = "trainer/config/sections.py"
    copy.edit(sections, '"adamw8bit", "schedulefree"]', '"adamw8bit", "schedulefree", "heavy_ball"]')
    copy.edit(sections, "or schedule-free AdamW.", "schedule-free AdamW, or SGD with momentum.")
    copy.edit(sections, '"schedulefree": 8.0}', '"schedulefree": 8.0, "heavy_ball": 4.0}')
    toy = (TOYS / "optimizer.py").read_text(encoding="utf-8").partition("# In optim.py:\n")[2]
    copy.edit("trainer/optim.py", "\n\n_MAKERS = {", f'{toy}\n\n_MAKERS = {{"heavy_ball": _heavy_ball, ')
    copy.python("-m", "trainer.config.load")
    return copy


def test_a_new_optimizer_changes_the_files_of_its_recipe_and_no_others_and_form_and_plan_know_it(copy: Copy) -> None:
    assert copy.changed() == listed("Add an optimizer")
    assert copy.python("-c", LISTED) == "adamw adamw8bit schedulefree heavy_ball heavy_ball  4.0\n"


@pytest.mark.slow
def test_a_new_optimizer_trains_resumes_as_if_it_had_not_stopped_and_exports(copy: Copy) -> None:
    make_pictures(copy.path / "pictures", count=4)
    copy.add("toy.yaml", PRESET)
    for run, steps in (("whole", 4), ("parts", 2)):
        copy.python("launch.py", "--headless", "toy.yaml", "--run-dir", run, f"train.steps={steps}")
    copy.python("launch.py", "--resume", "parts", "train.steps=4")
    whole, parts = copy.python("-c", LOSSES, "whole", "parts").splitlines()
    assert whole == parts and whole.count(":") == 4
    exports = (copy.path / run / "export" / "toy.safetensors" for run in ("whole", "parts"))
    assert copy.python("-c", SAME, *exports) == "True True\n"
    assert "heavy_ball" in (copy.path / "whole" / "report.html").read_text(encoding="utf-8")
