"""Remembers a whole scan, so that a later start with the same files and settings reads none of them.

The launcher scans before it starts the ranks, and they find what it kept. Imports neither torch nor numpy.

See DECISIONS 194, 199.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import PIL
import psutil
from pydantic import TypeAdapter, ValidationError

from trainer.config.sections import DataConfig
from trainer.data.images.image_files import CaptionedImage, Dataset, read_folders, scan, separate_folders
from trainer.data.images.image_io import NativeText, entries_below, folders_with_images
from trainer.data.images.image_members import file_of
from trainer.data.images.known_files import KnownFiles
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.index import Index

FORMAT = 1
"""Version of the stored records: raise it when a scan of the same files finds something else."""
Keep = Callable[[], None]
SCANS, HANDED = f"scan {FORMAT} {PIL.__version__}", "handed"
"""Kinds of records in the index: scans by their digest, and the digest that a launcher named by its settings."""
HANDED_S = 120.0
"""Seconds for which ranks take what their launcher saw; later, as after a restart, they look themselves."""
MOST_KEPT = 8
"""Scans that are kept, the ones that were used last."""
_HANDED = TypeAdapter(tuple[str | None, int, float, float])
_HEAD = TypeAdapter(tuple[int, tuple[NativeText, ...]])
"""The first line of a record: how many of its images are trained on, and the warnings. Each image is a line of its own:
what the parser takes for 100,000 in one text, 57 MB, it does not give back."""
_IMAGE = TypeAdapter(CaptionedImage)


def checked(cfg: DataConfig, cache: Path, most_references: int | None = None) -> Keep:
    """Scan, unless nothing has changed since an earlier scan.

    Args:
        cfg: The section `data`.
        cache: The folder that runs share.
        most_references: Most reference images of an example that the model reads; None for any number.

    Returns:
        A function that keeps the scan, for the ranks that start next. Until then nothing is written.

    Raises:
        InputError: As `image_files.scan`, or an image has more reference images than the model reads.
    """
    memory = ScanMemory(cfg, cache)
    known = KnownFiles(Index(cache))
    if memory.has_scan:
        if most_references is not None:
            _require_few_references(memory.scan(lambda: known), most_references)
        return memory.hand_over
    found = scan(cfg, known=known)
    if most_references is not None:
        _require_few_references(found, most_references)

    def keep() -> None:
        known.save()
        memory.keep(found)
        memory.hand_over()

    return keep


def _require_few_references(dataset: Dataset, most: int) -> None:
    images = (*dataset.train, *dataset.validation)
    many = [image for image in images if len(image.references) > most]
    if many:
        raise InputError(
            f"data.references: {len(many)} of {len(images)} images have more reference images than the {most} that "
            f"this model reads, first {many[0].location} with {len(many[0].references)}: "
            f"{many[0].references[-1].location}; keep {most} of each"
        )


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
        self._cfg, self._index = cfg, Index(cache)
        self.digest = digest
        self._walked: set[str] = set()
        if digest is None:
            self._walk()

    @classmethod
    def of_launcher(cls, cfg: DataConfig, cache: Path) -> ScanMemory:
        """The scan that the process which started this rank has just checked; else as the files are now."""
        return cls(cfg, cache, _handed(Index(cache).get(HANDED, _settings(cfg))))

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
    def has_scan(self) -> bool:
        return self.digest is not None and self._index.get(SCANS, self.digest) is not None

    def hand_over(self) -> None:
        """Name the digest to the ranks that this process starts next, so that they need not look at all files again."""
        launcher = psutil.Process()
        handed = [self.digest, launcher.pid, launcher.create_time(), time.time()]
        self._index.put(HANDED, {_settings(self._cfg): json.dumps(handed).encode()})

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
        content = self._index.get(SCANS, self.digest) if self.digest else None
        if self.digest is None or content is None:
            return None
        self._index.touch(SCANS, self.digest)
        with suppress(ValidationError), without_collection():  # what a stranger wrote is scanned again
            head, *lines = content.split(b"\n")
            num_train, warnings = _HEAD.validate_json(head)
            images = tuple(map(_IMAGE.validate_json, lines))
            return Dataset(images[:num_train], images[num_train:], warnings)
        return None

    def keep(self, dataset: Dataset) -> None:
        """Keep a scan that has just been made, if all that it read was looked at."""
        images = (*dataset.train, *dataset.validation)
        others = ((image.mask, image.rejected) for image in images)
        read = (image.path for image in chain(dataset.images, *others) if image is not None)
        if self.digest is None or any(str(file_of(path)) not in self._walked for path in read):
            self.digest = None  # a row of a table may name an image anywhere
            return
        head = _HEAD.dump_json((len(dataset.train), dataset.warnings))
        lines = (_IMAGE.dump_json(image, exclude_defaults=True) for image in images)
        self._index.put(SCANS, {self.digest: b"\n".join((head, *lines))}, MOST_KEPT)


def _settings(cfg: DataConfig) -> str:
    return hashlib.sha256(cfg.model_dump_json().encode()).hexdigest()[:32]


def _handed(content: bytes | None) -> str | None:
    """The digest that a launcher named just now, if this process is its rank; ranks of other machines never are."""
    try:
        digest, pid, started, at = _HANDED.validate_json(content or b"")
        own = psutil.Process()
        launchers = {(one.pid, one.create_time()) for one in (own, *own.parents())}
    except (ValidationError, psutil.Error):
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


@contextmanager
def without_collection() -> Iterator[None]:
    """Make many objects that all stay: looking for garbage among them again and again takes as long as they do."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
