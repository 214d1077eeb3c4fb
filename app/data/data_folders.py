"""Folders of data that the page writes images into: only below the allowed roots, and never through a link.

A folder is named by a path once, which is resolved and checked. From then on it is opened from its root downwards, one
name after the other, without following links: one that is put in the way later cannot redirect what is written.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from app.data.folders import Picker, typed_folder
from app.data.upload import upload_names
from trainer.system import files, installation
from trainer.system.errors import InputError

PROGRAM = (*(Path(installation.__file__).parents[2] / name for name in ("app", "trainer")), installation.PRESETS)
"""Folders of the program's own files, such as the images of the quickstart."""
PICTURES = "pictures"
"""Name of the folder next to the runs in which new folders of images are made."""
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DataFolders:
    """Checks, opens and makes folders of data."""

    def __init__(self, picker: Picker, runs: Path) -> None:
        """Create it with the allowed roots of `picker`. `runs` holds runs, of which nothing is changed."""
        self._picker = picker
        self._runs = runs

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders that a new folder may be made in."""
        return tuple(root for root in self._picker.roots if not self._reserved(root))

    def checked(self, path: str) -> Path:
        """Return the real path of a folder. Raises InputError for one that nothing may be put into."""
        folder = typed_folder(path)
        if not path or not folder.is_absolute():
            raise InputError(f"{path!r}: not the full path of a folder; choose a folder of images in New run")
        real = Path(os.path.realpath(folder))
        if why := self.refusal(real):
            raise InputError(f"{folder}: {why}")
        if not os.path.isdir(real):
            raise InputError(f"{folder}: not a folder; choose a folder of images in New run")
        return real

    def refusal(self, real: Path) -> str:
        """Return why nothing may be put into a resolved path, "" where it may."""
        root = self._picker.root_of(real)
        if root is None:
            outside = " and ".join(map(str, self._picker.roots))
            return f"outside {outside}, where the page puts no files; copy them there yourself, or choose a new folder"
        if any(part.startswith(".") for part in real.relative_to(root).parts):
            return "a hidden folder, which a run does not read; choose another"
        return self._reserved(real)

    def require_changeable(self, real: Path) -> None:
        """Raise InputError for a folder of runs or of the program itself, whose images are not deleted."""
        if why := self._reserved(real):
            raise InputError(f"{real}: {why}")

    def _reserved(self, real: Path) -> str:
        if real.is_relative_to(os.path.realpath(self._runs)):
            return "a folder of runs, whose files the page does not change; choose another"
        if any(real.is_relative_to(os.path.realpath(own)) for own in PROGRAM):
            return "images of the program itself, which stay as they are; put yours into a new folder"
        return ""

    @contextmanager
    def opened(self, real: Path) -> Iterator[int]:
        """Open a folder that `checked` returned and yield its descriptor. Raises InputError where a link is in the way.

        It is checked again: what is true of a path may have changed.
        """
        root = self._picker.root_of(real)
        if root is None or (why := self.refusal(real)):
            raise InputError(f"{real}: {'outside the allowed folders' if root is None else why}")
        with opened(root, real.relative_to(root).parts) as descriptor:
            yield descriptor

    def make(self, above: str, name: str) -> Path:
        """Make a folder and return it. Raises InputError for a name that is taken or that no folder may have."""
        real = self.checked(above)
        name = upload_names.folder(name)
        with self.opened(real) as descriptor:
            try:
                os.mkdir(name, dir_fd=descriptor)
            except FileExistsError as error:
                raise Taken(f"{real / name}: is there already; choose it in New run, or another name") from error
            except OSError as error:
                raise InputError(f"{real / name}: cannot be made ({error.strerror}); choose another folder") from error
            os.fsync(descriptor)
        return real / name

    def make_new(self, name: str) -> Path:
        """Make a folder of this name, or with a number behind it, in `pictures` next to the runs, and return it.

        Where nothing can be made there, as on a volume for the runs alone, `pictures` is in another allowed root. Of
        two that ask at once, each gets its own.

        Raises:
            InputError: No folder may have this name, or it cannot be made.
        """
        roots = [self._runs.resolve().parent, *self.roots]
        written = {root: root / PICTURES if os.path.lexists(root / PICTURES) else root for root in roots}
        allowed = (root for root in roots if not self.refusal(root / PICTURES))
        above = next((root for root in allowed if os.access(written[root], os.W_OK | os.X_OK)), roots[0])
        with suppress(Taken):
            self.make(str(above), PICTURES)
        while True:
            try:
                return self.make(str(above / PICTURES), free_name(above / PICTURES, name))
            except Taken:  # by another window just now
                continue


def free_name(above: Path, name: str = "images") -> str:
    """Return a name that no file or folder in a folder has: images, else images-2, and so on."""
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(above / name))


class Taken(InputError):
    """A folder that is to be made is there already."""


class Missing(InputError):
    """A folder that is opened is not there."""


@contextmanager
def opened(
    root: Path, parts: Sequence[str], makes: bool = False, mode: int = 0o777, may_be_link: bool = False
) -> Iterator[int]:
    """Open a folder below `root` and yield its descriptor. No link is followed below the root.

    Args:
        root: The folder to start from.
        parts: Names of the folders from there to the one to open.
        makes: Make those below the root that are missing.
        mode: Permissions of those that are made.
        may_be_link: Whether the root itself may be a link: a person named it.

    Raises:
        Missing: The root or a part is missing.
        InputError: A part is a link, not a folder, or closed to this user.
    """
    place, descriptor = root, _below(str(root), None, root, _FLAGS & ~os.O_NOFOLLOW if may_be_link else _FLAGS)
    try:
        for part in parts:
            place /= part
            # A part is one step down, and each step refuses links: no name leads out of the root.
            if part in ("", ".", "..") or "/" in part or "\0" in part:
                raise InputError(f"{place}: not the name of a folder")
            if makes:
                _make(part, descriptor, mode)
            below = _below(part, descriptor, place, _FLAGS)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _make(name: str, above: int, mode: int) -> None:
    try:
        os.mkdir(name, mode, dir_fd=above)
    except FileExistsError:
        return
    os.fsync(above)


def _below(name: str, above: int | None, place: Path, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise InputError(
                f"{place}: a link or file is in the place of the folder; remove it, or choose another folder"
            ) from error
        kind = Missing if error.errno == errno.ENOENT else InputError
        raise kind(f"{place}: cannot be opened ({error.strerror}); choose the folder again") from error


def is_taken(folder: int, name: str) -> bool:
    """Whether an open folder has an entry of this name, be it a link that leads nowhere."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def is_same(folder: int, name: str, file: Path) -> bool:
    """Whether an entry of an open folder is a regular file with the bytes of `file`. Links are not followed."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:  # a link, or closed to us: another file
        return False
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return False
    with open(descriptor, "rb") as stream, files.opened(file) as other:
        sizes = {os.fstat(stream.fileno()).st_size, os.fstat(other.fileno()).st_size}
        if len(sizes) > 1:
            return False
        return all(stream.read(files.MIB) == block for block in iter(lambda: other.read(files.MIB), b""))
