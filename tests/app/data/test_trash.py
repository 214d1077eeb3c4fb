"""Deleted images: moved away and back exactly, and nothing that a stranger left in the trash leads elsewhere."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from app.data import trash
from tests.runs import make_pictures
from trainer.config.sections import DataConfig
from trainer.data.images.image_files import scan
from trainer.system.errors import InputError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = make_pictures(tmp_path / "data", 4)
    below = make_pictures(folder / "below", 2)
    (below / "01.txt").unlink()
    return folder


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """{path: content, or where a link leads to, and time} of everything below a folder."""
    return {
        str(path.relative_to(folder)): (
            os.readlink(path).encode() if path.is_symlink() else path.read_bytes(),
            path.lstat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_deleted_images_are_not_trained_on_and_come_back_exactly(data: Path):
    before = tree(data)
    deletion = trash.delete(data, [data / "01.png", data / "below" / "00.png", data / "below" / "01.png"])
    assert deletion.files == ("01.png", "01.txt", "below/00.png", "below/00.txt", "below/01.png")
    assert [image.path.name for image in scan(DataConfig(path=str(data))).train] == ["00.png", "02.png", "03.png"]
    assert (data / trash.FOLDER).stat().st_mode & 0o777 == 0o700
    later = trash.delete(data, [data / "00.png"])
    assert trash.deletions(data) == [later, deletion]
    assert trash.restore(data, deletion.name) == deletion.files
    assert trash.restore(data, later.name) == ("00.png", "00.txt")
    assert tree(data) == before and trash.deletions(data) == []
    with pytest.raises(InputError, match="it was restored or removed meanwhile"):
        trash.restore(data, later.name)


@pytest.mark.parametrize("pages", [1, 2])
def test_what_two_windows_restore_at_once_is_restored_once_and_the_other_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int
):
    refused = list[str]()

    def restore(root: Path, name: str) -> None:
        try:
            trash.restore(root, name)
        except InputError as error:
            refused.append(str(error).removeprefix(f"{root}/"))

    if pages == 2:  # two processes share no lock
        monkeypatch.setattr(trash, "CHANGES", nullcontext())
    for attempt in range(30):
        root = make_pictures(tmp_path / str(attempt), 8)
        before = tree(root)
        name = trash.delete(root, sorted(root.glob("*.png"))).name
        with ThreadPoolExecutor(3) as windows:
            done = [windows.submit(restore, root, name), windows.submit(restore, root, name)]
            done.append(windows.submit(trash.deletions, root))
            for window in done:
                window.result()
        if pages == 2:
            with suppress(InputError):  # each may have stopped at the other
                trash.restore(root, name)
        assert tree(root) == before
    if pages == 1:
        assert refused == ["nothing to restore: it was restored or removed meanwhile"] * 30
    else:
        assert "another page restores or removes these files; look again in a moment" in refused


def test_restoring_overwrites_nothing_and_then_restores_nothing(data: Path):
    deletion = trash.delete(data, [data / "00.png", data / "01.png"])
    (data / "01.txt").write_text("of another")
    before = tree(data)
    with pytest.raises(InputError, match=r"01.txt: is there again; rename it first. Nothing was restored"):
        trash.restore(data, deletion.name)
    assert tree(data) == before
    (data / "01.txt").unlink()
    assert len(trash.restore(data, deletion.name)) == 4


def test_of_a_link_the_link_is_deleted_and_a_mask_and_a_shared_caption_stay(data: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere.png"
    (data / "02.png").rename(elsewhere)
    (data / "02.png").symlink_to("../elsewhere.png")
    (data / "00.webp").write_bytes(b"another image of this name")
    (data / "masks").mkdir()
    (data / "masks" / "00.png").write_bytes(b"mask")
    before = tree(data)
    deletion = trash.delete(data, [data / "00.png", data / "02.png"])
    assert deletion.files == ("00.png", "02.png", "02.txt")
    assert (data / "00.txt").exists() and (data / "masks" / "00.png").exists() and elsewhere.exists()
    trash.restore(data, deletion.name)
    assert tree(data) == before


def test_the_trash_is_emptied_only_of_what_was_deleted(data: Path):
    shown = [trash.delete(data, [data / name]).name for name in ("00.png", "01.png")]
    later = trash.delete(data, [data / "02.png"])
    (data / trash.FOLDER / "notes.txt").write_text("of a person")
    assert trash.empty(data, shown) == 2
    assert trash.deletions(data) == [later]
    assert trash.empty(data) == 1
    assert os.listdir(data / trash.FOLDER) == ["notes.txt"]
    assert trash.empty(data) == trash.empty(data / "below") == 0


def test_a_trash_of_pipes_links_and_files_is_emptied_without_opening_them(data: Path, tmp_path: Path):
    outside = make_pictures(tmp_path / "outside", 1)
    bin = data / trash.FOLDER
    bin.mkdir()
    os.mkfifo(bin / "20260101T000000Z-1")
    (bin / "20260101T000000Z-2").symlink_to(outside)
    (bin / "20260101T000000Z-3").write_text("a file")
    assert trash.empty(data) == 3
    assert os.listdir(bin) == [] and sorted(os.listdir(outside)) == ["00.png", "00.txt"]


@pytest.mark.parametrize("image", ["../out.png", "/etc/passwd", "00.txt", ".hidden.png", ".git/a.png", "none.png", "a"])
def test_only_images_of_the_folder_are_deleted(data: Path, tmp_path: Path, image: str):
    (tmp_path / "out.png").write_bytes(b"x")
    (data / ".hidden.png").write_bytes(b"x")
    before = tree(tmp_path)
    with pytest.raises(InputError):
        trash.delete(data, [data / image])
    assert tree(tmp_path) == before and trash.deletions(data) == []


def test_an_image_behind_a_link_to_a_folder_is_not_moved(data: Path, tmp_path: Path):
    (data / "linked").symlink_to(make_pictures(tmp_path / "outside", 1))
    with pytest.raises(InputError, match="a link or file is in the place of the folder"):
        trash.delete(data, [data / "linked" / "00.png"])
    assert (tmp_path / "outside" / "00.png").exists() and trash.deletions(data) == []


def test_what_was_deleted_before_something_failed_can_be_restored(data: Path):
    before = tree(data)
    with pytest.raises(
        InputError, match=r"not deleted: none.png: No such file or directory; 2 files were deleted before"
    ):
        trash.delete(data, [data / "00.png", data / "none.png"])
    [deletion] = trash.deletions(data)
    trash.restore(data, deletion.name)
    assert tree(data) == before


@pytest.mark.parametrize("name", ["..", "../..", "/etc", "", "20260101T000000Z-1/..", "x", "20260101T000000Z-1\0"])
def test_a_name_that_is_not_a_deletion_restores_nothing(data: Path, name: str):
    trash.delete(data, [data / "00.png"])
    with pytest.raises(InputError, match=r"not a deletion; reload the page"):
        trash.restore(data, name)


def test_a_trash_that_a_stranger_made_leads_nowhere_else(data: Path, tmp_path: Path):
    outside = make_pictures(tmp_path / "outside", 1)
    entry = data / trash.FOLDER / "99999999T999999Z-1"
    entry.mkdir(parents=True)
    for name in (".bashrc", "run.sh", "x.pth"):
        (entry / name).write_text("id")
    (entry / "out").symlink_to(outside)
    (entry / "below").symlink_to(outside)
    (entry / "a.png").symlink_to("/etc/passwd")
    os.mkfifo(entry / "b.png")
    assert [(found.deleted_at, found.files) for found in trash.deletions(data)] == [(0.0, ("a.png",))]
    assert trash.restore(data, entry.name) == ("a.png",)
    assert sorted(os.listdir(entry)) == [".bashrc", "b.png", "below", "out", "run.sh", "x.pth"]
    assert trash.empty(data) == 1
    assert sorted(os.listdir(outside)) == ["00.png", "00.txt"]
    os.rmdir(data / trash.FOLDER)
    (data / trash.FOLDER).symlink_to(outside)
    for ask in (lambda: trash.delete(data, [data / "00.png"]), lambda: trash.empty(data)):
        with pytest.raises(InputError, match="a link or file is in the place of the folder"):
            ask()
    assert sorted(os.listdir(outside)) == ["00.png", "00.txt"] and trash.deletions(data) == []
