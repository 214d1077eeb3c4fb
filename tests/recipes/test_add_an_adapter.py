"""Recipe "Add an adapter": a toy made of the files that it names is trained, shown, exported and read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.copies import TOYS, Copy, listed
from tests.runs import make_pictures

SECTION = '''
class ScaleAdapter(AdapterSection):
    """Factor of each output of a layer."""

    type: Literal["scale"] = "scale"
    title: ClassVar[str] = "Toy scales"
    line: ClassVar[str] = "A toy that scales outputs."
    formats: ClassVar[tuple[str, ...]] = ("auto", "comfyui", "lycoris")


AnyAdapter = (
    ScaleAdapter
    | '''
PRESET = """\
name: toy
model: {family: flux2, path: tiny}
adapter: {type: scale}
data: {path: pictures, resolution: 64}
train: {steps: 3, batch_size: 2, precision: fp32}
optim: {lr: 0.1}
parallel: {device: cpu, devices: 2, strategy: full}
"""
SHOWN = """
from pathlib import Path
from app.runs.run_screen import about
from app.runs.run_table import method
from trainer.export.card import model_card
from trainer.run.folder import RunDir

run = RunDir(Path("first").absolute())
config = run.config()
print(about(config), method(config), "| Method | Toy scales |" in model_card(run), sep="; ")
"""


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """The code with the toy, added as the recipe says."""
    copy = Copy(tmp_path)
    copy.edit("trainer/config/sections.py", "\nAnyAdapter = (\n    ", SECTION)
    copy.add("trainer/adapters/scale.py", (TOYS / "adapter.py").read_text(encoding="utf-8"))
    kinds = "trainer/adapters/kinds.py"
    copy.edit(kinds, "lokr, lora\n", "lokr, lora, scale\n")
    copy.edit(
        kinds, "    (boft.KIND, boft.READER),\n", "    (boft.KIND, boft.READER),\n    (scale.KIND, scale.READER),\n"
    )
    copy.python("-m", "trainer.config.load")
    return copy


def test_a_new_adapter_changes_the_files_of_its_recipe_and_no_others_and_the_form_lists_it(copy: Copy) -> None:
    assert copy.changed() == listed("Add an adapter", name="scale")
    form = copy.python("-c", "from app.form.form_answers import METHODS; print(*METHODS[0])")
    assert form == "scale Toy scales A toy that scales outputs.\n"


def test_a_file_that_the_recipe_does_not_name_is_noticed(copy: Copy) -> None:
    copy.edit("trainer/adapters/state.py", "class TrainedAdapter", "\n\nclass TrainedAdapter")
    copy.add("app/more.py", "")
    (copy.path / "trainer" / "rng.py").unlink()
    more = {"trainer/adapters/state.py", "app/more.py", "trainer/rng.py"}
    assert copy.changed() == listed("Add an adapter", name="scale") | more


@pytest.mark.slow
def test_a_new_adapter_is_trained_shown_exported_and_read_again(copy: Copy) -> None:
    make_pictures(copy.path / "pictures", count=4)
    copy.add("toy.yaml", PRESET)
    copy.python("launch.py", "--headless", "toy.yaml", "--run-dir", "first")
    assert copy.python("-c", SHOWN) == "Tiny model (flux2) · Toy scales · 2 ranks; Toy scales; True\n"
    assert "Toy scales" in (copy.path / "first" / "report.html").read_text(encoding="utf-8")
    file = copy.path / "first" / "export" / "toy.safetensors"
    copy.python("launch.py", "--headless", "toy.yaml", "--run-dir", "second", f"adapter.start={file}", "optim.lr=1e-12")
    again = copy.path / "second" / "export" / "toy.safetensors"
    compare = f"from safetensors.torch import load_file as f; a, b = f('{file}'), f('{again}'); print("
    compare += "a.keys() == b.keys(), all(a[n].allclose(b[n], atol=1e-6) for n in a), any(t.any() for t in a.values()))"
    assert copy.python("-c", compare) == "True True True\n"
