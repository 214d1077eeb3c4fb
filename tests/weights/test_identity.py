"""Model files are told apart by all of their bytes, which are read once."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from trainer.system.files import Stamp
from trainer.weights.identity import FOLDER, SMALL_BYTES, digest

OLD = 1_700_000_000
CONTENT = bytes(range(256)) * (SMALL_BYTES // 128)


@pytest.fixture
def memories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are remembered, also those of files of this moment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", -(10**12))
    return tmp_path / "home" / "shardstudio" / FOLDER


def model(folder: Path, content: bytes = CONTENT) -> Path:
    (folder / "vae").mkdir(parents=True)
    (folder / "vae" / "model.safetensors").write_bytes(content)
    (folder / "vae" / "config.json").write_text("{}")
    return folder / "vae"


@pytest.mark.parametrize("place", [0, len(CONTENT) // 2, len(CONTENT) - 1])
def test_a_file_that_differs_in_one_byte_anywhere_is_another_model(tmp_path: Path, memories: Path, place: int) -> None:
    other = CONTENT[:place] + bytes([CONTENT[place] ^ 1]) + CONTENT[place + 1 :]
    assert digest([model(tmp_path / "a")]) == digest([model(tmp_path / "b")])
    assert digest([model(tmp_path / "c", other)]) != digest([tmp_path / "a" / "vae"])


def test_the_names_of_files_are_part_of_it(tmp_path: Path, memories: Path) -> None:
    before = digest([model(tmp_path)])
    (tmp_path / "vae" / "config.json").rename(tmp_path / "vae" / "other.json")
    assert digest([tmp_path / "vae"]) != before


def test_a_name_that_is_not_utf_8_has_a_digest_as_any_other(tmp_path: Path, memories: Path) -> None:
    before = digest([model(tmp_path)])
    Path(os.fsdecode(os.fsencode(tmp_path / "vae") + b"/caf\xe9.txt")).write_bytes(b"")
    assert digest([tmp_path / "vae"]) != before


def test_a_large_file_is_read_again_only_when_it_has_changed(tmp_path: Path, memories: Path) -> None:
    folder = model(tmp_path)
    before = digest([folder])
    [memory] = memories.glob("*.json")
    stamp, _ = json.loads(memory.read_text())
    memory.write_text(json.dumps([stamp, "remembered"]))
    remembered = digest([folder])
    assert remembered != before
    file = folder / "model.safetensors"
    status = file.stat()
    file.write_bytes(CONTENT[::-1])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a program does that keeps times
    changed = digest([folder])
    assert changed not in (before, remembered)
    assert digest([model(tmp_path / "other", CONTENT[::-1])]) == changed
    assert memories.stat().st_mode & 0o077 == 0


def test_a_damaged_memory_costs_time_only(tmp_path: Path, memories: Path) -> None:
    before = digest([model(tmp_path)])
    [memory] = memories.glob("*.json")
    for damage in ("", "[1", '[[1, 2, 3, "x"], 3]'):
        memory.write_text(damage)
        assert digest([tmp_path / "vae"]) == before


def test_a_file_that_was_written_just_now_is_not_remembered(
    tmp_path: Path, memories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", 2 * 10**9)
    digest([model(tmp_path)])
    assert list(memories.glob("*.json")) == []
    assert not Stamp(0, time.time_ns(), 0, 0).is_safe(time.time_ns())


@pytest.mark.parametrize("home", ["a file", "no home", "of a group"])
@pytest.mark.parametrize("has_temporary", [True, False])
def test_without_a_cache_of_the_user_they_are_remembered_in_the_temporary_folder_or_read_each_time(
    tmp_path: Path, memories: Path, monkeypatch: pytest.MonkeyPatch, home: str, has_temporary: bool
) -> None:
    before = digest([model(tmp_path)])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    if not has_temporary:
        (temporary / f"shardstudio-{os.getuid()}").write_text("")
    if home == "a file":
        (tmp_path / "taken").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    elif home == "of a group":
        memories.parent.chmod(0o770)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", _no_home)
    assert digest([tmp_path / "vae"]) == before
    assert len(list(temporary.glob(f"*/{FOLDER}/*.json"))) == has_temporary


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_ranks_that_ask_at_once_agree(tmp_path: Path, memories: Path) -> None:
    folder = model(tmp_path)
    with ProcessPoolExecutor(4) as pool:
        assert len({*pool.map(digest, [[folder]] * 8)}) == 1
