"""Where the program's own files lie, and what is typed to start it: in a checkout and installed from a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.run import process
from trainer.system import installation, terminal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Python's programs where a wheel is installed, still without a script."""
    for module in (installation, terminal, process):
        monkeypatch.setattr(module, "CHECKOUT", None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path


def test_a_checkout_is_started_by_its_launch_py_from_any_folder(tmp_path):
    assert installation.start_command() == [sys.executable, str(ROOT / "launch.py")]
    done = subprocess.run([*installation.start_command(), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["usage:", "launch.py"])


def test_an_installation_is_started_by_its_script(installed):
    (installed / "shardstudio").touch()
    assert installation.start_command() == [str(installed / "shardstudio")]


def test_an_installation_whose_script_lies_elsewhere_is_started_as_a_module(installed):
    assert installation.start_command() == [str(installed / "python"), "-P", "-m", "app"]


def test_the_module_that_an_installation_is_started_as_is_the_command_line(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-P", "-m", "app", "--export", "nowhere"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "nowhere: not a run folder (it has no config.yaml); name a folder below runs/\n",
    )


@pytest.mark.parametrize(
    ("typed", "program"), [("launch.py", "python launch.py"), ("/venv/bin/shardstudio", "shardstudio")]
)
def test_a_checkout_names_the_program_as_it_was_started(typed, program, monkeypatch):
    monkeypatch.setattr(sys, "argv", [typed])
    assert installation.program() == program


@pytest.mark.usefixtures("installed")
def test_an_installation_calls_itself_shardstudio_also_on_its_page(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-m"])
    assert installation.program() == "shardstudio"


def test_an_installation_that_lacks_a_package_is_told_how_to_find_which(installed):
    python = installed / "python"
    assert terminal.not_installed(ModuleNotFoundError(name="peft")) == (
        f"{python} has no module 'peft', which ShardStudio needs. "
        f"Run {python} -m pip check: it names the packages to install"
    )


def test_workers_find_a_checkout_first_and_an_installation_by_themselves(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert process.worker_environment()["PYTHONPATH"] == f"{ROOT}{os.pathsep}/mine"
    monkeypatch.setattr(process, "CHECKOUT", None)
    assert process.worker_environment()["PYTHONPATH"] == "/mine"
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in process.worker_environment()
