"""Where torch.compile keeps what it has compiled."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.runs import run_config
from trainer.run import compiler

ON_GPU: dict[str, Any] = {"parallel__device": "auto", "train__compile": "auto"}


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (compiler.FOLDER, compiler.THREADS):
        monkeypatch.delenv(name, raising=False)


def test_ranks_keep_it_in_a_folder_that_only_this_user_writes_to(tmp_path: Path) -> None:
    for _ in range(2):
        found, problem = compiler.environment(run_config(tmp_path, **ON_GPU), tmp_path / "cache")
        assert problem == ""
    folder = Path(found[compiler.FOLDER])
    assert folder.parent == tmp_path / "cache"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert 1 <= int(found[compiler.THREADS]) <= compiler.MOST_THREADS


@pytest.mark.parametrize("changes", [{"train__compile": False}, {"parallel__device": "cpu"}])
def test_runs_that_compile_nothing_get_no_folder(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert compiler.environment(run_config(tmp_path, **(ON_GPU | changes)), tmp_path / "cache") == ({}, "")
    assert not (tmp_path / "cache").exists()


def test_what_the_user_has_set_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.FOLDER, "elsewhere")
    monkeypatch.setenv(compiler.THREADS, "1")
    assert compiler.environment(run_config(tmp_path, **ON_GPU), tmp_path / "cache") == ({}, "")


def shared(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o770)


def a_file(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.touch()


def a_link(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.symlink_to(folder.parent)


@pytest.mark.parametrize("damage", [shared, a_file, a_link])
def test_a_folder_that_others_may_fill_is_not_used(tmp_path: Path, damage: Any) -> None:
    """torch unpickles what it finds there."""
    folder = tmp_path / "cache" / f"compiled-{os.getuid()}"
    damage(folder)
    found, problem = compiler.environment(run_config(tmp_path, **ON_GPU), tmp_path / "cache")
    assert compiler.FOLDER not in found
    assert problem.startswith(f"{folder}: cannot be used (")
    assert problem.endswith("is kept in the temporary folder, and may have to be made again")
