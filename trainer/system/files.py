"""Read and write files safely against power cuts, other processes and untrusted content. Imports no torch.

A replaced file is on the disk before it gets its name. A file to read may be anything: a pipe that never ends, a
device, a folder, a gigabyte, half a sentence.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

from pydantic import TypeAdapter, ValidationError

from trainer.system.errors import InputError
from trainer.system.installation import user_folder

MIB = 2**20
MOST_BYTES = 64 * MIB
"""Largest size of a file that is read whole and that a person or this program wrote."""
PAGE_BYTES = 64 * 1024
MOST_SHOWN = 200
"""Longest location within a file that an error shows, in characters."""
NOT_REGULAR = "not a regular file; remove it, or put a file in its place"
LEADS_OUT = (
    "a link out of the model's folder, which would be copied into what is exported; put the file in its place, or copy "
    "the folder with cp -rL and name the copy"
)
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Names of files in the Hugging Face cache, by their content."""
COARSEST_NS = 2_000_000_000
"""Coarsest time stamps of a file system, those of FAT. A file that was read earlier than this after its last change may
have changed once more without another time stamp; git reads such files again too."""
FORMAT_FILE = "format"
"""In a run folder and in the examples of a cache: `format: 1`. JSON files hold their format as a field."""
T = TypeVar("T")


_FIELDS: TypeAdapter[dict[str, object]] = TypeAdapter(dict[str, object])


class FormatError(InputError):
    """A file or folder is of another version, which wrote it in a format that this one does not read."""


class Stamp(NamedTuple):
    """Facts of a file that change with its content. Times are in nanoseconds; `changed` is when the inode changed
    (st_ctime), which programs cannot set back."""

    size: int
    modified: int
    changed: int
    inode: int

    @classmethod
    def of(cls, file: Path) -> Stamp:
        """The stamp of a file. Raises OSError if there is none."""
        status = file.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def is_safe(self, read_at: int) -> bool:
        """Whether a file read at this time, in nanoseconds, cannot have changed afterwards without another stamp."""
        return max(self.modified, self.changed) + COARSEST_NS < read_at


def replace(file: Path, content: str | bytes, mode: int | None = None) -> None:
    """Write a whole file atomically. The folder must exist.

    When this returns, the content is on the disk: after a power cut the file holds either the former content or this
    one. An existing file keeps its permissions and, if allowed, its group.

    Args:
        file: The file to write or replace.
        content: Text is written as UTF-8.
        mode: Permissions for the file, in place of those it had.

    Raises:
        OSError: It cannot be written, for example because the disk is full.
    """
    with _temporary(file, content) as temporary:
        with suppress(FileNotFoundError):
            former = file.lstat()
            if stat.S_ISREG(former.st_mode):
                mode = stat.S_IMODE(former.st_mode) if mode is None else mode
                with suppress(PermissionError):  # a group that this user is not in
                    os.chown(temporary, -1, former.st_gid)
        if mode is not None:
            temporary.chmod(mode)
        rename(temporary, file)


def replace_at(folder: int, name: str, content: bytes) -> None:
    """Write a whole file atomically into an open folder, which no link that is put in its way can redirect.

    An existing file keeps its permissions.

    Args:
        folder: Descriptor of the folder.
        name: Name of the file in the folder.
        content: The content.

    Raises:
        OSError: It cannot be written.
    """
    temporary = f".{os.getpid()}-{threading.get_ident()}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with open(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as stream:
            stream.write(content)
            with suppress(FileNotFoundError):
                former = os.stat(name, dir_fd=folder, follow_symlinks=False)
                os.fchmod(stream.fileno(), stat.S_IMODE(former.st_mode))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise
    # The name is in the folder, which a power cut may set back as well.
    os.fsync(folder)


def create(file: Path, content: str | bytes) -> None:
    """Write a new file atomically, as `replace` does. If several writers use the same name, the first one wins.

    Raises:
        FileExistsError: The file exists.
        OSError: It cannot be written.
    """
    with _temporary(file, content) as temporary:
        flush(temporary)
        try:
            os.link(temporary, file)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links, such as exFAT: the file is empty for a moment
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            os.replace(temporary, file)
        temporary.unlink(missing_ok=True)
        flush(file.parent)


def place_at(source: Path, folder: int, name: str) -> None:
    """Move a complete file into an open folder, also one of another file system. Nothing is overwritten.

    Args:
        source: The file, which nothing writes meanwhile.
        folder: Descriptor of the folder, which no link that is put in its way can redirect.
        name: Name of the file in the folder.

    Raises:
        FileExistsError: The name is taken.
        OSError: It cannot be written.
    """
    flush(source)
    try:
        os.link(source, name, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # another file system, or one without hard links
        _copy_at(source, folder, name)
    os.fsync(folder)
    source.unlink()


def move_at(folder: int, name: str, target: int, new_name: str) -> None:
    """Move a file, or a link itself, between open folders of one file system. Nothing is overwritten.

    Raises:
        FileExistsError: The new name is taken.
        OSError: It cannot be moved.
    """
    try:
        os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=target, follow_symlinks=False)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise
        # A file system without hard links, or a file of another user: the new name is empty for a moment.
        os.close(os.open(new_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=target))
        try:
            os.replace(name, new_name, src_dir_fd=folder, dst_dir_fd=target)
        except OSError:
            os.unlink(new_name, dir_fd=target)
            raise
    else:
        os.unlink(name, dir_fd=folder)
    os.fsync(target)


def _copy_at(source: Path, folder: int, name: str) -> None:
    temporary = f".{secrets.token_hex(8)}.part"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as copy, opened(source) as original:
            shutil.copyfileobj(original, copy, MIB)
            os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(original.fileno()).st_mode))
            copy.flush()
            os.fsync(copy.fileno())
        move_at(folder, temporary, folder, name)
    except BaseException:
        os.unlink(temporary, dir_fd=folder)
        raise


def write_problem(folder: Path) -> OSError | None:
    """Return why nothing can be written into a folder, found by writing a page; None if it can.

    The free space that a file system states does not count quotas.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as page:  # without a name: a process that is killed leaves nothing
            page.write(bytes(PAGE_BYTES))
            page.flush()
            os.fsync(page.fileno())
    except OSError as error:
        return error
    return None


@contextmanager
def _temporary(file: Path, content: str | bytes) -> Iterator[Path]:
    """Yield a temporary file next to `file` with the content. It is removed if the block raises."""
    temporary = file.with_name(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def put_aside(path: Path, folder: Path | None = None) -> Path:
    """Rename a damaged file or folder, so that its name is free again.

    Args:
        path: The damaged file or folder.
        folder: Where to move it. None: it stays in its folder.

    Returns:
        Its new path.

    Raises:
        OSError: It cannot be moved.
    """
    target = folder or path.parent
    target.mkdir(parents=True, exist_ok=True)
    aside = target / f"{path.name}.damaged-{time.time_ns()}"
    os.replace(path, aside)
    flush(aside.parent)
    return aside


def rename(temporary: Path, final: Path) -> None:
    """Give a complete file or folder its final name. On return, both the content and the name are on the disk."""
    flush(temporary)
    os.replace(temporary, final)
    flush(final.parent)


def flush_all(path: Path) -> None:
    """Return when a file, or a folder with everything in it, is on the disk."""
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
    """Open a regular file for reading, without ever blocking.

    Raises:
        OSError: It does not exist or cannot be opened.
        InputError: It is a folder, a pipe, a socket, a device or a loop of links.
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


def opened_to_append(file: Path, mode: int = 0o600) -> int:
    """Open a file of a run folder or cache to read and append, and return its descriptor. It is made if it is missing.

    The folder may come from a stranger: nothing is written through a link, nor into a file with a second name, which
    an archive can make as well.

    Args:
        file: The file.
        mode: Permissions of a new file, before the umask.

    Raises:
        OSError: It cannot be opened.
        InputError: It is not a regular file of this one name.
    """
    # Without O_NONBLOCK the opening of a device or a pipe that lies there may wait for ever.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(file, flags, mode)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP):
            raise InputError(f"{file}: {NOT_REGULAR}") from error
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise InputError(f"{file}: has a second name (a hard link), under which it would change, too; put a copy here")
    raise InputError(f"{file}: {NOT_REGULAR}")


def written(status: os.stat_result) -> float:
    """Return when a file was last written, as unix time. Archives may set any date: one that is to come counts as that
    of the unpacking."""
    return min(status.st_mtime, status.st_ctime)  # the second is set by the disk alone


def pasted(path: str) -> str:
    """Return a path that was pasted as file managers and terminals copy it: in quotes, or as file:///a%20folder."""
    path = path.strip() or path
    if len(path) > 2 and path[0] == path[-1] and path[0] in "'\"":
        path = path[1:-1]
    address = re.fullmatch(r"file://(?:localhost)?(/.*)", path)
    return unquote(address[1]) if address else path


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path below a folder leads out of it through a link.

    The Hugging Face cache keeps the content of a snapshot's files in the folder `blobs`, which belongs to it.
    """
    try:
        root, target = folder.resolve(), path.resolve()
    except RuntimeError:  # links in a loop
        return True
    blobs = [(above.parent / "blobs").resolve() for above in (root, *root.parents) if above.name == "snapshots"]
    return not any(target.is_relative_to(place) for place in (root, *blobs))


def leads_out_of_model(file: Path, folder: Path) -> bool:
    """Whether a file of a model's folder is a link out of it, and not to a file of the Hugging Face cache.

    Downloads into a folder of one's own used to link to that cache. Its files are named by their content, so that
    nobody can name one who does not know it.
    """
    if not leads_out(file, folder):
        return False
    target = Path(os.path.realpath(file))
    is_cached = target.parent.name == "blobs" and target.parents[1].name.startswith("models--")
    return not (is_cached and BLOB.fullmatch(target.name))


def unreadable(file: Path | str, error: OSError) -> InputError:
    """Return the InputError for a file that exists but cannot be read."""
    return InputError(f"{file}: cannot be read ({error.strerror}); repair or remove it")


def read(file: Path, at_most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: It does not exist or cannot be read.
        InputError: It is not a regular file, or is longer than `at_most` bytes.
    """
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size  # read() allocates as many bytes as it is asked for
        content = stream.read(min(size, at_most) + 1)
        if size < len(content) <= at_most:  # a growing file, or one in /proc, which has no size
            content += stream.read(at_most + 1 - len(content))
    if len(content) > at_most:
        raise InputError(f"{file}: longer than {at_most / MIB:g} MiB; remove it, or put a shorter one in its place")
    return content


def check_format(file: Path, found: object, reads: int, remedy: str) -> None:
    """Raise FormatError unless a file has the format that this version reads.

    Args:
        file: The file.
        found: The format that it says; None if it says none.
        reads: The format of this version.
        remedy: What the user can do.

    See DECISIONS 213.
    """
    if type(found) is not int or found != reads:
        has = "no format" if found is None else f"format {ascii(found)[:20]}"
        raise FormatError(f"{file}: has {has}, and this version of ShardStudio reads format {reads}; {remedy}")


def check_folder_format(folder: Path, reads: int, remedy: str) -> None:
    """Do the same for a folder, by its file `format`. Raises InputError if that cannot be read."""
    file = folder / FORMAT_FILE
    try:
        text = read(file).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return check_format(folder, None, reads, remedy)
    except OSError as error:
        raise unreadable(file, error) from error
    number = re.fullmatch(r"format: (\d{1,9})", text)
    return check_format(file, int(number[1]) if number else text, reads, remedy)


def write_folder_format(folder: Path, number: int) -> None:
    """Write the file `format` of a folder."""
    replace(folder / FORMAT_FILE, f"format: {number}\n", 0o644)


def read_json(
    file: Path,
    kind: TypeAdapter[T],
    remedy: str = "repair or remove it",
    at_most: int = MOST_BYTES,
    reads: int | None = None,
) -> T:
    """Read a JSON file and validate it.

    Args:
        file: The file to read.
        kind: The type it must hold.
        remedy: What the user can do about a damaged file.
        at_most: Largest size in bytes.
        reads: The format that it must say it has; None for a file that says none.

    Raises:
        OSError: It does not exist or cannot be read.
        InputError: It is damaged, too long or not a regular file; FormatError, it is of another version.
    """
    return parsed(file, read(file, at_most), kind, remedy, reads)


def parsed(
    file: Path, content: bytes, kind: TypeAdapter[T], remedy: str = "repair or remove it", reads: int | None = None
) -> T:
    """Validate the content of a JSON file. Raises InputError, naming the file, as `read_json` does."""
    try:
        if reads is not None:
            check_format(
                file, _FIELDS.validate_json(content).get("format"), reads, f"use the version that wrote it, or {remedy}"
            )
        return kind.validate_json(content)
    except ValidationError as error:
        raise InputError(f"{file}: damaged ({first_problem(error)}); {remedy}") from error


def first_problem(error: ValidationError) -> str:
    """Return the first problem of invalid data in one line, with its location in the data."""
    first = error.errors(include_url=False, include_input=False)[0]
    location = ".".join(map(str, first["loc"]))
    location = (location if location.isprintable() else ascii(location))[:MOST_SHOWN]
    return f"{location}: {first['msg']}" if location else first["msg"]


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock on `file`, which is created if missing, across processes and threads.

    Raises OSError where it cannot be opened, or is a link: that may come from a stranger.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def locked_by_one(file: Path, refusal: str) -> Iterator[None]:
    """Hold an exclusive lock on `file`, which is created if missing. Others are refused where `locked` waits.

    Raises:
        InputError: Another process holds it; the message is `refusal`.
        OSError, InputError: As `opened_to_append` does.
    """
    lock = opened_to_append(file)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(refusal) from error
        yield
    finally:
        os.close(lock)


def make_private(folder: Path) -> Path:
    """Make a folder that only its owner can access, or remove the access of others to an existing one. Returns it.

    A folder that is shared with a group (setgid and writable by the group) stays shared with it and is closed to all
    others. A link and a folder of another user are not changed.

    Raises:
        OSError: The folder cannot be made or changed.

    See DECISIONS 138.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _close(folder, is_shared=False)
    return folder


def close_to_others(folder: Path) -> None:
    """Remove the access of others to an existing folder, as `make_private` does, wherever it came from.

    The group keeps what it may do where it shares the folder around it.

    Raises:
        OSError: The folder cannot be changed.
    """
    _close(folder, is_shared=_is_shared(folder.parent.stat().st_mode))


def _close(folder: Path, is_shared: bool) -> None:
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
        mode = stat.S_IMODE(status.st_mode)
        closed = mode & ~0o007 if is_shared or _is_shared(mode) else mode & ~0o077
        if mode != closed:
            folder.chmod(closed)


def user_cache() -> Path | None:
    """Return the folder below the user's own cache where only this program writes; None for a user without a home."""
    return user_folder("XDG_CACHE_HOME", ".cache")


def own_folders() -> Iterator[Path]:
    """The folders of this user that only this program writes to, best first: the last does not outlive the machine.

    They may not exist, or be of no use: see `make_own`.
    """
    cache = user_cache()
    if cache is not None:
        yield cache
    yield Path(tempfile.gettempdir()) / f"shardstudio-{os.getuid()}"


def make_own(folder: Path) -> None:
    """Make a folder that only this user can access. Raises OSError if others may have written to an existing one."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    around = folder.parent.stat()
    if around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
        raise PermissionError(0, f"others may rename what is in {folder.parent}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or others_write:
        yours = f"; if all in it is yours, chmod -R go-w {folder}"
        raise PermissionError(0, f"others may write to {folder}, or it is not a folder{yours}")
    folder.chmod(0o700)
    if not os.access(folder, os.W_OK):
        raise PermissionError(0, "it is not writable")


def private_mode(folder: Path) -> int:
    """Return the permissions for a private file in this folder: for its owner, and the group that shares the folder."""
    return 0o660 if _is_shared(folder.stat().st_mode) else 0o600


def _is_shared(mode: int) -> bool:
    return mode & 0o2020 == 0o2020


def make_private_if_new(folder: Path) -> None:
    """Make a folder that only its owner can access. An existing one keeps its permissions: a user may share it.

    Raises:
        OSError: The folder cannot be made, or the path is not a folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o770 if _is_shared(folder.parent.stat().st_mode) else 0o700)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
