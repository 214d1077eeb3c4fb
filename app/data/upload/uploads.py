"""Takes images and captions from a browser, in chunks, into one folder of data. Without a browser and gradio.

A file is collected in the private folder `drafts/uploads` and enters the folder of data only when it is complete and a
run can read it. Its id is made of the folder and of what the browser knows of the file, so the same file that is chosen
again goes on where it stopped, also after a restart, and one that is there already is not sent again.

Nothing is overwritten. An image whose name another image has, whatever its suffix, gets ` (2)`. The page sends images
before their captions and names the image of each caption, so a caption follows an image that was renamed. A caption
without such an image keeps its name, waits for an image of that name, and is refused where another caption has it.

See DECISIONS 196.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

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
SWEPT_EVERY_S = 3600.0
MOST_REMEMBERED = 50_000
"""Finished uploads that are remembered, the newest ones."""
MOST_GIVEN = 4096
"""Characters of what a browser says about a file."""
_HEX = frozenset("0123456789abcdef")


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


class NotWritten(InputError):
    """The disk is full, or the folder closed. What was sent is kept, and the upload goes on when it is chosen again."""


@dataclass(frozen=True)
class Placed:
    """A file that is in the folder.

    Attributes:
        name: Its name there.
        is_new: Whether it was put there; False where the folder had the same content under this name.
    """

    name: str
    is_new: bool


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


@dataclass(frozen=True)
class _Upload:
    """The record of an unfinished upload. `device` and `inode` are those of the folder."""

    folder: str
    device: int
    inode: int
    name: str
    size: int
    image: str


@dataclass(frozen=True)
class _Kept:
    """A finished upload, with the file's stamp: another file of the same name is not it."""

    id: str
    name: str
    size: int
    modified: int
    inode: int


_UPLOAD = TypeAdapter(_Upload)
_KEPT = TypeAdapter(_Kept)


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
        self._swept_at = 0.0
        self._finished = _Finished(state / "finished.jsonl")
        self._lock = threading.Lock()

    def begin(self, folder: str, name: str, size: int, identity: str = "", image: str = "", head: bytes = b"") -> Begun:
        """Begin an upload, or go on with it.

        Args:
            folder: Where the file goes.
            name: Its name, without a folder.
            size: Its bytes.
            identity: What else the browser knows of it: its path in the chosen folder and its time.
            image: Name in the folder of the image that a caption belongs to.
            head: Its first bytes, by which most files that are not read are refused before they are sent.

        Raises:
            InputError: It would be refused, there are too many unfinished uploads, or the disk is too full.
        """
        self._require_open()
        if max(map(len, (name, identity, image))) > MOST_GIVEN:
            raise InputError(f"{name[:200]!r}: its name or path is longer than {MOST_GIVEN} characters; rename it")
        real, safe = self.folders.checked(folder), upload_names.safe(name)
        safe = METADATA if safe.lower() == METADATA else safe
        upload_kinds.check_start(safe, size, head[: upload_kinds.HEAD])
        about = [str(real), name, size, identity, image]
        id = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
        with self._locked(), self.folders.opened(real) as descriptor:
            require_usable(descriptor, real)
            self._sweep()
            if kept := self._finished.find(id, descriptor):
                return Begun(id, size, Placed(kept.name, is_new=False))
            status = os.fstat(descriptor)
            upload = _Upload(str(real), status.st_dev, status.st_ino, safe, size, image)
            return Begun(id, self._prepare(id, upload, descriptor))

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
        upload = self._upload(id)
        with self._part(id) as part:
            received = os.fstat(part).st_size
            if offset != received:
                raise WrongOffset(received)
            if received + len(chunk) > upload.size:
                raise InputError(f"{upload.name}: more than its {upload.size} bytes; choose the file again")
            rest = memoryview(chunk)
            try:
                while rest:
                    rest = rest[os.write(part, rest) :]
            except OSError as error:
                wrong = f"{upload.name}: cannot be written to {self._state} ({error.strerror})"
                raise NotWritten(
                    f"{wrong}; free some space and choose it again, it goes on where it stopped"
                ) from error
            return received + len(chunk)

    def finish(self, id: str) -> Placed:
        """Check a complete file and put it into its folder. A file that is refused is removed.

        Raises:
            InputError: It is not complete, not read by a run, or its folder was replaced meanwhile.
            NotWritten: The folder cannot be written; it can be finished later.
        """
        self._require_open()
        upload = self._upload(id)
        with self._part(id) as part:
            received = os.fstat(part).st_size
            if received != upload.size:
                raise InputError(f"{upload.name}: {received} of its {upload.size} bytes are here; send the rest")
            try:
                placed = self._place(id, upload, part)
            except NotWritten:
                raise
            except InputError:
                self._forget(id)
                raise
        self._file(id).unlink(missing_ok=True)
        return placed

    def cancel(self, id: str) -> None:
        """Forget an unfinished upload, after another window has finished it, if it does. What the folder has stays."""
        try:
            with self._part(id):
                self._forget(id)
        except Unknown:
            self._forget(id)

    def _forget(self, id: str) -> None:
        for file in (self._file(id), self._part_file(id)):
            file.unlink(missing_ok=True)

    def _require_open(self) -> None:
        if self.closed:
            raise InputError(self.closed)

    def _file(self, id: str) -> Path:
        if len(id) != 32 or not _HEX.issuperset(id):
            raise Unknown("not an upload; choose the file again")
        return self._state / f"{id}.json"

    def _part_file(self, id: str) -> Path:
        return self._file(id).with_suffix(".part")

    def _upload(self, id: str) -> _Upload:
        try:
            return files.read_json(self._file(id), _UPLOAD)
        except FileNotFoundError as error:
            raise Unknown("this upload is finished, cancelled or too old; choose the file again") from error

    @contextmanager
    def _part(self, id: str) -> Iterator[int]:
        """Open the bytes of an upload and yield their descriptor; others wait meanwhile."""
        try:
            part = os.open(self._part_file(id), os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise Unknown("this upload is finished, cancelled or too old; choose the file again") from error
        try:
            fcntl.flock(part, fcntl.LOCK_EX)
            if not stat.S_ISREG(os.fstat(part).st_mode):
                raise InputError(f"{self._part_file(id)}: {files.NOT_REGULAR}")
            if not self._is_current(id, part):  # finished or cancelled by another window while this one waited
                raise Unknown("this upload is finished or cancelled already; choose the file again")
            yield part
        finally:
            os.close(part)

    def _is_current(self, id: str, part: int) -> bool:
        try:
            status = os.stat(self._part_file(id), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(status, os.fstat(part))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        files.make_private(self._state)
        with self._lock, files.locked(self._state / "lock"):
            yield

    def _prepare(self, id: str, upload: _Upload, folder: int) -> int:
        """Return the bytes of an upload that are there, after making a place for it where there is none."""
        part = self._part_file(id)
        if not os.path.lexists(self._file(id)):
            self._require_room(upload, folder)
        files.replace(self._file(id), _UPLOAD.dump_json(upload), 0o600)  # the folder may have been made anew
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        return part.stat().st_size

    def _require_room(self, upload: _Upload, folder: int) -> None:
        known = list(self._state.glob("*.json"))
        if len(known) >= MOST_UNFINISHED:
            raise InputError(
                f"{upload.name}: {len(known)} uploads are not finished, which is the limit; finish or cancel them, or "
                f"remove {self._state}"
            )
        waiting = 0
        for file in known:
            try:
                waiting += files.read_json(file, _UPLOAD).size
            except (InputError, FileNotFoundError):  # damaged, or finished just now
                continue
        if waiting + upload.size > MOST_WAITING:
            raise InputError(
                f"{upload.name}: unfinished uploads would take {(waiting + upload.size) / 2**30:.1f} GiB, the limit is "
                f"{MOST_WAITING / 2**30:g}; finish or cancel some first"
            )
        there = sum(size for size, _ in map(_size_and_time, self._state.glob("*.part")))
        needed = max(waiting - there, 0) + upload.size + LEAST_FREE
        free = min(shutil.disk_usage(self._state).free, _free(folder))
        if free < needed:
            raise InputError(
                f"{upload.name}: needs {needed / 2**30:.1f} GiB of free disk for {upload.folder}, which has "
                f"{free / 2**30:.1f}; free some space"
            )

    def _sweep(self) -> None:
        """Remove what was abandoned."""
        now = self._clock()
        if 0 <= now - self._swept_at < SWEPT_EVERY_S:
            return
        self._swept_at = now
        for file in (*self._state.glob("*.part"), *self._state.glob("*.json")):
            part, about = file.with_suffix(".part"), file.with_suffix(".json")
            if now - max(_size_and_time(part)[1], _size_and_time(about)[1]) > ABANDONED_S:
                part.unlink(missing_ok=True)
                about.unlink(missing_ok=True)

    def _place(self, id: str, upload: _Upload, part: int) -> Placed:
        """Put a complete file into its folder, under a name that nothing there has."""
        file, real = self._part_file(id), Path(upload.folder)
        suffix = CAPTION if upload_kinds.is_text(upload.name) else upload_kinds.check_image(file, upload.name)
        # One at a time: a.png and a.jpg, which are sent at once, would both find the name free and share a caption.
        with self.folders.opened(real) as folder, files.locked(self._state / "placing"):
            status = os.fstat(folder)
            if (status.st_dev, status.st_ino) != (upload.device, upload.inode):
                raise InputError(f"{real}: was replaced by another folder meanwhile; choose the files again")
            _share(part, status)
            try:
                if upload.name == METADATA:
                    placed = _place_metadata(folder, file)
                elif suffix == CAPTION:
                    placed = _place_caption(folder, file, upload)
                else:
                    placed = _place_image(folder, file, upload, suffix)
            except OSError as error:
                os.fchmod(part, 0o600)
                raise NotWritten(
                    f"{upload.name}: cannot be written to {real} ({error.strerror}); free some space, or change the "
                    "folder's permissions, and choose it again; it is not sent again"
                ) from error
            self._finished.add(id, placed.name, folder)
        file.unlink(missing_ok=True)
        return placed


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


def _place_image(folder: int, file: Path, upload: _Upload, suffix: str) -> Placed:
    stem, present = os.path.splitext(upload.name)[0], upload_names.by_stem(os.listdir(folder))
    for number, candidate in enumerate(upload_names.numbered(stem)):
        name = f"{candidate}{suffix}"
        taken = upload_names.in_the_way(present, candidate, number == 0)
        same = [other for other in taken if upload_names.parts(other) == upload_names.parts(name)]
        if found := next((other for other in same if is_same(folder, other, file)), None):
            return Placed(found, is_new=False)
        if taken:
            continue
        try:
            files.place_at(file, folder, name)
        except FileExistsError:  # made by another program just now
            continue
        return Placed(name, is_new=True)
    raise AssertionError("numbered() ends with an error")


def _place_caption(folder: int, file: Path, upload: _Upload) -> Placed:
    upload_kinds.check_caption(file, upload.name)
    present = os.listdir(folder)
    if upload.image:
        if upload.image not in present or not upload_names.is_image(upload.image):
            raise InputError(
                f"{upload.name}: its image {upload.image[:200]!r} is not in {upload.folder}; send it first"
            )
        stem = os.path.splitext(upload.image)[0]
    else:
        wanted = upload_names.parts(upload.name)[0]
        own = os.path.splitext(upload.name)[0]
        images = sorted(os.path.splitext(name)[0] for name in present if upload_names.is_image(name))
        alike = [stem for stem in images if upload_names.parts(stem + CAPTION)[0] == wanted]
        stem = own if own in alike else next(iter(alike), own)
    name = f"{stem}{CAPTION}"
    return _place_once(
        folder, file, name, f"{name}: the folder has another caption of this name, which stays; edit it here"
    )


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


def _size_and_time(file: Path) -> tuple[int, float]:
    """Bytes of a file of the store and when they were written last; nothing for one that is gone meanwhile."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return 0, 0.0
    return status.st_size, status.st_mtime


def _share(part: int, folder: os.stat_result) -> None:
    """Let those who may read the folder read the file; in a folder that gives its group away, that group."""
    if folder.st_mode & stat.S_ISGID:
        with suppress(PermissionError):  # a group that this user is not in
            os.fchown(part, -1, folder.st_gid)
    os.fchmod(part, 0o664 & folder.st_mode)


def _free(folder: int) -> int:
    status = os.fstatvfs(folder)
    return status.f_bavail * status.f_frsize


class _Finished:
    """The newest finished uploads, one per line of a file. Without it, files are only sent again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, _Kept] | None = None

    def find(self, id: str, folder: int) -> _Kept | None:
        """Return a finished upload whose file is still in the open folder, unchanged."""
        kept = self._read().get(id)
        if kept is None:
            return None
        try:
            status = os.stat(kept.name, dir_fd=folder, follow_symlinks=False)
        except (OSError, ValueError):  # gone, or a damaged name
            return None
        is_it = (status.st_size, status.st_mtime_ns, status.st_ino) == (kept.size, kept.modified, kept.inode)
        return kept if is_it and stat.S_ISREG(status.st_mode) else None

    def add(self, id: str, name: str, folder: int) -> None:
        """Remember a file of the open folder."""
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        kept = _Kept(id, name, status.st_size, status.st_mtime_ns, status.st_ino)
        known = self._read()
        known[id] = kept
        with suppress(OSError):  # a full disk: the file is sent again then, and found to be there
            if len(known) > 2 * MOST_REMEMBERED:
                self._known = dict(list(known.items())[-MOST_REMEMBERED:])
                files.replace(self._file, "".join(map(_line, self._known.values())), 0o600)
            else:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
                with open(os.open(self._file, flags, 0o600), "ab") as stream:
                    stream.write(_line(kept).encode())

    def _read(self) -> dict[str, _Kept]:
        if self._known is None:
            self._known = {}
            try:
                lines = files.read(self._file).splitlines()
            except (InputError, OSError):  # none yet, or damaged
                lines = []
            for line in lines:
                try:
                    kept = _KEPT.validate_json(line)
                except ValidationError:  # torn by a power cut
                    continue
                self._known[kept.id] = kept
        return self._known


def _line(kept: _Kept) -> str:
    return f"{json.dumps(asdict(kept))}\n"
