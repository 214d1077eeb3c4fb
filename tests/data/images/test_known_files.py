"""What is remembered of image files between starts."""

from __future__ import annotations

import os
import shutil
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from tests.commands import PRESET, launch_py
from tests.runs import make_pictures
from trainer.config.sections import DataConfig
from trainer.data.cache import RankGroup, content_keys
from trainer.data.images.image_files import scan
from trainer.data.images.known_files import DIGESTS, HEADERS, KnownFiles
from trainer.system.index import Index

OLD = 1_700_000_000
ALONE = RankGroup(0, 1, lambda value: [value])
_opened: list[list[str]] = []
sys.addaudithook(lambda event, values: _opened[-1].append(str(values[0])) if event == "open" and _opened else None)


@contextmanager
def images_opened() -> Iterator[list[str]]:
    """The names of the images that are opened inside, in the order of the openings."""
    _opened.append([])
    found: list[str] = []
    try:
        yield found
    finally:
        found += [Path(path).name for path in _opened.pop() if path.endswith(".png")]


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four images, all of them of one length; a change of their inode counts as old."""
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", -(10**12))
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(folder / f"{number}.png", compress_level=0)
    return folder


def start(folder: Path) -> list[str]:
    """What a start reads of the images. Returns their digests."""
    cfg = DataConfig(path=str(folder), missing_caption="empty")
    known = KnownFiles(Index(folder.parent / "cache"))
    dataset = scan(cfg, known=known)
    return content_keys([image.location for image in dataset.train], ALONE, known)


def test_a_second_start_opens_no_image_and_writes_nothing(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(images)
    monkeypatch.setattr(Index, "put", None)
    with images_opened() as opened:
        assert start(images) == first
    assert opened == []


def test_a_digest_that_another_rank_has_found_in_the_index_is_not_written_again(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(images)
    monkeypatch.setattr(Index, "put", None)
    known, theirs = (KnownFiles(Index(images.parent / "cache")) for _ in range(2))
    paths = [image.location for image in scan(DataConfig(path=str(images), missing_caption="empty"), known=known).train]
    read = {number: theirs.with_digest(Path(paths[number])) for number in (1, 3)}
    assert content_keys(paths, RankGroup(0, 2, lambda value: [value, (read, None)]), known) == first


def test_an_image_whose_name_is_not_utf_8_is_known_like_all_others(images: Path) -> None:
    (images / "0.png").rename(os.fsdecode(os.fsencode(images) + b"/\xff.png"))
    first = start(images)
    with images_opened() as opened:
        assert start(images) == first
    assert opened == []


def test_a_changed_image_is_read_again_and_no_other(images: Path) -> None:
    first = start(images)
    file = images / "2.png"
    before = file.stat()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with images_opened() as opened:
        second = start(images)
    assert set(opened) >= {"2.png"}
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, True, False, True]


def test_an_image_that_was_read_within_two_seconds_of_its_change_is_read_again(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.system.files.COARSEST_NS", 2 * 10**9)
    for file in images.iterdir():
        os.utime(file, (OLD, OLD))  # the change of the inode is new all the same
    start(images)
    with images_opened() as opened:
        start(images)
    assert set(opened) == {f"{number}.png" for number in range(4)}


def test_what_another_machine_read_of_its_copies_does_not_replace_what_this_one_read(images: Path) -> None:
    first = start(images)
    copies = images.parent / "copies"
    shutil.copytree(images, copies)
    theirs = KnownFiles()
    read = {number: theirs.with_digest(copies / f"{number}.png") for number in range(4)}
    cfg = DataConfig(path=str(images), missing_caption="empty")
    known = KnownFiles(Index(images.parent / "cache"))
    paths = [image.location for image in scan(cfg, known=known).train]
    assert content_keys(paths, RankGroup(0, 1, lambda value: [value, (read, None)]), known) == first
    with images_opened() as opened:
        assert start(images) == first
    assert opened == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'[[1,2,3],"x"]'])
def test_a_record_that_a_stranger_wrote_costs_the_reading_of_its_image_alone(images: Path, content: bytes) -> None:
    Image.new("RGB", (32, 32)).save(images / "2.png")  # of another length: it is compared with none
    first = start(images)
    index = Index(images.parent / "cache")
    for kind in (HEADERS, DIGESTS):
        index.put(kind, {str(images / "2.png"): content})
    with images_opened() as opened:
        assert start(images) == first
    assert set(opened) == {"2.png"}
    with images_opened() as opened:
        start(images)
    assert opened == []


def test_of_images_that_are_known_nothing_is_in_memory_before_it_is_asked_for(tmp_path: Path) -> None:
    Index(tmp_path).put(DIGESTS, {f"/data/images/{number:06d}.png": b"x" * 150 for number in range(2000)})
    tracemalloc.start()
    try:
        assert KnownFiles(Index(tmp_path)).digest(tmp_path) is None
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 200_000


def test_a_memory_that_cannot_be_written_only_costs_time(images: Path) -> None:
    first = start(images)
    shutil.rmtree(images.parent / "cache")
    (images.parent / "cache").write_bytes(b"a file in its place")
    assert start(images) == first


def test_copies_are_found_without_reading_them_again(images: Path) -> None:
    (images / "copy.png").write_bytes((images / "1.png").read_bytes())
    start(images)
    cfg = DataConfig(path=str(images), missing_caption="empty")
    with images_opened() as opened:
        dataset = scan(cfg, known=KnownFiles(Index(images.parent / "cache")))
    assert opened == []
    assert any("the same bytes" in warning for warning in dataset.warnings)


HOOK = """\
import os, sys
def hook(event, values):
    if event == "open" and str(values[0]).endswith(".png") and "pictures" in str(values[0]):
        os.write(log, f"{sys.argv[0]} {values[0]}\\n".encode())
log = os.open(os.environ["OPENED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.addaudithook(hook)
"""


@pytest.mark.slow
def test_the_second_start_of_a_run_opens_no_image_in_any_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pictures(tmp_path / "pictures", 4)
    (tmp_path / "preset.yaml").write_text(PRESET, encoding="utf-8")
    time.sleep(2.1)  # read sooner after their last change, files are not trusted
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    for name in ("first", "second"):
        monkeypatch.setenv("OPENED", str(tmp_path / name))
        assert launch_py(tmp_path, "--headless", "preset.yaml").returncode == 0
    assert len((tmp_path / "first").read_text().splitlines()) >= 4
    assert (tmp_path / "second").read_text() == ""
