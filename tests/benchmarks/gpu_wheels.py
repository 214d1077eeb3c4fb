"""Collect the wheels that a bare GPU machine lacks: `python -m tests.benchmarks.gpu_wheels`, into build/gpu-wheels.

Such a machine has Python 3.12, torch 2.11 and what comes with them, and no network. There:

    python3 -m pip install --no-index --no-deps --target build/site build/gpu-wheels/*.whl
    PYTHONPATH=build/site make gpu-check
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.commands import takes_no_arguments

FOLDER = Path(__file__).parents[2] / "build" / "gpu-wheels"
PACKAGES = (
    "diffusers",
    "transformers",
    "peft",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "typing-extensions",
    "importlib-metadata",
    "zipp",
    "schedulefree",
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")


def main() -> int:
    """Download the versions that are installed here. Returns pip's exit code."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.whl"):  # two versions of a package stop the installation
        old.unlink()
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    argv += ["--python-version", "3.12", "--implementation", "cp", *platforms, "--dest", str(FOLDER)]
    code = subprocess.run([*argv, *(f"{name}=={version(name)}" for name in PACKAGES)], check=False).returncode
    size = sum(file.stat().st_size for file in FOLDER.glob("*.whl"))
    print(f"{len(list(FOLDER.glob('*.whl')))} wheels, {size / 1e6:.0f} MB, in {FOLDER}")
    return code


if __name__ == "__main__":
    takes_no_arguments(__doc__)
    sys.exit(main())
