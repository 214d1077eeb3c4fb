"""What a config names and is not there: every problem at once, with its line and a way out, before a file is opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.config.test_load import read
from trainer.config.load import ConfigError, load_config
from trainer.launcher import preflight
from trainer.system.errors import InputError
from trainer.system.installation import PRESETS

DATA = "data: {path: photos}\n"
QUICKSTART = PRESETS / "quickstart.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, so that a preset's path is short and the same everywhere."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_folder_and_model_that_does_not_exist_is_named_with_its_line(folder: Path) -> None:
    (folder / "photos").mkdir()
    (folder / "notes.txt").touch()
    loaded = read(
        "model: {path: /models/flux2, base: org/name}\n"
        "data:\n  path: photo\n  validation: notes.txt\n  folders: [{path: photos}, {path: /none}]\n"
    )
    with pytest.raises(ConfigError) as caught:
        preflight.check_named(loaded)
    assert str(caught.value).splitlines() == [
        f"preset.yaml:3: data.path: no folder '{folder}/photo'; did you mean '{folder}/photos'?",
        "preset.yaml:5: data.folders[1].path: no folder '/none'; name the folder with the images",
        f"preset.yaml:4: data.validation: '{folder}/notes.txt' is a file; name the folder with the images",
        "preset.yaml:1: model.path: no file or folder '/models/flux2'; "
        "name a diffusers folder, a .safetensors file or a hub id (org/name)",
    ]


def test_what_goes_with_the_data_is_looked_for_beside_the_file_too(folder: Path) -> None:
    (folder / "photos").mkdir()
    (folder / "fox.png").touch()
    loaded = read(
        "data:\n  path: photos\n  masks: mask\n  regularization: others\n  references: fox.png\n"
        "sample: {prompts: [a, b], references: [fox.png, fix.png]}\n"
    )
    assert loaded.config.sample.references == (f"{folder}/fox.png", f"{folder}/fix.png")
    with pytest.raises(ConfigError) as caught:
        preflight.check_named(loaded)
    assert str(caught.value).splitlines() == [
        f"preset.yaml:3: data.masks: no folder '{folder}/mask'; name the folder with the images",
        f"preset.yaml:4: data.regularization: no folder '{folder}/others'; name the folder with the images",
        f"preset.yaml:5: data.references: '{folder}/fox.png' is a file; name the folder with the images",
        f"preset.yaml:6: sample.references[1]: no file '{folder}/fix.png'; did you mean '{folder}/fox.png'?",
    ]


def test_a_new_run_needs_the_file_that_its_adapter_starts_from(folder: Path) -> None:
    (folder / "photos").mkdir()
    (folder / "fox.safetensors").touch()
    (folder / "peft").mkdir()
    for start in ("fox.safetensors", "peft"):
        preflight.check_named(read(f"adapter:\n  start: {start}\ndata: {{path: photos}}\n"))
    with pytest.raises(ConfigError) as caught:
        preflight.check_named(read("adapter:\n  start: fix.safetensors\ndata: {path: photos}\n"))
    assert str(caught.value) == (
        f"preset.yaml:2: adapter.start: no file '{folder}/fix.safetensors'; did you mean '{folder}/fox.safetensors'?"
    )


def test_schedule_free_weights_are_not_averaged_again(folder: Path) -> None:
    refused = "optim.ema: 0.99 cannot be combined with optim.type schedulefree, which averages the weights itself"
    stages = "stages: [{name: a, set: {optim.type: schedulefree}}]\n"
    for text, place in (
        (f"{DATA}optim:\n  type: schedulefree\n  ema: 0.99\n", "preset.yaml:4: "),
        (f"{DATA}optim: {{ema: 0.99}}\n{stages}", "preset.yaml:3: stages[0].set."),
    ):
        with pytest.raises(ConfigError) as caught:
            read(text)
        assert str(caught.value) == f"{place}{refused}; set 0"


def test_a_config_whose_files_exist_passes(folder: Path) -> None:
    (folder / "photos").mkdir()
    for model in ("tiny", "demo", "org/name", str(folder)):
        preflight.check_named(read("data: {path: photos, validation: photos}\n", f"model.path={model}"))


@pytest.mark.parametrize("is_link", [False, True], ids=["a file", "a link to nothing"])
def test_a_cache_that_is_not_a_folder_is_refused_before_a_run_folder_is_made(tmp_path: Path, is_link: bool) -> None:
    loaded = load_config(QUICKSTART, ["train.steps=2", "optim.warmup=1"])
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "cache").symlink_to("nowhere") if is_link else (runs / "cache").touch()
    with pytest.raises(InputError) as caught:
        preflight.new_run(loaded, runs)
    assert str(caught.value) == f"{runs}/cache: not a folder; remove it, or set data.cache"
    assert [path.name for path in runs.iterdir()] == ["cache"]


def test_the_cache_next_to_a_run_folder_that_is_the_current_one_is_looked_at(folder: Path) -> None:
    (folder / "cache").touch()
    (folder / "run").mkdir()
    os.chdir(folder / "run")
    with pytest.raises(InputError, match="cache: not a folder"):
        preflight.new_run(load_config(QUICKSTART), Path("runs"), Path("."))
    assert not list(Path(".").iterdir())


def test_the_adapter_that_a_stage_starts_from_is_looked_for(tmp_path: Path) -> None:
    loaded = load_config(QUICKSTART, ["stages=[{name: a, set: {adapter.start: /nowhere}}]"])
    with pytest.raises(InputError) as caught:
        preflight.new_run(loaded, tmp_path / "runs")
    assert "stage a: adapter.start: no file '/nowhere'; name the .safetensors file" in str(caught.value)
    assert not (tmp_path / "runs").exists()
