"""Reads and writes the masks of a draft's images, as `data.masks` has them. The page paints them.

A mask is edited at the size at which the page shows its image, and written at the image's own size as a grayscale PNG.
Before a mask is replaced or removed, it is copied to a private folder, from where the page brings it back.

See DECISIONS 198.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath

from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from app.data.data_folders import Missing, opened
from app.data.scans import ScanResult
from app.data.thumbnails import FULL
from trainer.config.sections import DataConfig
from trainer.data.images.image_io import IMAGE_SUFFIXES, ImageFile, files_below, load_mask, png, read_header, same_name
from trainer.data.images.image_tables import named_file
from trainer.system import files
from trainer.system.errors import InputError

MOST_SENT = 3 * 2**20
"""Bytes of a painted mask on its way from the page."""
MOST_FORMER = 20
"""Former masks of an image that are kept, in addition to the first one: that may come from another program."""
SUFFIX = ".png"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class ChangedElsewhere(InputError):
    """A mask is not what it was when it was loaded. It is left unchanged."""


@dataclass(frozen=True)
class Place:
    """Where the mask of an image is, or will be.

    Attributes:
        image: The image.
        folder: The folder of masks.
        name: Path of the mask below the folder, without suffix.
        field: The field of the config that names the folder.
        is_set: Whether it does; else it has to be set when the mask is written.
    """

    image: Path
    folder: Path
    name: str
    field: str
    is_set: bool

    @property
    def file(self) -> Path:
        """The mask as it is written here."""
        return self.folder / f"{self.name}{SUFFIX}"


@dataclass(frozen=True)
class Mask:
    """A mask as it is edited.

    Attributes:
        levels: 255 where the image is in the loss, 0 where not; of `canvas_size`.
        digest: SHA-256 of the file's content.
    """

    levels: Image.Image
    digest: str


def place_of(data: DataConfig, found: ScanResult, image: Path) -> Place:
    """Return where the mask of an image belongs.

    Args:
        data: The config's section.
        found: Its images, completely read.
        image: One of them.

    Raises:
        InputError: The image is not one of them, has no mask by its kind, or shares its name with another image.
    """
    named = found.named.get(image)
    if named is None:
        folders = "data.path, data.folders or data.validation"
        raise InputError(f"{image}: not an image that is trained with a mask; choose one of {folders}")
    if not _is_inside(named.name):
        raise InputError(f"{named.name[:500]!r}: a mask of this name is not possible; rename the image in its table")
    place = _place(data, image, named.field, named.name)
    _require_no_images(data, place)
    for other in (other for other, others in found.named.items() if others.name == named.name and other != image):
        if _place(data, other, found.named[other].field, "").folder == place.folder:
            raise InputError(f"{place.file}: would belong to both {image} and {other}; give the images different names")
    return place


def _require_no_images(data: DataConfig, place: Place) -> None:
    """Raise InputError where the folder of masks holds images under another path: a mask would replace its image."""
    named = (data.path, *(folder.path for folder in data.folders), data.validation)
    others = (folder for field, folder in data.companions.items() if not field.endswith("masks"))
    images = [_absolute(folder) for folder in (*named, *others) if isinstance(folder, str)]
    if os.path.realpath(place.folder) in map(os.path.realpath, images):
        raise InputError(
            f"{place.field}: {place.folder} is a folder of images, which masks would replace; name another in New run"
        )


def _place(data: DataConfig, image: Path, source: str, name: str) -> Place:
    """The mask's place for an image of the folder that the field `source` names."""
    root, field, folder = data.path, "data.masks", data.masks
    if source == "data.validation":
        root = str(data.validation)
    elif source != "data.path":
        number = int(source.split(".")[2])
        own = data.folders[number]
        root = own.path
        if own.masks or not data.masks:
            field, folder = f"data.folders.{number}.masks", own.masks
    if folder:
        return _spelled(Place(image, _absolute(folder), name, field, is_set=True))
    start = _absolute(root or "")
    start = start.with_suffix("") if start.is_file() else start
    return _spelled(Place(image, start.with_name(f"{start.name}-masks"), name, field, is_set=False))


def _spelled(place: Place) -> Place:
    """The place with the folders of its name as they are on the disk: a second one of other accents would be another
    mask of the same name for a run."""
    above, _, name = place.name.rpartition("/")
    if above.isascii():
        return place
    found = named_file(place.folder, above).relative_to(place.folder)
    return replace(place, name=(found / name).as_posix())


def waiting(data: DataConfig, folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return {name: mask} of the images of a folder that the config has a mask for, of an earlier image perhaps.

    Opens no file; folders of masks are listed.

    Args:
        data: The config's section.
        folder: One of its folders of images, by its absolute path; another one has no masks.
        names: Files in it.
    """
    sources = {"data.path": data.path, "data.validation": data.validation}
    sources |= {f"data.folders.{number}": own.path for number, own in enumerate(data.folders)}
    present: dict[str, Path] = {}
    for source, path in sources.items():
        if path and isinstance(path, str) and _absolute(path) == folder:
            place = _place(data, folder, source, "")
            if place.is_set:
                present = {**_by_stem(place.folder), **present}
    stems = {name: same_name(os.path.splitext(name)[0]) for name in names}
    return {name: present[stem] for name, stem in stems.items() if stem in present}


def _by_stem(folder: Path) -> dict[str, Path]:
    """{name without suffix: file} of the images in a folder that a run reads; none where it cannot be listed."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return {}
    parts = [(*os.path.splitext(name), folder / name) for name in names if name[0] != "."]
    return {
        same_name(stem): file
        for stem, suffix, file in parts
        if suffix.lower() in IMAGE_SUFFIXES and os.path.isfile(file)
    }


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))


def _is_inside(name: str) -> bool:
    """Whether a name, which a table may give, stays in the folder of masks and is not skipped by a run."""
    return not any(part.startswith(".") or not part or "\0" in part for part in name.split("/"))


def sizes(place: Place) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (width, height) of an image, and that at which its mask is painted."""
    header = read_header(place.image)
    return (header.width, header.height), canvas_size(header)


def data_url(image: Image.Image) -> str:
    """Return an image as a PNG in a data URL."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def canvas_size(image: ImageFile) -> tuple[int, int]:
    """Return the (width, height) at which an image's mask is painted: that of the page's copy of the image.

    The mask of a larger image is enlarged to the image's size when it is written.
    """
    scale = min(1, FULL / max(image.width, image.height))
    return max(1, round(image.width * scale)), max(1, round(image.height * scale))


def stamp(place: Place) -> str:
    """Return what tells a mask from a later one of its name, "" where there is none. Opens no file."""
    found = _found(place)
    return f"{found[1].st_mtime_ns}-{found[1].st_size}" if found else ""


def _found(place: Place) -> tuple[Path, os.stat_result] | None:
    """The file that is an image's mask, None where it has none."""
    with suppress(OSError):
        return place.file, os.stat(place.file)
    folder, stem = place.file.parent, PurePosixPath(place.name).name
    with suppress(OSError):
        if name := _spellings(folder, os.stat(folder).st_mtime_ns).get(stem):
            return folder / name, os.stat(folder / name)
    return None


@lru_cache(maxsize=8)
def _spellings(folder: Path, changed: int) -> dict[str, str]:
    """{name without suffix, as a run compares it: name} of the images in a folder. changed: its time."""
    return _by_spelling(os.listdir(folder))


def _by_spelling(names: Iterable[str]) -> dict[str, str]:
    parts = [(*os.path.splitext(name), name) for name in sorted(names, reverse=True)]
    return {same_name(stem): name for stem, suffix, name in parts if suffix.lower() in IMAGE_SUFFIXES}


class Masks:
    """Writes masks and keeps the former ones. Several pages may write at once."""

    def __init__(self, kept: Path) -> None:
        """Create the editor. `kept` is the private folder of former masks."""
        self._kept = kept

    def mask_of(self, place: Place) -> Mask | None:
        """Return the mask of an image, None where it has none.

        Raises:
            InputError: It cannot be read, or is a link.
        """
        with _opened(place) as folder:
            name, content = _present(folder, place)
        if content is None:
            return None
        file = read_header(place.file.with_name(name))
        return Mask(_decoded(file, place), _digest(content))

    def save(self, place: Place, sent: bytes | None, before: str) -> str:
        """Write a painted mask, or remove the mask.

        Args:
            place: Where it belongs.
            sent: An 8-bit grayscale PNG of `canvas_size`; None removes the mask.
            before: Digest of the mask when it was loaded; "" where there was none.

        Returns:
            The digest of the mask now, "" where there is none.

        Raises:
            ChangedElsewhere: The mask was changed meanwhile.
            InputError: `sent` is something else, or the mask cannot be written.
        """
        content = None if sent is None else png(_checked(sent, read_header(place.image)))
        try:
            with self._locked(), _opened(place, makes=content is not None) as folder:
                name, former = _present(folder, place)
                # Another window or program may have written since: nothing of theirs is lost.
                if _digest(former) != before:
                    raise ChangedElsewhere(f"{place.folder / name}: changed elsewhere since it was loaded")
                if former is not None and former != content:
                    self._keep(place, name, former)
                if former != content:
                    _write(folder, place.file.name, content, None if former is None else name)
        except OSError as error:
            wrong = f"{place.file}: cannot be written ({error.strerror})"
            raise InputError(f"{wrong}; free some space, or change the folder's owner") from error
        return _digest(content)

    def num_former(self, place: Place) -> int:
        """Return how many former masks of an image are kept."""
        return len(self._former(place))

    def former(self, place: Place, number: int) -> Image.Image:
        """Return a former mask in the size in which it is edited; 0 is the newest.

        Raises:
            InputError: There are fewer, or it cannot be read.
        """
        kept = self._former(place)
        if not 0 <= number < len(kept):
            raise InputError(f"{place.file}: {len(kept)} former masks are kept; choose one of them")
        return _decoded(read_header(kept[number]), place)

    def _former(self, place: Place) -> list[Path]:
        """The kept files of a mask, newest first."""
        folder = self._folder_of(place)
        kept = [file for file in folder.iterdir() if not file.name.startswith(".")] if folder.is_dir() else []
        return sorted(kept, key=lambda file: file.name, reverse=True)

    def _folder_of(self, place: Place) -> Path:
        return self._kept / hashlib.sha256(os.fsencode(place.file)).hexdigest()[:24]

    def _keep(self, place: Place, name: str, content: bytes) -> None:
        """Keep a mask that is about to be replaced; of the former ones the latest MOST_FORMER stay, and the first."""
        folder = files.make_private(self._folder_of(place))
        files.replace(folder / f"{time.time_ns():020d}{Path(name).suffix.lower()}", content, mode=0o600)
        for old in self._former(place)[MOST_FORMER:-1]:
            old.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with files.locked(files.make_private(self._kept) / "lock"):
            yield


def is_empty(folder: Path) -> bool:
    """Whether a folder holds no masks at all."""
    if not folder.is_dir():
        return True
    return not any(file.suffix.lower() in IMAGE_SUFFIXES for file in files_below(folder, frozenset()))


def _decoded(file: ImageFile, place: Place) -> Image.Image:
    """A mask's levels in the size in which they are edited, mode L."""
    levels = load_mask(file, canvas_size(read_header(place.image)))
    return levels.point(lambda level: level + 0.5).convert("L")


def _checked(sent: bytes, image: ImageFile) -> Image.Image:
    """The levels that the page sent, in the size of the image. Raises InputError for everything else."""
    width, height = canvas_size(image)
    if len(sent) > MOST_SENT:
        raise InputError(f"a mask of {len(sent)} bytes is larger than {MOST_SENT}; paint it with fewer details")
    if sent[:8] != _SIGNATURE or sent[12:16] != b"IHDR" or len(sent) < 33:
        raise InputError("the mask is not a PNG file; reload the page")
    *size, depth, colour = struct.unpack(">IIBB", sent[16:26])
    if (depth, colour) != (8, 0):
        raise InputError(f"the mask has {depth} bits and colour type {colour}; it must be 8-bit grayscale")
    if size != [width, height]:
        raise InputError(
            f"the mask is {size[0]} x {size[1]}, but {image.path} is painted at {width} x {height}; open it again"
        )
    try:
        levels = Image.frombytes("L", (width, height), PngImageFile(io.BytesIO(sent)).convert("L").tobytes())
    except Exception as error:  # for damaged files, decoders raise exceptions without a common base class
        raise InputError(f"the mask cannot be read ({error}); reload the page") from error
    return levels.resize((image.width, image.height), Image.Resampling.BILINEAR)


def _digest(content: bytes | None) -> str:
    return "" if content is None else hashlib.sha256(content).hexdigest()


@contextmanager
def _opened(place: Place, makes: bool = False) -> Iterator[int | None]:
    """Open the folder that a mask is in, following no link below the folder of masks; None where it is missing.

    A folder of masks that the config names may be a link itself. makes: missing folders are made.
    """
    *parts, _ = place.name.split("/")
    with ExitStack() as stack:
        try:
            if makes and not place.folder.is_symlink():
                place.folder.mkdir(exist_ok=True)
            folder = stack.enter_context(opened(place.folder, parts, makes, may_be_link=place.is_set))
        except FileExistsError as error:
            raise InputError(f"{place.folder}: not a folder; remove it, or change {place.field}") from error
        except Missing:
            if makes:
                raise
            folder = None
        yield folder


def _present(folder: int | None, place: Place) -> tuple[str, bytes | None]:
    """The (name, content) of a mask that is there. Raises InputError for what is not a plain file."""
    names = [] if folder is None else os.listdir(folder)
    name = place.file.name if place.file.name in names else _by_spelling(names).get(PurePosixPath(place.name).name)
    if folder is None or name is None:
        return place.file.name, None
    file = place.file.with_name(name)
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{file}: a link, or {files.NOT_REGULAR}")
    if status.st_size > files.MOST_BYTES:
        raise InputError(f"{file}: larger than {files.MOST_BYTES // files.MIB} MiB; edit it with another program")
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(descriptor, "rb") as stream:
        return name, stream.read(files.MOST_BYTES)


def _write(folder: int | None, name: str, content: bytes | None, former: str | None) -> None:
    """Replace or remove a file of an open folder.

    Args:
        folder: Descriptor of the folder; None where it is missing and nothing is written.
        name: The file that is written.
        content: Its content; None where it is removed.
        former: Name of the file that this one takes the place of; None where there is none.
    """
    assert folder is not None
    if content is not None:
        files.replace_at(folder, name, content)
    if former is not None and (content is None or former != name):
        os.unlink(former, dir_fd=folder)
        os.fsync(folder)


def shown(data: DataConfig, found: ScanResult, image: Path) -> str | None:
    """Return the stamp of an image's mask, "" where it has none, None where masks do not apply to the image."""
    named = found.named.get(image)
    if named is None or not _is_inside(named.name):
        return None
    return stamp(_place(data, image, named.field, named.name))
