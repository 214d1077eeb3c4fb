"""Takes images and captions from a browser, in chunks, into one folder of data. Without a browser and gradio.

A file is collected in the private folder `drafts/uploads` and enters the folder of data only when it is complete and a
run can read it. The part that is there is all that is written down: its name is the id, made of the folder and of what
the browser knows of the file, so the same file that is chosen again goes on where it stopped, also after a restart. An
image gets the time that it has in the browser, by which it is found again and not sent twice.

Nothing is overwritten. An image whose name another image has, whatever its suffix, gets ` (2)`. The page sends images
before their captions and names the image of each caption, so a caption follows an image that was renamed. A caption
without such an image keeps its name, waits for an image of that name, and is refused where another caption has it.

See DECISIONS 196.
"""

from __future__ import annotations

import binascii
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from app.data.data_folders import DataFolders, is_same
from app.data.upload import upload_kinds, upload_names
from app.data.upload.upload_names import CAPTION, METADATA
from trainer.data.images import image_files
from trainer.system import files
from trainer.system.errors import InputError

MOST_CHUNK = 2 * files.MIB
"""Bytes of one chunk."""
MOST_UNFINISHED = 2_000
"""Uploads that are not finished."""
MOST_WAITING = 20 * 2**30
"""Bytes of all unfinished uploads when they are complete."""
LEAST_FREE = 2**30
"""Bytes that stay free on the disks that are written."""
ABANDONED_S = 7 * 86_400.0
"""An upload without a new chunk for so long is removed."""
MOST_GIVEN = 4096
"""Characters of what a browser says about a file."""
SAMPLES, SAMPLE = 16, 64 * 1024
"""Parts of a file, and bytes of each, that its mark is made of: the whole of one up to a megabyte."""
ID = re.compile(r"[0-9a-f]{32}-(?P<size>[0-9]{1,12})")
"""The id of an upload, with the bytes that it has when it is complete."""


class WrongOffset(InputError):
    """A chunk does not follow what is there.

    Attributes:
        received: Bytes that are there.
    """

    def __init__(self, received: int) -> None:
        super().__init__(f"the next byte is number {received}; send from there")
        self.received = received


class Unknown(InputError):
    """No unfinished upload has this id."""

    def __init__(self) -> None:
        super().__init__("this upload is finished, cancelled or too old; choose the file again")


class NotWritten(InputError):
    """The disk is full, or the folder closed. What was sent is kept, and the upload goes on when it is chosen again."""


@dataclass(frozen=True)
class Chosen:
    """What a browser says about a file.

    Attributes:
        folder: Where it goes.
        name: Its name, without a folder.
        size: Its bytes.
        path: Its path in the folder that was chosen.
        image: Name in the folder of the image that a caption belongs to.
        head: Its first bytes in hexadecimal digits, by which most files that are not read are refused before they are
            sent.
        modified_ms: When it was changed, in milliseconds since 1970; 0 where that is not known.
        mark: Adler-32 of its samples in hexadecimal digits: unpacked archives give all their files one time.
    """

    folder: str
    name: str
    size: int
    path: str = ""
    image: str = ""
    head: str = ""
    modified_ms: int = 0
    mark: str = ""


@dataclass(frozen=True)
class Placed:
    """A file that is in the folder.

    Attributes:
        name: Its name there.
        is_new: Whether it was put there; False where the folder had the same content under this name.
        is_alone: Whether it is a caption and the folder has no image of its name.
    """

    name: str
    is_new: bool
    is_alone: bool = False


@dataclass(frozen=True)
class Begun:
    """Where an upload stands.

    Attributes:
        id: Names it from now on.
        received: Bytes that are there already.
        placed: The file, where it is in the folder already and nothing has to be sent.
    """

    id: str
    received: int
    placed: Placed | None = None


class Uploads:
    """The unfinished uploads of one folder of runs. Several windows and pages may send at once.

    Attributes:
        closed: Why nothing is taken; "" where it is.
    """

    def __init__(self, folders: DataFolders, state: Path, clock: Callable[[], float] = time.time) -> None:
        """Create the store. state: the private folder of what is not complete."""
        self.closed = ""
        self.folders = folders
        self._state = state
        self._clock = clock

    def begin(self, chosen: Chosen) -> Begun:
        """Begin an upload, or go on with it.

        Raises:
            InputError: It would be refused, there are too many unfinished uploads, or the disk is too full.
        """
        real, name = self._checked(chosen)
        head = _bytes(chosen)
        upload_kinds.check_start(name, chosen.size, head)
        files.make_private(self._state)
        with self.folders.opened(real) as folder:
            require_usable(folder, real)
            part = self._part_file(id := _id(chosen, folder))
            if head and chosen.mark and not upload_kinds.is_text(name):
                stem, suffix = os.path.splitext(name)[0], upload_kinds.image_suffix(name, head)
                found, is_there = _name_of_image(folder, stem, suffix, lambda other: _is_chosen(folder, other, chosen))
                if is_there:
                    return Begun(id, chosen.size, Placed(found, is_new=False))
            if not os.path.lexists(part):
                self._require_room(name, chosen, folder)
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            return Begun(id, part.stat().st_size)

    def append(self, id: str, offset: int, chunk: bytes) -> int:
        """Add a chunk and return the bytes that are there now.

        Raises:
            WrongOffset: The bytes before the chunk are not there, or it is there already.
            InputError: It is too large, belongs to no upload, or goes beyond the file's end.
            NotWritten: The disk is full.
        """
        self._require_open()
        if len(chunk) > MOST_CHUNK:
            raise InputError(f"a chunk of {len(chunk)} bytes is larger than {MOST_CHUNK}; reload the page")
        with self._part(id) as part:
            received, size = os.fstat(part).st_size, _size(id)
            if offset != received:
                raise WrongOffset(received)
            if received + len(chunk) > size:
                raise InputError(f"more than its {size} bytes; choose the file again")
            rest = memoryview(chunk)
            try:
                while rest:
                    rest = rest[os.write(part, rest) :]
            except OSError as error:
                raise NotWritten(
                    f"cannot be written to {self._state} ({error.strerror}); free some space and choose it again, it "
                    "goes on where it stopped"
                ) from error
            return received + len(chunk)

    def finish(self, chosen: Chosen) -> Placed:
        """Check a complete file and put it into its folder. A file that is refused is removed.

        Raises:
            InputError: It is not complete, or not read by a run.
            Unknown: It is not there, or its folder was replaced meanwhile.
            NotWritten: The folder cannot be written; it can be finished later.
        """
        real, name = self._checked(chosen)
        with self.folders.opened(real) as folder, self._part(id := _id(chosen, folder)) as part:
            received, file = os.fstat(part).st_size, self._part_file(id)
            if received != chosen.size:
                raise InputError(f"{name}: {received} of its {chosen.size} bytes are here; send the rest")
            try:
                suffix = CAPTION if upload_kinds.is_text(name) else upload_kinds.check_image(file, name)
                # One at a time: a.png and a.jpg, which are sent at once, would both find the name free and share a
                # caption.
                with files.locked(self._state / "placing"):
                    _share(part, os.fstat(folder))
                    if name == METADATA:
                        placed = _place_metadata(folder, file)
                    elif suffix == CAPTION:
                        placed = _place_caption(folder, file, name, chosen)
                    else:
                        placed = _place_image(folder, file, os.path.splitext(name)[0], suffix, chosen)
            except InputError:
                file.unlink(missing_ok=True)
                raise
            except OSError as error:
                os.fchmod(part, 0o600)
                raise NotWritten(
                    f"{name}: cannot be written to {real} ({error.strerror}); free some space, or change the folder's "
                    "permissions, and choose it again; it is not sent again"
                ) from error
            file.unlink(missing_ok=True)
            return placed

    def cancel(self, id: str) -> None:
        """Forget an unfinished upload, after another window has finished it, if it does. What the folder has stays."""
        with suppress(Unknown), self._part(id):
            self._part_file(id).unlink(missing_ok=True)

    def _checked(self, chosen: Chosen) -> tuple[Path, str]:
        """Return the folder and the name to keep a file under."""
        self._require_open()
        if max(map(len, (chosen.name, chosen.path, chosen.image))) > MOST_GIVEN:
            wrong = f"its name or path is longer than {MOST_GIVEN} characters"
            raise InputError(f"{chosen.name[:200]!r}: {wrong}; rename it")
        real, name = self.folders.checked(chosen.folder), upload_names.safe(chosen.name)
        return real, METADATA if name.lower() == METADATA else name

    def _require_open(self) -> None:
        if self.closed:
            raise InputError(self.closed)

    def _part_file(self, id: str) -> Path:
        if not ID.fullmatch(id):
            raise Unknown
        return self._state / f"{id}.part"

    @contextmanager
    def _part(self, id: str) -> Iterator[int]:
        """Open the bytes of an upload and yield their descriptor; others wait meanwhile."""
        file = self._part_file(id)
        try:
            part = os.open(file, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise Unknown from error
        try:
            fcntl.flock(part, fcntl.LOCK_EX)
            status = os.fstat(part)
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{file}: {files.NOT_REGULAR}")
            try:
                is_current = os.path.samestat(os.stat(file, follow_symlinks=False), status)
            except FileNotFoundError:
                is_current = False
            if not is_current:  # finished or cancelled by another window while this one waited
                raise Unknown
            yield part
        finally:
            os.close(part)

    def _require_room(self, name: str, chosen: Chosen, folder: int) -> None:
        """Remove what was abandoned, and raise InputError where there is no room for another upload."""
        waiting, there, count = chosen.size, 0, 0
        for file in self._state.glob("*.part"):
            try:
                status = file.stat()
            except FileNotFoundError:  # finished just now
                continue
            if self._clock() - status.st_mtime > ABANDONED_S:
                file.unlink(missing_ok=True)
                continue
            waiting, there, count = waiting + _size(file.stem), there + status.st_size, count + 1
        if count >= MOST_UNFINISHED:
            raise InputError(
                f"{name}: {count} uploads are not finished, which is the limit; finish or cancel them, or remove "
                f"{self._state}"
            )
        if waiting > MOST_WAITING:
            raise InputError(
                f"{name}: unfinished uploads would take {waiting / 2**30:.1f} GiB, the limit is "
                f"{MOST_WAITING / 2**30:g}; finish or cancel some first"
            )
        needed, disk = max(waiting - there, chosen.size) + LEAST_FREE, os.fstatvfs(folder)
        free = min(shutil.disk_usage(self._state).free, disk.f_bavail * disk.f_frsize)
        if free < needed:
            raise InputError(
                f"{name}: needs {needed / 2**30:.1f} GiB of free disk for {chosen.folder}, which has "
                f"{free / 2**30:.1f}; free some space"
            )


def require_usable(folder: int, real: Path) -> None:
    """Raise InputError for an open folder that cannot be written, or whose images are in tables.

    A run does not read tables next to images.
    """
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
        raise InputError(f"{real}: cannot be written; change its permissions, or choose another folder")
    names = os.listdir(folder)
    tables = sorted(name for name in names if upload_names.is_table(name))
    if tables and not any(map(upload_names.is_image, names)):
        raise InputError(
            f"{real}: its images are in {tables[0]}, which is not read once the folder has images of its own; choose a "
            "new folder"
        )


def _id(chosen: Chosen, folder: int) -> str:
    """Return the id of an upload into this very folder: another one in its place has another inode."""
    about = json.dumps([*astuple(chosen), os.fstat(folder).st_ino])
    return f"{hashlib.sha256(about.encode()).hexdigest()[:32]}-{chosen.size}"


def _size(id: str) -> int:
    """Return the bytes of an upload when it is complete; 0 for a file that is not one."""
    found = ID.fullmatch(id)
    return int(found["size"]) if found else 0


def _bytes(chosen: Chosen) -> bytes:
    try:
        return binascii.unhexlify(chosen.head)[: upload_kinds.HEAD]
    except ValueError as error:
        raise InputError(f"{chosen.name[:200]!r}: its first bytes are not hexadecimal; reload the page") from error


def _is_chosen(folder: int, name: str, chosen: Chosen) -> bool:
    """Whether an entry of an open folder is the file that a browser speaks of, by its size, time and samples."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:  # a link, or closed to us: another file
        return False
    try:
        status, value = os.fstat(descriptor), 1
        if not stat.S_ISREG(status.st_mode):
            return False
        if (status.st_size, status.st_mtime_ns // 1_000_000) != (chosen.size, chosen.modified_ms):
            return False
        for at in range(0, chosen.size, max(SAMPLE, -(-chosen.size // SAMPLES))):
            value = zlib.adler32(os.pread(descriptor, SAMPLE, at), value)
        return f"{value:x}" == chosen.mark
    finally:
        os.close(descriptor)


def _name_of_image(folder: int, stem: str, suffix: str, is_it: Callable[[str], bool]) -> tuple[str, bool]:
    """Return the name of an image in an open folder, and whether it has it there already: else the name is free."""
    present = upload_names.by_stem(os.listdir(folder))
    for number, candidate in enumerate(upload_names.numbered(stem)):
        name = f"{candidate}{suffix}"
        taken = upload_names.in_the_way(present, candidate, number == 0)
        same = [other for other in taken if upload_names.parts(other) == upload_names.parts(name)]
        if found := next(filter(is_it, same), None):
            return found, True
        if not taken:
            return name, False
    raise AssertionError("numbered() ends with an error")


def _place_image(folder: int, file: Path, stem: str, suffix: str, chosen: Chosen) -> Placed:
    while True:
        name, is_there = _name_of_image(folder, stem, suffix, lambda other: is_same(folder, other, file))
        if is_there:
            return Placed(name, is_new=False)
        with suppress(FileExistsError):  # made by another program just now
            files.place_at(file, folder, name)
            if 0 < chosen.modified_ms < 2**42:
                # Nanoseconds of its own: a thumbnail is known by path, size and time, and a file may replace another.
                modified = chosen.modified_ms * 1_000_000 + secrets.randbelow(1_000_000)
                os.utime(name, ns=(modified, modified), dir_fd=folder, follow_symlinks=False)
            return Placed(name, is_new=True)


def _place_caption(folder: int, file: Path, given: str, chosen: Chosen) -> Placed:
    upload_kinds.check_caption(file, given)
    present, is_alone = os.listdir(folder), False
    if chosen.image:
        if chosen.image not in present or not upload_names.is_image(chosen.image):
            raise InputError(f"{given}: its image {chosen.image[:200]!r} is not in {chosen.folder}; send it first")
        stem = os.path.splitext(chosen.image)[0]
    else:
        wanted = upload_names.parts(given)[0]
        own = os.path.splitext(given)[0]
        images = sorted(os.path.splitext(name)[0] for name in present if upload_names.is_image(name))
        alike = [stem for stem in images if upload_names.parts(stem + CAPTION)[0] == wanted]
        stem, is_alone = own if own in alike else next(iter(alike), own), not alike
    name = f"{stem}{CAPTION}"
    refusal = f"{name}: the folder has another caption of this name, which stays; edit it here"
    return replace(_place_once(folder, file, name, refusal), is_alone=is_alone)


def _place_metadata(folder: int, file: Path) -> Placed:
    present = os.listdir(folder)
    upload_kinds.check_metadata(file, frozenset(name for name in present if upload_names.is_image(name)))
    refusal = f"{METADATA}: the folder has another one, which stays; add your rows to it there"
    if any(name.lower() in image_files.METADATA and name.lower() != METADATA for name in present):
        raise InputError(refusal)
    return _place_once(folder, file, METADATA, refusal)


def _place_once(folder: int, file: Path, name: str, refusal: str) -> Placed:
    """Put a file into a folder under this name and no other. Raises InputError where it is taken by other content."""
    taken = [other for other in os.listdir(folder) if upload_names.parts(other) == upload_names.parts(name)]
    if found := next((other for other in taken if is_same(folder, other, file)), None):
        return Placed(found, is_new=False)
    if taken:
        raise InputError(refusal)
    try:
        files.place_at(file, folder, name)
    except FileExistsError as error:
        raise InputError(refusal) from error
    return Placed(name, is_new=True)


def _share(part: int, folder: os.stat_result) -> None:
    """Let those who may read the folder read the file; in a folder that gives its group away, that group."""
    if folder.st_mode & stat.S_ISGID:
        with suppress(PermissionError):  # a group that this user is not in
            os.fchown(part, -1, folder.st_gid)
    os.fchmod(part, 0o664 & folder.st_mode)
