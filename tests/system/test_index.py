"""An index only saves time: whatever becomes of its file, records are found, or missing with one sentence."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from trainer.system import index
from trainer.system.index import FORMAT, NAME, SHARED_NAME, Index

KEPT = {b"\xff": b"one", b"b": b"two"}


@pytest.fixture
def folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    """A folder with an index of two records."""
    index._say.cache_clear()
    Index(tmp_path / "cache").put("kind", KEPT)
    assert caplog.messages == []
    return tmp_path / "cache"


def test_records_are_found_by_another_process_and_by_kind(folder: Path):
    assert Index(folder).all("kind") == KEPT
    assert (Index(folder).get("kind", "b"), Index(folder).get("other", "b")) == (b"two", None)
    Index(folder).put("kind", {"b": b"three"})
    assert Index(folder).get("kind", b"b") == b"three" and len(Index(folder).all("kind")) == 2


def test_nothing_is_made_where_nothing_is_kept(tmp_path: Path):
    assert Index(tmp_path / "cache").get("kind", "b") is None and Index(tmp_path / "cache").all("kind") == {}
    assert list(tmp_path.iterdir()) == []


def test_of_more_records_than_are_kept_those_written_or_used_first_go(folder: Path, monkeypatch: pytest.MonkeyPatch):
    found = Index(folder)
    for key in "cdef":
        found.touch("kind", "b")
        found.put("kind", {key: b"new"}, most=3)
    assert sorted(found.all("kind")) == [b"b", b"e", b"f"]
    monkeypatch.setattr(index, "UNUSED_NS", -1)
    found.put("other", {"g": b"new"})
    assert found.all("kind") == {}


def damage(folder: Path, content: bytes, at: int) -> None:
    with (folder / NAME).open("r+b") as file:
        file.seek(at)
        file.write(content)


def misspell(name: bytes, found: bytes) -> Callable[[Path], object]:
    return lambda folder: damage(folder, found, (folder / NAME).read_bytes().index(name))


def run_sql(sql: str) -> Callable[[Path], object]:
    return lambda folder: sqlite3.connect(folder / NAME).executescript(sql).close()


def journal(folder: Path) -> None:
    """A journal that names a file, which sqlite would remove: it ends with the name, its length, a sum and a mark."""
    name = os.fsencode(folder.parent / "mine.txt")
    mark = bytes.fromhex("d9d505f920a163d7")
    tail = name + len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big") + mark
    (folder / f"{NAME}-journal").write_bytes(mark + bytes(4 * 512 - 8) + (2**30).to_bytes(4, "big") + tail)


DAMAGED: dict[str, Callable[[Path], object]] = {
    "empty": lambda folder: (folder / NAME).write_bytes(b""),
    "text": lambda folder: (folder / NAME).write_text("no database " * 1000),
    "cut": lambda folder: os.truncate(folder / NAME, 4096),
    "a page": lambda folder: damage(folder, b"\xff" * 4000, 4096),
    "the table's name": misspell(b"recordsrecords", b"re\xc1ords"),
    "a column's name": misspell(b"used INTEGER", b"us\xc1d"),
    "a record": run_sql("UPDATE records SET value = x'00'"),
    "a record of no bytes": run_sql("UPDATE records SET value = NULL"),
    "a key of no bytes": run_sql("INSERT INTO records SELECT kind, 1, sum, used, value FROM records LIMIT 1"),
    "another table": run_sql("CREATE TABLE more (x)"),
    "a trigger": run_sql("CREATE TRIGGER t AFTER UPDATE ON records BEGIN DELETE FROM records; END"),
    "a view": run_sql("DROP TABLE records; CREATE VIEW records AS SELECT 1 kind, 2 key, 3 value, 4 sum, 5 used"),
    "a journal": journal,
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_index_is_named_once_and_built_anew(folder: Path, what: str, caplog: pytest.LogCaptureFixture):
    (folder.parent / "mine.txt").write_bytes(b"")
    DAMAGED[what](folder)
    found = Index(folder)
    assert found.all("kind") == {}
    found.put("kind", KEPT)
    assert found.all("kind") == Index(folder).all("kind") == KEPT
    (said,) = caplog.messages
    assert said.startswith(f"{folder / NAME}: damaged (") and said.endswith("); it is removed and built anew")
    assert (folder.parent / "mine.txt").exists()


def link(suffix: str) -> Callable[[Path], object]:
    def made(folder: Path) -> None:
        (folder.parent / "mine.txt").write_bytes(b"mine")
        (folder / f"{NAME}{suffix}").unlink(missing_ok=True)
        (folder / f"{NAME}{suffix}").symlink_to(folder.parent / "mine.txt")

    return made


def second_name(folder: Path) -> None:
    (folder.parent / "mine.txt").hardlink_to(folder / NAME)


def contents(folder: Path) -> dict[Path, bytes]:
    """What lies in a folder, without the memory that open files share."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != f"{NAME}-shm"}


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "newer": (run_sql(f"PRAGMA user_version={FORMAT + 1}"), f"a newer version wrote it, in format {FORMAT + 1}"),
    "a folder": (lambda folder: ((folder / NAME).unlink(), (folder / NAME).mkdir()), "is a link, has a second name"),
    "a link": (link(""), f"{NAME} is a link"),
    "a linked log": (link("-wal"), f"{NAME}-wal is a link"),
    "a linked memory": (link("-shm"), f"{NAME}-shm is a link"),
    "a linked journal": (link("-journal"), f"{NAME}-journal is a link"),
    "a second name": (second_name, f"{NAME} is a link, has a second name"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_index_that_is_not_this_program_s_is_named_once_and_left_as_it_is(
    folder: Path, what: str, caplog: pytest.LogCaptureFixture
):
    make, why = UNUSABLE[what]
    make(folder)
    before = contents(folder.parent)
    for _ in range(2):
        found = Index(folder)
        found.put("kind", {"b": b"new"})
        assert found.get("kind", "b") is None and found.all("kind") == {}
    assert contents(folder.parent) == before
    (said,) = caplog.messages
    assert why in said and said.endswith("what it holds is read again")


def test_an_index_that_another_process_holds_is_gone_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(index, "BUSY_S", 0.1)
    other = sqlite3.connect(folder / NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    found = Index(folder)
    assert found.all("kind") == KEPT  # a writer hinders no reader
    found.put("kind", {"b": b"new"})
    assert caplog.messages == [f"{folder / NAME}: not used (database is locked); what it holds is read again"]
    other.close()
    assert found.all("kind") == {}
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + index.REST_S)
    assert found.all("kind") == KEPT


def test_a_record_that_is_too_long_costs_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(index, "LONGEST", 9)
    Index(folder).put("kind", {"c": b"ten bytes."})
    assert caplog.messages == [
        f"{folder / NAME}: not used (a record is longer than 9 bytes); what it holds is read again"
    ]
    assert Index(folder).all("kind") == KEPT


def test_a_failure_in_one_thread_damages_nothing_for_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(index, "BUSY_S", 0.1)
    monkeypatch.setattr(index, "_say", lambda sentence: (said.append(sentence), time.sleep(0.2)))  # a slow terminal
    said: list[str] = []
    found, is_over = Index(folder), threading.Event()
    found.all("kind")
    other = sqlite3.connect(folder / NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    def read() -> None:
        while not is_over.is_set():
            found.all("kind")

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for _ in range(5):
        found._rests_until = 0.0
        found.put("kind", {"b": b"new"})
    is_over.set()
    for reader in readers:
        reader.join()
    other.close()
    assert {sentence.split(" (")[1].split(")")[0] for sentence in said} == {"database is locked"}
    assert Index(folder).all("kind") == KEPT


def test_an_index_on_a_read_only_disk_is_read_and_one_that_is_full_keeps_what_it_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    before = sorted(folder.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        assert Index(folder).all("kind") == KEPT and sorted(folder.iterdir()) == before
        Index(folder).put("kind", {"b": b"new"})
    full = Index(folder)
    full.all("kind")
    assert full._db
    full._db.execute("PRAGMA max_page_count=1")
    full.put("kind", {"b": bytes(10**6)})
    assert [message.split(" (")[1].split(")")[0] for message in caplog.messages] == [
        "attempt to write a readonly database", "database or disk is full",
    ]  # fmt: skip
    assert Index(folder).all("kind") == KEPT


@contextmanager
def user(uid: int, gid: int) -> Iterator[None]:
    """Be another user of a group for a moment."""
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users for a moment")
def test_a_folder_of_a_group_has_one_index_for_all_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    index._say.cache_clear()
    for above in (tmp_path, *tmp_path.parents):
        if (mode := above.stat().st_mode) & 0o011 != 0o011:
            above.chmod(mode | 0o011)
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, 0, 3000)
    cache.chmod(0o2770)
    with user(1001, 3000):
        first = Index(cache)
        first.put("kind", {"a": b"one"})
    with user(1002, 3000):
        Index(cache).put("kind", {"b": b"two"})
    with user(1003, 3000):
        second = Index(cache)
        assert second.all("kind") == {b"a": b"one", b"b": b"two"}
        second.put("kind", {"c": b"three"})
    assert len(first.all("kind")) == 3 and caplog.messages == []
    # Where others may write too, a file of somebody else is a stranger's.
    del first, second
    cache.chmod(0o2777)
    with user(1002, 3000):
        Index(cache).put("kind", {"d": b"four"})
    assert "is not yours" in caplog.text


def test_a_lock_that_is_a_link_makes_no_file_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    index._say.cache_clear()
    (tmp_path / f".{NAME}.lock").symlink_to(tmp_path / "elsewhere")
    Index(tmp_path).put("kind", KEPT)
    assert not (tmp_path / "elsewhere").exists() and Index(tmp_path).all("kind") == {}
    assert "not used" in caplog.text


def test_on_a_network_share_there_is_no_log_and_another_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(index, "LOCAL", set())
    found = Index(folder)
    assert found.file.name == SHARED_NAME and found.all("kind") == {}
    found.put("kind", KEPT)
    assert Index(folder).all("kind") == KEPT
    assert {file.name for file in folder.iterdir()} == {NAME, SHARED_NAME, f".{NAME}.lock", f".{SHARED_NAME}.lock"}
    assert caplog.messages == []


WRITER = """
import os, random, signal, sys, time
from pathlib import Path
from trainer.system.index import Index
folder = Path(sys.argv[1])
for start in range(200):
    read, write = os.pipe()
    if not (child := os.fork()):
        found = Index(folder)
        for number in range(100_000):
            found.put("kind", {f"{start}-{number}-{part}": b"x" * 2000 for part in range(3)})
            os.write(write, b"x")
    os.close(write)
    os.read(read, 1)
    time.sleep(random.random() / 100)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    count = 1
    while some := len(os.read(read, 65536)): count += some
    os.close(read)
    found = set(Index(folder).all("kind"))
    assert all(f"{start}-{n}-{part}".encode() in found for n in range(count) for part in range(3)), start
    assert len(found) % 3 == 0, "a part of a write"
    Index(folder).put("kind", {"a": b"", "b": b"", "c": b""}, most=3)
"""


def test_a_writer_that_is_killed_200_times_loses_nothing(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", WRITER, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_log_that_another_process_is_removing_is_no_link(tmp_path: Path):
    """A file that is looked at while it is removed has no name at all."""
    program = "import sys\nfrom pathlib import Path\nwhile True: Path(sys.argv[1]).touch(), Path(sys.argv[1]).unlink()"
    log = tmp_path / f"{NAME}-wal"
    with subprocess.Popen([sys.executable, "-c", program, log]) as other:
        try:
            nameless, until = 0, time.monotonic() + 60
            while nameless < 100 and time.monotonic() < until:
                index._require_own(log, tmp_path)
                with suppress(FileNotFoundError):
                    nameless += log.lstat().st_nlink == 0
        finally:
            other.kill()
    assert nameless == 100


def test_writers_at_once_lose_nothing(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path; from trainer.system.index import Index\n"
        "for n in range(50): Index(Path(sys.argv[1])).put('kind', {f'{sys.argv[2]}-{n}': b'x'})"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, tmp_path, name], stderr=subprocess.PIPE) for name in "abcd"
    ]
    assert [(writer.communicate()[1], writer.returncode) for writer in writers] == [(b"", 0)] * 4
    assert len(Index(tmp_path).all("kind")) == 200
