"""Finds images with their captions. Imports neither torch nor numpy: a dataset is checked before they are loaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trainer.config.sections import (
    TRIGGER_PLACE,
    DataConfig,
    DataFolder,
    fill_trigger,
    half_character,
    has_trigger_place,
)
from trainer.data.images import image_warnings, unread_files
from trainer.data.images.image_io import (
    IMAGE_SUFFIXES,
    OTHER_IMAGE_SUFFIXES,
    WHOLE,
    ImageFile,
    entries_below,
    same_name,
)
from trainer.data.images.image_members import TAR
from trainer.data.images.image_tables import (
    COMPRESSED,
    CSV,
    IS_COMPRESSED,
    TABLES,
    Columns,
    NoImage,
    TableRow,
    Unread,
    csv_rows,
    read_table,
    unix_lines,
)
from trainer.data.images.known_files import KnownFiles
from trainer.data.images.masks_references import Findings, Masks, References, Rejected
from trainer.data.text.text_files import ABOUT, MOST_NAMED, rows
from trainer.system.errors import InputError
from trainer.system.files import opened
from trainer.system.terminal import shortened

METADATA = ("metadata.jsonl", "metadata.csv")
"""Files that list the captions of the images next to and below them."""
REPEATS = re.compile(r"([1-9]\d{0,2})_(.*\S.*)")
"""Names of folders as kohya's scripts read them: how often their images occur, and their caption where they have none.
Not 01_portraits, which is a number in a list, nor 2023_holiday, a year."""
RESOLUTIONS = frozenset({"256", "512", "768"})
"""Numbers in such names that are usual resolutions. Larger ones have more digits than repeats."""
COUNTED = re.compile(r"(0|[1-9]\d{0,2})_.*\S.*")
"""Names of folders that may count them, such as those of classes."""
LEAST_COUNTED = 3
"""Fewest folders that are counted, in place of having repeats: 1_style next to 2_face is common in kohya's scripts."""
LABEL = re.compile(r"(.*)-masklabel", re.DOTALL)
"""The name of a mask that OneTrainer reads next to its image."""
MOST_WRONG_ROWS = 1000
"""Wrong rows after which the rest of a .jsonl is not read."""
MAX_CAPTION = 64 * 2**10
"""Limit for a caption, bytes: some 16,000 tokens, more than any encoder reads."""

_FOLDERS = "data.folders."
_PART_OF_WORD = r"[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
"""A character that continues a word. Chinese, Japanese, Thai, Lao, Burmese and Khmer have no spaces between words, and
Korean has particles behind them."""
_NEEDED = (("file_name",), ("text", "caption"))
"""Columns of a metadata.csv: one of each."""
C = TypeVar("C", Masks, References, Rejected)


@dataclass(frozen=True, slots=True)
class CaptionedImage(ImageFile):
    """One image with its caption and what belongs to it.

    Attributes:
        caption: The caption, with the trigger filled in.
        weight: Occurrences per epoch.
        loss_weight: Weight of its loss; 1 unless it is a regularization image.
        mask: The mask of the loss; None where the whole image is in the loss.
        references: The reference images of edit training.
        rejected: In preference training the image that this one is preferred to.
        is_own: Whether it shows the subject to train; False for a regularization image.
        more_captions: Further captions; each sample takes one of all.
        sides: The resolutions that it is trained at, from small to large.
        focus: The point (x, y) around which it is cropped, as in `Framing`.
        may_flip: Whether half of its samples are mirrored.
        caption_dropout: Share of its samples that are trained with the empty caption.
        micro_batch: Most samples of a pass with this image; None for `train.micro_batch`.
    """

    caption: str
    weight: float
    loss_weight: float = 1.0
    mask: ImageFile | None = None
    references: tuple[ImageFile, ...] = ()
    rejected: ImageFile | None = None
    is_own: bool = True
    more_captions: tuple[str, ...] = ()
    sides: tuple[int, ...] = ()
    focus: tuple[float, float] = WHOLE.focus
    may_flip: bool = False
    caption_dropout: float = 0.0
    micro_batch: int | None = None

    @property
    def captions(self) -> tuple[str, ...]:
        return (self.caption, *self.more_captions)


@dataclass(frozen=True)
class Dataset:
    """The images of a scan: folders in the order of the config, images by relative path within a folder."""

    train: tuple[CaptionedImage, ...]
    validation: tuple[CaptionedImage, ...]
    warnings: tuple[str, ...]

    @property
    def images(self) -> tuple[ImageFile, ...]:
        """All images that are scaled to a bucket, references last. Masks follow their images."""
        images = (*self.train, *self.validation)
        return (*images, *(reference for image in images for reference in image.references))


@dataclass(frozen=True)
class Row:
    """A row of a metadata.jsonl.

    Attributes:
        captions: The image's captions; none where the row only has a focus point.
        focus: The point (x, y) around which it is cropped, as in `Framing`.
    """

    captions: tuple[str, ...]
    focus: tuple[float, float] = WHOLE.focus


class StalePoint(InputError):
    """A row has only a focus point, and its image is gone: nothing of use is lost without it."""


class Watcher:
    """Follows a scan that may take long. An exception from one of its methods ends the scan."""

    def found(self, file: Path) -> None:
        """Called for every file in one of the folders."""

    def reading(self, image: Path) -> None:
        """Called before the header and the caption of an image are read."""

    def named(self, image: Path, field: str, name: str) -> None:
        """Called for each image that may have a mask, before its header is read.

        Args:
            image: The image.
            field: The field of the config that names its folder, such as `data.path`.
            name: The name by which its mask is found: its path below the folder, without suffix.
        """

    def read(self, image: CaptionedImage) -> None:
        """Called for an image whose header was read, also where its caption is missing or cannot be read."""

    def bad(self, image: Path) -> None:
        """Called for an image that cannot be used: itself, its mask or a reference cannot be read or does not fit."""

    def listed(self, captions: Mapping[Path, str], is_fixed: bool = False) -> None:
        """Called with {image: caption} of a folder's metadata.jsonl, or of a table, the first one of several.

        Args:
            captions: The captions.
            is_fixed: Whether they are used in any case; else a .txt next to the image is used instead.
        """


def scan(cfg: DataConfig, watcher: Watcher | None = None, known: KnownFiles | None = None) -> Dataset:
    """Find the images of all folders of the config, with captions, masks and references; only headers are read.

    Folders are searched recursively. Hidden ones, `cache`, `*_cache`, runs and `data.cache` are skipped, and a folder
    that the config lists separately counts only there. A caption is the .txt next to the image, else a row of a
    metadata.jsonl whose `file_name` leads to the image, and which may have several captions and a focus point, else
    the text of a folder `REPEATS_TEXT`. Names are compared with composed accents (NFC).
    `data.validation: n` sets aside the last n images of the order; `data.max_images` chooses of what is left.
    Regularization images are the last of `train`, without masks and references. The result is empty where only
    questions are trained.

    Args:
        known: What was read before, which is not read again.

    Raises:
        InputError: Lists all problems, the first 20 of them in words.
    """
    if cfg.questions and not (cfg.path or cfg.folders):
        return Dataset((), (), ())
    known = known or KnownFiles()
    scanner = _Scanner(cfg, watcher or Watcher(), known)
    images = [image for source in _training_sources(cfg) for image in scanner.images(source)]
    held_out: list[CaptionedImage] = []
    if isinstance(cfg.validation, str):
        held_out = scanner.images(_Source("data.validation", _absolute(cfg.validation)))
    others: list[CaptionedImage] = []
    if cfg.regularization is not None:
        others = scanner.images(_Source("data.regularization", _absolute(cfg.regularization), is_own=False))
    scanner.finish()
    if isinstance(cfg.validation, int):
        images, held_out = _set_aside(images, cfg.validation)
    if most := cfg.max_images:
        images, held_out, others = (evenly(found, most) for found in (images, held_out, others))
    images += _as_frequent(others, images, cfg)
    dataset = Dataset(tuple(images), tuple(held_out), tuple(image_warnings.folded(scanner.findings.warnings)))
    # A folder may be listed twice, with other settings.
    paths = map(Path, dict.fromkeys(image.location for image in (*images, *held_out)))
    copies = image_warnings.of_copies(paths, known.digest)
    edits = {image.path: [one.path for one in image.references] for image in (*images, *held_out) if image.references}
    own = (*image_warnings.of_files(dataset.images), *image_warnings.of_unchanged(edits))
    return replace(dataset, warnings=(*dataset.warnings, *own, *copies))


@dataclass(frozen=True)
class _Source:
    """A folder of images, and the field of the config that names it.

    Attributes:
        field: The field of the config.
        root: The folder.
        weight: Occurrences of each image per epoch.
        is_own: Whether the images show the subject to train; only then is the trigger filled into their
            captions, and are masks and references read for them.
        holds: The expected content, for messages.
        folder: The folder's own settings.
    """

    field: str
    root: Path
    weight: float = 1.0
    is_own: bool = True
    holds: str = "images with captions"
    folder: DataFolder | None = None


def _training_sources(cfg: DataConfig) -> Iterator[_Source]:
    if cfg.path is not None:
        yield _Source("data.path", _absolute(cfg.path), float(cfg.repeats))
    for index, folder in enumerate(cfg.folders):
        weight = cfg.repeats * folder.weight
        yield _Source(f"{_FOLDERS}{index}.path", _absolute(folder.path), weight, folder=folder)


def _settings(cfg: DataConfig, source: _Source, repeats: int) -> dict[str, Any]:
    """The fields of `CaptionedImage` that are the same for all images of a folder."""
    own = source.folder
    sides = tuple(sorted(set(own.resolutions))) if own else ()
    dropout = own.caption_dropout if own and own.caption_dropout is not None else cfg.caption_dropout
    return {
        "weight": source.weight * repeats,
        "sides": sides or cfg.sides,
        "may_flip": own.flip if own and own.flip is not None else cfg.flip,
        "caption_dropout": dropout,
        "micro_batch": own.micro_batch if own else None,
    }


def read_folders(cfg: DataConfig) -> list[Path]:
    """All folders and files in which images are looked for, with their masks, references and so on."""
    paths = [cfg.path, *(folder.path for folder in cfg.folders), *cfg.companions.values()]
    if isinstance(cfg.validation, str):
        paths.append(cfg.validation)
    return [_absolute(path) for path in paths if path is not None]


def separate_folders(cfg: DataConfig) -> frozenset[Path]:
    """Folders whose content does not belong to the folder that contains them."""
    own = [] if cfg.cache is None else [_absolute(cfg.cache)]
    return frozenset(Path(os.path.realpath(path)) for path in (*read_folders(cfg), *own))


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))


def _set_aside(images: list[CaptionedImage], count: int) -> tuple[list[CaptionedImage], list[CaptionedImage]]:
    if count >= len(images):
        raise InputError(
            f"data.validation: {count} of {len(images)} images leaves none to train on; use at most {len(images) - 1}"
        )
    border = len(images) - count
    return images[:border], images[border:]


def evenly(images: Sequence[CaptionedImage], most: int) -> list[CaptionedImage]:
    """At most so many of some images, with the same distance between them."""
    count = min(most, len(images))
    return [images[at * len(images) // count] for at in range(count)]


def _as_frequent(
    others: Sequence[CaptionedImage], images: Sequence[CaptionedImage], cfg: DataConfig
) -> list[CaptionedImage]:
    """Regularization images that together occur as often as `images`, whether there are fewer or more of them.

    An image occurs at each of its resolutions, unless it is trained at the largest that it fills alone.
    """

    def times(image: CaptionedImage) -> int:
        return max(1, len(image.sides)) if cfg.at_resolutions == "each" else 1

    wanted = sum(image.weight * times(image) for image in images)
    weight = wanted / sum(map(times, others)) if others else 0.0
    return [replace(other, weight=weight, loss_weight=cfg.regularization_weight) for other in others]


class _Scanner:
    """Reads folders one after the other and collects the problems in them."""

    def __init__(self, cfg: DataConfig, watcher: Watcher, known: KnownFiles) -> None:
        self.cfg = cfg
        self.findings = Findings()
        self._watcher, self._known = watcher, known
        self._separate_folders = separate_folders(cfg)
        self._captioned: dict[str, list[Path]] = {}
        self._texts: dict[str, str] = {}
        self._uncaptioned: list[tuple[str, str]] = []
        self._twice: list[Path] = []
        self._relisted: list[Path] = []
        self._named_by_folder: list[Path] = []
        self._counted: frozenset[str] = frozenset()
        self._rows_elsewhere: dict[Path, Row] = {}
        self._masks = self._companions(Masks, "data.masks", cfg.masks)
        self._own_masks: dict[str, Masks | None] = {
            f"{_FOLDERS}{number}.path": self._companions(Masks, f"{_FOLDERS}{number}.masks", folder.masks)
            for number, folder in enumerate(cfg.folders)
            if folder.masks
        }
        self._references = self._companions(References, "data.references", cfg.references)
        self._rejected = self._companions(Rejected, "data.rejected", cfg.rejected)

    def images(self, source: _Source) -> list[CaptionedImage]:
        """The usable images of one folder, by relative path."""
        files = self._files(source)
        tables = self._tables(source, files)
        if tables:
            if self.cfg.pair_suffixes and source.is_own:
                self.findings.problems.append(
                    f"{source.field}: {tables[0]}: data.pair_suffixes pairs the image files of a folder, not those of "
                    "rows; name the column of the image before the edit in data.reference_columns, or unpack the file"
                )
                return []
            others = set(files).difference(tables)
            self.findings.warnings += unread_files.of_tables(source.field, [file for file in files if file in others])
            return self._of_tables(source, tables)
        paths = self._paths(source, files)
        has_others = self._references or self.cfg.pair_suffixes
        if paths and self.cfg.reference_columns and source.is_own and not has_others:
            self.findings.problems.append(
                f"{source.field}: {source.root}: a folder of images has no columns, but data.reference_columns names "
                "some; name a file with these columns, or the images before the edit in data.references"
            )
        self._texts |= _text_files(files)
        before: dict[Path, Path] = {}
        if self.cfg.pair_suffixes and source.is_own:
            before = self._pairs(source, paths)
            paths = list(before)
        # Rows of images that are left out are no mistakes.
        left_out = [file for file in files if file.suffix.lower() in OTHER_IMAGE_SUFFIXES]
        listed = self._metadata([file for file in files if file.name in METADATA], by_name([*left_out, *paths]))
        listed = {path: row for path in paths if (row := self._rows_elsewhere.get(path))} | listed
        self._watcher.listed({image: row.captions[0] for image, row in listed.items() if row.captions})
        # Folders that the config lists separately count too: a weight for one must not make repeats of the others.
        below = {path.parent for path in paths}
        self._counted = _counted(below.union(*(folder.parents for folder in below), read_folders(self.cfg)))
        images = [
            image
            for path in paths
            if (image := self._of_file(path, listed.get(path), source, before.get(path))) is not None
        ]
        self._check(source, len(paths), images, files)
        return images

    def _check(self, source: _Source, count: int, images: list[CaptionedImage], files: Sequence[Path] = ()) -> None:
        """Collect what concerns all of a folder's images.

        Args:
            source: The folder.
            count: The images that were found.
            images: Those that are used.
            files: All files of a folder of images; none of tables.
        """
        unread = [
            file
            for file in files
            if file.suffix.lower() not in IMAGE_SUFFIXES and not (file.name in METADATA or str(file) in self._captioned)
        ]
        near = unread_files.nearest(unread, [Path(place) for place, _ in self._uncaptioned]) if files else {}
        texts = [file for file in unread if file.suffix.lower() == ".txt"]
        rivals = [file for file in texts if self._texts[f"{unread_files.stem_of(file)}.txt"] in self._captioned]
        lists = [file for file in unread if file.suffix.lower() in unread_files.LISTS and file.name not in ABOUT]
        self._name_uncaptioned(source, count, near, lists[:1])
        self._warn_of_second_captions(source, rivals)
        self._warn_of_repeats(source, images if files else ())
        self.findings.warnings += unread_files.of_captioned(source.field, unread, {*near.values(), *rivals})
        if count and not images and not self.findings.problems:
            self.findings.problems.append(f"{source.field}: {source.root}: none of its {count} images can be read")
        self._warn_of_open_trigger(source, images)

    def _name_uncaptioned(self, source: _Source, count: int, near: Mapping[Path, Path], lists: Sequence[Path]) -> None:
        """Name the images of a folder that have no caption, as a problem or, where that is allowed, as a warning.

        Args:
            source: The folder.
            count: Its images.
            near: {image: a file that probably is its caption}.
            lists: A file that may hold captions of several images, and is not read.
        """
        missing, self._uncaptioned = self._uncaptioned, []
        if not missing:
            return
        place, remedy = missing[0]
        hint = "".join(
            f"; {file} is not read, a caption is read from {os.path.basename(_stem(image))}.txt"
            for image, file in [*near.items()][:1]
        )
        for file in () if near else lists:
            hint = (
                f"; {file} is not read, captions of several images are read from a metadata.jsonl or metadata.csv with "
                "file_name and text"
            )
        is_allowed = self.cfg.missing_caption == "empty"
        done = f"{'has' if len(missing) == 1 else 'have'} no caption"
        if is_allowed:
            done += f" and {'is' if len(missing) == 1 else 'are'} trained without one"
        sentence = f"{source.field}: {len(missing)} of {count} images {done}: first {place}"
        if is_allowed:
            self.findings.warnings.append(f"{sentence}{hint}")
            return
        if len(missing) == 1:
            sentence = f"{place}: no caption"
        elif not hint and remedy.endswith(".txt"):  # a table's row is not written by a model
            remedy += f", let a model write them with --caption {source.root}"
        self.findings.problems.append(f"{sentence}; {remedy}, or set data.missing_caption: empty{hint}")

    def _warn_of_second_captions(self, source: _Source, rivals: Sequence[Path]) -> None:
        """Warn of captions that another one of the same image keeps from being used. rivals: their files."""
        twice, self._twice = [*rivals, *self._twice], []
        if twice:
            count = image_warnings.counted(len(twice), "image has", "images have")
            self.findings.warnings.append(
                f"{source.field}: {count} another caption than the .txt, which is not used: first {twice[0]}; remove "
                "one of them"
            )
        relisted, self._relisted = self._relisted, []
        if relisted:
            count = image_warnings.counted(len(relisted), "image is", "images are")
            self.findings.warnings.append(
                f"{source.field}: {count} listed again with another caption, and the last one is used: first "
                f"{relisted[0]}; remove the other rows"
            )

    def _warn_of_repeats(self, source: _Source, images: Iterable[CaptionedImage]) -> None:
        """Say which folders are trained more often, and which images without a caption have that of their folder."""
        places = (image.location[len(str(source.root)) :].lstrip("/") for image in images)
        folders = dict.fromkeys(place.rpartition("/")[0] for place in places)
        found = dict.fromkeys(_repeats(source, f"{folder}/", self._counted) for folder in folders)
        often = [f"{one.folder} {one.times} times" for one in found if one.times > 1]
        if often:
            self.findings.warnings.append(
                f"{source.field}: images occur in an epoch as often as the names of their folders say, as in kohya's "
                f"scripts: {', '.join(often)}; to change this, rename a folder or give it a weight in data.folders"
            )
        unread = [one.folder for one in found if one.unread > 1]
        if unread:
            more = f" and {len(unread) - MOST_NAMED} more" if len(unread) > MOST_NAMED else ""
            self.findings.warnings.append(
                f"{source.field}: numbers that are resolutions, or count folders from 0 or 1 on, are not read as "
                f"repeats: {', '.join(unread[:MOST_NAMED])}{more}; where they are meant, give these folders a weight "
                "in data.folders"
            )
        named, self._named_by_folder = self._named_by_folder, []
        if named:
            count = image_warnings.counted(len(named), "image has", "images have")
            self.findings.warnings.append(
                f"{source.field}: {count} no caption but the text of the folder's name, as in kohya's scripts: first "
                f"{named[0]}"
            )

    def _tables(self, source: _Source, files: Sequence[Path]) -> list[Path]:
        """The files of several images each that are read: that which the config names, or those of a folder that has
        no images of its own, of one kind."""
        for file in files:
            if file.name.lower().endswith(COMPRESSED):
                self.findings.problems.append(f"{source.field}: {file}: {IS_COMPRESSED}")
        tables = [file for file in files if file.suffix.lower() in TABLES and file.name not in METADATA]
        others = [file for file in tables if file.suffix.lower() != CSV]
        if not others and tables and source.root not in tables:
            tables = []  # a .csv next to images is read where it is named, or called metadata.csv
        # Programs that write tar files of images list them in .parquet or .csv files next to these.
        tars = [file for file in others if file.suffix.lower() == TAR]
        tables = tars or others or tables
        has_images = any(file.suffix.lower() in IMAGE_SUFFIXES for file in files)
        if has_images and others:
            count = image_warnings.counted(len(others), "file is", "files are")
            self.findings.warnings.append(
                f"{source.field}: {count} not read, since the folder has images of its own: first {others[0]}; name "
                "it in place of the folder"
            )
        return [] if has_images else tables

    def _of_tables(self, source: _Source, tables: Sequence[Path]) -> list[CaptionedImage]:
        """The usable images of tables, in their order."""
        images: list[CaptionedImage] = []
        unused: list[str] = []
        unread: list[Path] = []
        count, columns = 0, Columns.of(self.cfg)
        for table in tables:
            prefix = table.relative_to(source.root).with_suffix("").as_posix() + "/" if len(tables) > 1 else ""
            before, captions = len(self.findings.problems), dict[Path, str]()
            with self._collecting(table):
                for row in read_table(table, columns):
                    if isinstance(row, Unread):
                        unread.append(table / row.name.lstrip("/"))
                        continue
                    count += 1
                    if isinstance(row, NoImage):
                        self._bad_image(str(row))
                    elif isinstance(row, InputError):
                        self.findings.problems.append(str(row))
                    else:
                        captions |= {row.image: row.captions[0]} if row.captions else {}
                        unused += [f"{table}: {name}" for name in row.unused[:1]]
                        images += filter(None, [self._of_row(source, row, prefix)])
                    if len(self.findings.problems) - before >= MOST_WRONG_ROWS:
                        raise InputError(f"{table}: {MOST_WRONG_ROWS} rows are wrong; the rest of them was not read")
            self._watcher.listed(captions, is_fixed=True)
        if not count and not self.findings.problems:
            self.findings.problems.append(f"{source.field}: {source.root}: holds no rows; name a file with images")
        self.findings.warnings += unread_files.of_samples(source.field, unused)
        self.findings.warnings += unread_files.of_members(source.field, unread)
        self._check(source, count, images)
        return images

    def _of_row(self, source: _Source, row: TableRow, prefix: str) -> CaptionedImage | None:
        """The image of a row of a table, which also names its references and has no focus; None for a finding."""
        captions = self._complete(row.captions, row.place, "write it into the row")
        return self._image(row.image, f"{prefix}{row.name}", captions, WHOLE.focus, source, row.references)

    def finish(self) -> None:
        """To be called after the last folder. Raises InputError if any problem stops the run."""
        for companions in (self._masks, *self._own_masks.values(), self._references, self._rejected):
            if companions:
                companions.finish()
        self._warn_of_shared_captions()
        if self.findings.problems:
            raise InputError(image_warnings.listing(self.findings.problems))

    def _companions(self, kind: type[C], field: str, folder: str | None) -> C | None:
        if folder is None:
            return None
        source = _Source(field, _absolute(folder), holds="images named as those of the data")
        files = self._files(source)
        paths = self._paths(source, files)
        used = frozenset(paths)
        self.findings.warnings += unread_files.of_others(field, [file for file in files if file not in used])
        return kind(field, source.root, paths, self.findings, self._known) if paths else None

    def _files(self, source: _Source) -> list[Path]:
        """The files of a folder by relative path. Problems with the folder are collected."""
        root = source.root
        try:
            if root.is_file() and root.name.lower().endswith((*TABLES, *COMPRESSED)):
                return [root]
            if not root.is_dir():
                kind = "not a folder" if root.exists() else "no such folder"
                self.findings.problems.append(f"{source.field}: {root}: {kind}; give a folder of {source.holds}")
                return []
            files, passed = [], list[str]()
            for entry in entries_below(root, self._separate_folders, passed):
                file = Path(entry.path)
                self._watcher.found(file)
                files.append(file)
            self.findings.warnings += unread_files.of_folders(source.field, passed)
        except OSError as error:
            wrong = f"{source.field}: {shortened(str(error.filename), 500)}: cannot be read ({error.strerror})"
            self.findings.problems.append(f"{wrong}; change its permissions, or name a folder without it")
            return []
        except InputError as error:
            self.findings.problems.append(f"{source.field}: {error}")
            return []
        if not files:
            self.findings.problems.append(f"{source.field}: {root}: the folder is empty; put {source.holds} into it")
        return sorted(files, key=str)

    def _paths(self, source: _Source, files: Sequence[Path]) -> list[Path]:
        paths = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
        for file in files:
            if file.suffix.lower() in OTHER_IMAGE_SUFFIXES:
                self._bad_image(f"{file}: {file.suffix} images are not read; convert it to png or jpg, or remove it")
        if files and not paths:
            expected = " ".join(sorted(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES))
            self.findings.problems.append(
                f"{source.field}: {source.root}: no images in this folder; expected {expected}"
            )
        stems = {os.path.splitext(path)[0] for path in paths}
        labels = [
            path for path in paths if (label := LABEL.fullmatch(str(path.parent / path.stem))) and label[1] in stems
        ]
        if labels:
            count = image_warnings.counted(len(labels), "mask lies", "masks lie")
            self.findings.problems.append(
                f"{source.field}: {count} among the images, as OneTrainer has them: first {labels[0]}; move them into "
                "a folder of their own, under the names of their images, and name it in data.masks"
            )
        return paths

    def _pairs(self, source: _Source, paths: Sequence[Path]) -> dict[Path, Path]:
        """{image after an edit: the one before it} of a folder; images without the other one are collected."""
        first, last = self.cfg.pair_suffixes
        by_stem = {_stem(path): path for path in paths}
        pairs = {
            path: by_stem[f"{stem.removesuffix(last)}{first}"]
            for stem, path in by_stem.items()
            if stem.endswith(last) and f"{stem.removesuffix(last)}{first}" in by_stem
        }
        used = {*pairs, *pairs.values()}
        alone = [path for path in paths if path not in used]
        if alone:
            self.findings.problems.append(
                f"{source.field}: {len(alone)} of {len(paths)} images are in no pair of names that end with {first} "
                f"and {last}: first {alone[0]}; add the other one, or remove it"
            )
        return pairs

    def _of_file(
        self, path: Path, row: Row | None, source: _Source, before: Path | None = None
    ) -> CaptionedImage | None:
        """The image of a file; None for a finding. before: the image before the edit, if both lie in the folder."""
        name = _stem(path)[len(str(source.root)) :].lstrip("/")
        found = _repeats(source, name, self._counted)
        captions = self._captions(path, row, found.caption)
        focus = row.focus if row else WHOLE.focus
        return self._image(path, name, captions, focus, source, [before] if before else (), found.times)

    def _image(
        self,
        path: Path,
        name: str,
        captions: tuple[str, ...] | None,
        focus: tuple[float, float],
        source: _Source,
        own_references: Sequence[Path] = (),
        repeats: int = 1,
    ) -> CaptionedImage | None:
        """The image; None if it, its captions, mask or a reference has a problem, which is collected.

        Args:
            path: The image.
            name: The name by which its mask and references are found.
            captions: Its captions; None if they have a problem, which was collected.
            focus: Its focus point.
            source: Its folder.
            own_references: References that its row names.
            repeats: How much more often than others it occurs.
        """
        name = same_name(name)
        self._watcher.reading(path)
        if source.is_own:
            self._watcher.named(path, source.field, name)
        masks = self._own_masks.get(source.field, self._masks)
        try:
            file = self._known.header(path)
            mask = masks.of(name, file) if masks and source.is_own else None
            references = self._references.of(name, file) if self._references and source.is_own else ()
            references += tuple(map(self._known.header, own_references))
            rejected = self._rejected.of(name, file) if self._rejected else None
        except InputError as error:
            self._watcher.bad(path)
            self._bad_image(str(error))
            return None
        image = CaptionedImage(
            **file.values,
            caption="",
            **_settings(self.cfg, source, repeats),
            mask=mask,
            references=references,
            rejected=rejected,
            is_own=source.is_own,
            focus=focus,
        )
        self._watcher.read(image)
        if captions is None:
            return None
        prefix = source.folder.caption_prefix if source.folder else ""
        first, *more = (self._completed(caption, prefix, source.is_own) for caption in captions)
        return replace(image, caption=first, more_captions=tuple(more))

    def _completed(self, caption: str, prefix: str, is_own: bool) -> str:
        """A caption with the folder's prefix, and with the trigger filled in."""
        caption = " ".join(filter(None, (prefix.strip(), caption)))
        return with_trigger(caption, self.cfg.trigger) if is_own else caption

    def _captions(self, path: Path, row: Row | None, of_folder: str) -> tuple[str, ...] | None:
        """All captions of an image, at least one; None where they have a problem, which is collected.

        of_folder: its caption where it has none of its own.
        """
        wanted = f"{_stem(path)}.txt"
        names = [wanted]
        if self.cfg.pair_suffixes:
            names.append(f"{_stem(path).removesuffix(self.cfg.pair_suffixes[1])}.txt")
        captions = row.captions if row else ()
        found = (self._texts.get(name) or self._texts.get(same_name(name)) for name in names)
        if file := next(filter(None, found), None):
            self._captioned.setdefault(file, []).append(path)
            text = self._text(Path(file))
            if text is None:
                return None
            lines = text.splitlines() if self.cfg.caption_lines else [text]
            written = tuple(line.strip() for line in lines if line.strip())
            self._twice += [path] if written and captions not in ((), written) else []
            if file != wanted and written:
                self._watcher.listed({path: written[0]})
            captions = written or captions
        elif of_folder and not captions:
            self._named_by_folder.append(path)
            captions = (of_folder,)
        return self._complete(captions, str(path), f"write it into {os.path.basename(wanted)}")

    def _complete(self, captions: Sequence[str], place: str, remedy: str) -> tuple[str, ...] | None:
        """Captions that are not empty, or a single empty one, if that may be; else None. Missing ones are collected."""
        captions = tuple(caption for caption in captions if caption)
        if captions:
            return captions
        self._uncaptioned.append((place, remedy))
        return ("",) if self.cfg.missing_caption == "empty" else None

    def _metadata(self, files: Iterable[Path], images: Mapping[str, Path]) -> dict[Path, Row]:
        """{image: its row} of all metadata files."""
        listed: dict[Path, Row] = {}
        for file in files:
            before = len(self.findings.problems)
            with self._collecting(file):
                for number, offset, line in metadata_lines(file):
                    if len(self.findings.problems) - before >= MOST_WRONG_ROWS:
                        raise InputError(f"{file}: {MOST_WRONG_ROWS} rows are wrong; the rest of them was not read")
                    with self._collecting(file, offset, f"{file}:{number}: "):
                        try:
                            text = line.decode().removeprefix("\ufeff")
                            image, row = metadata_row(text, file.parent, images, self._separate_folders)
                        except StalePoint as error:
                            self.findings.warnings.append(f"{file}:{number}: {error}")
                        else:
                            former = listed.get(image)
                            if former and former.captions and row.captions not in ((), former.captions):
                                self._relisted.append(image)
                            listed[image] = _joined(former, row)
        # Of folders that the config names separately, as one for validation.
        self._rows_elsewhere |= {image: row for image, row in listed.items() if str(image) not in images}
        return listed

    def _text(self, path: Path) -> str | None:
        """The stripped text of a caption's file; None if it has too many bytes, cannot be read or is not UTF-8, which
        is collected as a problem."""
        with self._collecting(path), opened(path) as stream:
            data = stream.read(MAX_CAPTION + 1)
            if len(data) > MAX_CAPTION:
                raise InputError(f"{path}: {too_long(os.fstat(stream.fileno()).st_size)}")
            # Windows editors write a byte order mark before the text.
            return unix_lines(data.decode("utf-8").removeprefix("\ufeff")).strip()
        return None

    @contextmanager
    def _collecting(self, path: Path, offset: int = 0, place: str = "") -> Iterator[None]:
        """Collect an error about a file as a problem, and continue after the `with` block.

        Args:
            path: The file.
            offset: Offset of the decoded bytes in the file.
            place: File and line, put before the message of an InputError.
        """
        try:
            yield
        except UnicodeDecodeError as error:
            byte = f"byte {offset + error.start} (0x{error.object[error.start]:02x})"
            self.findings.problems.append(f"{path}: {byte} is not UTF-8; save the file as UTF-8")
        except InputError as error:
            self.findings.problems.append(f"{place}{error}")
        except OSError as error:
            self.findings.problems.append(f"{path}: cannot be read ({error.strerror}); change its permissions")

    def _bad_image(self, message: str) -> None:
        if self.cfg.bad_image == "warn":
            self.findings.warnings.append(image_warnings.left_out(message))
        else:
            self.findings.problems.append(f"{message}, or set data.bad_image: warn")

    def _warn_of_shared_captions(self) -> None:
        owners = ((caption, list(dict.fromkeys(images))) for caption, images in self._captioned.items())
        shared = [(caption, images) for caption, images in owners if len(images) > 1]
        if shared:
            caption, images = shared[0]
            count = image_warnings.counted(len(shared), "caption is", "captions are")
            self.findings.warnings.append(
                f"{count} shared by images of one name: first {caption} by "
                f"{' and '.join(image.name for image in images)}; rename those that need their own"
            )

    def _warn_of_open_trigger(self, source: _Source, images: list[CaptionedImage]) -> None:
        count = sum(has_trigger_place(image.caption) for image in images)
        if count:
            remedy = "set data.trigger" if source.is_own else "remove it: the trigger is not for these images"
            self.findings.warnings.append(
                f"{source.field}: {count} captions of {source.root} hold an unfilled {TRIGGER_PLACE}; {remedy}"
            )


def metadata_lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset in bytes, JSON) of every row of a metadata.jsonl or metadata.csv."""
    if file.suffix == CSV:
        return ((number, 0, json.dumps(row).encode()) for number, row in csv_rows(file, needed=_NEEDED))
    return rows(file)


def named_images(file: Path) -> frozenset[Path]:
    """Return the paths that the rows of a metadata.jsonl or metadata.csv lead to; rows that are wrong lead nowhere."""
    named: set[Path] = set()
    for _, _, line in metadata_lines(file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("file_name"), str):
            named.add(Path(os.path.normpath(file.parent / row["file_name"])))
    return frozenset(named)


def metadata_row(
    line: str, folder: Path, images: Mapping[str, Path], elsewhere: Collection[Path] = ()
) -> tuple[Path, Row]:
    """The image of a row and the row. Raises InputError with the reason and the remedy, without file and line.

    Args:
        line: The row.
        folder: The folder that its file is in.
        images: {path, as it is and as it is compared: image}.
        elsewhere: Folders below it whose images are not among those.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not a JSON object ({error}); each line is one, with file_name and text") from error
    if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
        raise InputError('no "file_name"; each line is a JSON object with file_name and text')
    name = shortened(row["file_name"])
    focus = focus_of(row["focus"], name) if "focus" in row else WHOLE.focus
    text = row.get("text", row.get("caption"))
    captions = [caption for caption in (text if isinstance(text, list) else [text]) if isinstance(caption, str)]
    is_point = text is None and "focus" in row
    if len(captions) != (len(text) if isinstance(text, list) else not is_point) or text == []:
        raise InputError(f'no "text" or "caption" for {name}; add the caption as a string, or several as a list')
    if half := half_character("".join((row["file_name"], *captions))):
        raise InputError(f"a text {half}")
    if (size := max((len(caption.encode()) for caption in captions), default=0)) > MAX_CAPTION:
        raise InputError(f"{name}: {too_long(size)}")
    path = os.path.normpath(folder / row["file_name"])
    image = images.get(path) or images.get(same_name(path))
    if image is None and any(Path(path).is_relative_to(other) for other in elsewhere) and os.path.isfile(path):
        image = Path(path)
    if image is None:
        raise (StalePoint if is_point else InputError)(f"no such image: {name}; correct file_name or remove the line")
    return image, Row(tuple(unix_lines(caption).strip() for caption in captions), focus)


def _joined(former: Row | None, row: Row) -> Row:
    """The last row of an image, with the captions or the focus of a former one if one of them has nothing else."""
    if former is not None and not row.captions:
        return replace(former, focus=row.focus)
    if former is not None and not former.captions and row.focus == WHOLE.focus:
        return replace(row, focus=former.focus)
    return row


def focus_of(value: Any, name: str) -> tuple[float, float]:
    """Return the focus point of a row, (x, y), for its value. Raises InputError for what is none."""
    if not (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(part, int | float) and not isinstance(part, bool) and 0 <= part <= 1 for part in value)
    ):
        raise InputError(
            f"focus of {name}: {shortened(str(value))} is not a point; give [x, y], shares from 0 to 1 of its width "
            "from the left and of its height from the top"
        )
    return float(value[0]), float(value[1])


def by_name(paths: Iterable[Path]) -> dict[str, Path]:
    """Return {path, as it is and as it is compared: image}."""
    found = {str(path): path for path in paths}
    return {same_name(name): path for name, path in found.items()} | found


def _text_files(files: Sequence[Path]) -> dict[str, str]:
    """{path of a .txt: that file}; a path also leads to a .TXT, or one with other accents, if there is nothing else."""
    texts = [str(file) for file in files if file.suffix.lower() == ".txt"]
    others = {same_name(f"{os.path.splitext(text)[0]}.txt"): text for text in reversed(texts)}
    return others | {text: text for text in texts if text.endswith(".txt")}


class _Repeats(NamedTuple):
    """Settings of images in their folder's name.

    Attributes:
        times: How often they occur.
        caption: Their caption, where they have no other.
        folder: The folder.
        unread: The number in its name, if it is none of repeats; else 1.
    """

    times: int = 1
    caption: str = ""
    folder: str = ""
    unread: int = 1


def _repeats(source: _Source, name: str, counted: frozenset[str]) -> _Repeats:
    """Read the name of the folder `10_ohwx woman` of an image.

    Of several such folders the one nearest to that of the data counts, and the folder of the data itself only where it
    holds none; one whose number is none of repeats, only where there is no other. A weight in the config replaces the
    repeats of the folder of the data.

    Args:
        source: The folder of the data.
        name: The path of the image below it.
        counted: Folders whose numbers count them.
    """
    folders = name.split("/")[:-1]
    named = ["/".join(folders[:depth]) for depth, folder in enumerate(folders, 1) if REPEATS.fullmatch(folder)]
    read: tuple[str, re.Match[str], bool] | None = None
    for folder in (*named, ""):
        path = f"{source.root}/{folder}" if folder else str(source.root)
        found = REPEATS.fullmatch(os.path.basename(path))
        if found is None:
            continue
        is_read = found[1] not in RESOLUTIONS and path not in counted
        if read is None or is_read:
            read = folder, found, is_read
        if is_read:
            break
    if read is None:
        return _Repeats()
    folder, found, is_read = read
    has_weight = not folder and source.folder is not None and source.folder.weight != 1
    is_weighed = source.is_own and source.field != "data.validation" and not has_weight
    number = int(found[1]) if is_weighed else 1
    times, unread = (number, 1) if is_read else (1, number)
    return _Repeats(times, found[2].strip(), folder or source.root.name, unread)


def _counted(folders: Iterable[Path]) -> frozenset[str]:
    """The paths of folders whose numbers count them: three or more in one folder, from 0 or 1 on, each number once."""
    siblings: dict[Path, list[tuple[int, str]]] = {}
    for folder in folders:
        if found := COUNTED.fullmatch(folder.name):
            siblings.setdefault(folder.parent, []).append((int(found[1]), str(folder)))
    counted: list[str] = []
    for numbered in siblings.values():
        numbers = sorted(number for number, _ in numbered)
        is_series = numbers[0] < 2 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]
        counted += [path for _, path in numbered] if is_series and len(numbers) >= LEAST_COUNTED else []
    return frozenset(counted)


def _stem(path: Path) -> str:
    """A file's path without its suffix."""
    return os.path.splitext(path)[0]


def too_long(size: int) -> str:
    """The message about a caption of more than MAX_CAPTION bytes, without its file and line."""
    return f"{size} bytes are too many for a caption, the limit is {MAX_CAPTION}; shorten or remove it"


def with_trigger(caption: str, trigger: str) -> str:
    """Return a caption with the trigger in place of [trigger], else in front where it does not hold it."""
    if not trigger:
        return caption
    if has_trigger_place(caption):
        return fill_trigger(caption, trigger)
    if re.search(rf"(?<!{_PART_OF_WORD}){re.escape(trigger)}(?!{_PART_OF_WORD})", caption, re.IGNORECASE):
        return caption
    return f"{trigger}, {caption}" if caption else trigger
