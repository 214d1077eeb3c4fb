"""Recipe "Add a model family": a toy made of the files that it names trains, draws, and its export is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.recipes.copies import TOYS, Copy, listed
from tests.runs import make_pictures

FACTS = "trainer/config/families.json"
"""Written from all families, which takes half a minute."""
PRESET = """\
name: first
model: {family: toy, path: tiny}
adapter: {rank: 4}
data: {path: pictures, resolution: 64}
train: {steps: 3, batch_size: 2, precision: fp32}
sample: {every: 3, prompts: [a fox], size: [64, 48], steps: 2}
optim: {lr: 0.01}
export: {dtype: fp32}
parallel: {device: cpu, devices: 2, strategy: full}
"""
LISTED = """
from pathlib import Path
from app.form import draft

checked = draft.check(draft.from_overrides(Path("presets/quickstart.yaml"), ["model.family=toy", "model.path=tiny"]))
[row] = [row for row in draft.rows(checked) if row.field == "model.family"]
print("toy" in row.choices, row.value, row.error)
"""
SHOWN = """
from pathlib import Path
from app.runs.run_screen import about
from trainer.export.card import model_card
from trainer.run.folder import RunDir

run = RunDir(Path("first").absolute())
print(about(run.config()), "![a fox](samples/" in model_card(run), sep="; ")
"""


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """The code with the toy, added as the recipe says."""
    copy = Copy(tmp_path)
    copy.add("trainer/models/families/toy.py", (TOYS / "family.py").read_text(encoding="utf-8"))
    return copy


def test_a_new_family_changes_the_files_of_its_recipe_and_no_others_and_the_form_lists_it(copy: Copy) -> None:
    assert copy.changed() | {FACTS} == listed("Add a model family", name="toy")
    assert copy.python("-c", LISTED) == "True toy \n"


@pytest.mark.slow
def test_a_new_family_is_trained_draws_a_sample_is_shown_exported_and_read_again(copy: Copy) -> None:
    copy.python("-m", "trainer.models")
    assert copy.changed() == listed("Add a model family", name="toy")
    make_pictures(copy.path / "pictures", count=4)
    copy.add("first.yaml", PRESET)
    copy.python("launch.py", "--headless", "first.yaml", "--run-dir", "first")
    with Image.open(copy.path / "first" / "samples" / "step-000003-0.png") as drawn:
        assert drawn.size == (64, 48)
    assert "Tiny model (toy)" in (copy.path / "first" / "report.html").read_text(encoding="utf-8")
    assert copy.python("-c", SHOWN) == "Tiny model (toy) · LoRA rank 4 · 2 ranks; True\n"
    file = copy.path / "first" / "export" / "first.safetensors"
    copy.python(
        "launch.py", "--headless", "first.yaml", "--run-dir", "second", f"adapter.start={file}", "optim.lr=1e-12"
    )
    again = copy.path / "second" / "export" / "first.safetensors"
    compare = f"from safetensors.torch import load_file as f; a, b = f('{file}'), f('{again}'); print("
    compare += "len(a), a.keys() == b.keys(), all(a[n].allclose(b[n], atol=1e-6) and a[n].any() for n in a))"
    assert copy.python("-c", compare) == "8 True True\n"
