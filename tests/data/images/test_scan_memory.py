"""A whole scan is remembered for as long as no file and no setting has changed."""

from __future__ import annotations

import gc
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.data.images.test_image_files import data
from trainer.config.sections import DataConfig
from trainer.data.images import scan_memory
from trainer.data.images.image_files import CaptionedImage, Dataset, scan
from trainer.data.images.known_files import KnownFiles
from trainer.data.images.scan_memory import HANDED, SCANS, ScanMemory, checked
from trainer.system.errors import InputError
from trainer.system.index import Index


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
    index = Index(tmp_path / "cache")
    ((settings, handed),) = index.all(HANDED).items()
    digest, pid, started, at = json.loads(handed)
    if why == "other settings":
        everything = everything.model_copy(update={"trigger": "another"})
    changed = {
        "another launcher": [digest, pid, started + 1, at],
        "long ago": [digest, pid, started, at - scan_memory.HANDED_S],
        "the clock was set back": [digest, pid, started, at + 100],
        "damaged": ["../../else"],
    }
    if why in changed:
        index.put(HANDED, {settings: json.dumps(changed[why]).encode()})
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


@pytest.mark.parametrize("content", ["", "{", "[]", "null path", "[1,[]]\n{}"])
def test_a_scan_that_a_stranger_wrote_is_replaced(everything: DataConfig, tmp_path: Path, content: str) -> None:
    expected, index = ScanMemory(everything, tmp_path / "cache").scan(KnownFiles), Index(tmp_path / "cache")
    ((digest, kept),) = index.all(SCANS).items()
    checked(everything, tmp_path / "cache")()
    written = (
        re.sub(rb'"location":"[^"]*"', b'"location":null', kept, count=1) if "path" in content else content.encode()
    )
    for opened in (ScanMemory, ScanMemory.of_launcher):
        index.put(SCANS, {digest: written})
        assert opened(everything, tmp_path / "cache").scan(KnownFiles) == expected
        assert index.get(SCANS, digest) == kept


def test_each_of_many_images_takes_few_bytes(tmp_path: Path) -> None:
    count = 500
    images = [
        CaptionedImage(
            f"/home/someone/data sets/images/{number:06d}.png",
            640,
            480,
            caption=f"image {number}",
            weight=1.0,
            sides=(512,),
        )
        for number in range(count)
    ]
    memory = ScanMemory(data(tmp_path), tmp_path / "cache", "0" * 32)
    memory._walked.update(image.location for image in images)
    memory.keep(Dataset(tuple(images), (), ()))
    assert memory.scan(KnownFiles).train == tuple(images)  # imports what a first time alone imports
    tracemalloc.start()
    try:
        found = memory.scan(KnownFiles)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.train) == count and count * 200 < held < count * 500


def test_names_that_are_not_utf_8_are_recalled(everything: DataConfig, tmp_path: Path, monkeypatch: Any) -> None:
    for file in (*tmp_path.glob("more/h.*"), tmp_path / "before" / "h.png"):
        file.rename(file.with_name(f"\udcff{file.suffix}"))
    done = scanned(monkeypatch)
    found = [ScanMemory(everything, tmp_path / "cache").scan(KnownFiles) for _ in range(2)]
    assert found[0] == found[1] and len(done) == 1
    assert found[1].train[3].location == f"{tmp_path}/more/\udcff.png"


def test_a_file_that_was_changed_just_now_is_not_trusted(tmp_path: Path) -> None:
    Image.new("RGB", (32, 48)).save(tmp_path / "a.png")
    ScanMemory(data(tmp_path, missing_caption="empty"), tmp_path / "cache").scan(KnownFiles)
    assert Index(tmp_path / "cache").all(SCANS) == {}


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
    for cfg in configs:
        ScanMemory(configs[0], tmp_path / "cache").scan(KnownFiles)
        ScanMemory(cfg, tmp_path / "cache").scan(KnownFiles)
    done = scanned(monkeypatch)
    for cfg in (configs[-1], configs[0], configs[1]):
        ScanMemory(cfg, tmp_path / "cache").scan(KnownFiles)
    assert done == [configs[1]]
    assert len(Index(tmp_path / "cache").all(SCANS)) == scan_memory.MOST_KEPT
