"""The functions that the script of Drop and name calls: folders of their own, a draft of the word, one start."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.form.draft import Draft
from app.studio import Studio
from app.web.answers import answering
from app.web.pages import drop
from tests.runs import make_pictures, write_preset
from tests.system.gpus.machines import TWO_H100, install
from trainer.config.models import captioners

Call = Callable[..., Any]


@pytest.fixture
def call(studio: Studio) -> Call:
    functions = answering([drop.calls(studio)])

    def call(name: str, **values: Any) -> Any:
        answer = json.loads(json.dumps(functions[f"drop_{name}"](values)))
        return answer.get("error", answer.get("value"))

    return call


def test_windows_that_give_one_word_at_once_get_a_folder_each_and_one_that_asks_again_gets_its_own(
    studio: Studio, call: Call
):
    former = {"preset": "quickstart", "values": {"train.steps": 7}}
    studio.save_draft(Draft(studio.preset("quickstart"), former["values"]))
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda id: call("make", id=id, word="Milo"), "aabbccdd"))
    made = [answer["folder"] for answer in answers]
    assert any(answer["undo"] == former for answer in answers)
    pictures = studio.runs.parent / "pictures"
    assert {*made} == {str(pictures / name) for name in ("milo", "milo-2", "milo-3", "milo-4")}
    assert made[::2] == made[1::2]
    draft = studio.draft()
    assert draft.preset.stem == "quickstart" and draft.values["data.path"] in made
    assert (draft.values["name"], draft.values["data.trigger"]) == ("Milo", "milo")


def test_a_word_that_names_nothing_changes_nothing(studio: Studio, call: Call):
    studio.save_draft(Draft(studio.preset("quickstart"), {"train.steps": 7}))
    for word, sentence in (
        ("", "is missing"),
        ("🦊", "neither a letter"),
        ("x" * 65, "65 letters"),
        ("con", "not a name"),
    ):
        assert sentence in call("make", id=word or "none", word=word)
    assert studio.draft().values == {"train.steps": 7}
    assert not [*(studio.runs.parent / "pictures").glob("*")]
    studio.uploads.closed = "No uploads here."
    assert call("make", id="2", word="milo") == "No uploads here."


def test_lines_follow_the_pictures_and_no_run_is_started_of_what_the_window_does_not_show(
    studio: Studio, call: Call, tmp_path: Path
):
    folder = call("make", id="1", word="Milo")["folder"]
    for file in make_pictures(tmp_path / "photos", 9).iterdir():
        file.rename(Path(folder) / file.name)
    (Path(folder) / "08.txt").unlink()
    studio.scans.of(studio.check(studio.draft()).config, is_fresh=True)
    assert call("state")["folder"] == folder and call("state")["lines"] is None
    seen = call("state", folder=folder)
    state = seen["lines"]
    assert (state["images"]["count"], state["errors"]) == (9, [])
    assert state["captions"]["missing"] == 1
    assert [writer["model"] for writer in state["captions"]["writers"]] == [*captioners(), "demo"]
    assert state["offered"]["data.validation"] == "1"
    assert state["rows"]["sample.prompts"].splitlines()[:2] == ["[trigger]", "[trigger], picture number 0"]
    assert "20 of the other models need more than this machine has" in state["note"]
    again = call("state", folder=folder, known=seen["key"])
    assert again is None or again["lines"]["looks"] != state["looks"]
    other = make_pictures(tmp_path / "other")
    write_preset(studio.own_presets / "own.yaml", other)
    studio.save_draft(Draft(studio.own_presets / "own.yaml"))
    assert "another folder" in call("start", id="1", folder=folder)
    assert "another folder" in call("edit", folder=folder, edits={"name": "milo-2"})
    assert "another folder" in call("preset", folder=folder, chosen="quickstart")
    assert studio.draft() == Draft(studio.own_presets / "own.yaml")
    assert call("edit", folder=str(other), edits={"name": "mine"}) is None
    assert call("preset", folder=str(other), chosen="own") == []
    assert studio.draft().values == {"name": "mine"}
    studio.save_draft(Draft(studio.preset("quickstart"), {"data.path": str(other), "optim.lr": -1}))
    assert call("start", id="1", folder=str(other)).startswith("Learning rate: ")
    assert call("is_home") is True and [*studio.runs.glob("*/config.yaml")] == []


def test_captions_are_counted_of_the_folder_that_they_are_written_in(studio: Studio, call: Call, tmp_path: Path):
    folder, more = make_pictures(tmp_path / "milo", 12), make_pictures(tmp_path / "more", 5)
    for file in (folder / "00.txt", *more.glob("*.txt")):
        file.unlink()
    values = {"data.path": str(folder), "data.missing_caption": "empty", "data.folders": [{"path": str(more)}]}
    studio.save_draft(Draft(studio.preset("quickstart"), values))
    studio.scans.of(studio.check(studio.draft()).config, is_fresh=True)
    lines = call("state", folder=str(folder))["lines"]
    assert (lines["images"]["count"], lines["captions"]["missing"]) == (17, 1)
    said = [text.partition(" images")[0] for text in lines["images"]["warnings"] if "no caption" in text]
    assert said == ["data.path: 1 of 12", "data.folders.0.path: 5 of 5"]


@pytest.mark.slow  # every preset is planned for the GPUs
def test_on_a_machine_with_gpus_the_model_to_download_is_proposed_with_size_licence_and_time(
    studio: Studio, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(TWO_H100, tmp_path, monkeypatch)
    folder = call("make", id="1", word="milo")["folder"]
    for file in make_pictures(tmp_path / "photos", 30).iterdir():
        file.rename(Path(folder) / file.name)
    studio.scans.of(studio.check(studio.draft()).config, is_fresh=True)
    lines = call("state", folder=folder)["lines"]
    assert (lines["preset"], lines["errors"], lines["num_gpus"]) == ("flux2-klein-4b-lora-1gpu", [], 1)
    assert lines["plan"]["whole"][0] > 0
    assert "16 GB to download, which Start does first. Licence: Apache 2.0." in lines["note"], lines["note"]
    [klein] = [model for model in call("models") if model["name"] == "FLUX.2 klein 4B"]
    assert klein["presets"] == [["flux2-klein-4b-lora-1gpu", "FLUX.2 klein 4B: LoRA, 1 card from 16 GB, fits"]]
