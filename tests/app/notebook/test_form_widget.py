"""The form in a notebook: its widgets are driven as a browser drives them, by their values and clicks."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import ipywidgets as widgets
import nbformat
import pytest
from ipywidgets.embed import dependency_state
from markupsafe import escape
from nbclient import NotebookClient

from app.form.draft import Draft, check, group_of, rows
from app.form.form_answers import GROUPS
from app.notebook.form_widget import MOST_FOUND, PLACES, Form
from app.studio import Studio
from app.web.pages import new_run
from tests.app.browser import in_training, recorded
from tests.runs import make_pictures
from trainer.config.load import ConfigError, dump_config, load_config
from trainer.launcher.queue import Settings
from trainer.launcher.rehearsal import config_of
from trainer.run.events import StatusEvent

ROOT = Path(__file__).parents[3]
PRESETS = sorted((ROOT / "presets").glob("*.yaml"))
QUICK = ("quickstart", "sdxl-locon-text-encoders-2gpu", "qwen3-8b-qlora-1x24gb", "bagel-7b-mot-lora-nf4-1x24gb")
QUICKSTART = ROOT / "presets" / "quickstart.yaml"
DEV = "black-forest-labs/FLUX.2-dev"
KINDS = {
    "choice": widgets.Dropdown,
    "switch": widgets.Checkbox,
    "text": widgets.Text,
    "lines": widgets.Textarea,
    "yaml": widgets.Textarea,
}
MOST_BYTES = 200_000
"""Of a fresh form in a saved notebook; FLUX.2 dev has most, 180 kB, as it has six presets."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all forms: the presets are planned once for each."""
    return tmp_path_factory.mktemp("forms") / "runs"


@pytest.fixture(autouse=True)
def nothing_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What fails while a button is pressed, ipywidgets only logs."""
    yield
    assert [record.message for record in caplog.records if record.name.startswith("traitlets")] == []


def settled(form: Form) -> Form:
    """The form when it no longer changes by itself."""
    until(lambda: form.models.box.children and "Reading" not in form.why.text)
    return form


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def open_all(form: Form) -> Form:
    """The form with all settings shown."""
    form.own_model.selected_index = form.folders.selected_index = 0
    for at in range(len(GROUPS)):
        form.groups.selected_index = at
    return form


def box_of(form: Form, name: str) -> widgets.Box:
    """The box in which the input and the note of a field stand."""
    return form._rows[name].box


def shown(form: Form) -> set[str]:
    return {name for name in form.inputs if box_of(form, name).layout.display != "none"}


def note(form: Form, name: str) -> str:
    """What stands below the input of a field."""
    text: str = box_of(form, name).children[1].value
    return text


@pytest.mark.parametrize(
    "preset",
    [pytest.param(file, marks=() if file.stem in QUICK else pytest.mark.slow, id=file.stem) for file in PRESETS],
)
def test_every_field_has_an_input_of_its_kind_on_a_card_or_under_more(preset: Path, runs: Path):
    form = settled(Form(preset, (), runs))
    expected = {row.field: row for row in rows(check(Draft(preset))) if row.is_visible and row.field != "adapter.type"}
    wrong = {error["field"] for error in form._state["errors"]} - {"model.path"}
    assert shown(form) == wrong | {name for name in chain(*PLACES.values()) if name in expected}
    assert len(json.dumps(dependency_state(form.widget, drop_defaults=False), indent=1)) < MOST_BYTES
    open_all(form)
    assert shown(form) == set(expected)
    for name, row in expected.items():
        widget = form.inputs[name]
        assert isinstance(widget, KINDS[row.kind]) and widget.value == row.value
        assert widget.description == f"{escape(row.label)} <code>{name}</code>"
        assert row.kind != "choice" or widget.options == row.choices
    assert form.overrides == []
    assert form.config.config == load_config(preset).config


def test_the_cards_hold_what_the_page_answers(runs: Path):
    form = settled(Form(QUICKSTART, (), runs))
    page = Studio(runs)
    page.models = form._studio.models  # planned already
    answer = new_run.state(page)
    assert answer is not None
    first = next(iter(new_run.models(page)))
    tile = form.models.box.children[0].children[0].value
    assert all(text in tile for text in (first["name"], first["size"], first["licence"], first["badge"][1]))
    assert form.models.buttons[first["path"]].description == "Demo model, chosen"
    assert f"<b>Ready.</b> {answer['looked_at']}" in form.why.text
    assert all(f"<b>{words}</b> {rest}" in form._pictures.value for words, rest in answer["data"]["facts"])
    assert form._pictures.value.count("data:image/webp;base64,") == 8
    assert "Memory of each rank" in form.plan.text and "at the fullest moment" in form.plan.text
    assert form.facts.buttons == {}, "the demo model is here"


def test_a_queued_run_has_a_place_in_the_queue_and_the_gpus_that_were_chosen(runs: Path):
    form = settled(Form(QUICKSTART, ["name=later"], runs))
    queue = form._studio.queue
    queue.change(Settings(is_paused=True))  # else it would start
    form.starter.enqueue.click()
    paused = "Paused: no run is started until you resume the queue."
    assert f"later waits in the queue as number 1. {paused}" in form.refusal.text
    form.starter.show(form._state | {"gpus": [{"index": at, "name": "H100"} for at in (0, 1)]})
    form.starter.gpus.value = (1,)
    form.starter.enqueue.click()
    every, one = queue.waiting()
    assert (every.gpus, one.gpus, every.config) == ((), (1,), dump_config(form.config.config))
    form.inputs["train.steps"].value = "many"
    assert form.starter.enqueue.disabled and "waits in the queue" not in form.refusal.text


def test_a_rehearsal_is_shown_with_its_pictures_and_what_it_cannot_show(runs: Path):
    form = settled(Form(QUICKSTART, ["name=ours"], runs))
    real = form.config.config
    run = recorded(runs, "ours-rehearsal-20261130-101112-abcdef", [StatusEvent(state="training")])
    run.config_file.write_text(dump_config(config_of(real)))
    run.rehearsed_file.write_text(dump_config(real))
    with in_training(run):  # as after a first click
        form.starter.rehearse.click()
        words, dashboard = form.starter.board.children
        until(lambda: words.value.count("data:image/webp;base64,") == 6)
    assert "A rehearsal of ours</b>, for Demo model. Crops, masks and captions are" in words.value
    assert "<li>Likeness and detail: its pictures have 64 × 64 pixels." in words.value
    assert f"--film {run.path}</code> makes the film." in words.value
    assert "shardstudio" in dashboard._dom_classes
    assert (form.run, form.starter.shown) == (None, run)
    assert f"notebook.attach({escape(repr(str(run.path)))})" in form._saved_output().data
    form.starter.show(form._state | {"is_text": True})
    assert form.starter._buttons.children == (form.starter.enqueue,), "a rehearsal shows pictures"


def test_another_model_leaves_behind_what_belongs_to_the_former_and_undo_brings_it_back(runs: Path):
    form = settled(Form(QUICKSTART, ["train.steps=40", "name=mine"], runs))
    form.models.buttons[DEV].click()
    assert form.code == "notebook.form('flux2-dev-lora-nf4-1x24gb', 'name=mine')"
    assert "Left behind, as it belongs to the former preset: Steps." in form.left.text
    assert "FLUX.2 dev is not on this machine yet; download it on the first card, 113 GB." in form.why.text
    assert list(form.facts.buttons) == ["Download"]
    assert form.starter.start.disabled
    assert len(form.presets.buttons) == 6
    form.presets.buttons["flux2-dev-lora-4gpu"].click()
    assert "'flux2-dev-lora-4gpu'" in form.code
    form.left.buttons["Undo"].click()
    assert form.overrides == ["train.steps=40", "name=mine"]
    assert form.left.box.layout.display == "none"
    assert form.inputs["train.steps"].value == "40"


def test_a_preset_that_cannot_take_an_edit_asks_first(runs: Path):
    form = settled(Form(QUICKSTART, ["data.caption_dropout=0.3"], runs))
    form.choose_preset("qwen3-8b-qlora-1x24gb")
    assert "Leave these edits behind? qwen3-8b-qlora-1x24gb cannot take what you set." in form.left.text
    assert form.overrides == ["data.caption_dropout=0.3"]
    form.left.buttons["Keep this one"].click()
    assert form.left.text == ""
    form.choose_preset("qwen3-8b-qlora-1x24gb")
    form.left.buttons["Change the model"].click()
    assert form.overrides == []
    assert "Texts" in form._data.value


def test_an_empty_input_shows_the_models_own_value_and_the_form_warns_of_a_distilled_model(runs: Path):
    form = open_all(Form(ROOT / "presets" / "flux1-schnell-lora-1gpu.yaml", ["sample.steps="], runs))
    assert (form.inputs["sample.steps"].value, form.inputs["sample.steps"].placeholder) == ("", "4")
    assert "the model was distilled to generate in 4 steps without guidance" in form.warnings.text


def test_a_wrong_value_stays_as_typed_with_its_error_and_start_waits_for_it(runs: Path):
    form = settled(open_all(Form(QUICKSTART, (), runs)))
    form.inputs["train.steps"].value = "many"
    form.inputs["optim.lr"].value = "-1"
    form.inputs["train.seed"].value = "5"
    assert form.inputs["train.steps"].value == "many"
    error = '<span role="alert" class="wrong">✗ needs a whole number, not &#39;many&#39;</span>'
    assert note(form, "train.steps").startswith(error)
    assert "shardstudio-bad" in box_of(form, "train.steps")._dom_classes
    assert "Start waits for 2 things" in form.why.text
    assert form.starter.start.disabled
    with pytest.raises(ConfigError) as refused:
        _ = form.config
    assert str(refused.value).splitlines() == [
        "command line: optim.lr: is -1, must be > 0 and <= 10",
        "command line: train.steps: needs a whole number, not 'many'",
    ]
    form.inputs["train.steps"].value = "50"
    form.inputs["optim.lr"].value = "1e-4"
    assert "alert" not in note(form, "train.steps") + form.why.text
    assert "shardstudio-bad" not in box_of(form, "train.steps")._dom_classes
    assert form.inputs["optim.lr"].value == "0.0001"
    assert (form.config.config.train.steps, form.config.config.train.seed) == (50, 5)


def test_a_setting_that_stands_under_more_comes_below_start_when_it_is_wrong(runs: Path):
    form = settled(Form(QUICKSTART, (), runs))
    form.groups.selected_index = list(GROUPS).index("Cluster")
    form.inputs["parallel.nodes"].value = "2"
    assert "2 nodes need host:port" in note(form, "parallel.rendezvous")
    assert box_of(form, "parallel.rendezvous") in form._wrong.children
    assert form.groups.titles[list(GROUPS).index(group_of("parallel.rendezvous"))].endswith(", 1 wrong")


def test_own_pictures_bring_name_trigger_and_prompts_and_what_they_lack_is_mended_by_a_button(
    runs: Path, tmp_path: Path
):
    form = settled(Form(QUICKSTART, (), runs))
    folder = make_pictures(tmp_path / "my cats", count=6)
    (folder / "00.txt").unlink()
    form.inputs["data.path"].value = str(folder)
    settled(form)
    assert "00.png: no caption" in form.why.text and "notebook.caption(folder, model)" in form.why.text
    form.why.buttons["Train without"].click()
    settled(form)
    assert "alert" not in form.why.text
    assert "For these pictures" in form.proposals.text
    assert "words: name quickstart, trigger word risograph, sample prompts" in form.warnings.text
    form.proposals.buttons["Take them"].click()
    assert (form.inputs["name"].value, form.inputs["data.trigger"].value) == ("my-cats", "my-cats")
    assert form.inputs["sample.prompts"].value.startswith("[trigger]")
    assert form.proposals.box.layout.display == "none"
    assert "words: name" not in form.warnings.text


def chosen(files: Mapping[str, bytes]) -> list[dict[str, object]]:
    """Files as a browser sends them."""
    kind = {"type": "", "last_modified": datetime(2026, 11, 30, tzinfo=UTC)}
    return [
        {"name": name, "size": len(content), "content": memoryview(content), **kind} for name, content in files.items()
    ]


def choose_files(form: Form, word: str, files: Mapping[str, bytes]) -> Form:
    """The form after files were chosen, a word was typed, and Go on was pressed."""
    form.drop.files.value = chosen(files)
    form.drop.word.value = word
    form.drop.go.click()
    until(lambda: not form.drop.go.disabled)
    return settled(form)


def test_pictures_and_a_word_get_a_folder_of_their_own_and_what_is_proposed_for_them(runs: Path, tmp_path: Path):
    own = {file.name: file.read_bytes() for file in make_pictures(tmp_path / "own", count=6).iterdir()}
    others = {"a.pdf": b"%PDF-1", "b.pdf": b"%PDF-2", "a.txt": b"of no picture", "alone.txt": b"alone"}
    taken = runs.parent / "pictures" / "milo"
    taken.mkdir(parents=True)  # by somebody else
    form = settled(Form(QUICKSTART, ["train.steps=40"], runs))
    choose_files(form, " Milo ", own | others | {"05.png": b"\xff\xd8\xff cut"})
    folder = taken.with_name("milo-2")
    assert f"<b>11</b> added, <b>5</b> not taken: {folder}" in form.drop.said.text
    assert "<b>a.pdf, b.pdf</b>: a document, not an image; export it as JPEG or PNG" in form.drop.said.text
    assert "<b>05.txt, a.txt</b>: not taken, because its image was refused" in form.drop.said.text
    assert "without a caption" not in form.drop.said.text
    assert "<b>alone.txt</b>: no image has its name, so it is not a caption yet" in form.drop.said.text
    kept = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert kept == {name: own[name] for name in own if not name.startswith("05")} | {"alone.txt": b"alone"}
    assert (form.drop.files.value, list(taken.iterdir())) == ((), [])
    values = {name: form.inputs[name].value for name in ("name", "data.path", "data.trigger", "data.validation")}
    assert values == {"name": "Milo", "data.path": str(folder), "data.trigger": "milo", "data.validation": "1"}
    assert form.inputs["sample.prompts"].value.splitlines()[0] == "[trigger], picture number 4"
    assert not form.starter.start.disabled and form.proposals.text == ""

    other = make_pictures(tmp_path / "other", count=9) / "00.png"
    choose_files(form, "Milo", {"00.png": own["00.png"], "01.png": other.read_bytes()})
    assert f"<b>1</b> there already, <b>1</b> added: {folder}" in form.drop.said.text
    assert "<b>01.png</b>: is called 01 (2).png here" in form.drop.said.text
    assert (folder / "01.png").read_bytes() == own["01.png"]

    choose_files(form, "tom", {"00.png": own["00.png"]})
    assert "Of 1 picture without a caption, the word alone is trained." in form.drop.said.text
    form.drop.said.buttons["Bring them back"].click()
    assert settled(form).inputs["data.path"].value == str(folder)
    assert form.drop.said.text == ""


@pytest.mark.parametrize(
    ("word", "refused"),
    [("", "is missing"), ("🦊", "neither a letter"), ("x" * 65, "65 letters"), ("con", "not a name")],
)
def test_a_word_that_names_nothing_is_refused_and_changes_nothing(word: str, refused: str, runs: Path):
    form = settled(Form(QUICKSTART, ["train.steps=40"], runs))
    choose_files(form, word, {"a.png": b"any"})
    assert refused in form.drop.said.text
    assert form.overrides == ["train.steps=40"]
    assert len(form.drop.files.value) == 1, "they need not be chosen again"


def test_a_word_without_pictures_waits_for_them(runs: Path):
    form = choose_files(settled(Form(QUICKSTART, (), runs)), "milo", {})
    assert "Now the pictures: choose them above." in form.drop.said.text
    assert form.overrides == []


def test_a_config_of_another_trainer_is_imported_with_its_lists_and_undone(runs: Path):
    foreign = ROOT / "tests" / "config" / "foreign"
    form = settled(Form(QUICKSTART, ["train.steps=40"], runs))
    form.imports.value = chosen({file.name: file.read_bytes() for file in foreign.glob("kohya*.t*")})
    assert "<b>From a config of sd-scripts (kohya).</b>" in form.left.text and "<summary>Left out (" in form.left.text
    assert form.imports.value == () and form.overrides != ["train.steps=40"]
    form.left.buttons["Undo"].click()
    assert (form.overrides, form.left.text) == (["train.steps=40"], "")
    form.imports.value = chosen({"other.toml": b"a = 1"})
    assert "other.toml" in form.refusal.text and form.overrides == ["train.steps=40"]


def test_a_folder_is_found_by_going_up_and_down(runs: Path):
    folder = make_pictures(runs.parent / "own cats", count=3)
    form = settled(Form(QUICKSTART, (), runs))
    form.folder.buttons["Browse for a folder …"].click()
    form.folder.buttons[str(runs.parent.resolve())].click()
    form.folder.buttons[str(folder.resolve())].click()
    assert f"<b>{folder.resolve()}</b>: 3 images, 3 with a caption." in form.folder.text
    form.folder.buttons["Take this folder"].click()
    assert form.inputs["data.path"].value == str(folder.resolve())
    form.folder.buttons[str(runs.parent.resolve())].click()
    form.folder.buttons["Close"].click()
    assert (form.folder.text, len(form.folder.buttons)) == ("", 1)


def test_what_belongs_to_the_former_pictures_goes_with_them(runs: Path, tmp_path: Path):
    masks = tmp_path / "masks"
    masks.mkdir()
    one, other = (make_pictures(tmp_path / name, count=3) for name in ("one", "other"))
    form = settled(Form(QUICKSTART, [f"data.path={one}", f"data.masks={masks}"], runs))
    form.inputs["data.path"].value = str(other)
    assert "former images: Mask folder." in form.left.text
    form.left.buttons["Undo"].click()
    assert f"data.masks={masks}" in form.overrides


def test_what_is_typed_is_never_html(runs: Path):
    form = Form(QUICKSTART, (), runs)
    form.inputs["train.steps"].value = form.inputs["data.trigger"].value = "<img src=x onerror=alert(1)>"
    texts = note(form, "train.steps") + form.why.text + form.changes.text + form._saved_output().data
    assert "<img" not in texts
    assert "&lt;img" in note(form, "train.steps")


def test_another_adapter_has_other_rows_and_leaves_out_what_was_typed_for_the_first(runs: Path):
    form = open_all(Form(QUICKSTART, (), runs))
    form.inputs["adapter.rank"].value = "8"
    form.methods.buttons["boft"].click()
    assert {"adapter.block_size", "adapter.num_stages"} <= shown(form)
    assert not {"adapter.rank", "adapter.alpha"} & shown(form)
    assert form.overrides == ["adapter.type=boft"]
    form.methods.buttons["lora"].click()
    assert "adapter.rank" in shown(form)
    assert form.inputs["adapter.rank"].value == "16"
    assert form.config.config == load_config(QUICKSTART).config


def test_only_words_that_go_together_can_be_chosen_and_one_that_was_chosen_before_stays(runs: Path):
    form = open_all(Form(QUICKSTART, (), runs))
    assert form.inputs["export.what"].options == ("auto", "none", "adapter", "merged")
    form.inputs["export.what"].value = "merged"
    form.methods.buttons["none"].click()
    assert form.inputs["export.what"].options == ("auto", "none", "full", "merged")
    assert form.inputs["export.what"].value == "merged"
    assert "alert" in note(form, "export.what")


def test_a_search_shows_the_settings_it_finds(runs: Path):
    form = Form(QUICKSTART, (), runs)
    form.search.value = "warm up"
    assert box_of(form, "optim.warmup") in form._found.children
    form.inputs["optim.warmup"].value = "3"
    assert form.overrides == ["optim.warmup=3"]
    form.search.value = "VRAM"
    assert 0 < len(form._found.children) <= MOST_FOUND
    form.search.value = "zzz"
    assert form._missing.value == "No setting has these words."
    form.search.value = ""
    assert form._found.children == ()


def test_the_plan_is_for_the_gpus_that_are_chosen_and_what_makes_it_fit_is_a_button(runs: Path):
    form = settled(Form(ROOT / "presets" / "flux2-dev-lora-4gpu.yaml", (), runs))
    form.plan_for.value = "24gb"
    assert 'class="wrong">Does not fit' in form.plan.text
    fix = next(words for words in form.plan.buttons if words.startswith("Make it fit: parallel.cpu_offload=true"))
    form.plan.buttons[fix].click()
    assert form.overrides == ["parallel.cpu_offload=true"]
    assert "Does not fit" not in form.plan.text
    form.changes.buttons["Back to the preset"].click()
    assert form.overrides == []


def test_the_form_and_the_page_do_not_share_what_was_typed(runs: Path):
    form = Form(QUICKSTART, ["train.steps=40"], runs)
    form.inputs["optim.lr"].value = "0.001"
    assert Studio(runs).draft() == Draft(QUICKSTART)
    assert form.overrides == ["train.steps=40", "optim.lr=0.001"]


def test_a_preset_that_was_broken_meanwhile_is_refused_in_words(tmp_path: Path, runs: Path):
    file = tmp_path / "own.yaml"
    file.write_text(dump_config(load_config(QUICKSTART).config))
    form = settled(Form(file, (), runs))
    file.write_text("train: 5")
    form.inputs["train.steps"].value = "7"
    assert f"{file}:1: train: needs a section" in form.refusal.text


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


@pytest.mark.parametrize("seed", range(3))
def test_the_code_of_a_form_makes_the_same_form_whatever_was_typed_before(seed: int, runs: Path):
    draw = random.Random(seed)
    form = open_all(Form(QUICKSTART, (), runs))
    for name, value in draw.sample(TYPED, 8):
        if name == "adapter.type":
            form.methods.buttons[value].click()
        elif name in shown(form):
            form.inputs[name].value = value
    again = Form(QUICKSTART, form.overrides, runs)
    assert again.config.config == form.config.config
    assert again.config.config == Form(QUICKSTART, again.overrides, runs).config.config
    called = Caller()
    eval(form.code, {"notebook": called})
    assert called.arguments == (str(QUICKSTART), *form.overrides)


class Caller:
    """Stands for app.notebook in the code of a form."""

    arguments: tuple[str, ...] = ()

    def form(self, *arguments: str) -> None:
        self.arguments = arguments


def test_a_saved_notebook_keeps_the_code_of_what_was_typed_last_and_says_where_widgets_are_shown(tmp_path: Path):
    cells = [
        "from app import notebook",
        f'form = notebook.form("quickstart", "train.steps=40", runs=notebook.Path({str(tmp_path)!r}))\nform',
        'form.inputs["optim.lr"].value = "0.001"',
    ]
    saved = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(saved, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    live, kept = saved.cells[1].outputs
    assert live.data["text/plain"].startswith("Widgets are not shown here. Run this cell in JupyterLab with ipywidgets")
    assert "application/vnd.jupyter.widget-view+json" in live.data
    code = "notebook.form(&#39;quickstart&#39;, &#39;train.steps=40&#39;, &#39;optim.lr=0.001&#39;)"
    assert kept.data["text/html"] == f'<div class="shardstudio-code">The form as code:<pre>{code}</pre></div>'
    assert len(nbformat.writes(saved)) < MOST_BYTES
