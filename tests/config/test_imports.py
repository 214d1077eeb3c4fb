"""Which packages a rank imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainer.config.imports import OPTIONAL, optional_packages_hidden

RANK = f"""\
import sys, trainer.train.loop, trainer.export
from trainer.models import families
families.get("flux2")
print(sorted(set({OPTIONAL!r}) & set(sys.modules)))
"""


def test_a_rank_imports_no_optional_package_of_the_libraries_it_uses() -> None:
    pytest.importorskip("bitsandbytes")
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, check=True)
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
