"""The run folder: made once, opened by anybody, never overwritten."""

import re

import pytest

from trainer.config.load import dump_config
from trainer.config.schema import RunConfig
from trainer.config.sections import DataConfig, ModelConfig
from trainer.run.folder import RunDir
from trainer.system.errors import InputError


@pytest.fixture
def cfg(tmp_path):
    return RunConfig(name="fox", model=ModelConfig(family="flux2"), data=DataConfig(path=str(tmp_path)))


def test_a_new_run_folder_holds_the_config_and_every_folder_of_the_contract(tmp_path, cfg):
    run = RunDir.create(tmp_path / "runs", cfg)
    assert re.fullmatch(r"fox-\d{8}-\d{6}-[0-9a-f]{6}", run.path.name)
    assert run.path.stat().st_mode & 0o777 == 0o700
    found = sorted(path.name for path in run.path.iterdir())
    assert found == ["checkpoints", "config.yaml", "export", "format", "logs", "ranks", "requests", "samples"]
    assert run.config() == cfg


def test_two_runs_of_one_name_get_two_folders(tmp_path, cfg):
    assert RunDir.create(tmp_path, cfg).path != RunDir.create(tmp_path, cfg).path


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path, cfg):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError) as error:
        RunDir.create(tmp_path / "runs", cfg, at=tmp_path)
    assert str(error.value) == (f"{tmp_path}: exists and is not empty; name a new folder, or continue it with --resume")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_made_names_the_reason(tmp_path, cfg):
    (tmp_path / "file").touch()
    with pytest.raises(InputError) as error:
        RunDir.create(tmp_path, cfg, at=tmp_path / "file" / "run")
    assert str(error.value) == (
        f"{tmp_path}/file/run: the run folder cannot be made (Not a directory); choose another path"
    )


def test_opening_a_run_again_finds_the_same_config(tmp_path, cfg):
    run = RunDir.create(tmp_path, cfg)
    assert RunDir.open(run.path) == run
    assert RunDir.open(run.path).config() == cfg


def test_opening_a_folder_that_is_no_run_says_so(tmp_path):
    with pytest.raises(InputError) as error:
        RunDir.open(tmp_path)
    assert str(error.value) == f"{tmp_path}: not a run folder (it has no config.yaml); name a folder below runs/"


def test_a_replaced_config_keeps_the_former_ones_beside_it(tmp_path, cfg):
    run = RunDir.create(tmp_path, cfg)
    first = run.config_file.read_text()
    longer = RunConfig(name="fox", model=ModelConfig(family="flux2"), data=cfg.data, train={"steps": 2000})
    longest = RunConfig(name="fox", model=ModelConfig(family="flux2"), data=cfg.data, train={"steps": 3000})
    assert run.replace_config(longer) == run.path / "config-1.yaml"
    assert run.replace_config(longest) == run.path / "config-2.yaml"
    assert run.config() == longest
    assert (run.path / "config-1.yaml").read_text() == first
    (run.path / "config-1.yaml").unlink()
    assert run.replace_config(longer) == run.path / "config-3.yaml"
    assert (run.path / "config-2.yaml").read_text() == dump_config(longer)


def test_a_request_is_seen_by_others_until_it_is_cleared(tmp_path, cfg):
    run = RunDir.create(tmp_path, cfg)
    other = RunDir.open(run.path)
    assert not other.requested("stop")
    run.request("stop")
    run.request("stop")
    assert other.requested("stop")
    assert not other.requested("save")
    other.clear("stop")
    assert not run.requested("stop")


@pytest.mark.parametrize(
    "path", ["../private.png", "/etc/hostname", "samples/link.png", "samples/../../x", "samples/loop"]
)
def test_a_file_that_an_event_names_lies_in_the_run_or_is_refused(tmp_path, cfg, path):
    run = RunDir.create(tmp_path, cfg, at=tmp_path / "here")
    (tmp_path / "private.png").touch()
    (run.samples / "link.png").symlink_to(tmp_path / "private.png")
    (run.samples / "loop").symlink_to("loop")
    (run.samples / "own.png").touch()
    assert run.own_file("samples/own.png") == run.samples / "own.png"
    with pytest.raises(InputError, match="not a file of here"):
        run.own_file(path)
