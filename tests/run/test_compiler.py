"""Where torch.compile keeps what it has compiled: code, which no config, preset or run folder may bring along."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.rooms import ROOT
from tests.runs import make_pictures, run_config
from trainer.run import compiler
from trainer.run.process import worker_environment
from trainer.weights.identity import SMALL_BYTES, digest

ON_GPU: dict[str, Any] = {"parallel__device": "auto", "train__compile": "auto"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder; nothing else is set."""
    for name in (compiler.FOLDER, compiler.THREADS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir(mode=0o777)
    (tmp_path / "temporary").chmod(0o1777)
    return tmp_path / "home"


def test_every_process_keeps_it_in_the_users_own_cache_folder(home: Path) -> None:
    for _ in range(2):
        assert worker_environment()[compiler.FOLDER] == str(home / "shardstudio" / "compiled")
    for folder in (home, home / "shardstudio", home / "shardstudio" / "compiled"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_without_a_cache_folder_of_the_desktop_it_is_that_of_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home))
    for setting in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", setting)
        assert compiler.cache_environment() == ({compiler.FOLDER: f"{home}/.cache/shardstudio/compiled"}, "")


@pytest.mark.parametrize(
    "changes", [{}, {"data__cache": "somewhere"}, {"parallel__device": "cpu", "train__compile": True}]
)
def test_no_config_decides_where_it_is(tmp_path: Path, home: Path, changes: dict[str, Any]) -> None:
    found, problem = compiler.environment(run_config(tmp_path, **(ON_GPU | changes)))
    assert (set(found), problem) == ({compiler.THREADS}, "")
    assert 1 <= int(found[compiler.THREADS]) <= compiler.MOST_THREADS


@pytest.mark.parametrize("changes", [{"train__compile": False}, {"parallel__device": "cpu"}])
def test_runs_that_compile_nothing_get_no_threads_for_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert compiler.environment(run_config(tmp_path, **(ON_GPU | changes))) == ({}, "")


def test_what_the_user_has_set_is_left_alone(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.FOLDER, "elsewhere")
    monkeypatch.setenv(compiler.THREADS, "1")
    assert compiler.environment(run_config(tmp_path, **ON_GPU)) == ({}, "")
    assert worker_environment()[compiler.FOLDER] == "elsewhere"
    assert not home.exists()


def shared(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o770)


def a_file(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.touch()


def a_link(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.symlink_to(folder.parent)


@pytest.mark.parametrize("name", ["shardstudio", "shardstudio/compiled"])
@pytest.mark.parametrize("damage", [shared, a_file, a_link])
def test_a_folder_that_others_may_fill_is_not_used(tmp_path: Path, home: Path, damage: Any, name: str) -> None:
    """torch unpickles what it finds there."""
    damage(home / name)
    found, problem = compiler.cache_environment()
    assert found == {compiler.FOLDER: f"{tmp_path}/temporary/shardstudio-{os.getuid()}/compiled"}
    assert problem.startswith(f"{home}/shardstudio/compiled: cannot be used (")
    assert problem.endswith("is in the temporary folder, and may have to be built again")


@pytest.mark.parametrize("is_large", [False, True])
def test_folders_made_for_a_group_by_the_users_mask_are_not_ours(tmp_path: Path, home: Path, is_large: bool) -> None:
    """What is made first for other memories is as private."""
    before = os.umask(0o002)
    try:
        file = tmp_path / "weights"
        file.write_bytes(bytes(SMALL_BYTES + is_large))
        digest([file])
        assert compiler.cache_environment() == ({compiler.FOLDER: f"{home}/shardstudio/compiled"}, "")
    finally:
        os.umask(before)


def test_a_cache_folder_in_which_others_may_rename_is_not_used(home: Path) -> None:
    home.mkdir()
    home.chmod(0o777)
    assert f"(others may rename what is in {home})" in compiler.cache_environment()[1]


def test_a_temporary_folder_that_another_user_made_first_is_not_used_either(tmp_path: Path, home: Path) -> None:
    home.touch()
    shared(tmp_path / "temporary" / f"shardstudio-{os.getuid()}")
    folder = Path(compiler.cache_environment()[0][compiler.FOLDER])
    assert folder.parent == tmp_path / "temporary"
    assert (stat.S_IMODE(folder.stat().st_mode), list(folder.iterdir())) == (0o700, [])


class Marker:
    """A pickle that writes a file when it is opened."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.file, "code of a stranger ran")


def launch(arguments: list[str], **variables: str) -> None:
    """Run `launch.py`. variables: of the environment."""
    argv = [sys.executable, str(ROOT / "launch.py"), *arguments]
    done = subprocess.run(argv, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def kernels_in(folder: Path) -> set[str]:
    """Names of the pickled graphs in a folder of compiled code."""
    places = [place for kind in ("fxgraph", "aotautograd") for place in folder.glob(f"{kind}/**/*")]
    return {place.name for place in places if place.is_file() and not place.name.endswith(".lock")}


@pytest.mark.slow
def test_compiled_code_that_came_with_a_preset_or_a_run_folder_is_not_loaded(tmp_path: Path, home: Path) -> None:
    """The cache of an equal run, with a marker in every entry, lies where `data.cache` says, and in the run folder."""
    marker, own = tmp_path / "marker", home / "shardstudio" / "compiled"
    bundle = tmp_path / "bundle"
    make_pictures(bundle / "pictures", 4)
    (bundle / "fox.yaml").write_text(
        "name: fox\nmodel: {family: flux2}\ndata: {path: pictures, cache: cache, resolution: 64}\n"
        "train: {steps: 1, batch_size: 2, micro_batch: 2, compile: true}\n"
        "parallel: {devices: 1}\ncheckpoint: {every: 1}\nsample: {prompts: []}\nexport: {what: none}\n"
    )
    start = ["--headless", str(bundle / "fox.yaml"), "--run-dir"]
    launch([*start, str(tmp_path / "first")], CUDA_VISIBLE_DEVICES="")
    assert kernels_in(own)
    poisoned = bundle / "cache" / f"compiled-{os.getuid()}"
    shutil.copytree(own, poisoned, dirs_exist_ok=True)
    for file in poisoned.rglob("*"):
        if file.is_file() and file.name in kernels_in(poisoned):
            file.write_bytes(pickle.dumps(Marker(marker)))
    for place in (tmp_path / "first", tmp_path / "runs"):
        shutil.copytree(poisoned, place / "cache" / poisoned.name)
    shutil.rmtree(own)

    launch([*start, str(tmp_path / "runs" / "second")], CUDA_VISIBLE_DEVICES="")
    assert (marker.exists(), bool(kernels_in(own))) == (False, True)
    shutil.rmtree(own)
    launch(["--resume", str(tmp_path / "first"), "train.steps=2"], CUDA_VISIBLE_DEVICES="")
    assert (marker.exists(), bool(kernels_in(own))) == (False, True)

    # The marker is one that torch opens where it finds it.
    settings: Mapping[str, str] = {compiler.FOLDER: str(poisoned), "CUDA_VISIBLE_DEVICES": ""}
    launch([*start, str(tmp_path / "third")], **settings)
    assert marker.exists()
