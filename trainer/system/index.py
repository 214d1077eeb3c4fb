"""Remembers what can be found out again, in an sqlite file of a cache or a folder of runs. Imports no torch.

The file is never the only copy of anything: whatever is wrong with it, only time is lost, and a sentence says so once.
It may lie in a stranger's folder: links are refused, no trigger or view is run, and no journal is followed, because
sqlite deletes files that one names. See DECISIONS 216.
"""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
import stat
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote_from_bytes

import psutil

from trainer.system import files

FORMAT = 1
"""Of the table. What a record holds is the business of its kind, whose name says its version."""
NAME, SHARED_NAME = "index.sqlite", "index-shared.sqlite"
"""The second one has no write-ahead log: that needs memory which all processes share."""
LOCAL = {"apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
"""File systems of one machine. Any other one may be a network share."""
BUSY_S = 5.0
"""How long other writers are waited for; one writes 100,000 records in a second."""
REST_S = 60.0
"""How long a file that could not be used is left alone: a page runs for days, a disk may be full for a minute."""
UNUSED_NS = 180 * 24 * 3600 * 10**9
"""Records that were neither written nor used for so long are removed."""
MOST = 1_000_000
"""Records of a kind that are kept, unless its writer names fewer."""
LONGEST = 9 * 10**8
"""Bytes of a value; sqlite takes no row of 10^9. The scan of 1.5 million images with captions may be longer."""
SUFFIXES = ("", "-wal", "-shm", "-journal")
TABLE = "CREATE TABLE records (kind TEXT, key BLOB, sum INTEGER, used INTEGER, value BLOB, PRIMARY KEY (kind, key))"
"""A value may have 20 MB: what is looked for in each row stands before it."""
Key = str | bytes
T = TypeVar("T")
log = logging.getLogger(__name__)


class _Damaged(sqlite3.DatabaseError):
    """A file that is not what this module writes."""


class Index:
    """Records by kind and key. Several processes may read and write at once.

    Nothing is raised: a record that cannot be read is missing, and one that cannot be written is lost.
    """

    def __init__(self, folder: Path) -> None:
        """Create the index of a folder. The file is opened by the first use, and made by the first `put`."""
        self.file = folder / (NAME if _is_local(folder) else SHARED_NAME)
        self._db: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._is_missing = False
        self._rests_until = 0.0

    def get(self, kind: str, key: Key) -> bytes | None:
        """Return a record; None where it is missing."""

        def find(db: sqlite3.Connection) -> bytes | None:
            row = db.execute("SELECT value, sum FROM records WHERE kind=? AND key=?", (kind, _bytes(key))).fetchone()
            return _checked(_bytes(key), *row) if row else None

        return self._try(find, None)

    def all(self, kind: str) -> dict[bytes, bytes]:
        """Return all records of a kind."""

        def find(db: sqlite3.Connection) -> dict[bytes, bytes]:
            rows = db.execute("SELECT key, value, sum FROM records WHERE kind=?", (kind,))
            return {key: _checked(key, value, checksum) for key, value, checksum in rows}

        return self._try(find, {})

    def put(self, kind: str, records: Mapping[str, bytes] | Mapping[bytes, bytes], most: int = MOST) -> None:
        """Write records: all of them or, where the process is killed or the disk full, none.

        Args:
            kind: Their kind.
            records: By their keys.
            most: Records of this kind that are kept, those that were written or used last.
        """
        now = time.time_ns()
        keyed = ((_bytes(key), value) for key, value in records.items())
        rows = [(kind, key, zlib.crc32(value, zlib.crc32(key)), now, value) for key, value in keyed]

        def write(db: sqlite3.Connection) -> None:
            if any(len(value) > LONGEST for value in records.values()):
                raise sqlite3.OperationalError(f"a record is longer than {LONGEST} bytes")
            with db:  # a transaction
                db.execute("BEGIN IMMEDIATE")
                db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", rows)
                db.execute("DELETE FROM records WHERE used < ?", (now - UNUSED_NS,))
                db.execute(
                    "DELETE FROM records WHERE kind = ?1 AND rowid IN"
                    " (SELECT rowid FROM records WHERE kind = ?1 ORDER BY used DESC, rowid DESC LIMIT -1 OFFSET ?2)",
                    (kind, most),
                )

        self._try(write, None, is_made=True)

    def touch(self, kind: str, key: Key) -> None:
        """Note that a record was used."""
        found = (time.time_ns(), kind, _bytes(key))
        self._try(lambda db: db.execute("UPDATE records SET used=? WHERE kind=? AND key=?", found), None)

    def _try(self, act: Callable[[sqlite3.Connection], T], otherwise: T, is_made: bool = False) -> T:
        """Do something with the open file. What hinders it is said; a damaged file is removed.

        Args:
            act: What is done.
            otherwise: Returned where it cannot be.
            is_made: Whether a missing file is made; else there is nothing to be found.
        """
        with self._lock:  # another thread must not use what is closed below
            try:
                if self._db is None and self._rests_until <= time.monotonic() and (is_made or not self._is_missing):
                    self._open(is_made)
                return otherwise if self._db is None else act(self._db)
            except (OSError, sqlite3.OperationalError) as error:  # locked, full, read-only, of a newer version
                why = error.strerror if isinstance(error, OSError) else error
                _say(f"{self.file}: not used ({why}); what it holds is read again")
                self._rests_until = time.monotonic() + REST_S
                self._close()
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # sqlite's own message may quote damaged text
                _say(f"{self.file}: damaged ({error}); it is removed and built anew")
                self._close()
                with suppress(OSError):
                    self._remove()
            return otherwise

    def _open(self, is_made: bool) -> None:
        """Open the file if there is one, or if it is to be made."""
        parts = [self.file.with_name(self.file.name + suffix) for suffix in SUFFIXES]
        folder = self.file.parent
        if is_made:
            files.make_private_if_new(folder)
            if not os.path.lexists(self.file):  # others of a group that shares the file may not open the lock
                with files.locked(self._lock_file):
                    self._make()
        for part in parts:
            _require_own(part, folder)
        if parts[-1].exists():  # no process of this program makes one
            raise _Damaged("a journal lies next to it")
        self._is_missing = not parts[0].exists()
        if self._is_missing:
            return
        # The log of a read-only disk cannot be shared, and nobody writes there.
        mode = "rw" if os.access(folder, os.W_OK) else "ro&immutable=1"
        self._db = _connection(parts[0], mode)
        weakref.finalize(self, self._db.close)
        _require_table(self._db)

    def _close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    @property
    def _lock_file(self) -> Path:
        """Held while the file is made or removed."""
        return self.file.with_name(f".{self.file.name}.lock")

    def _make(self) -> None:
        """Make the file with its table, under another name, unless it is there."""
        if os.path.lexists(self.file):
            return
        descriptor, draft = tempfile.mkstemp(prefix=".", suffix=".part", dir=self.file.parent)
        try:
            os.fchmod(descriptor, files.private_mode(self.file.parent))
            with closing(_connection(Path(draft), "rw")) as db:
                db.execute("PRAGMA journal_mode=MEMORY")
                db.execute(TABLE)
                db.execute(f"PRAGMA user_version={FORMAT}")
                if self.file.name == NAME:
                    db.execute("PRAGMA journal_mode=WAL")
            files.rename(Path(draft), self.file)
        finally:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(draft)

    def _remove(self) -> None:
        """Remove the database and what SQLite keeps next to it, under the lock that a process that makes it holds."""
        with files.locked(self._lock_file):
            for suffix in SUFFIXES:
                self.file.with_name(self.file.name + suffix).unlink(missing_ok=True)


def _connection(file: Path, mode: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"file:{quote_from_bytes(os.fsencode(file.absolute()))}?mode={mode}",
        uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False,
    )  # fmt: skip
    db.text_factory = bytes  # damaged text is compared, not decoded
    db.execute("PRAGMA trusted_schema=OFF")
    db.execute("PRAGMA synchronous=NORMAL")
    return db


def _require_table(db: sqlite3.Connection) -> None:
    """Raise OperationalError for a file of a newer version, and DatabaseError for one that this module did not make."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > FORMAT:
        raise sqlite3.OperationalError(f"a newer version wrote it, in format {version}")
    if db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall() != [(TABLE.encode(),)]:
        raise _Damaged("it holds something else")
    if db.execute("PRAGMA journal_mode").fetchone() != (b"wal",):
        db.execute("PRAGMA journal_mode=MEMORY")


def _require_own(file: Path, folder: Path) -> None:
    """Raise OSError for a link, a file with a second name, and one of somebody else than this user or the folder's.

    Where only the owner of a folder and one group may write, files of that group belong to the folder, too.
    """
    with suppress(FileNotFoundError):
        status, around = file.lstat(), folder.stat()
        is_of_group = around.st_mode & 0o2022 == 0o2020 and status.st_gid == around.st_gid
        is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1  # none while another process removes it
        if not is_plain or not (is_of_group or status.st_uid in (os.geteuid(), around.st_uid)):
            raise PermissionError(0, f"{file.name} is a link, has a second name, or is not yours; remove it")


def _is_local(folder: Path) -> bool:
    """Whether a folder is on a file system of this machine alone."""
    real = os.path.realpath(folder)
    around = [disk for disk in psutil.disk_partitions(all=True) if Path(real).is_relative_to(disk.mountpoint)]
    return max(around, key=lambda disk: len(disk.mountpoint)).fstype in LOCAL if around else False


def _checked(key: bytes, value: bytes, checksum: int) -> bytes:
    """The value. Raises DatabaseError where a stranger, or a writer that was killed without a log, left another."""
    is_plain = isinstance(key, bytes) and isinstance(value, bytes)  # sqlite keeps any type in any column
    if not is_plain or zlib.crc32(value, zlib.crc32(key)) != checksum:
        raise _Damaged("a record differs from its checksum")
    return value


def _bytes(key: Key) -> bytes:
    return os.fsencode(key) if isinstance(key, str) else key


@functools.cache
def _say(sentence: str) -> None:
    log.warning(sentence)
