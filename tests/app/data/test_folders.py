"""Folders of images: what a glance at one tells, choosing one below the roots, and those used last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.data import folders
from app.data.folders import HalfTyped, Picker, Recent
from app.form.form_answers import glance
from tests.runs import make_pictures
from trainer.system.errors import InputError


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = make_pictures(tmp_path / "home" / "pictures", count=3)
    (folder / "01.txt").unlink()
    (folder / "notes.txt").write_text("no caption")
    (folder / "below").mkdir()
    (folder / ".hidden").mkdir()
    return folder


def test_a_glance_counts_what_is_in_a_folder_and_lists_no_other(pictures: Path, listed: list[str]):
    make_pictures(pictures / "below" / "deep")
    listed.clear()
    assert glance(str(pictures)) == {"images": "3", "captions": "2", "folders": 1}
    assert listed == [str(pictures)]


def test_a_glance_at_what_is_missing_lists_the_folder_above_only(pictures: Path, listed: list[str]):
    assert glance(f"{pictures}s") == {"wrong": f"no folder '{pictures}s'; did you mean '{pictures}'?"}
    assert listed == [str(pictures.parent)]
    assert glance("/no/such/place") == {"wrong": "no folder '/no/such/place'"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", ""),
        (" ", ""),
        ("/etc/passwd", "'/etc/passwd' is a file; name the folder with the images"),
        ("a\0b", "a path cannot hold the character NUL; remove it"),
        ("~nobody-of-this-name/x", "no folder '~nobody-of-this-name/x'"),
    ],
)
def test_a_glance_at_no_folder_says_what_is_wrong(path: str, said: str):
    assert glance(path) == {"wrong": said}


@pytest.mark.parametrize("path", ["x" * 300, "/" + "y" * 5000, "y/" * 3000])
def test_a_path_that_no_disk_holds_is_no_folder(path: str):
    assert glance(path)["wrong"].startswith("no folder '")


def test_a_glance_reads_nothing_of_a_file(tmp_path: Path):
    """A person who may open the page may read these files in the form anyway; a glance tells names of folders only."""
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    secret.chmod(0)
    assert glance(str(secret)) == {"wrong": f"'{secret}' is a file; name the folder with the images"}
    assert glance(str(tmp_path)) == {"images": "0", "captions": "0", "folders": 0}


def test_a_large_folder_is_counted_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folders, "MOST_ENTRIES", 10)
    for number in range(11):
        (tmp_path / f"{number}.png").touch()
    assert glance(str(tmp_path)) == {"images": "10+", "captions": "0+", "folders": 0}


def test_a_folder_below_the_roots_is_listed_with_the_way_up(pictures: Path):
    picker = Picker((pictures.parent,))
    found = picker.listing(str(pictures))
    assert (found.path, found.above, found.folders) == (str(pictures), str(pictures.parent), ("below",))
    assert (found.num_images, found.num_captions, found.is_cut) == (3, 2, False)
    assert picker.listing("").path == str(pictures.parent)
    assert picker.listing("").above == ""


def test_nothing_outside_the_roots_is_listed(pictures: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (pictures / "link").symlink_to(outside)
    (pictures / "inside").symlink_to(pictures / "below")
    picker = Picker((pictures.parent,))
    for path in (outside, pictures / "link", pictures / ".." / "..", pictures / "below/../../../outside", "/etc", "/"):
        with pytest.raises(InputError, match=r"outside .*; type its path into the field"):
            picker.listing(str(path))
    assert picker.listing(str(pictures / "inside")).path == str(pictures / "below")


def test_what_is_not_a_folder_is_refused(pictures: Path):
    picker = Picker((pictures.parent,))
    for path in ("00.png", "none", "x" * 300):
        with pytest.raises(InputError, match="not a folder"):
            picker.listing(str(pictures / path))
    with pytest.raises(InputError, match="cannot hold the character NUL"):
        picker.listing("\0")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user for a moment")
def test_a_folder_that_cannot_be_read_is_named(pictures: Path):
    for above in (pictures, *pictures.parents):
        above.chmod(above.stat().st_mode | 0o011)
    (pictures / "below").chmod(0)
    os.seteuid(65534)
    try:
        with pytest.raises(InputError, match=r"below: cannot be read \(Permission denied\)"):
            Picker((pictures.parent,)).listing(str(pictures / "below"))
        assert glance(str(pictures / "below")) == {"wrong": f"{pictures}/below: cannot be read (Permission denied)"}
    finally:
        os.seteuid(0)


def test_the_folders_used_last_come_first_and_those_that_are_gone_are_left_out(tmp_path: Path):
    recent = Recent(tmp_path / "drafts" / "folders.json")
    assert recent.all() == ()
    made = [tmp_path / str(number) for number in range(8)]
    for folder in made:
        folder.mkdir()
        recent.add(str(folder))
    recent.add(str(made[5]))
    made[6].rmdir()
    expected = tuple(str(tmp_path / name) for name in "57432")
    assert recent.all() == Recent(tmp_path / "drafts" / "folders.json").all() == expected
    assert (tmp_path / "drafts").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "[" * 10_000])
def test_a_damaged_list_of_folders_is_an_empty_one(tmp_path: Path, content: str):
    file = tmp_path / "folders.json"
    file.write_text(content)
    assert Recent(file).all() == ()
    Recent(file).add(str(tmp_path))
    assert Recent(file).all() == (str(tmp_path),)


def test_a_path_is_typed_until_it_is_left_changed_or_its_window_is_gone(monkeypatch: pytest.MonkeyPatch):
    half_typed = HalfTyped()
    assert not half_typed.holds({"data.path": "/da"})
    half_typed.typing({"data.path": "/da"})
    assert half_typed.holds({"data.path": "/da"}) and not half_typed.holds({"data.path": "/data"})
    half_typed.leave(["train.steps"])
    assert half_typed.holds({"data.path": "/da"})
    half_typed.leave(["data.path"])
    assert not half_typed.holds({"data.path": "/da"})
    half_typed.typing({"data.path": "/dat"})
    monkeypatch.setattr("app.data.folders.TYPING_S", 0.0)
    assert not half_typed.holds({"data.path": "/dat"})
