"""Which packages a rank imports."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.run.process import worker_environment
from trainer.system.imports import OPTIONAL, light_imports

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
    monkeypatch.setattr("trainer.system.imports.OPTIONAL", ("wave", "json"))
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with light_imports():
        with pytest.raises(ModuleNotFoundError):
            import wave
        import json
    import wave

    assert (wave.__name__, json.__name__) == ("wave", "json")


READS = """\
import collections, sys
reads = collections.Counter()
sys.addaudithook(lambda event, given: reads.update([str(given[0])]) if event == "open" else None)
import trainer.train.loop
sources = [count for file, count in reads.items() if "/transformers/models/" in file and file.endswith(".py")]
print(len(sources), sum(count > 1 for count in sources))
"""


@pytest.mark.slow
def test_a_rank_does_not_read_the_sources_of_all_models_twice() -> None:
    argv = [sys.executable, "-c", READS]
    done = subprocess.run(argv, env=worker_environment(), capture_output=True, text=True, check=True)
    found, twice = map(int, done.stdout.splitlines()[-1].split())
    assert twice < 50, f"{twice} of {found}"  # a few that it imports are read once more


def test_caches_that_are_made_meanwhile_are_those_of_the_standard_library() -> None:
    with light_imports():

        @functools.lru_cache
        def bare() -> None: ...

        @functools.lru_cache(maxsize=2, typed=True)
        def limited() -> None: ...

    assert bare.cache_parameters() == {"maxsize": 128, "typed": False}
    assert limited.cache_parameters() == {"maxsize": 2, "typed": True}
    assert functools.lru_cache.__module__ == "functools"
