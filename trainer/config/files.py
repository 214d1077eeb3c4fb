"""Files that a power cut, another process or a stranger may have had their hands on. No torch here.

What is replaced is on the disk before it gets its name. What is read may be anything: a pipe that never ends, a
device, a folder, a gigabyte, half a sentence.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from trainer.config.errors import InputError

MIB = 2**20
MOST_BYTES = 64 * MIB
"""Of a file that is read whole and that a person or this program wrote."""
MOST_SHOWN = 200
"""Letters of a place in a file that an error names."""
NOT_REGULAR = "not a regular file; remove it, or put a file in its place"
T = TypeVar("T")


def replace(file: Path, content: str | bytes, mode: int | None = None) -> None:
    """Write a whole file, or leave what was there. The folder must exist. An existing file keeps its permissions and,
    where that is allowed, its group.

    mode: the permissions that it gets instead.
    When this returns, the content is on the disk: after a power cut the file holds the former content or this one.
    Raises OSError, as for a full disk.
    """
    with _draft(file, content) as draft:
        with suppress(FileNotFoundError):
            former = file.lstat()
            if stat.S_ISREG(former.st_mode):
                mode = stat.S_IMODE(former.st_mode) if mode is None else mode
                with suppress(PermissionError):  # a group that this user is not in
                    os.chown(draft, -1, former.st_gid)
        if mode is not None:
            draft.chmod(mode)
        rename(draft, file)


def create(file: Path, content: str | bytes) -> None:
    """Write a new file whole, or none, as `replace` does. Of several writers of one name the first one wins.

    Raises FileExistsError where there is one.
    """
    with _draft(file, content) as draft:
        flush(draft)
        try:
            os.link(draft, file)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links, as exFAT: empty for a moment
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            os.replace(draft, file)
        draft.unlink(missing_ok=True)
        flush(file.parent)


@contextmanager
def _draft(file: Path, content: str | bytes) -> Iterator[Path]:
    """A file next to `file` that holds the content, and is removed when anything goes wrong in the block."""
    draft = file.with_name(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        yield draft
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def put_aside(path: Path, folder: Path | None = None) -> Path:
    """Give the name of something damaged free, whatever it is. folder: where to, else where it lies. Returns where.

    Raises OSError where it cannot be moved.
    """
    home = folder or path.parent
    home.mkdir(parents=True, exist_ok=True)
    aside = home / f"{path.name}.damaged-{time.time_ns()}"
    os.replace(path, aside)
    flush(aside.parent)
    return aside


def rename(draft: Path, final: Path) -> None:
    """Give a file that is complete, or a folder of such, its name: what is on the disk is on it under that name."""
    flush(draft)
    os.replace(draft, final)
    flush(final.parent)


def flush_all(path: Path) -> None:
    """Return when a file, or a folder with all that is in it, is on the disk."""
    if path.is_dir():
        for inner in path.iterdir():
            flush_all(inner)
    flush(path)


def flush(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot flush a folder write names at once
            raise
    finally:
        os.close(descriptor)


def opened(file: Path) -> BufferedReader:
    """A regular file, open for reading. Waits for nothing.

    Raises FileNotFoundError or another OSError, and InputError for a folder, a pipe, a socket, a device or links in a
    loop.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"{file}: {NOT_REGULAR}") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{file}: {NOT_REGULAR}")
    return open(descriptor, "rb")


def unreadable(file: Path | str, error: OSError) -> InputError:
    """The error about a file that is there and cannot be read."""
    return InputError(f"{file}: cannot be read ({error.strerror}); repair or remove it")


def read(file: Path, at_most: int = MOST_BYTES) -> bytes:
    """The content of a regular file. Raises as `opened` does, and InputError for one that is longer."""
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size  # room is made for all that is asked for, at once
        content = stream.read(min(size, at_most) + 1)
        if size < len(content) <= at_most:  # one that grows, or of /proc, which have no size
            content += stream.read(at_most + 1 - len(content))
    if len(content) > at_most:
        raise InputError(f"{file}: longer than {at_most / MIB:g} MiB; remove it, or put a shorter one in its place")
    return content


def read_json(file: Path, kind: TypeAdapter[T], remedy: str = "repair or remove it", at_most: int = MOST_BYTES) -> T:
    """What a JSON file holds, checked. Raises OSError and InputError as `read` does, and InputError for a damaged one.

    remedy: what the user may do about a damaged file.
    """
    content = read(file, at_most)
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        raise InputError(f"{file}: damaged ({first_problem(error)}); {remedy}") from error


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong with some data, with its place in them, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    place = (place if place.isprintable() else ascii(place))[:MOST_SHOWN]
    return f"{place}: {first['msg']}" if place else first["msg"]


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Only one process and thread at a time is inside the block. file: made where it is missing; its content counts
    for nothing."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def make_private(folder: Path) -> Path:
    """Make a folder that only its owner may look into, or close one that others could. Returns it.

    One that is shared with a group (setgid, and writable by the group) stays so and is closed to all others. A link,
    and a folder of another user, are left as they are. Raises OSError where nothing can be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
        mode = stat.S_IMODE(status.st_mode)
        closed = mode & ~0o007 if _is_shared(mode) else mode & ~0o077
        if mode != closed:
            folder.chmod(closed)
    return folder


def private_mode(folder: Path) -> int:
    """The permissions of a file in this folder that only its owner reads, and the group that shares the folder."""
    return 0o660 if _is_shared(folder.stat().st_mode) else 0o600


def _is_shared(mode: int) -> bool:
    return mode & 0o2020 == 0o2020


def make_private_if_new(folder: Path) -> None:
    """Make a folder that only its owner may look into. One that exists keeps its permissions: a user may share it.

    Raises OSError where nothing can be written, or something else is there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o770 if _is_shared(folder.parent.stat().st_mode) else 0o700)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
