"""A whole scan is remembered for as long as no file and no setting has changed."""

from __future__ import annotations

import gc
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.data.images.test_image_files import data
from trainer.config.sections import DataConfig
from trainer.data.images import scan_memory
from trainer.data.images.image_files import Dataset, scan
from trainer.data.images.known_files import KnownFiles
from trainer.data.images.scan_memory import ScanMemory, checked
from trainer.system.errors import InputError


@pytest.fixture
def everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """Images with masks, references, several captions, a focus, regularization and validation images."""
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", -(10**12))  # files of this moment are trusted
    for folder in ("images", "masks", "before", "others", "held", "more"):
        (tmp_path / folder).mkdir()
    for folder, names in (("images", "abc"), ("others", "de"), ("held", "fg"), ("more", "h")):
        for name in names:
            Image.new("RGB", (32, 48), f"#{ord(name):02x}8040").save(tmp_path / folder / f"{name}.png")
            (tmp_path / folder / f"{name}.txt").write_text(f"one of {name}\nan\u00f6ther [trigger]", encoding="utf-8")
    for name in "abcfgh":
        Image.new("RGB", (32, 48)).save(tmp_path / "before" / f"{name}.png")
    Image.new("L", (32, 48)).save(tmp_path / "masks" / "a.png")
    row = {"file_name": "b.png", "focus": [0.1, 0.7]}
    (tmp_path / "images" / "metadata.jsonl").write_text(json.dumps(row), encoding="utf-8")
    folders = {"masks": "masks", "references": "before", "regularization": "others", "validation": "held"}
    return data(
        tmp_path / "images",
        trigger="ohwx",
        caption_lines=True,
        folders=[{"path": str(tmp_path / "more"), "weight": 1.5, "resolutions": [256, 64], "micro_batch": 3}],
        **{name: str(tmp_path / folder) for name, folder in folders.items()},
    )


def scanned(monkeypatch: pytest.MonkeyPatch) -> list[DataConfig]:
    """The configs that are really scanned from now on."""
    done: list[DataConfig] = []

    def watched(cfg: DataConfig, **others: Any) -> Dataset:
        done.append(cfg)
        return scan(cfg, **others)

    monkeypatch.setattr(scan_memory, "scan", watched)
    return done


def test_a_scan_is_recalled_whole(everything: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, expected = scanned(monkeypatch), scan(everything)
    found = [ScanMemory(everything, tmp_path / "cache").scan(KnownFiles) for _ in range(3)]
    assert found == [expected] * 3 and len(done) == 1
    assert found[2].train[0].mask is not None and found[2].warnings


def test_ranks_find_what_the_launcher_scanned(
    everything: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = scanned(monkeypatch)
    keep = checked(everything, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    keep()
    checked(everything, tmp_path / "cache")()
    assert ScanMemory(everything, tmp_path / "cache").scan(KnownFiles) == scan(everything)
    assert len(done) == 1


def test_ranks_walk_through_no_folder_that_their_launcher_just_checked(
    everything: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(everything, tmp_path / "cache")()
    walked: list[DataConfig] = []
    stamps = scan_memory._stamps

    def watched(cfg: DataConfig, passed: list[str]) -> Any:
        walked.append(cfg)
        return stamps(cfg, passed)

    monkeypatch.setattr(scan_memory, "_stamps", watched)
    found = ScanMemory.of_launcher(everything, tmp_path / "cache")
    assert found.scan(KnownFiles) == scan(everything) and walked == []
    assert found.digest == ScanMemory(everything, tmp_path / "cache").digest


@pytest.mark.parametrize("why", ["another launcher", "long ago", "the clock was set back", "other settings", "damaged"])
def test_ranks_look_at_the_files_themselves_where_no_launcher_just_did(
    everything: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    checked(everything, tmp_path / "cache")()
    (handed,) = (tmp_path / "cache").rglob("*.handed")
    digest, pid, started, at = json.loads(handed.read_text(encoding="utf-8"))
    if why == "other settings":
        everything = everything.model_copy(update={"trigger": "another"})
    changed = {
        "another launcher": [digest, pid, started + 1, at],
        "long ago": [digest, pid, started, at - scan_memory.HANDED_S],
        "the clock was set back": [digest, pid, started, at + 100],
        "damaged": ["../../else"],
    }
    if why in changed:
        handed.write_text(json.dumps(changed[why]), encoding="utf-8")
    Image.new("RGB", (32, 48)).save(tmp_path / "more" / "a.png")
    (tmp_path / "more" / "a.txt").write_text("new", encoding="utf-8")
    Image.new("RGB", (32, 48)).save(tmp_path / "before" / "a.png")
    with pytest.raises(InputError, match="belongs to both"):
        ScanMemory.of_launcher(everything, tmp_path / "cache").scan(KnownFiles)


def test_a_check_of_files_that_changed_just_now_takes_back_what_an_earlier_one_handed_over(
    everything: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(everything, tmp_path / "cache")()
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", 2 * 10**9)
    (tmp_path / "images" / "a.txt").write_text("changed", encoding="utf-8")
    checked(everything, tmp_path / "cache")()
    found = ScanMemory.of_launcher(everything, tmp_path / "cache").scan(KnownFiles)
    assert found.train[0].caption == "ohwx, changed"


CHANGES: dict[str, Callable[[Path], object]] = {
    "a caption": lambda root: (root / "images" / "a.txt").write_text("another", encoding="utf-8"),
    "a new image": lambda root: Image.new("RGB", (32, 48)).save(root / "more" / "a.png"),
    "an image": lambda root: Image.new("RGB", (48, 32)).save(root / "held" / "f.png"),
    "a mask": lambda root: Image.new("L", (64, 96)).save(root / "masks" / "a.png"),
    "a removed caption": lambda root: (root / "images" / "c.txt").unlink(),
    "a name": lambda root: (root / "before" / "f.png").rename(root / "before" / "f_0.png"),
    "a row": lambda root: (root / "images" / "metadata.jsonl").unlink(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_is_seen(everything: DataConfig, tmp_path: Path, what: str) -> None:
    cfg = everything.model_copy(update={"missing_caption": "empty"})
    before = ScanMemory(cfg, tmp_path / "cache").scan(KnownFiles)
    CHANGES[what](tmp_path)
    try:
        expected = scan(cfg)
    except InputError as error:
        with pytest.raises(InputError) as caught:
            ScanMemory(cfg, tmp_path / "cache").scan(KnownFiles)
        assert str(caught.value) == str(error)
    else:
        found = ScanMemory(cfg, tmp_path / "cache").scan(KnownFiles)
        assert found == expected
        assert found != before or what in ("a mask", "a removed caption")


def test_another_setting_is_scanned_anew_and_both_are_kept(
    everything: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = everything.model_copy(update={"trigger": "another"})
    done = scanned(monkeypatch)
    for _ in range(2):
        for cfg in (everything, other):
            assert ScanMemory(cfg, tmp_path / "cache").scan(KnownFiles) == scan(cfg)
    assert done == [everything, other]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": [], "train": [[0]], "validation": [], "warnings": []}'])
def test_a_damaged_memory_is_replaced(everything: DataConfig, tmp_path: Path, content: str) -> None:
    expected = ScanMemory(everything, tmp_path / "cache").scan(KnownFiles)
    (kept,) = (tmp_path / "cache").rglob("*.scan")
    whole = kept.read_text(encoding="utf-8")
    checked(everything, tmp_path / "cache")()
    for opened in (ScanMemory, ScanMemory.of_launcher):
        kept.write_text(content, encoding="utf-8")
        assert opened(everything, tmp_path / "cache").scan(KnownFiles) == expected
        assert kept.read_text(encoding="utf-8") == whole


@pytest.mark.parametrize("path", [5, None, [], {}])
def test_a_memory_with_a_path_that_is_none_is_replaced(everything: DataConfig, tmp_path: Path, path: Any) -> None:
    expected = ScanMemory(everything, tmp_path / "cache").scan(KnownFiles)
    (kept,) = (tmp_path / "cache").rglob("*.scan")
    content = json.loads(kept.read_text(encoding="utf-8"))
    content["files"][0][0] = path
    kept.write_text(json.dumps(content), encoding="utf-8")
    assert ScanMemory(everything, tmp_path / "cache").scan(KnownFiles) == expected


def test_each_of_many_images_takes_few_bytes(tmp_path: Path) -> None:
    count = 500
    files = [
        [f"/home/someone/data sets/images/{number:06d}.png", 640, 480, "none", False, False] for number in range(count)
    ]
    shared = [[1.0, 1.0, True, [512], False, 0.0, None]]
    rows = [[number, 0, f"image {number}", [], [0.5, 0.5], None, [], None] for number in range(count)]
    content = {"files": files, "shared": shared, "train": rows, "validation": [], "warnings": []}
    memory = ScanMemory(data(tmp_path), tmp_path / "cache", "0" * 32)
    (tmp_path / "cache" / "images").mkdir(parents=True)
    (tmp_path / "cache" / "images" / f"{'0' * 32}.scan").write_text(json.dumps(content))
    memory.scan(KnownFiles)  # what a first time alone imports
    tracemalloc.start()
    try:
        found = memory.scan(KnownFiles)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.train) == count and count * 200 < held < count * 500


def test_a_file_that_was_changed_just_now_is_not_trusted(tmp_path: Path) -> None:
    Image.new("RGB", (32, 48)).save(tmp_path / "a.png")
    ScanMemory(data(tmp_path, missing_caption="empty"), tmp_path / "cache").scan(KnownFiles)
    assert list((tmp_path / "cache").rglob("*.scan")) == []


def test_images_that_a_table_names_elsewhere_are_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", -(10**12))
    for folder in ("images", "lists"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (32, 48)).save(tmp_path / "images" / "a.png")
    (tmp_path / "lists" / "a.csv").write_text("file_name,text\n../images/a.png,a\n", encoding="utf-8")
    cfg = data(tmp_path / "lists" / "a.csv")
    assert len(ScanMemory(cfg, tmp_path / "cache").scan(KnownFiles).train) == 1
    Image.new("RGB", (48, 48)).save(tmp_path / "images" / "a.png")
    assert ScanMemory(cfg, tmp_path / "cache").scan(KnownFiles).train[0].width == 48


def test_the_scans_that_were_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", -(10**12))
    Image.new("RGB", (32, 48)).save(tmp_path / "a.png")
    configs = [data(tmp_path, missing_caption="empty", trigger=f"t{number}") for number in range(12)]
    for number, cfg in enumerate(configs):
        ScanMemory(cfg, tmp_path / "cache").scan(KnownFiles)
        for place, kept in enumerate(sorted((tmp_path / "cache").rglob("*.scan"), key=lambda one: one.stat().st_mtime)):
            os.utime(kept, (number + place / 100, number + place / 100))
    done = scanned(monkeypatch)
    ScanMemory(configs[-1], tmp_path / "cache").scan(KnownFiles)
    ScanMemory(configs[0], tmp_path / "cache").scan(KnownFiles)
    assert done == [configs[0]]
    assert len(list((tmp_path / "cache").rglob("*.scan"))) == scan_memory.MOST_KEPT
