"""Presets are found by name, and a file that exists always wins."""

from __future__ import annotations

from pathlib import Path

import pytest

import launch as command_line
from trainer.config import load
from trainer.config.load import load_config
from trainer.config.presets import find_presets, preset_file
from trainer.system.errors import InputError
from trainer.system.installation import PRESETS

QUICKSTART = PRESETS / "quickstart.yaml"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(preset: str) -> str:
    with pytest.raises(InputError) as refused:
        preset_file(preset, Path("runs/presets"))
    return str(refused.value)


def test_a_name_is_that_of_a_preset_that_comes_with_the_program():
    assert preset_file("quickstart", Path("runs/presets")) == QUICKSTART


def test_a_preset_that_was_saved_beside_the_runs_is_named_likewise(here):
    saved = here / "runs" / "presets" / "mine.yaml"
    saved.parent.mkdir(parents=True)
    saved.touch()
    assert preset_file("mine", saved.parent) == saved
    assert list(find_presets(saved.parent))[:2] == ["quickstart", "mine"]


def test_a_file_of_that_name_in_the_current_folder_wins(here):
    (here / "quickstart").touch()
    assert preset_file("quickstart", Path("runs/presets")) == Path("quickstart")


def test_a_folder_of_that_name_or_a_file_with_an_ending_does_not(here):
    (here / "quickstart").mkdir()
    (here / "quickstart.yaml").touch()
    assert preset_file("quickstart", Path("runs/presets")) == QUICKSTART


def test_the_ending_of_a_file_in_the_current_folder_may_be_left_out(here):
    (here / "mine.yaml").touch()
    assert preset_file("mine", Path("runs/presets")) == Path("mine.yaml")


def test_what_exists_and_is_no_file_is_named_when_it_is_read(here):
    (here / "folder").mkdir()
    (here / "loop").symlink_to("loop")
    for name in ("folder", "loop", ".."):
        assert preset_file(name, Path("runs/presets")) == Path(name)


@pytest.mark.parametrize("path", ["missing.yaml", "missing/preset", "/missing"])
def test_what_looks_like_a_path_is_the_file_itself_also_where_it_is_missing(path):
    assert preset_file(path, Path("runs/presets")) == Path(path)


def test_a_misspelt_name_is_refused_with_the_nearest_one():
    assert refusal("quikstart") == "no preset 'quikstart'; did you mean 'quickstart'?"


def test_the_beginning_of_several_names_is_refused_with_all_of_them():
    assert refusal("sd3") == "no preset 'sd3'; did you mean 'sd3-medium-lora-1gpu' or 'sd35-large-lora-2gpu'?"


@pytest.mark.parametrize("part", ["", "flux2"], ids=["near none", "near many"])
def test_a_name_that_is_near_none_is_refused_with_all_there_are_and_one_near_many_with_those(part):
    names = [name for name in find_presets(Path("runs/presets")) if part in name]
    assert refusal(part or "zzz") == f"no preset '{part or 'zzz'}'; there are {', '.join(names)}"


def test_the_command_line_takes_a_name(capsys):
    assert command_line.main(["--plan", "quickstart"]) == 0
    assert capsys.readouterr().out.startswith("quickstart: lora rank 16, ")
    assert command_line.main(["--headless", "quickstart", "train.steps=2"]) == 2
    message = f"{QUICKSTART}:37: optim.warmup: must be less than train.steps 2, not 10; lower it\n"
    assert capsys.readouterr().err == message


def test_the_users_data_that_a_preset_names_is_beside_the_presets_of_a_checkout():
    assert load_config(PRESETS / "flux2-dev-lora-4gpu.yaml").config.data.path == str(PRESETS.parent / "my-images")


def test_the_users_data_that_an_installed_preset_names_is_in_the_current_folder(here, monkeypatch):
    monkeypatch.setattr(load, "CHECKOUT", None)
    assert load_config(PRESETS / "flux2-dev-lora-4gpu.yaml").config.data.path == str(here / "my-images")
    staged = load_config(PRESETS / "single_node_8gpu.yaml").config
    assert staged.data.path == str(here / "my-text")
    assert staged.stages[-1].set["data.path"] == str(here / "my-instructions")
    assert load_config(QUICKSTART).config.data.path == str(PRESETS / "quickstart")


@pytest.mark.parametrize("mode", ["--headless", "--plan"])
def test_the_command_line_refuses_an_unknown_name_in_one_sentence_and_writes_nothing(mode, here, capsys):
    assert command_line.main([mode, "quikstart"]) == 2
    assert capsys.readouterr().err == "no preset 'quikstart'; did you mean 'quickstart'?\n"
    assert list(here.iterdir()) == []
