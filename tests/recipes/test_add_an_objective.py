"""Recipe "Add an objective": a toy made of the files that it names trains, and what it measures is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.app.browser import opened, serving, watch
from tests.recipes.copies import TOYS, Copy, listed
from tests.runs import make_pictures

FACTS = "trainer/config/families.json"
"""Written from all families, which takes half a minute."""
FIELD = '''
    roots: bool = option(False, title="Toy roots")
    """Train on the roots of the errors."""

    @property
    def compares_pairs(self)'''
PRESET = """\
name: toy
model: {family: flux2, path: tiny}
data: {path: pictures, resolution: 64}
train: {steps: 3, batch_size: 2, precision: fp32}
objective: {roots: true}
parallel: {device: cpu, devices: 2, strategy: full}
"""
LISTED = """
from app.form.form_answers import FIELDS

print(FIELDS["objective.roots"]["label"], FIELDS["objective.roots"]["help"])
"""
OF_FAMILIES = """
from trainer.config import families

print({name: families.of(name).reads("objective.roots") for name in ("flux2", "sdxl", "bagel", "causal_lm")})
"""
SAME = """
import math
from trainer.run.events import EventReader, StepEvent

steps = [event for event in EventReader("runs/first/events.jsonl").read() if isinstance(event, StepEvent)]
print([list(step.metrics) for step in steps], all(step.loss**2 <= step.metrics["squares"] for step in steps))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """The code with the toy, added as the recipe says."""
    copy = Copy(tmp_path)
    copy.edit("trainer/config/sections.py", "\n    @property\n    def compares_pairs(self)", FIELD)
    copy.add("trainer/models/objectives/roots.py", (TOYS / "objective.py").read_text(encoding="utf-8"))
    kinds = "trainer/models/objectives/kinds.py"
    copy.edit(kinds, "TextPreferences\n\n", "TextPreferences\nfrom trainer.models.objectives.roots import Roots\n\n")
    copy.edit(kinds, "ImagePreferences, Objective)", "ImagePreferences, Roots, Objective)")
    copy.python("-m", "trainer.config.load")
    return copy


def test_a_new_objective_changes_the_files_of_its_recipe_and_no_others_and_the_form_lists_its_field(copy: Copy) -> None:
    assert copy.changed() | {FACTS} == listed("Add an objective", name="roots")
    assert copy.python("-c", LISTED) == "Toy roots Train on the roots of the errors.\n"


@pytest.mark.slow
def test_a_new_objective_trains_and_its_metric_is_in_the_report_and_on_the_page(copy: Copy, browser: Browser) -> None:
    copy.python("-m", "trainer.models")
    assert copy.changed() == listed("Add an objective", name="roots")
    families = {"flux2": True, "sdxl": True, "bagel": False, "causal_lm": False}
    assert copy.python("-c", OF_FAMILIES) == f"{families}\n"
    make_pictures(copy.path / "pictures", count=4)
    copy.add("toy.yaml", PRESET)
    copy.python("launch.py", "--headless", "toy.yaml", "--run-dir", "runs/first")
    assert copy.python("-c", SAME) == f"{[['squares']] * 3} True\n"
    assert (copy.path / "runs" / "first" / "export" / "toy.safetensors").is_file()
    report = (copy.path / "runs" / "first" / "report.html").read_text(encoding="utf-8")
    assert "<dt>Squares, smoothed</dt>" in report and "roots: true" in report
    program, environment = copy.path / "launch.py", {"PYTHONPATH": str(copy.path)}
    with (
        serving(copy.path / "runs", program=program, environment=environment) as server,
        opened(browser, server.url) as page,
    ):
        watch(page, "first")
        expect(page.locator("#chart-squares")).to_be_visible()
        expect(page.locator("#chart-squares")).to_contain_text("Squares")
