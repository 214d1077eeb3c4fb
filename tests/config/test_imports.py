"""Which packages a rank imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.imports import OPTIONAL, optional_packages_hidden
from trainer.run.process import worker_environment

RANK = f"""\
import sys, trainer.train.loop, trainer.export
from trainer.models import families
families.get("flux2")
print(sorted(set({OPTIONAL!r}) & set(sys.modules)))
"""


def test_a_rank_imports_no_optional_package_of_the_libraries_it_uses(tmp_path: Path) -> None:
    for name in OPTIONAL:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError(__name__)", encoding="utf-8")
    inherited = worker_environment()
    path = os.pathsep.join([str(tmp_path), inherited.get("PYTHONPATH", "")])
    argv, env = [sys.executable, "-c", RANK], inherited | {"PYTHONPATH": path}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_hidden_packages_are_found_again_and_imported_ones_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.config.imports.OPTIONAL", ("wave", "json"))
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with optional_packages_hidden():
        with pytest.raises(ModuleNotFoundError):
            import wave
        import json
    import wave

    assert (wave.__name__, json.__name__) == ("wave", "json")
