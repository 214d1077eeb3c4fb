"""The form in a notebook: its widgets are driven as a browser drives them, by their values."""

from __future__ import annotations

import json
import random
from pathlib import Path

import ipywidgets as widgets
import nbformat
import pytest
from ipywidgets.embed import dependency_state
from markupsafe import escape
from nbclient import NotebookClient

from app.form import draft as rows_of_a_form
from app.form.draft import Draft
from app.notebook.form_widget import Form
from trainer.config.load import ConfigError, dump_config, load_config

ROOT = Path(__file__).parents[3]
PRESETS = sorted((ROOT / "presets").glob("*.yaml"))
QUICK = ("quickstart", "sdxl-locon-text-encoders-2gpu", "qwen3-8b-qlora-1x24gb", "bagel-7b-mot-lora-nf4-1x24gb")
QUICKSTART = ROOT / "presets" / "quickstart.yaml"
KINDS = {
    "choice": widgets.Dropdown,
    "switch": widgets.Checkbox,
    "text": widgets.Text,
    "lines": widgets.Textarea,
    "yaml": widgets.Textarea,
}
TRAINING = list(rows_of_a_form.GROUPS).index("Training")
MOST_BYTES = 120_000
"""Of a fresh form in a saved notebook; BAGEL has most rows, 112 kB."""


def open_all(form: Form) -> Form:
    """The form with all settings shown."""
    for button in form.more.values():
        button.value = True
    return form


def shown(form: Form) -> set[str]:
    return {name for name, widget in form.inputs.items() if widget.layout.display != "none"}


def note(form: Form, name: str) -> str:
    """What stands beside the input of a field."""
    boxes = [box for step in tabs(form).children for box in step.children if isinstance(box, widgets.Box)]
    beside = {one: other for box in boxes for one, other in zip(box.children[::2], box.children[1::2], strict=True)}
    text: str = beside[form.inputs[name]].value
    return text


def tabs(form: Form) -> widgets.Tab:
    return next(widget for widget in form.widget.children if isinstance(widget, widgets.Tab))


def review(form: Form) -> str:
    text: str = form.widget.children[-1].value
    return text


@pytest.mark.parametrize(
    "preset",
    [pytest.param(file, marks=() if file.stem in QUICK else pytest.mark.slow, id=file.stem) for file in PRESETS],
)
def test_every_row_of_a_preset_has_an_input_of_its_kind_and_a_fresh_form_is_small(preset: Path):
    form = Form(preset)
    checked = rows_of_a_form.check_with_files(rows_of_a_form.check(Draft(preset)))
    rows = {row.field: row for row in rows_of_a_form.rows(checked) if row.is_visible}
    assert shown(form) == {name for name, row in rows.items() if row.in_front or row.error}
    assert len(json.dumps(dependency_state(form.widget, drop_defaults=False), indent=1)) < MOST_BYTES
    open_all(form)
    assert shown(form) == set(rows)
    for name, row in rows.items():
        widget = form.inputs[name]
        assert type(widget) is KINDS[row.kind]
        assert (widget.value, widget.description) == (row.value, row.label)
        assert row.kind != "choice" or widget.options == row.choices
        assert row.help.partition("`")[0].partition("'")[0] in note(form, name)
        assert (row.error != "") == ('role="alert"' in note(form, name))
    assert form.overrides == []
    assert form.config.config == checked.config


def test_an_empty_input_shows_the_models_own_value_and_the_review_warns_of_a_distilled_model():
    form = Form(ROOT / "presets" / "flux1-schnell-lora-1gpu.yaml", ["sample.steps="])
    assert (form.inputs["sample.steps"].value, form.inputs["sample.steps"].placeholder) == ("", "4")
    assert "the model was distilled to generate in 4 steps without guidance" in form._review.value


def test_the_tabs_are_the_groups_and_each_says_how_many_settings_there_are_more():
    form = Form(QUICKSTART)
    assert tabs(form).titles == tuple(rows_of_a_form.GROUPS)
    counts = {step: int(button.description.removesuffix(" more settings")) for step, button in form.more.items()}
    form.more["Adapter"].value = True
    assert len(shown(form)) - len(shown(Form(QUICKSTART))) == counts["Adapter"]


def test_a_wrong_value_stays_as_typed_with_its_error_and_the_config_tells_all():
    form = open_all(Form(QUICKSTART))
    form.inputs["train.steps"].value = "many"
    form.inputs["optim.lr"].value = "-1"
    form.inputs["train.seed"].value = "5"
    assert form.inputs["train.steps"].value == "many"
    error = '<span role="alert" class="wrong">✗ needs a whole number, not &#39;many&#39;</span>'
    assert note(form, "train.steps").startswith(error)
    assert "shardstudio-bad" in form.inputs["train.steps"]._dom_classes
    assert tabs(form).titles[TRAINING] == "Training (2 wrong)"
    assert "<b>train.steps</b> needs a whole number" in review(form)
    with pytest.raises(ConfigError) as refused:
        _ = form.config
    assert str(refused.value).splitlines() == [
        "command line: optim.lr: is -1, must be > 0 and <= 10",
        "command line: train.steps: needs a whole number, not 'many'",
    ]
    form.inputs["train.steps"].value = "50"
    form.inputs["optim.lr"].value = "1e-4"
    assert "alert" not in note(form, "train.steps") + review(form)
    assert "shardstudio-bad" not in form.inputs["train.steps"]._dom_classes
    assert form.inputs["optim.lr"].value == "0.0001"
    assert (form.config.config.train.steps, form.config.config.train.seed) == (50, 5)


def test_a_setting_that_was_not_in_front_comes_there_when_it_is_wrong(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text("model: {family: sdxl}\ndata: {path: photos}\nsample: {every: 0}")
    form = Form(file)
    assert "sample.prompts" not in form.inputs
    form.inputs["sample.every"].value = "5"
    assert "there are no prompts" in note(form, "sample.prompts")
    form.inputs["sample.prompts"].value = "a fox"
    assert "alert" not in note(form, "sample.prompts")


def test_settings_that_were_put_away_are_shown_again_when_one_is_wrong():
    form = open_all(Form(QUICKSTART))
    more = form.more["Cluster"]
    more.value = False
    *_, others = tabs(form).children[list(rows_of_a_form.GROUPS).index("Cluster")].children
    assert others.layout.display == "none"
    form.inputs["parallel.nodes"].value = "2"
    assert "2 nodes need host:port" in note(form, "parallel.rendezvous")
    assert more.value
    assert others.layout.display is None


def test_a_folder_that_does_not_exist_is_told_and_is_no_hindrance_to_the_config(tmp_path: Path):
    form = Form(QUICKSTART)
    form.inputs["data.path"].value = str(tmp_path / "none")
    assert "no folder" in note(form, "data.path")
    assert form.config.config.data.path == str(tmp_path / "none")


def test_what_is_typed_is_never_html():
    form = Form(QUICKSTART)
    form.inputs["train.steps"].value = form.inputs["data.trigger"].value = "<img src=x onerror=alert(1)>"
    assert "<img" not in note(form, "train.steps") + review(form) + form._saved_output().data
    assert "&lt;img" in note(form, "train.steps")


def test_another_adapter_has_other_rows_and_leaves_out_what_was_typed_for_the_first():
    form = open_all(Form(QUICKSTART))
    form.inputs["adapter.rank"].value = "8"
    form.inputs["adapter.type"].value = "boft"
    assert {"adapter.block_size", "adapter.num_stages"} <= shown(form)
    assert not {"adapter.rank", "adapter.alpha"} & shown(form)
    assert form.overrides == ["adapter.type=boft"]
    form.inputs["adapter.type"].value = "lora"
    assert "adapter.rank" in shown(form)
    assert form.inputs["adapter.rank"].value == "16"
    assert form.config.config == load_config(QUICKSTART).config


def test_only_words_that_go_together_can_be_chosen_and_one_that_was_chosen_before_stays():
    form = open_all(Form(QUICKSTART))
    assert form.inputs["export.what"].options == ("auto", "none", "adapter", "merged")
    form.inputs["export.what"].value = "merged"
    form.inputs["adapter.type"].value = "none"
    assert form.inputs["export.what"].options == ("auto", "none", "full", "merged")
    assert form.inputs["export.what"].value == "merged"
    assert "alert" in note(form, "export.what")


def test_a_preset_that_was_broken_meanwhile_is_told(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text(dump_config(load_config(QUICKSTART).config))
    form = Form(file)
    file.write_text("train: 5")
    form.inputs["train.steps"].value = "7"
    assert 'role="alert"' in review(form)
    assert f"{file}:1: train: needs a section" in review(form)
    assert escape(form.code) in review(form)


TYPED = [
    ("adapter.type", "boft"),
    ("adapter.type", "lokr"),
    ("adapter.rank", "4"),
    ("adapter.targets", "attn.to_q\nattn.to_k"),
    ("adapter.rank_pattern", "attn.to_q: 8"),
    ("data.trigger", 'it\'s "2024"'),
    ("name", "2024"),
    ("sample.prompts", "a fox, [trigger]\nit's: a {bear}\n"),
    ("sample.size", "[128, 64]"),
    ("sample.negative", "# none"),
    ("optim.lr", "1e-5"),
    ("optim.clip_norm", ""),
    ("optim.schedule", "constant"),
    ("train.steps", "400"),
    ("train.checkpointing", "2"),
    ("train.compile", "true"),
    ("parallel.strategy", "ddp"),
    ("model.train", "transformer: adapter"),
]


@pytest.mark.parametrize("seed", range(6))
def test_the_code_of_a_form_makes_the_same_form_whatever_was_typed_before(seed: int):
    draw = random.Random(seed)
    form = open_all(Form(QUICKSTART))
    for name, value in draw.sample(TYPED, 8):
        if name in shown(form):
            form.inputs[name].value = value
    again = Form(QUICKSTART, form.overrides)
    assert again.config.config == form.config.config
    assert again.config.config == Form(QUICKSTART, again.overrides).config.config
    called = Caller()
    eval(form.code, {"notebook": called})
    assert called.arguments == (str(QUICKSTART), *form.overrides)


class Caller:
    """Stands for app.notebook in the code of a form."""

    arguments: tuple[str, ...] = ()

    def form(self, *arguments: str) -> None:
        self.arguments = arguments


def test_a_saved_notebook_keeps_the_code_of_what_was_typed_last():
    cells = [
        "from app import notebook",
        'form = notebook.form("quickstart", "train.steps=40")\nform',
        'form.inputs["optim.lr"].value = "0.001"',
    ]
    saved = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(saved, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    live, kept = saved.cells[1].outputs
    assert live.data["text/plain"] == "A form, while its kernel is running."
    assert "application/vnd.jupyter.widget-view+json" in live.data
    code = "notebook.form(&#39;quickstart&#39;, &#39;train.steps=40&#39;, &#39;optim.lr=0.001&#39;)"
    assert kept.data["text/html"] == f'<div class="shardstudio-code">The form as code:<pre>{code}</pre></div>'
    assert len(nbformat.writes(saved)) < MOST_BYTES
