"""The recipes of `trainer/RECIPES.md`: each toy, made of the files that its recipe names and no others, works."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from diffusers import AuraFlowPipeline
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.app.browser import opened, serving, show, watch
from tests.models import auto_folders
from tests.models.common import edit_json
from tests.recipes.copies import Copy, listed, toy
from tests.runs import make_pictures

SECTIONS = "trainer/config/sections.py"
FACTS = "trainer/config/families.json"
"""Written from all families, which takes half a minute: the slow tests write it."""
IMAGES = """\
name: toy
model: {family: flux2, path: tiny}
data: {path: pictures, resolution: 64}
train: {steps: 3, batch_size: 2, precision: fp32}
parallel: {device: cpu, devices: 2, strategy: full}
"""
TEXTS = """\
name: toy
model: {family: causal_lm, path: tiny}
data: {path: texts, length: 48, shuffle_window: 4}
train: {steps: 4, batch_size: 2, precision: fp32}
sample: {every: 4, prompts: [Double], tokens: 4}
parallel: {device: cpu, devices: 2, strategy: full}
"""


@dataclass(frozen=True)
class Recipe:
    """A recipe carried out.

    Attributes:
        make: Adds the toy to a copy of the code.
        name: What stands for `<name>` in the recipe's files.
        shown: Python code that asks the form, the page or the plan for the toy.
        answer: What it prints.
        facts: Whether FACTS changes too.
    """

    make: Callable[[Copy], None]
    name: str
    shown: str
    answer: str
    facts: bool = False


def add_adapter(copy: Copy) -> None:
    section = '''
class ScaleAdapter(AdapterSection):
    """Factor of each output of a layer."""

    type: Literal["scale"] = "scale"
    title: ClassVar[str] = "Toy scales"
    line: ClassVar[str] = "A toy that scales outputs."
    formats: ClassVar[tuple[str, ...]] = ("auto", "comfyui", "lycoris")


AnyAdapter = (
    ScaleAdapter
    | '''
    copy.edit(SECTIONS, "\nAnyAdapter = (\n    ", section)
    copy.add("trainer/adapters/scale.py", toy("adapter.py"))
    kinds, last = "trainer/adapters/kinds.py", "    (boft.KIND, boft.READER),\n"
    copy.edit(kinds, "lokr, lora\n", "lokr, lora, scale\n")
    copy.edit(kinds, last, f"{last}    (scale.KIND, scale.READER),\n")
    copy.python("-m", "trainer.config.load")


def add_objective(copy: Copy) -> None:
    field = '''
    roots: bool = option(False, title="Toy roots")
    """Train on the roots of the errors."""

    @property
    def compares_pairs(self)'''
    copy.edit(SECTIONS, "\n    @property\n    def compares_pairs(self)", field)
    copy.add("trainer/models/objectives/roots.py", toy("objective.py"))
    kinds = "trainer/models/objectives/kinds.py"
    copy.edit(kinds, "TextPreferences\n\n", "TextPreferences\nfrom trainer.models.objectives.roots import Roots\n\n")
    copy.edit(kinds, "ImagePreferences, Objective)", "ImagePreferences, Roots, Objective)")
    copy.python("-m", "trainer.config.load")


def add_optimizer(copy: Copy) -> None:
    copy.edit(SECTIONS, '"adamw8bit", "schedulefree"]', '"adamw8bit", "schedulefree", "heavy_ball"]')
    copy.edit(SECTIONS, "or schedule-free AdamW.", "schedule-free AdamW, or SGD with momentum.")
    copy.edit(SECTIONS, '"schedulefree": 8.0}', '"schedulefree": 8.0, "heavy_ball": 4.0}')
    made = toy("optimizer.py").partition("# In optim.py:\n")[2]
    copy.edit("trainer/optim.py", "\n\n_MAKERS = {", f'{made}\n\n_MAKERS = {{"heavy_ball": _heavy_ball, ')
    copy.python("-m", "trainer.config.load")


def add_data_format(copy: Copy) -> None:
    rows, made = "trainer/data/row_files.py", toy("data_format.py").partition("# In row_files.py:\n")[2]
    copy.edit(rows, "\n\nREADERS: Mapping", f"{made}\n\nREADERS: Mapping")
    copy.edit(rows, '    ".parquet": _parquet,\n}', '    ".parquet": _parquet,\n    ".tsv": _tabs,\n}')
    copy.edit(SECTIONS, ".csv or .parquet file (text,", ".csv, .tsv or .parquet file (text,")
    copy.python("-m", "trainer.config.load")
    (copy.path / "texts").mkdir()
    lines = ["prompt\tcompletion\n", *(f"Double {number}: \t{2 * number}.\n" for number in range(12))]
    copy.add("texts/a.tsv", "".join(lines))
    copy.add("texts.yaml", TEXTS)


def add_tracker(copy: Copy) -> None:
    field = '''\
    trackio: bool = False
    lines: bool = option(False, title="Toy lines")
    """Also write what the run reports into lines.jsonl."""
'''
    copy.edit(SECTIONS, "    trackio: bool = False\n", field)
    copy.edit(SECTIONS, '"trackio": "trackio"}', '"trackio": "trackio", "lines": ""}')
    copy.add("trainer/metrics/trackers/lines.py", toy("tracker.py"))
    copy.python("-m", "trainer.config.load")


def add_panel(copy: Copy) -> None:
    copy.add("app/web/pages/toy.py", toy("panel.py"))
    copy.add("app/web/assets/toy.js", toy("panel.js"))
    copy.edit("app/web/panels.py", "    samples,\n    upload,\n", "    samples,\n    toy,\n    upload,\n")
    copy.edit("app/web/panels.py", '    machine: ("machine",),\n', '    toy: ("toy",),\n    machine: ("machine",),\n')


SCANNED = """
import time
from pathlib import Path
from app.data.scans import Scans
from app.form.form_answers import FIELDS
from trainer.config.load import load_config

scans, config = Scans(), load_config(Path("texts.yaml")).config
while not (found := scans.of(config)).is_complete:
    time.sleep(0.05)
print([file.name for file in found.texts], found.num_documents, found.problems, ".tsv" in FIELDS["data.path"]["help"])
"""
RECIPES = {
    "Add a model family": Recipe(
        lambda copy: copy.add("trainer/models/families/toy.py", toy("family.py")),
        "toy",
        """
from pathlib import Path
from app.form import draft

checked = draft.check(draft.from_overrides(Path("presets/quickstart.yaml"), ["model.family=toy", "model.path=tiny"]))
[row] = [row for row in draft.rows(checked) if row.field == "model.family"]
print("toy" in row.choices, row.value, row.error)
""",
        "True toy \n",
        facts=True,
    ),
    "Add an adapter": Recipe(
        add_adapter,
        "scale",
        "from app.form.form_answers import METHODS; print(*METHODS[0])",
        "scale Toy scales A toy that scales outputs.\n",
    ),
    "Add an objective": Recipe(
        add_objective,
        "roots",
        """
from app.form.form_answers import FIELDS

print(FIELDS["objective.roots"]["label"], FIELDS["objective.roots"]["help"])
""",
        "Toy roots Train on the roots of the errors.\n",
        facts=True,
    ),
    "Add an optimizer": Recipe(
        add_optimizer,
        "",
        """
from pathlib import Path
from app.form import draft
from trainer.plan.simulate.sizes import optimizer_bytes

checked = draft.check(draft.from_overrides(Path("presets/quickstart.yaml"), ["optim.type=heavy_ball"]))
[row] = [row for row in draft.rows(checked) if row.field == "optim.type"]
print(*row.choices, row.value, row.error, optimizer_bytes(checked.config))
""",
        "adamw adamw8bit schedulefree heavy_ball heavy_ball  4.0\n",
    ),
    "Add a data format": Recipe(add_data_format, "", SCANNED, "['a.tsv'] 12 () True\n"),
    "Add a tracker": Recipe(
        add_tracker,
        "lines",
        """
from app.form.fit_proof import SHORT
from app.form.form_answers import FIELDS
from trainer.config.sections import TrackersConfig
from trainer.metrics import trackers

print(FIELDS["trackers.lines"]["label"], "trackers.lines=false" in SHORT, trackers.missing(TrackersConfig(lines=True)))
""",
        "Toy lines True []\n",
    ),
    "Add a panel": Recipe(
        add_panel,
        "toy",
        """
from pathlib import Path
from app.studio import Studio
from app.web import scripts
from app.web.panels import PANELS

answers = {name: call for module in PANELS for name, call in module.calls(Studio(Path("runs"))).items()}
print(answers["toy_greeting"](name="A"), "/toy.js" in scripts.page_end({}))
""",
        "Hello A, your runs are in runs. True\n",
    ),
}


QUICK = ("Add a model family", "Add an adapter", "Add a panel")


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Copy]:
    """The code with the toy of a recipe, made once."""
    made: dict[str, Copy] = {}

    def of(recipe: str) -> Copy:
        if recipe not in made:
            made[recipe] = Copy(tmp_path_factory.mktemp("copy"))
            RECIPES[recipe].make(made[recipe])
        return made[recipe]

    return of


@pytest.mark.parametrize(
    "heading", [heading if heading in QUICK else pytest.param(heading, marks=pytest.mark.slow) for heading in RECIPES]
)
def test_a_toy_changes_the_files_of_its_recipe_and_no_others_and_is_shown(
    copies: Callable[[str], Copy], heading: str
) -> None:
    recipe, copy = RECIPES[heading], copies(heading)
    assert copy.changed() | ({FACTS} if recipe.facts else set()) == listed(heading, name=recipe.name)
    assert copy.python("-c", recipe.shown) == recipe.answer


def test_a_file_that_the_recipe_does_not_name_is_noticed(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    add_adapter(copy)
    copy.edit("trainer/adapters/state.py", "class TrainedAdapter", "\n\nclass TrainedAdapter")
    copy.add("app/more.py", "")
    (copy.path / "trainer" / "rng.py").unlink()
    more = {"trainer/adapters/state.py", "app/more.py", "trainer/rng.py"}
    assert copy.changed() == listed("Add an adapter", name="scale") | more


def test_a_new_data_format_is_among_those_that_a_refusal_names(copies: Callable[[str], Copy]) -> None:
    code = (
        "from pathlib import Path; from trainer.data.text.text_files import find_files; find_files(Path('texts.yaml'))"
    )
    kinds = "a .txt, .jsonl, .json, .csv, .parquet, .tsv or .npy file"
    said = copies("Add a data format").refusal("-c", code)
    assert f"not a supported kind of text; give {kinds}" in said


def trained(copy: Copy, run: str, preset: str = "toy.yaml", *overrides: str) -> None:
    copy.python("launch.py", "--headless", preset, "--run-dir", run, *overrides)


def prepare(copy: Copy, *fields: str) -> None:
    """Write a preset of images with more fields, a line each, and its images."""
    make_pictures(copy.path / "pictures", count=4)
    copy.add("toy.yaml", "\n".join([IMAGES, *fields]) + "\n")


def report(copy: Copy, run: str) -> str:
    return (copy.path / run / "report.html").read_text(encoding="utf-8")


def read_again(copy: Copy) -> tuple[int, int]:
    """(tensors, those that are not zero) of the first run's export, which a second run starts from and writes again."""
    file, again = (copy.path / run / "export" / "toy.safetensors" for run in ("first", "second"))
    trained(copy, "second", "toy.yaml", f"adapter.start={file}", "optim.lr=1e-12")
    compare = f"from safetensors.torch import load_file as f; a, b = f('{file}'), f('{again}'); print("
    compare += "a.keys() == b.keys(), all(a[n].allclose(b[n], atol=1e-6) for n in a),"
    compare += " len(a), sum(bool(t.any()) for t in a.values()))"
    same, close, tensors, others = copy.python("-c", compare).split()
    assert (same, close) == ("True", "True")
    return int(tensors), int(others)


def assert_resumed_as_if_it_had_not_stopped(copy: Copy, preset: str) -> None:
    """The runs `whole` and `parts`: four steps, and two and two."""
    for run, steps in (("whole", 4), ("parts", 2)):
        trained(copy, run, preset, f"train.steps={steps}")
    copy.python("launch.py", "--resume", "parts", "train.steps=4")
    losses = """
import sys
from trainer.run.events import EventReader, StepEvent

for run in sys.argv[1:]:
    steps = [event for event in EventReader(f"{run}/events.jsonl").read() if isinstance(event, StepEvent)]
    print({step.step: step.loss for step in steps})
"""
    whole, parts = copy.python("-c", losses, "whole", "parts").splitlines()
    assert whole == parts and whole.count(":") == 4


@contextmanager
def page_of(copy: Copy, browser: Browser) -> Iterator[Page]:
    program, environment = copy.path / "launch.py", {"PYTHONPATH": str(copy.path)}
    with (
        serving(copy.path / "runs", program=program, environment=environment) as server,
        opened(browser, server.url) as page,
    ):
        yield page


@pytest.mark.slow
def test_a_new_family_is_trained_draws_a_sample_is_shown_exported_and_read_again(
    copies: Callable[[str], Copy],
) -> None:
    copy = copies("Add a model family")
    copy.python("-m", "trainer.models")
    assert copy.changed() == listed("Add a model family", name="toy")
    sample = "sample: {every: 3, prompts: [a fox], size: [64, 48], steps: 2}"
    prepare(copy, "adapter: {rank: 4}", sample, "optim: {lr: 0.01}", "export: {dtype: fp32}")
    copy.edit("toy.yaml", "family: flux2", "family: toy")
    trained(copy, "first")
    with Image.open(copy.path / "first" / "samples" / "step-000003-0.png") as drawn:
        assert drawn.size == (64, 48)
    assert "Tiny model (toy)" in report(copy, "first")
    shown = """
from pathlib import Path
from app.runs.run_screen import about
from trainer.export.card import model_card
from trainer.run.folder import RunDir

run = RunDir(Path("first").absolute())
print(about(run.config()), "![a fox](samples/" in model_card(run), sep="; ")
"""
    assert copy.python("-c", shown) == "Tiny model (toy) · LoRA rank 4 · 2 ranks; True\n"
    assert read_again(copy) == (8, 8)


@pytest.mark.slow
def test_a_new_adapter_is_trained_shown_exported_and_read_again(copies: Callable[[str], Copy]) -> None:
    copy = copies("Add an adapter")
    prepare(copy, "adapter: {type: scale}", "optim: {lr: 0.1}")
    trained(copy, "first")
    shown = """
from pathlib import Path
from app.runs.run_screen import about
from app.runs.run_table import method
from trainer.export.card import model_card
from trainer.run.folder import RunDir

run = RunDir(Path("first").absolute())
config = run.config()
print(about(config), method(config), "| Method | Toy scales |" in model_card(run), sep="; ")
"""
    assert copy.python("-c", shown) == "Tiny model (flux2) · Toy scales · 2 ranks; Toy scales; True\n"
    assert "Toy scales" in report(copy, "first")
    assert read_again(copy)[1] > 0


@pytest.mark.slow
def test_a_new_objective_trains_and_its_metric_is_in_the_report_and_on_the_page(
    copies: Callable[[str], Copy], browser: Browser
) -> None:
    copy = copies("Add an objective")
    copy.python("-m", "trainer.models")
    assert copy.changed() == listed("Add an objective", name="roots")
    of_families = """
from trainer.config import families

print({name: families.of(name).reads("objective.roots") for name in ("flux2", "sdxl", "bagel", "causal_lm")})
"""
    reads = {"flux2": True, "sdxl": True, "bagel": False, "causal_lm": False}
    assert copy.python("-c", of_families) == f"{reads}\n"
    prepare(copy, "objective: {roots: true}")
    trained(copy, "runs/first")
    same = """
from trainer.run.events import EventReader, StepEvent

steps = [event for event in EventReader("runs/first/events.jsonl").read() if isinstance(event, StepEvent)]
print([list(step.metrics) for step in steps], all(step.loss**2 <= step.metrics["squares"] for step in steps))
"""
    assert copy.python("-c", same) == f"{[['squares']] * 3} True\n"
    assert (copy.path / "runs" / "first" / "export" / "toy.safetensors").is_file()
    assert "<dt>Squares, smoothed</dt>" in report(copy, "runs/first") and "roots: true" in report(copy, "runs/first")
    with page_of(copy, browser) as page:
        watch(page, "first")
        expect(page.locator("#chart-squares")).to_be_visible()
        expect(page.locator("#chart-squares")).to_contain_text("Squares")


@pytest.mark.slow
def test_a_new_optimizer_trains_resumes_as_if_it_had_not_stopped_and_exports(copies: Callable[[str], Copy]) -> None:
    copy = copies("Add an optimizer")
    prepare(copy, "optim: {type: heavy_ball, lr: 0.01}")
    assert_resumed_as_if_it_had_not_stopped(copy, "toy.yaml")
    exports = (copy.path / run / "export" / "toy.safetensors" for run in ("whole", "parts"))
    same = """
import sys
from safetensors.torch import load_file

one, other = map(load_file, sys.argv[1:])
print(one.keys() == other.keys(), all(one[name].equal(other[name]) for name in one))
"""
    assert copy.python("-c", same, *exports) == "True True\n"
    assert "heavy_ball" in report(copy, "whole")


@pytest.mark.slow
def test_a_new_data_format_is_trained_resumed_as_if_it_had_not_stopped_and_exported(
    copies: Callable[[str], Copy],
) -> None:
    copy = copies("Add a data format")
    assert_resumed_as_if_it_had_not_stopped(copy, "texts.yaml")
    assert (copy.path / "whole" / "export" / "toy" / "adapter_model.safetensors").is_file()
    (copy.path / "texts" / "a.tsv").write_bytes(b"prompt\tcompletion\n\xff\n")
    assert "a.tsv: not UTF-8 (byte 0xff)" in copy.python("-c", SCANNED)


@pytest.mark.slow
def test_a_new_tracker_gets_steps_samples_and_states_once_over_a_run_and_its_resumption(
    copies: Callable[[str], Copy],
) -> None:
    copy = copies("Add a tracker")
    sample = "sample: {every: 2, prompts: [a fox], size: [64, 48], steps: 1}"
    prepare(copy, sample, "trackers: {lines: true}")
    trained(copy, "run", "toy.yaml", "train.steps=2")
    assert tracked(copy, 1)[-1] == {"failed": False}
    copy.python("launch.py", "--resume", "run", "train.steps=4")
    found = tracked(copy, 2)
    assert [line["step"] for line in found if "loss" in line] == [1, 2, 3, 4]
    pictures = [line for line in found if "prompt" in line]
    assert pictures == [{"step": step, "prompt": "a fox", "size": [64, 48]} for step in (0, 2, 4)]
    assert [line["state"] for line in found if "state" in line].count("finished") == 2
    assert "lines: true" in report(copy, "run")


def tracked(copy: Copy, number_of_ends: int, within_s: float = 60) -> list[dict[str, Any]]:
    """What the tracker wrote, as soon as it has ended so many times: it outlives the run that it follows."""
    file, deadline = copy.path / "run" / "lines.jsonl", time.monotonic() + within_s
    while True:
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
        if sum("failed" in line for line in found) == number_of_ends:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


@pytest.mark.slow
def test_a_new_panel_is_in_the_rail_before_the_one_listed_after_it_and_answers(
    copies: Callable[[str], Copy], browser: Browser
) -> None:
    with page_of(copies("Add a panel"), browser) as page:
        assert page.locator("#rail a.nav span").all_inner_texts()[-2:] == ["Toy", "Machine"]
        show(page, "Toy")
        expect(page.get_by_label("Whom to greet")).to_be_focused()
        page.get_by_label("Whom to greet").fill("<b>B</b>")
        page.get_by_role("button", name="Greet").click()
        expect(page.locator("#toy-greeting")).to_have_text("Hello <b>B</b>, your runs are in runs.")


@pytest.mark.slow
def test_a_concluded_family_is_kept_as_a_file_that_trains(tmp_path: Path) -> None:
    copy, model = Copy(tmp_path), auto_folders.write("AuraFlowPipeline", tmp_path / "aura")
    made = f"""
from pathlib import Path
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models import families
from trainer.models.parts.image.family_file import write_family

family = families.get("auto")(ModelConfig(family="auto", path="{model}"), ObjectiveConfig(), Path("cache"))
write_family("aura", family.conclusions, "aura")
"""
    copy.python("-c", made)
    copy.python("-m", "trainer.models")
    assert copy.changed() == {"trainer/models/families/aura.py", FACTS}
    prepare(copy, "adapter: {rank: 4}", "optim: {lr: 0.01}", "export: {dtype: fp32}")
    copy.edit("toy.yaml", "{family: flux2, path: tiny}", f"{{family: aura, path: {model}}}")
    trained(copy, "first")
    (exported,) = (copy.path / "first" / "export").glob("*.safetensors")
    pipeline = AuraFlowPipeline.from_pretrained(model)
    pipeline.load_lora_weights(exported)
    assert any("lora" in name for name, _ in pipeline.transformer.named_parameters())
    # A folder that says something else than the file is refused.
    edit_json(model / "scheduler" / "scheduler_config.json", shift=3.0)
    with pytest.raises(AssertionError, match=r"model\.family: aura was written for shift"):
        trained(copy, "second")
