"""The functions that the script of the screen New run calls, as a browser calls them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.data import scans
from app.form import form_answers
from app.form.draft import Draft
from app.studio import Studio
from app.web.answers import answering
from app.web.pages import new_run
from tests.app.browser import recorded
from tests.runs import full_disk, make_pictures, write_preset
from tests.system.gpus.machines import TWO_H100, Machine, install
from trainer.run.events import ErrorEvent, StatusEvent

TEXT = "qwen3-8b-qlora-1x24gb"
RECORDED_WITHIN_S = 240
PREFLIGHT_S = 0.1
"""Measured by `make bench`; only a time far above it fails here."""


class Window:
    """A window of the page: calls functions and keeps the last state."""

    def __init__(self, studio: Studio) -> None:
        self._functions = answering([new_run.calls(studio)])
        self.state: dict[str, Any] = {}

    def ask(self, name: str, /, **values: Any) -> dict[str, Any]:
        """Return the answer as it travels: {"value": ...} or {"error": ...}."""
        return json.loads(json.dumps(self._functions[f"new_{name}"](values), allow_nan=False))

    def call(self, name: str, /, **values: Any) -> Any:
        """Return the value of the answer."""
        answer = self.ask(name, **values)
        assert "error" not in answer, answer["error"]
        if isinstance(answer["value"], dict) and "key" in answer["value"]:
            self.state = answer["value"]
        return answer["value"]

    def refused(self, name: str, /, **values: Any) -> str:
        """Return the sentence that a call is refused with."""
        return self.ask(name, **values)["error"]

    def type(self, field: str, value: str | bool, **values: Any) -> None:
        self.call("edit", edits={field: value}, **values)

    def value(self, field: str) -> str | bool:
        return self.state["rows"][field]["value"]

    def errors(self) -> dict[str, str]:
        return {error["field"]: error["text"] for error in self.state["errors"]}

    def read(self) -> dict[str, Any]:
        """Look until the images are read."""
        return self.until(lambda state: not state["waiting"])

    def until(self, is_so: Callable[[dict[str, Any]], bool], timeout_s: float = 20) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while not is_so(self.call("state")):
            assert time.monotonic() < deadline, self.state
            time.sleep(0.02)
        return self.state


@pytest.fixture
def studio(studio: Studio, tmp_path: Path) -> Studio:
    folder = make_pictures(tmp_path / "pictures", count=2)
    write_preset(studio.runs / "presets" / "own.yaml", folder)
    return studio


@pytest.fixture
def window(studio: Studio) -> Window:
    window = Window(studio)
    window.call("state")
    return window


def test_a_window_that_shows_the_state_is_answered_with_nothing(window: Window):
    window.read()
    key = window.state["key"]
    assert window.ask("state", known=key) == {"value": None}
    window.type("train.steps", "7")
    assert window.ask("state", known=key)["value"]["key"] == window.state["key"] != key


def test_a_chosen_preset_fills_the_inputs(window: Window, studio: Studio):
    window.call("preset", name="own")
    assert window.value("data.path").endswith("pictures")
    assert (window.value("train.steps"), window.state["preset"]) == ("20", "own")
    assert studio.draft() == Draft(studio.preset("own"))


def test_every_setting_has_a_row_a_group_and_words(window: Window):
    facts = new_run.facts()
    assert set(window.state["rows"]) == set(facts["fields"])
    assert {field["group"] for field in facts["fields"].values()} == set(facts["groups"])
    assert window.state["rows"]["adapter.block_size"]["hidden"]
    assert "hidden" not in window.state["rows"]["parallel.max_restarts"]


def test_a_value_typed_back_is_kept_while_two_other_fields_are_wrong(window: Window, studio: Studio):
    """Two problems of different kinds: neither makes another field forget what was typed."""
    window.type("data.trigger", "")
    window.type("sample.size", "abc")
    assert set(window.errors()) == {"sample.prompts", "sample.size"}
    window.type("train.batch_size", "8")
    assert {"field": "train.batch_size", "label": "Batch size", "old": "16", "new": "8"} in window.state["changes"]
    window.type("train.batch_size", "16")
    assert window.value("train.batch_size") == "16"
    assert json.loads((studio.runs / "drafts" / "draft.json").read_text())["values"] == {
        "data.trigger": "",
        "sample.size": "abc",
    }
    assert "train.batch_size" not in [change["field"] for change in window.state["changes"]]
    window.call("edit", edits={"data.trigger": "sks", "sample.size": "[64, 64]"})
    assert (window.value("train.batch_size"), window.errors()) == ("16", {})
    assert "batch_size: 16" in window.state["yaml"]


def test_what_start_uses_is_what_is_shown(window: Window, studio: Studio):
    window.call("preset", name="own")
    window.call("edit", edits={"train.steps": "3", "name": "mine"})
    assert window.read()["ready"]
    queued = window.call("enqueue", gpus=[])
    assert queued == "mine waits in the queue as number 1."
    [entry] = studio.queue.waiting()
    assert "steps: 3" in entry.config and "name: mine" in entry.config


def test_the_gpus_that_can_be_chosen_are_those_that_are_visible_by_nvidia_smis_numbers(
    window: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(TWO_H100, tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    window.call("preset", name="flux2-dev-lora-nf4-2x24gb")
    monkeypatch.setattr("app.studio.GPUS_EVERY_S", 0)
    assert window.call("state")["gpus"] == [{"index": 1, "name": "NVIDIA H100 80GB HBM3"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert window.call("state")["gpus"] == []
    assert window.errors()["parallel.device"].startswith("cuda: CUDA_VISIBLE_DEVICES=5: '5' names none of this machine")


def test_a_gpu_that_others_use_is_among_the_warnings(window: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(Machine("NVIDIA L4, 23034, 20000, 0, 30, GPU-1, 580.65.06, 8.9, [N/A]"), tmp_path, monkeypatch)
    monkeypatch.setattr("app.studio.GPUS_EVERY_S", 0)
    window.call("preset", name="flux2-dev-lora-nf4-2x24gb")
    (warning,) = [text for text in window.call("state")["warnings"] if text.startswith("GPU 0, NVIDIA L4: ")]
    assert "other processes use 19.5 of 22.5 GiB, and the plan needs " in warning


def test_an_error_that_another_field_caused_goes_with_its_cause(window: Window):
    window.type("train.steps", "6")
    assert "must be less than train.steps 6" in window.errors()["optim.warmup"]
    window.type("train.steps", "60")
    assert window.errors() == {}
    assert "error" not in window.state["rows"]["optim.warmup"]


def test_a_wrong_value_names_its_row_and_keeps_start_from_starting(window: Window):
    window.type("train.steps", "many")
    assert window.state["errors"] == [
        {"field": "train.steps", "label": "Steps", "text": "needs a whole number, not 'many'"}
    ]
    assert (window.value("train.steps"), window.state["ready"]) == ("many", False)
    assert "train.steps: needs a whole number" in window.refused("start")


def test_after_a_restart_of_the_page_a_window_goes_on_with_what_it_shows(window: Window, studio: Studio):
    window.call("preset", name="own")
    again = Window(Studio(studio.runs))
    again.type("train.steps", "33")
    assert studio.draft() == Draft(studio.preset("own"), {"train.steps": 33})
    assert window.call("state")["key"] == again.state["key"]


def test_advice_and_warnings_do_not_keep_start_from_starting(window: Window):
    window.call("edit", edits={"adapter.type": "loha", "optim.lr": "2e-4"})
    assert window.read()["ready"]
    assert window.state["warnings"] == [
        "optim.lr: 0.0002 is a usual learning rate for lora, but loha learns about ten times more slowly with it; "
        "try 10 times as much"
    ]
    window.call("preset", name="flux1-schnell-lora-1gpu")
    assert "the model was distilled to generate in 4 steps without guidance" in window.state["warnings"][0]


def test_a_model_that_is_not_here_is_an_error_before_start(window: Window):
    window.call("preset", name="flux2-dev-lora-4gpu")
    assert "download" in window.errors()["model.path"].lower()
    assert not window.state["ready"]


def test_images_are_read_again_when_that_is_asked_for(window: Window, tmp_path: Path):
    window.call("preset", name="own")
    assert window.read()["data"]["num_images"] == 2
    (tmp_path / "pictures" / "broken.png").write_bytes(b"no image")
    assert window.read()["ready"]
    window.call("read_again")
    assert "broken.png" in window.until(lambda state: bool(state["errors"]))["errors"][0]["text"]
    assert "broken.png" in window.state["data"]["problems"][0]


def test_a_path_that_is_being_typed_is_not_read(window: Window, tmp_path: Path, listed: list[str]):
    (tmp_path / "pictures" / "below").mkdir()
    window.type("data.path", str(tmp_path / "pictures"), typing=True)
    assert window.state["waiting"] == "The folder is read when you leave its field."
    assert (window.state["data"], window.state["ready"]) == (None, False)
    window.call("state", typing=True)  # what an open window asks every two seconds
    time.sleep(2 * scans.PATIENCE_S)
    assert [folder for folder in listed if folder.startswith(str(tmp_path / "pictures"))] == []
    window.type("data.path", str(tmp_path / "pictures"))
    window.read()
    assert str(tmp_path / "pictures") in listed


def test_another_preset_takes_what_belongs_to_the_user_along(window: Window, tmp_path: Path):
    edits = {"data.path": str(tmp_path / "pictures"), "data.trigger": "sks", "name": "fox", "optim.lr": "1e-3"}
    window.call("edit", edits=edits | {"sample.prompts": "a fox"})
    answer = window.call("preset", name="sdxl-lora-1gpu")
    assert answer["left"] == ["Learning rate"]
    assert (window.value("data.trigger"), window.value("name"), window.value("sample.prompts")) == (
        "sks", "fox", "a fox"
    )  # fmt: skip
    assert window.value("data.path") == str(tmp_path / "pictures")
    window.call("edit", edits={"data.trigger": "later", "train.steps": "9"})
    window.call("restore", **answer["undo"])
    assert (window.state["preset"], window.value("optim.lr")) == ("quickstart", "0.001")
    assert (window.value("data.trigger"), window.value("train.steps")) == ("later", "100")


def test_an_edit_that_the_other_model_does_not_take_is_named_before_anything_changes(window: Window, studio: Studio):
    window.call("edit", edits={"data.flip": True, "name": "fox", "optim.lr": "2e-3"})
    before = studio.draft()
    assert window.call("preset", name=TEXT) == {"refused": {"Horizontal flip": "this model does not read it"}}
    assert studio.draft() == before
    answer = window.call("preset", name=TEXT, is_forced=True)
    assert (answer["left"], studio.draft().values) == (["Learning rate", "Horizontal flip"], {"name": "fox"})
    window.call("restore", **answer["undo"])
    assert studio.draft() == before


def test_what_is_wrong_with_masks_stands_at_their_field(window: Window, studio: Studio):
    window.call("preset", name="own")
    masks = make_pictures(studio.runs.parent / "masks", count=3)
    for file in masks.glob("*.png"):
        file.rename(masks / f"of another {file.name}")
    window.type("data.masks", str(masks))
    window.read()
    assert {*window.errors()} == {"data.masks"}
    assert "none of its images has the name of an image of the data" in window.errors()["data.masks"]
    assert window.state["data"]["num_images"] == 2
    window.type("data.path", str(make_pictures(studio.runs.parent / "others", count=2)))
    assert window.state["left_images"]["labels"] == []  # the preset's own images were followed by masks of one's own


def test_masks_of_a_folder_that_was_chosen_go_with_it(window: Window, studio: Studio):
    window.type("data.path", str(make_pictures(studio.runs.parent / "first", count=2)))
    window.type("data.masks", str(make_pictures(studio.runs.parent / "masks", count=2)))
    second = make_pictures(studio.runs.parent / "second", count=2)
    for at in range(1, len(str(second)) + 1):  # letter by letter, as somebody types it
        window.call("edit", edits={"data.path": str(second)[:at]}, typing=True)
    assert window.value("data.masks")
    window.type("data.path", str(second))
    assert (window.value("data.masks"), window.state["left_images"]["labels"]) == ("", ["Mask folder"])
    window.call("edit", edits=window.state["left_images"]["edits"])
    assert window.value("data.masks") == str(studio.runs.parent / "masks")


def test_masks_survive_another_windows_edit_while_the_folder_is_typed(window: Window, studio: Studio):
    own = {"data.path": "/a", "data.masks": "/of-a"}
    studio.save_draft(Draft(studio.draft().preset, own))
    window.type("data.path", "/ab", typing=True)
    answer = Window(studio).call("edit", edits={"train.steps": "7"})
    assert answer["left_images"] == {"labels": [], "edits": {}}
    window.type("data.path", "/a")
    assert studio.draft().values == own | {"train.steps": 7}
    window.type("data.path", "/ab", typing=True)
    Window(studio).type("train.steps", "8")
    assert window.call("edit", edits={"data.path": "/ab"})["left_images"]["edits"] == {"data.masks": "/of-a"}


def test_masks_that_a_reset_took_are_not_left_behind_by_the_next_edit(window: Window, studio: Studio):
    studio.save_draft(Draft(studio.draft().preset, {"data.path": "/a", "data.masks": "/of-a"}))
    window.type("data.path", "/ab", typing=True)
    window.call("reset")
    assert window.call("edit", edits={"train.steps": "7"})["left_images"]["labels"] == []


def test_a_preset_that_is_gone_is_named(window: Window, studio: Studio):
    window.call("preset", name="own")
    studio.preset("own").unlink()
    assert "own" in window.call("state")["problem"]
    assert "own" in window.refused("preset", name="own")


def test_the_plan_is_for_the_gpus_that_are_chosen(window: Window):
    window.call("preset", name="flux2-dev-lora-4gpu")
    assert (window.state["plan"]["limit"], window.state["plan"]["fixes"]) == (None, [])
    assert window.state["plan"]["need"] == sum(size for _, size in window.state["plan"]["kinds"]) > 24 * 2**30
    window.call("state", target="24gb")
    assert (window.state["plan"]["verdict"], len(window.state["plan"]["fixes"])) == ("does not fit", 2)
    assert window.state["plan"]["fixes"][0]["text"] == "parallel.cpu_offload=true"
    assert {fix["effect"] for fix in window.state["plan"]["fixes"]} == {""}
    window.call("edit", edits={"data.resolution": "1280"}, target="12gb")
    [fix] = window.state["plan"]["fixes"]
    assert fix["text"] == "parallel.cpu_offload=true quantize.format=nf4"
    assert fix["effect"] == "the frozen base is rounded, which changes the result a little"


def test_a_change_that_makes_the_run_fit_is_one_call(window: Window, studio: Studio):
    window.call("preset", name="flux2-dev-lora-4gpu", target="24gb")
    window.call("fix", changes=window.state["plan"]["fixes"][0]["changes"], target="24gb")
    assert (window.state["plan"]["verdict"], window.state["plan"]["fixes"]) == ("fits", [])
    assert studio.draft().values == {"parallel.cpu_offload": True}


def test_yaml_becomes_the_draft_and_changed_lines_are_marked(window: Window, studio: Studio):
    text = window.state["yaml"]
    window.call("apply_yaml", text=text.replace("steps: 100", "steps: 77"))
    assert studio.draft().values == {"train.steps": 77}
    lines = window.state["yaml"].splitlines()
    assert [lines[number - 1].strip() for number in window.state["marks"]] == ["steps: 77"]


def test_yaml_with_other_steps_and_epochs_has_the_length_of_its_epochs(window: Window):
    window.call("state")
    text = re.sub(r"(?m)^  steps: \d+\n  epochs: null", "  steps: 77\n  epochs: 3.0", window.state["yaml"])
    assert "steps: 77" in text
    window.call("apply_yaml", text=text)
    assert window.value("train.epochs") == "3.0" and "train.epochs" not in window.errors()


def test_an_imported_config_of_an_unknown_model_without_folders_keeps_those_of_the_form(window: Window, studio: Studio):
    window.call("state")
    folder = window.value("data.path")
    text = 'pretrained_model_name_or_path = "someone/sd15"\nnetwork_module = "networks.lora"\nnetwork_dim = 8\n'
    answer = window.call("import_config", files={"x.toml": text})
    assert (window.value("model.path"), window.value("data.path")) == ("demo", folder)
    assert (window.value("adapter.rank"), window.value("adapter.alpha")) == ("8", "1.0")
    assert "no model that ShardStudio knows" in answer["imported"]["lists"]["left out"][0]
    window.call("restore", **answer["undo"], is_whole=True)
    assert studio.draft().values == {}
    assert window.refused("import_config", files={"x.toml": "a = 1\n"}).startswith(
        "x.toml: is not a config of ai-toolkit"
    )


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("train:\n  steps: 7\n  batch_size: [\n", 4, ""),
        ("model: {family: flux2}\ntrain:\n  stepz: 7\n", 3, "train.stepz: unknown field; did you mean 'train.steps'?"),
        ("\0", 1, ""),
        ("a: " + "[" * 2000, 1, ""),
        ("!!python/object/apply:os.system [id]", 1, ""),
        ("a: &a [*a]", 1, ""),
        ("name: 🦊\n", 1, ""),
    ],
)
def test_wrong_yaml_is_named_with_its_lines_and_changes_nothing(
    window: Window, studio: Studio, text: str, line: int, sentence: str
):
    wrong = window.call("apply_yaml", text=text)["wrong"]
    assert line in [found["line"] for found in wrong]
    assert sentence in [found["text"] for found in wrong] if sentence else wrong[0]["text"]
    assert studio.draft() == Draft(studio.presets()["quickstart"])


def test_errors_of_yaml_without_a_line_have_none():
    text = "drafts/config.yaml:12: a: wrong\nno file at all\nx.yaml:3: b"
    assert form_answers.by_line(text) == [
        {"line": 12, "text": "a: wrong"}, {"line": 0, "text": "no file at all"}, {"line": 3, "text": "b"}
    ]  # fmt: skip


def test_a_saved_preset_is_gone_on_with_and_what_is_wrong_stays_typed(window: Window, studio: Studio):
    window.call("edit", edits={"train.steps": "55", "optim.lr": "fast"})
    saved = window.call("save_preset", name="mine")["saved"]
    assert "steps: 55" in Path(saved).read_text()
    assert (window.state["preset"], window.value("train.steps"), window.value("optim.lr")) == ("mine", "55", "fast")
    assert [change["label"] for change in window.state["changes"]] == ["Learning rate"]
    assert "already the name of a preset" in window.refused("save_preset", name="mine")


def test_a_damaged_run_does_not_take_the_place_of_what_was_typed(window: Window, studio: Studio):
    run = recorded(studio.runs, "old")
    window.type("train.steps", "7")
    run.config_file.write_text("train: 5\n")
    assert "config.yaml:1: train: needs a section" in window.refused("copy", run="old")
    assert "needs a section" in window.refused("retry", run="old")
    assert "needs a section" in window.refused("restore", preset="old", values={})
    assert studio.draft().values == {"train.steps": 7}


@pytest.mark.parametrize(
    ("retry", "said"),
    [
        (("train.micro_batch=1", "optim.lr=1e-5"), "The settings of old, with train.micro_batch=1, optim.lr=1e-5."),
        ((), "The settings of old."),
    ],
)
def test_a_failed_run_is_tried_again_with_what_its_error_suggests(
    window: Window, studio: Studio, retry: tuple[str, ...], said: str
):
    failed = [ErrorEvent(message="m", remedy="r", retry=retry), StatusEvent(state="failed", step=40)]
    recorded(studio.runs, "old", failed)
    assert window.call("retry", run="old") == said
    assert len(studio.draft().values) == len(retry)


def test_a_run_that_ran_out_of_memory_is_tried_again_with_the_next_rung_of_the_ladder(window: Window, studio: Studio):
    said = "CUDA out of memory. Tried to allocate 2.00 GiB."
    recorded(studio.runs, "old", [ErrorEvent(message=said, remedy="r"), StatusEvent(state="failed", step=40)])
    answer = window.call("retry", run="old")
    assert answer == "The settings of old, with train.checkpointing=full, parallel.offload_blocks=0."
    assert studio.draft().values == {"train.checkpointing": "full", "parallel.offload_blocks": 0}


def test_a_retry_of_a_run_with_stages_changes_the_stage_that_failed(window: Window, studio: Studio):
    said, stages = "CUDA out of memory. Tried to allocate 2.00 GiB.", [{"name": "first", "set": {}}, {"name": "last"}]
    recorded(
        studio.runs, "old", [ErrorEvent(message=said, remedy="r"), StatusEvent(state="failed", step=40)], stages=stages
    )
    answer = window.call("retry", run="old")
    given = {"train.checkpointing": "full", "parallel.offload_blocks": 0}
    assert answer == (
        "The settings of old, with stages.first.train.checkpointing=full, stages.first.parallel.offload_blocks=0."
    )
    window.call("state")
    assert studio.draft().values == {"stages": [{"name": "first", "set": given}, {"name": "last", "set": {}}]}


@pytest.mark.parametrize("retry", ["<b>=1", "train=5", "no override", "train.steps=many", "stages=[]]"])
def test_a_strangers_suggestion_that_is_none_is_refused(window: Window, studio: Studio, retry: str):
    failed = [ErrorEvent(message="m", remedy="r", retry=(retry,)), StatusEvent(state="failed", step=40)]
    recorded(studio.runs, "old", failed)
    assert "command line: " in window.refused("retry", run="old")
    assert studio.draft().preset == studio.presets()["quickstart"]


def test_a_started_run_is_named_also_when_its_folder_cannot_be_remembered(window: Window, studio: Studio):
    window.call("preset", name="own")
    window.read()
    (studio.runs / "drafts" / "folders.json").mkdir()
    name = window.call("start")
    [run] = studio.find_runs()
    assert run.path.name == name
    from trainer.run import process

    process.terminate(run)


def test_a_preset_that_is_chosen_while_somebody_types_loses_no_later_edit(studio: Studio):
    """Each edit is either made before the choice, and left behind with a word, or stays."""
    typing, choosing = Window(studio), Window(studio)
    done: list[int] = []

    def type_steps() -> None:
        for number in range(48, 60):
            typing.type("train.seed", str(number))
            done.append(number)

    thread = threading.Thread(target=type_steps)
    thread.start()
    while len(done) < 3:
        time.sleep(0.005)
    answer = choosing.call("preset", name="own")
    thread.join()
    assert studio.draft() == Draft(studio.preset("own"), {"train.seed": 59})
    assert answer["left"] == ["Seed"]


def test_on_a_full_disk_edits_stay_in_memory_and_are_saved_when_there_is_space(window: Window, studio: Studio):
    file = studio.runs / "drafts" / "draft.json"
    window.type("train.steps", "7")
    with full_disk():
        window.type("train.seed", "9")
        assert window.state["problem"] == "The form cannot be saved (File too large): free some space."
        window.type("optim.warmup", "3")
        assert (window.value("train.seed"), window.value("optim.warmup")) == ("9", "3")
        assert json.loads(file.read_text())["values"] == {"train.steps": 7}
    window.type("sample.every", "25")
    assert window.state["problem"] == ""
    assert json.loads(file.read_text())["values"] == {
        "train.steps": 7, "train.seed": 9, "optim.warmup": 3, "sample.every": 25
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("edit", {"edits": {"no.such": "1"}}, "no.such: not a setting of this version; reload the page"),
        ("edit", {"edits": {"stages": "[]"}}, "stages: not a setting of this version; reload the page"),
        ("edit", {"edits": {"name": "\ud800"}}, "half a character"),
        ("restore", {"preset": "../../etc", "values": {}}, "not the name of a run"),
        ("preset", {"name": "<img src=x onerror=alert(1)>"}, "not a run folder"),
        ("preset", {"name": "/etc/passwd"}, "not the name of a run"),
        ("save_preset", {"name": "../own"}, "'../own' is not"),
        ("save_preset", {"name": "a" * 5000}, "is not"),
        ("copy", {"run": ".."}, "'..' is not the name of a run"),
        ("retry", {"run": "drafts"}, "not a run folder"),
        ("enqueue", {"gpus": [-1]}, "GPUs: '-1' is not a list of numbers"),
        ("browse", {"path": "/etc"}, "/etc: outside "),
        ("browse", {"path": "/proc/self/root/etc"}, "outside "),
        ("browse", {"path": "a\0b"}, "a path cannot hold the character NUL; remove it"),
        ("edit", {"edits": {"train.steps": 5}}, "Input should be a valid string"),
        ("edit", {"edits": "all"}, "Input should be a valid dictionary"),
        ("edit", {"edits": {}, "studio": 1}, "studio: Unexpected keyword argument"),
        ("enqueue", {"gpus": ["0; rm"]}, "Input should be a valid integer"),
        ("glance", {"path": ["/etc"]}, "Input should be a valid string"),
        ("fix", {"changes": {"__class__": 1}}, "__class__: not a setting of this version"),
    ],
)
def test_what_no_window_of_the_page_sends_is_refused_and_changes_nothing(
    window: Window, studio: Studio, name: str, values: dict[str, Any], said: str
):
    before = studio.draft()
    assert said in window.refused(name, **values)
    assert studio.draft() == before
    assert not (studio.runs / "own.yaml").exists()


def test_whatever_is_typed_as_a_path_is_named_at_its_row_and_the_form_goes_on(window: Window):
    fields = {"data.path", "model.path", "model.base", "adapter.start", "data.masks"}
    for text in ("y" * 5000, "x" * 300, "a\0b", "~nobody/x", "/root/\x01"):
        window.call("edit", edits=dict.fromkeys(fields, text))
        assert {field for field in fields if window.value(field) != text} == set()
        assert fields - set(window.errors()) in (set(), {"model.path"}), text[:9]  # model.base takes its place
    window.call("edit", edits=dict.fromkeys(fields, "") | {"model.path": "y" * 5000, "train.steps": "7"})
    assert "no file or folder 'yyy" in window.errors()["model.path"]
    assert window.value("train.steps") == "7"


def test_values_that_no_window_sends_back_are_wrong_values_and_no_more(window: Window):
    values = {"train.steps": {"a": [1]}, "name": [[[]]], "zzz": 1, "optim.lr": 1e999, "data.path": None}
    window._functions["new_restore"]({"preset": "quickstart", "values": values})
    window.call("state")
    assert {"train.steps", "name", "optim.lr"} <= set(window.errors())
    assert "zzz" not in window.state["rows"]


def test_the_models_are_offered_with_their_presets(window: Window):
    found = window.call("models")
    demo = next(model for model in found if model["path"] == "demo" and model["family"] == "flux2")
    assert demo["image"].startswith("/gradio_api/file=")
    assert {"quickstart"} <= {preset["name"] for preset in demo["presets"]}
    known = [model for model in found if model["is_known"] and model is not demo]
    assert known and all(model["size"].endswith(" GB") and model["download"] for model in known)


def test_images_of_the_draft_are_shown_as_thumbnails(window: Window, studio: Studio):
    window.call("preset", name="own")
    window.read()
    shown = window.call("thumbnails")
    assert [image["name"] for image in shown] == ["00.png", "01.png"]
    for image in shown:
        assert Path(image["src"].removeprefix("/gradio_api/file=")).parent == studio.thumbnails.folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "preset"), [("record", "own"), ("verify", "quickstart")])
def test_a_model_is_recorded_and_a_plan_verified_with_a_click(window: Window, name: str, preset: str):
    window.call("preset", name=preset)
    assert window.state["plan"][f"can_{name}"]
    window.call(name)
    assert window.state["plan"]["is_waiting"]
    assert not window.state["plan"][f"can_{name}"]
    plan = window.until(lambda state: not state["plan"]["is_waiting"], RECORDED_WITHIN_S)["plan"]
    assert plan["need"] > 0
    if name == "verify":
        said = re.search(r"planned 0\.06 \(([+-][\d.]+)%\)", plan["checked"])
        assert said is not None and abs(float(said[1])) < 1


def test_an_edit_of_a_large_model_is_answered_while_somebody_types(window: Window):
    window.call("preset", name="flux2-dev-lora-4gpu", target="24gb")
    began = time.process_time()
    for number in range(5):
        window.type("train.seed", str(number), target="24gb")
    assert (time.process_time() - began) / 5 < 5 * PREFLIGHT_S


def test_a_preset_that_is_changed_on_disk_is_read_again(window: Window, studio: Studio):
    window.call("preset", name="own")
    file = studio.preset("own")
    file.write_text(file.read_text().replace("steps: 20", "steps: 21"))
    window.call("state")
    assert window.value("train.steps") == "21"
    window.call("restore", preset="own", values={"train.steps": 1})
    assert window.errors() == {}
    window.call("restore", preset="own", values={"train.steps": True})
    assert "train.steps" in window.errors()


@pytest.mark.slow
def test_the_form_says_how_long_a_run_takes_by_an_earlier_one_of_its_kind(window: Window, studio: Studio):
    window.call("preset", name="own")
    window.until(lambda state: state["earlier"] == {"is_looking": False})
    run = studio.start(studio.draft())
    deadline = time.monotonic() + RECORDED_WITHIN_S
    while studio.follower(run).view().is_running or not studio.follower(run).steps:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    studio.earlier = type(studio.earlier)(studio.runs)
    found = window.until(lambda state: "seconds" in state["earlier"])["earlier"]
    assert (found["run"], found["name"], found["has_samples"]) == (run.path.name, "own", True)
    assert found["seconds"] == pytest.approx(studio.follower(run).view().duration_s, rel=0.3)
    window.call("state", target="24gb")
    assert window.state["earlier"] is None


def test_another_window_does_not_read_the_path_that_is_being_typed(window: Window, studio: Studio, tmp_path: Path):
    other = Window(studio)
    make_pictures(tmp_path / "photos", count=2)
    window.type("data.path", str(tmp_path), typing=True)
    for _ in range(2):
        other.call("state")
        assert other.state["waiting"] == "The folder is read when you leave its field."
        assert other.state["data"] is None and other.call("thumbnails") == []
        other.type("train.seed", "4")  # of another field
    window.type("data.path", str(tmp_path / "photos"), typing=True)
    assert other.call("state")["waiting"]
    window.type("data.path", str(tmp_path / "photos"))
    assert other.read()["data"]["num_images"] == 2


def test_a_folder_without_the_familys_model_is_refused_at_its_field(window: Window, studio: Studio, tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    window.call("preset", name="own")
    window.type("model.path", str(tmp_path / "model"))
    assert "no transformer/config.json; expected a diffusers folder" in window.errors()["model.path"]
    window.call("save_preset", name="with-model")
    [model] = [model for model in window.call("models") if model["path"] == str(tmp_path / "model")]
    assert not model["is_here"]


def test_an_address_that_cannot_be_resolved_is_an_error_of_its_field(window: Window):
    window.call("edit", edits={"parallel.nodes": "2", "parallel.rendezvous": "nowhere.invalid:29400"})
    assert "the host name nowhere.invalid cannot be resolved here" in window.errors()["parallel.rendezvous"]
    assert "" not in window.errors()


def test_the_quantized_base_that_is_kept_counts_as_disk_that_the_run_needs(window: Window):
    window.call("preset", name="flux2-dev-lora-nf4-2x24gb")
    need = window.state["disk"]["need"]
    window.type("quantize.cache", False)
    assert window.state["disk"]["need"] < need - 10e9


def test_a_model_that_is_not_published_is_named_by_what_it_is(window: Window, studio: Studio, tmp_path: Path):
    preset = write_preset(studio.own_presets / "mine.yaml", tmp_path)
    preset.write_text(preset.read_text().replace("{family: flux2}", "{family: causal_lm, path: random}"))
    names = {model["path"]: model["name"] for model in window.call("models") if not model["is_known"]}
    assert names["random"] == "Random model (causal_lm)"


def test_back_to_the_preset_drops_every_edit_also_of_data_and_name(window: Window, studio: Studio, tmp_path: Path):
    window.call("edit", edits={"data.path": str(tmp_path), "name": "mine", "train.steps": "7"})
    window.call("reset")
    assert studio.draft() == Draft(studio.preset("quickstart"))
    assert window.state["changes"] == []


def test_images_without_captions_are_one_line_with_the_change_that_mends_all(window: Window, tmp_path: Path):
    folder = make_pictures(tmp_path / "bare", count=5)
    for file in folder.glob("*.txt"):
        file.unlink()
    window.type("data.path", str(folder))
    window.read()
    [said] = window.errors().values()
    assert f"5 of 5 images have no caption: first {folder}/00.png; " in said and f"--caption {folder}" in said
    [remedy] = window.state["remedies"][said]
    assert (remedy["field"], remedy["value"]) == ("data.missing_caption", "empty")
    window.type(remedy["field"], remedy["value"])
    window.read()
    assert window.errors() == {}


@pytest.mark.parametrize(
    ("sentence", "changes"),
    [
        ("no caption; write it into a.txt, or set data.missing_caption: empty", [("data.missing_caption", "empty")]),
        ("needs a GPU; set parallel.device: cpu.", [("parallel.device", "cpu")]),
        ("set train.steps: 20, or sample.scheduler: euler", [("train.steps", "20"), ("sample.scheduler", "euler")]),
        ("set objective.prediction: sideways", []),
        ("set model.path: tiny", []),
        ("set model.family: {families}", []),
        ("set data.missing_captions: empty", []),
    ],
)
def test_the_changes_that_a_sentence_names_are_offered(sentence: str, changes: list[tuple[str, str]]):
    found = form_answers.remedies([sentence])
    assert [(change["field"], change["value"]) for change in found.get(sentence, [])] == changes


def test_own_images_get_their_own_name_trigger_and_prompts_where_none_was_typed(window: Window, tmp_path: Path):
    folder = make_pictures(tmp_path / "My cats", count=6)
    (folder / "05.txt").write_text("a [trigger]\nthat sleeps")
    (folder / "04.txt").write_text("word " * 100)
    assert window.read()["proposals"] == [] and not window.state["kept_words"]  # the preset's own images
    window.type("data.path", str(folder))
    window.type("data.validation", "2")
    window.read()
    offered = {offer["field"]: offer["value"] for offer in window.state["proposals"]}
    assert (offered["name"], offered["data.trigger"]) == ("My-cats", "my-cats")
    held_out, other = offered["sample.prompts"].splitlines()[:2], offered["sample.prompts"].splitlines()[2:]
    assert held_out == ["[trigger], " + " ".join(["word"] * 60), "a [trigger] that sleeps"]
    assert other == ["[trigger], picture number 0", "[trigger], picture number 1"]
    window.type("name", "whiskers")
    for field in ("data.trigger", "sample.prompts"):
        window.type(field, offered[field])
    assert window.read()["proposals"] == []
    window.call("reset")
    signs = (tmp_path / "My cats").rename(tmp_path / "🦊🦊")
    (signs / "05.txt").write_text("a fox\0\u202e")
    window.type("data.path", str(signs))
    window.type("data.validation", "1")
    assert {offer["field"] for offer in window.read()["proposals"]} == {"sample.prompts"}
    window.call("preset", name="own")  # whose images have no trigger word
    [offer] = window.read()["proposals"]
    assert (offer["field"], offer["value"].splitlines()[0]) == ("sample.prompts", "a fox")
