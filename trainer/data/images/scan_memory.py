"""Remembers a whole scan, so that a later start with the same files and settings reads none of them.

The launcher scans before it starts the ranks, and they find what it kept. Imports neither torch nor numpy.

See DECISIONS 194, 199.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import PIL
import psutil
from pydantic import TypeAdapter

from trainer.config.sections import DataConfig
from trainer.data.images.image_files import CaptionedImage, Dataset, read_folders, scan, separate_folders
from trainer.data.images.image_io import WHOLE, ImageFile, entries_below, folders_with_images
from trainer.data.images.image_members import file_of
from trainer.data.images.known_files import FOLDER, MOST_BYTES, KnownFiles
from trainer.system import files
from trainer.system.errors import InputError

FORMAT = 1
"""Version of the stored records: raise it when a scan of the same files finds something else."""
Keep = Callable[[], None]
SUFFIX = ".scan"
HANDED_SUFFIX = ".handed"
HANDED_S = 120.0
"""Seconds for which ranks take what their launcher saw; later, as after a restart, they look themselves."""
_HANDED = TypeAdapter(tuple[str, int, float, float])
MOST_KEPT = 8
"""Files of each kind that are kept, the ones that were used last."""
_FILE = ("width", "height", "profile", "has_frames", "is_turned")
"""Fields of `ImageFile` in addition to its path."""
_LINKED = ("mask", "references", "rejected")
"""Fields that hold other images."""
_OWN = ("caption", "more_captions", "focus", *_LINKED)
"""Fields that differ between the images of a folder."""
_SHARED = tuple(field.name for field in fields(CaptionedImage) if field.name not in ("location", *_FILE, *_OWN))
"""Those that do not: each combination of them is kept once."""


def checked(cfg: DataConfig, cache: Path) -> Keep:
    """Scan, unless nothing has changed since an earlier scan.

    Returns:
        A function that keeps the scan, for the ranks that start next. Until then nothing is written.

    Raises:
        InputError: As `image_files.scan`.
    """
    memory = ScanMemory(cfg, cache)
    if memory.has_scan:
        return memory.hand_over
    known = KnownFiles.of(cfg, cache)
    found = scan(cfg, known=known)

    def keep() -> None:
        known.save()
        memory.keep(found)
        memory.hand_over()

    return keep


class ScanMemory:
    """The scan of a config's files as they are now: an earlier one, if nothing has changed since.

    Args:
        cfg: The section `data`.
        cache: The folder that runs share.
        digest: The digest below, if it is known: no folder is walked through.

    Attributes:
        digest: Of the files and settings; None where a later change could not be seen.
    """

    def __init__(self, cfg: DataConfig, cache: Path, digest: str | None = None) -> None:
        self._cfg, self._cache = cfg, cache
        self.digest = digest
        self._walked: set[str] = set()
        if digest is None:
            self._walk()

    @classmethod
    def of_launcher(cls, cfg: DataConfig, cache: Path) -> ScanMemory:
        """The scan that the process which started this rank has just checked; else as the files are now."""
        return cls(cfg, cache, _handed(_hand_over_file(cfg, cache)))

    def _walk(self) -> None:
        """Look at the stamps of all files."""
        cfg, self.digest = self._cfg, None
        began = time.time_ns()
        newest, content = 0, hashlib.sha256(f"{FORMAT} {PIL.__version__} {cfg.model_dump_json()}".encode())
        try:
            passed = list[str]()
            for path, status in _stamps(cfg, passed):
                self._walked.add(path)
                modified, changed = status.st_mtime_ns, status.st_ctime_ns
                newest = max(newest, modified, changed)
                stamp = f"\n{path}\0{status.st_size}\0{modified}\0{changed}\0{status.st_ino}"
                content.update(stamp.encode("utf-8", "surrogateescape"))
            # Not by their time: that of a run inside the data changes while it runs.
            content.update("\n".join(folders_with_images(passed)).encode("utf-8", "surrogateescape"))
        except (OSError, InputError):  # the scan names what is wrong
            return
        # A file that was read sooner after its last change may change once more without another time stamp.
        if newest + files.COARSEST_NS < began:
            self.digest = content.hexdigest()[:32]

    @property
    def _file(self) -> Path | None:
        return self._cache / FOLDER / f"{self.digest}{SUFFIX}" if self.digest else None

    @property
    def has_scan(self) -> bool:
        return self._file is not None and self._file.exists()

    def hand_over(self) -> None:
        """Name the digest to the ranks that this process starts next, so that they need not look at all files again."""
        file = _hand_over_file(self._cfg, self._cache)
        with contextlib.suppress(OSError):  # a full or read-only disk: the ranks look themselves
            if self.digest is None:
                file.unlink(missing_ok=True)
            else:
                launcher = psutil.Process()
                keep_last(file, json.dumps([self.digest, launcher.pid, launcher.create_time(), time.time()]))

    def scan(self, known: Callable[[], KnownFiles]) -> Dataset:
        """The scan, which is made and kept if it is not known.

        Args:
            known: Returns what was read of single files; called where the scan is not known.

        Raises:
            InputError: As `image_files.scan`.
        """
        found = self._recalled()
        if found is None:
            if not self._walked:
                self._walk()
            found = scan(self._cfg, known=known())
            self.keep(found)
        self._walked.clear()
        return found

    def _recalled(self) -> Dataset | None:
        if self._file is None:
            return None
        try:
            with without_collection():
                found = _dataset(json.loads(files.read(self._file, at_most=MOST_BYTES)))
            os.utime(self._file)
        except (OSError, InputError, ValueError, TypeError, KeyError, IndexError):  # none, or damaged: scanned again
            return None
        return found

    def keep(self, dataset: Dataset) -> None:
        """Keep a scan that has just been made, if all that it read was looked at."""
        content = _content(dataset)
        if self._file is None or any(str(file_of(Path(path))) not in self._walked for path, *_ in content["files"]):
            self.digest = None  # a row of a table may name an image anywhere
            return
        with contextlib.suppress(OSError):  # a full or read-only disk: the next start scans again
            keep_last(self._file, json.dumps(content))


def _hand_over_file(cfg: DataConfig, cache: Path) -> Path:
    settings = hashlib.sha256(cfg.model_dump_json().encode()).hexdigest()[:32]
    return cache / FOLDER / f"{settings}{HANDED_SUFFIX}"


def _handed(file: Path) -> str | None:
    """The digest that a launcher named just now, if this process is its rank; ranks of other machines never are."""
    try:
        digest, pid, started, at = files.read_json(file, _HANDED, at_most=MOST_BYTES)
        own = psutil.Process()
        launchers = {(one.pid, one.create_time()) for one in (own, *own.parents())}
    except (OSError, InputError, psutil.Error):
        return None
    return digest if (pid, started) in launchers and 0 <= time.time() - at < HANDED_S else None


def _stamps(cfg: DataConfig, passed: list[str]) -> Iterator[tuple[str, os.stat_result]]:
    """(path, state) of every file that a scan reads, or that says what it reads.

    passed: as for `entries_below`.
    """
    skipped = separate_folders(cfg)
    for folder in read_folders(cfg):
        if not folder.is_dir():
            yield str(folder), folder.stat()
            continue
        for entry in entries_below(folder, skipped, passed):
            yield entry.path, entry.stat()


def _content(dataset: Dataset) -> dict[str, Any]:
    """A dataset as JSON can hold it. Each file stands once, with its number."""
    numbers: dict[ImageFile, int] = {}
    listed: list[list[Any]] = []
    shared: dict[tuple[Any, ...], int] = {}

    def number_of(image: ImageFile) -> int:
        file = ImageFile(image.location, **{name: getattr(image, name) for name in _FILE})
        if file not in numbers:
            numbers[file] = len(numbers)
            listed.append([file.location, *(getattr(file, name) for name in _FILE)])
        return numbers[file]

    def row_of(image: CaptionedImage) -> list[Any]:
        common = shared.setdefault(tuple(getattr(image, name) for name in _SHARED), len(shared))
        return [number_of(image), common, *(_linked(name, getattr(image, name), number_of) for name in _OWN)]

    rows = {name: [row_of(image) for image in getattr(dataset, name)] for name in ("train", "validation")}
    return {"files": listed, "shared": list(shared), **rows, "warnings": dataset.warnings}


def _linked(name: str, value: Any, number_of: Any) -> Any:
    if name not in _LINKED or value is None:
        return value
    return [number_of(one) for one in value] if isinstance(value, tuple) else number_of(value)


def _dataset(content: Mapping[str, Any]) -> Dataset:
    listed = content["files"]
    if not all(isinstance(path, str) for path, *_ in listed):
        raise TypeError("a path is not a text")
    shared = [dict(zip(_SHARED, row, strict=True)) for row in content["shared"]]
    for common in shared:
        common["sides"] = tuple(common["sides"])

    def file_of(number: int) -> ImageFile:
        path, width, height, profile, has_frames, is_turned = listed[number]
        return ImageFile(path, width, height, profile=profile, has_frames=has_frames, is_turned=is_turned)

    def image_of(row: Sequence[Any]) -> CaptionedImage:
        number, common, caption, more_captions, (x, y), mask, references, rejected = row
        path, width, height, profile, has_frames, is_turned = listed[number]
        return CaptionedImage(
            path,
            width,
            height,
            profile=profile,
            has_frames=has_frames,
            is_turned=is_turned,
            caption=caption,
            more_captions=tuple(more_captions),
            focus=WHOLE.focus if (x, y) == WHOLE.focus else (x, y),
            mask=None if mask is None else file_of(mask),
            references=tuple(map(file_of, references)),
            rejected=None if rejected is None else file_of(rejected),
            **shared[common],
        )

    train, validation = (tuple(map(image_of, content[name])) for name in ("train", "validation"))
    return Dataset(train, validation, tuple(content["warnings"]))


def keep_last(file: Path, content: str) -> None:
    """Write a file named by a digest, and remove all but the MOST_KEPT last used ones of its suffix. Raises OSError."""
    files.make_private_if_new(file.parent)
    files.replace(file, content)
    kept = sorted(file.parent.glob(f"{'[0-9a-f]' * 32}{file.suffix}"), key=lambda one: one.stat().st_mtime_ns)
    for old in kept[:-MOST_KEPT]:
        old.unlink(missing_ok=True)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Make many objects that all stay: looking for garbage among them again and again takes as long as they do."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
