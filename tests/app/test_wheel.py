"""A release: what the wheel holds, and that it trains where there is nothing else of the checkout.

The source distribution is built first, and the wheel from it alone, without a network, by pip and the setuptools of
this environment. The wheel is installed into an environment of its own, which takes all other packages from here.
`make release` keeps both files.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = ("app", "trainer", "presets", "notebooks", "launch.py", "pyproject.toml", "README.md", "LICENSE")
FEW_STEPS = ("train.steps=2", "sample.every=0", "optim.warmup=0")


def files_below(folder: Path) -> set[str]:
    """All files but what Python and Jupyter leave behind, as `a/b.txt`."""
    found = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    return {str(file) for file in found if not {"__pycache__", ".ipynb_checkpoints"} & set(file.parts)}


def test_every_package_of_the_checkout_is_named_in_pyproject_toml():
    packages = set(PROJECT["tool"]["setuptools"]["packages"])
    mapped = set(PROJECT["tool"]["setuptools"]["package-dir"])
    sources = [file.parent.relative_to(ROOT) for top in ("app", "trainer") for file in (ROOT / top).rglob("*.py")]
    assert packages - mapped == {".".join(folder.parts) for folder in sources}


@dataclass(frozen=True)
class Installed:
    """An environment in which the wheel is installed. names: the files of the wheel."""

    folder: Path
    names: frozenset[str]

    def run(self, program: str, *arguments: str, here: Path) -> subprocess.CompletedProcess[str]:
        argv = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(argv, cwd=here, capture_output=True, text=True, timeout=500, check=False)

    @property
    def packages(self) -> Path:
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / python / "site-packages"


def pip(*arguments: str | Path) -> None:
    argv = [sys.executable, "-m", "pip", "--no-input", *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The source distribution is built from a copy: setuptools leaves its own files next to the sources."""
    assert Version(metadata.version("setuptools")) >= Version("77"), "pip install -e '.[test]' brings a newer one"
    root = tmp_path_factory.mktemp("wheel")
    copy = root / "checkout"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(root)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True, timeout=500)
    shutil.rmtree(copy)  # so that nothing of it is used by mistake
    [sources] = root.glob("*.tar.gz")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", root, sources)
    [wheel] = root.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = frozenset(archive.namelist())
    here = Installed(root / "venv", names)
    venv.create(here.folder)
    # A line of a .pth file adds a folder, but obeys none of that folder's own .pth files: they lead to the checkout.
    (here.packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    python = here.folder / "bin" / "python"
    # Without --ignore-installed pip asks itself whether to remove the checkout's own install, which it sees.
    pip("--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    yield here
    shutil.rmtree(here.folder)


@pytest.mark.slow
def test_the_wheel_holds_the_two_packages_the_presets_and_the_notebooks_and_nothing_else(installed):
    inside = {name for name in installed.names if ".dist-info/" not in name}
    packages = {f"{top}/{name}" for top in ("app", "trainer") for name in files_below(ROOT / top)}
    expected = packages - {"app/README.md", "app/data/README.md"}
    expected |= {f"trainer/presets/{name}" for name in files_below(ROOT / "presets") if name != "README.md"}
    lessons = {name for name in files_below(ROOT / "notebooks") if not name.startswith("lab/")}  # is for `make lab`
    expected |= {f"app/notebooks/{name}" for name in lessons - {"README.md"}}
    assert inside == expected
    pictures = {name for name in inside if name.endswith(".png")}
    assert {str(Path(name).parent) for name in pictures} == {"trainer/presets/quickstart"}


@pytest.mark.slow
def test_what_is_imported_is_the_wheel_and_notebooks_keep_their_runs_in_the_current_folder(installed, tmp_path):
    code = (
        "import app, trainer\nfrom app import notebook\n"
        "for file in (app.__file__, trainer.__file__, notebook.LESSONS, notebook.RUNS): print(file)"
    )
    done = installed.run("python", "-c", code, here=tmp_path)
    packages = installed.packages
    assert done.stdout.splitlines() == [
        *(f"{packages}/app/__init__.py", f"{packages}/trainer/__init__.py", f"{packages}/app/notebooks"),
        f"{tmp_path}/runs",
    ], done.stderr


@pytest.mark.slow
def test_the_installed_command_helps_by_its_own_name(installed, tmp_path):
    done = installed.run("shardstudio", "--help", here=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: shardstudio ")
    assert "\n  shardstudio --headless quickstart\n" in done.stdout
    assert "launch.py" not in done.stdout


@pytest.mark.slow
def test_the_installed_command_plans_a_preset_by_its_name_and_writes_nothing(installed, tmp_path):
    done = installed.run("shardstudio", "--plan", "quickstart", here=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("quickstart: lora rank 16, ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_job_of_an_installation_starts_its_command(installed, tmp_path):
    done = installed.run("shardstudio", "--headless", "quickstart", "--slurm", "--run-dir", "job", here=tmp_path)
    assert done.returncode == 0, done.stderr
    job = (tmp_path / "job" / "job.sbatch").read_text(encoding="utf-8")
    assert f"\n    {installed.folder}/bin/shardstudio --resume {tmp_path}/job &\n" in job


@pytest.mark.slow
def test_the_quickstart_trains_and_exports_in_an_empty_folder_and_changes_nothing_that_is_installed(
    installed, tmp_path
):
    def stamps() -> dict[Path, int]:
        files = [installed.packages / name for name in installed.names]
        return {file: file.stat().st_mtime_ns for file in files} | {
            file: 0 for top in ("app", "trainer") for file in map(Path, files_below(installed.packages / top))
        }

    before = stamps()
    done = installed.run("shardstudio", "--headless", "quickstart", *FEW_STEPS, here=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    [adapter] = tmp_path.glob("runs/*/export/quickstart.safetensors")
    assert done.stdout.splitlines()[-1] == str(adapter)
    assert adapter.stat().st_size > 100_000
    config = yaml.safe_load((adapter.parents[1] / "config.yaml").read_text(encoding="utf-8"))
    assert config["data"]["path"] == str(installed.packages / "trainer" / "presets" / "quickstart")
    assert {entry.name for entry in tmp_path.iterdir()} == {"runs"}
    assert stamps() == before
