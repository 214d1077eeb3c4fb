"""Files are replaced whole and on the disk, and what is read may be anything."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from trainer.system import files
from trainer.system.errors import InputError


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_is_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        calls.append(("flushed", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def record_rename(draft: Path, final: Path) -> None:
        calls.append(("named", Path(draft)))
        rename(draft, final)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_rename)
    files.replace(tmp_path / "a.json", "new")
    draft = calls[0][1]
    assert draft.parent == tmp_path and draft.name.endswith(".part")
    assert calls == [("flushed", draft), ("named", draft), ("flushed", tmp_path)]
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "new"


def test_a_file_that_cannot_be_written_stays_as_it_was_and_leaves_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        files.replace(file, "half a character: \ud800")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.txt", "before")]


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("before")
    file.chmod(0o640)
    files.replace(file, b"after")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_short_file_is_read_in_little_memory_and_one_of_no_size_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert len(files.read(tmp_path / "short")) == 1000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**17
    status = files.read(Path("/proc/self/status"))
    assert status.startswith(b"Name:")
    assert b"VmPeak" in status


def test_a_pipe_a_device_a_folder_a_loop_and_a_long_file_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "long").write_bytes(b"x" * 101)
    for name in ("pipe", "zero", "folder", "loop"):
        with pytest.raises(InputError, match=f"{name}: not a regular file"):
            files.read(tmp_path / name)
    with pytest.raises(InputError, match=r"long: longer than 9\.\d+e-05 MiB"):
        files.read(tmp_path / "long", 100)
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "none")


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"\xff", b'{"a": "x"}', b"[" * 100_000])
def test_damaged_json_is_one_sentence_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "values.json"
    file.write_bytes(content)
    with pytest.raises(InputError) as refused:
        files.read_json(file, TypeAdapter(dict[str, int]), "remove it")
    assert str(refused.value).startswith(f"{file}: damaged (") and str(refused.value).endswith("); remove it")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_only_one_is_inside_a_lock(tmp_path: Path) -> None:
    counts: list[int] = []
    inside = 0

    def enter() -> None:
        nonlocal inside
        for _ in range(50):
            with files.locked(tmp_path / "lock"):
                inside += 1
                counts.append(inside)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1] * 200


def test_a_folder_that_others_could_read_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "drafts"
    folder.mkdir(mode=0o755)
    for _ in range(2):
        assert stat.S_IMODE(files.make_private(folder).stat().st_mode) == 0o700
    assert stat.S_IMODE(files.make_private(tmp_path / "new" / "one").stat().st_mode) == 0o700


def test_a_folder_that_a_group_shares_stays_shared_and_is_closed_to_all_others(tmp_path: Path) -> None:
    shared = tmp_path / "runs"
    shared.mkdir()
    shared.chmod(0o2775)
    assert stat.S_IMODE(files.make_private(shared).stat().st_mode) == 0o2770
    files.make_private_if_new(shared / "cache")
    assert stat.S_IMODE((shared / "cache").stat().st_mode) & 0o2007 == 0o2000
    assert files.private_mode(shared) == 0o660
    assert files.private_mode(files.make_private(tmp_path / "own")) == 0o600


def test_a_link_to_a_folder_closes_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o755)
    (tmp_path / "queue").symlink_to(disk)
    files.make_private(tmp_path / "queue")
    assert stat.S_IMODE(disk.stat().st_mode) == 0o755


def test_a_replaced_file_keeps_its_group(tmp_path: Path) -> None:
    """Run as root, as the tests of several machines are; another user keeps it where the group is one of theirs."""
    file = tmp_path / "a.txt"
    file.write_text("before")
    group = os.getgroups()[-1] if os.geteuid() else 65534
    os.chown(file, -1, group)
    files.replace(file, "after")
    assert (file.read_text(), file.stat().st_gid) == ("after", group)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_new_file_is_made_once_also_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    files.create(tmp_path / "a", "first")
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "a", "second")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a", "first")]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    """An open folder with one file."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").write_bytes(b"former")
    descriptor = os.open(tmp_path / "there", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file system without hard links answers, such as exFAT."""

    def refuse(*paths: object, **where: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_is_moved_into_an_open_folder_and_overwrites_none(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    source = tmp_path / "new"
    source.write_bytes(b"new")
    source.chmod(0o640)
    if not has_links:
        without_links(monkeypatch)
    for name in ("a", "a"):
        with pytest.raises(FileExistsError):
            files.place_at(source, folder, name)
    assert source.read_bytes() == b"new" and os.listdir(folder) == ["a"]
    files.place_at(source, folder, "b")
    assert not source.exists() and sorted(os.listdir(folder)) == ["a", "b"]
    there = tmp_path / "there"
    assert ((there / "a").read_bytes(), (there / "b").read_bytes()) == (b"former", b"new")
    assert stat.S_IMODE((there / "b").stat().st_mode) == 0o640


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_and_a_link_itself_move_between_open_folders_and_overwrite_none(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    (tmp_path / "there" / "link").symlink_to("/etc/passwd")
    target = os.open(tmp_path, os.O_RDONLY)
    if not has_links:
        without_links(monkeypatch)
    with pytest.raises(FileNotFoundError):
        files.move_at(folder, "none", target, "none")
    with pytest.raises(FileExistsError):
        files.move_at(folder, "a", folder, "link")
    assert os.listdir(tmp_path) == ["there"]
    files.move_at(folder, "link", target, "link")
    files.move_at(folder, "a", target, "b")
    assert os.readlink(tmp_path / "link") == "/etc/passwd"
    assert (tmp_path / "b").read_bytes() == b"former" and os.listdir(folder) == []
    os.close(target)


def test_a_file_of_an_open_folder_is_replaced_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_bytes(b"former")
    (tmp_path / "kept" / "a").chmod(0o640)
    folder = os.open(tmp_path / "kept", os.O_RDONLY)
    (tmp_path / "kept").rename(tmp_path / "moved")
    (tmp_path / "kept").symlink_to("/")
    try:
        files.replace_at(folder, "a", b"new")
        (tmp_path / "moved" / "b").mkdir()
        with pytest.raises(IsADirectoryError):
            files.replace_at(folder, "b", b"new")
    finally:
        os.close(folder)
    assert (tmp_path / "moved" / "a").read_bytes() == b"new"
    assert (tmp_path / "moved" / "a").stat().st_mode & 0o777 == 0o640
    assert sorted(file.name for file in (tmp_path / "moved").iterdir()) == ["a", "b"]


def test_a_process_that_is_killed_while_it_tries_a_folder_leaves_no_file_there(tmp_path: Path):
    script = f"""
import os, signal
from pathlib import Path
from trainer.system import files
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
files.write_problem(Path({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (-signal.SIGKILL, [])
