"""Caches hold a user's pictures and captions: what this program makes, other users of the machine cannot read."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.runs import make_pictures, run_config
from trainer.config.load import dump_config, load_config
from trainer.data.cache import ExampleCache
from trainer.launcher import preflight
from trainer.models.parts.folder import write_once
from trainer.plan import calibration
from trainer.plan.record import make_tables
from trainer.system.errors import InputError

NOBODY = 65534
KEY = "ab" * 32


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may look into, those above it too."""
    folder = Path(tempfile.mkdtemp(prefix="shardstudio-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def read_as_nobody(file: Path) -> int:
    """The exit code of reading a file as another user."""
    done = subprocess.run(["cat", file], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False)
    return done.returncode


def measured() -> calibration.Measured:
    return calibration.Measured(gpu="a", ranks=1, planned=1.0, allocated=1, reserved=1, used=1, seconds=1.0)


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "examples": (
        f"examples/ab/{KEY}.safetensors",
        lambda cache: ExampleCache(cache / "examples").write(KEY, {"latents": torch.zeros(2)}),
    ),
    "models": ("tiny/a.txt", lambda cache: write_once(cache / "tiny", lambda at: (at / "a.txt").write_text("a"))),
    "plans": ("plans/a.json.gz", lambda cache: make_tables.write(cache / "plans" / "a.json.gz", {}, {})),
    "measured": ("plans/measured.jsonl", lambda cache: calibration.keep(cache, measured())),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
def test_another_user_cannot_read_a_cache_that_was_made_here(place: Path, name: str) -> None:
    file, write = WRITERS[name]
    cache = place / "runs" / "cache"
    write(cache)
    assert (mode(cache), read_as_nobody(cache / file)) == (0o700, 1)
    write(cache)
    assert (cache / file).exists()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
def test_a_cache_that_a_user_made_for_several_stays_open_to_them(place: Path, name: str) -> None:
    file, write = WRITERS[name]
    cache = place / "shared"
    cache.mkdir()
    cache.chmod(0o755)
    write(cache)
    assert (mode(cache), read_as_nobody(cache / file)) == (0o755, 0)


@pytest.mark.parametrize("kind", ["file", "loop"])
def test_a_cache_that_cannot_be_a_folder_is_named_before_a_run_folder_is_made(tmp_path: Path, kind: str) -> None:
    cache = tmp_path / kind
    if kind == "file":
        cache.write_text("mine")
    else:
        cache.symlink_to(kind)
    cfg = run_config(make_pictures(tmp_path / "pictures"), data__cache=str(cache))
    preset = tmp_path / "preset.yaml"
    preset.write_text(dump_config(cfg))
    with pytest.raises(InputError) as error:
        preflight.new_run(load_config(preset), tmp_path / "runs")
    line = next(number for number, line in enumerate(preset.read_text().splitlines(), 1) if str(cache) in line)
    assert str(error.value) == (
        f"{preset}:{line}: data.cache: the folder {cache} cannot be made (Not a directory); choose another path, or "
        "remove what is there"
    )
    assert not (tmp_path / "runs").exists()
