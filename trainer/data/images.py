"""Finds images with their captions, and decodes them. No torch and no numpy: a dataset is checked before they load."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from trainer.config import DataConfig, InputError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})
OTHER_IMAGE_SUFFIXES = frozenset({".gif", ".heic", ".heif", ".avif", ".jxl", ".jp2", ".tga", ".psd", ".exr", ".dng"})
TRIGGER_PLACE = "[trigger]"
MAX_SHOWN_PROBLEMS = 20

# Pillow has no common base class for what its decoders raise on damaged files.
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


@dataclass(frozen=True)
class Photo:
    """One image with its caption. width, height: pixels after the EXIF orientation.  weight: occurrences per epoch."""

    path: Path
    caption: str
    width: int
    height: int
    weight: float


@dataclass(frozen=True)
class Dataset:
    """What a scan found: folders in the order of the config, images by relative path within a folder."""

    train: tuple[Photo, ...]
    validation: tuple[Photo, ...]
    warnings: tuple[str, ...]


def scan(cfg: DataConfig) -> Dataset:
    """The images of `data.path`, `data.folders` and `data.validation` with their captions; only headers are read.

    Folders are searched recursively. Hidden ones, `cache`, `*_cache` and `data.cache` are skipped, and a folder that
    the config lists by itself counts there only. A caption is the .txt beside the image, else a row of a
    metadata.jsonl whose `file_name` leads to it. `data.validation: n` sets aside the last n images of the order.
    Raises InputError with all problems found, the first 20 of them in words.
    """
    scanner = _Scanner(cfg, _own_places(cfg))
    photos = [photo for source in _training_sources(cfg) for photo in scanner.photos(source)]
    held_out: list[Photo] = []
    if isinstance(cfg.validation, str):
        held_out = scanner.photos(_Source("data.validation", _absolute(cfg.validation), 1.0))
    scanner.raise_problems()
    if isinstance(cfg.validation, int):
        photos, held_out = _set_aside(photos, cfg.validation)
    return Dataset(tuple(photos), tuple(held_out), tuple(scanner.warnings))


def load_photo(photo: Photo, size: tuple[int, int]) -> Image.Image:
    """The image as RGB of exactly `size` (width, height): oriented, transparency on white, scaled to cover, cropped.

    Raises InputError naming the file when its pixels cannot be decoded.
    """
    try:
        with _open(photo.path) as image:
            upright = ImageOps.exif_transpose(image)
    except _DECODER_ERRORS as error:
        raise _unreadable(photo.path, error) from error
    return ImageOps.fit(_as_rgb(upright), size, Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class _Source:
    """A folder of images, and the field of the config that names it."""

    field: str
    root: Path
    weight: float


def _training_sources(cfg: DataConfig) -> Iterator[_Source]:
    if cfg.path is not None:
        yield _Source("data.path", _absolute(cfg.path), float(cfg.repeats))
    for index, folder in enumerate(cfg.folders):
        yield _Source(f"data.folders.{index}.path", _absolute(folder.path), cfg.repeats * folder.weight)


def _own_places(cfg: DataConfig) -> frozenset[Path]:
    """Folders whose content does not belong to the folder around them."""
    named = [cfg.path, cfg.cache, *(folder.path for folder in cfg.folders)]
    if isinstance(cfg.validation, str):
        named.append(cfg.validation)
    return frozenset(_absolute(path).resolve() for path in named if path is not None)


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))


def _set_aside(photos: list[Photo], count: int) -> tuple[list[Photo], list[Photo]]:
    if count >= len(photos):
        raise InputError(
            f"data.validation: {count} of {len(photos)} images leaves none to train on; use at most {len(photos) - 1}"
        )
    border = len(photos) - count
    return photos[:border], photos[border:]


@dataclass
class _Scanner:
    """Reads folders one after the other and collects what is wrong with them."""

    cfg: DataConfig
    own_places: frozenset[Path]
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def photos(self, source: _Source) -> list[Photo]:
        """The usable images of one folder, by relative path."""
        files = self._files(source)
        images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
        for file in files:
            if file.suffix.lower() in OTHER_IMAGE_SUFFIXES:
                self._bad_image(f"{file}: {file.suffix} images are not read; convert it to png or jpg, or remove it")
        if files and not images:
            expected = " ".join(sorted(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES))
            self.problems.append(f"{source.field}: {source.root}: no images in this folder; expected {expected}")
        rows = self._metadata([file for file in files if file.name == "metadata.jsonl"], frozenset(images))
        photos = [photo for image in images if (photo := self._photo(image, rows, source.weight)) is not None]
        if images and not photos and not self.problems:
            self.problems.append(f"{source.field}: {source.root}: none of its {len(images)} images can be read")
        self._warn_of_unset_trigger(source, photos)
        return photos

    def raise_problems(self) -> None:
        """Raises InputError if anything was found wrong so far."""
        if self.problems:
            hidden = len(self.problems) - MAX_SHOWN_PROBLEMS
            more = [f"and {hidden} more"] if hidden > 0 else []
            raise InputError("\n".join(self.problems[:MAX_SHOWN_PROBLEMS] + more))

    def _files(self, source: _Source) -> list[Path]:
        root = source.root
        if not root.is_dir():
            kind = "not a folder" if root.exists() else "no such folder"
            self.problems.append(f"{source.field}: {root}: {kind}; give a folder of images with captions")
            return []
        files = list(_walk(root, set(self.own_places)))
        if not files:
            self.problems.append(f"{source.field}: {root}: the folder is empty; put images with captions into it")
        return sorted(files, key=lambda file: file.relative_to(root).as_posix())

    def _photo(self, path: Path, rows: Mapping[Path, str], weight: float) -> Photo | None:
        """None if something is wrong with the image or its caption; that is noted."""
        caption = self._caption(path, rows)
        try:
            width, height = _upright_size(path)
        except InputError as error:
            self._bad_image(str(error))
            return None
        if caption is None:
            return None
        return Photo(path, _with_trigger(caption, self.cfg.trigger), width, height, weight)

    def _caption(self, path: Path, rows: Mapping[Path, str]) -> str | None:
        beside = path.with_suffix(".txt")
        caption = self._text(beside) if beside.is_file() else rows.get(path, "")
        if caption == "" and self.cfg.missing_caption == "stop":
            self.problems.append(f"{path}: no caption; write it into {beside.name}, or set data.missing_caption: empty")
            return None
        return caption

    def _metadata(self, files: Iterable[Path], images: frozenset[Path]) -> dict[Path, str]:
        """{image: caption} of all rows of all metadata files."""
        captions: dict[Path, str] = {}
        for file in files:
            for number, line in enumerate((self._text(file) or "").split("\n"), start=1):
                if line.strip():
                    try:
                        image, caption = _metadata_row(line, file.parent, images)
                    except InputError as error:
                        self.problems.append(f"{file}:{number}: {error}")
                    else:
                        captions[image] = caption
        return captions

    def _text(self, path: Path) -> str | None:
        """The stripped text of a file, or None if it is not UTF-8; that is noted."""
        data = path.read_bytes()
        try:
            # Windows editors put a byte order mark before the text.
            return data.decode("utf-8").removeprefix("\ufeff").strip()
        except UnicodeDecodeError as error:
            self.problems.append(
                f"{path}: byte {error.start} (0x{data[error.start]:02x}) is not UTF-8; save the file as UTF-8"
            )
            return None

    def _bad_image(self, message: str) -> None:
        if self.cfg.bad_image == "warn":
            self.warnings.append(f"left out: {message}")
        else:
            self.problems.append(f"{message}, or set data.bad_image: warn")

    def _warn_of_unset_trigger(self, source: _Source, photos: list[Photo]) -> None:
        count = sum(TRIGGER_PLACE in photo.caption for photo in photos)
        if count:
            self.warnings.append(
                f"{source.field}: {count} captions of {source.root} hold {TRIGGER_PLACE} as it stands; set data.trigger"
            )


def _walk(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """The files below a folder. Links to folders are followed, but none is entered twice."""
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            yield entry
        elif not (entry.name == "cache" or entry.name.endswith("_cache")) and entry.resolve() not in seen:
            seen.add(entry.resolve())
            yield from _walk(entry, seen)


def _metadata_row(line: str, folder: Path, images: frozenset[Path]) -> tuple[Path, str]:
    """The image of a row and its caption. Raises InputError with the reason and the remedy, without the place."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"not a JSON object ({error}); each line is one, with file_name and text") from error
    if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
        raise InputError('no "file_name"; each line is a JSON object with file_name and text')
    caption = row.get("text", row.get("caption"))
    if not isinstance(caption, str):
        raise InputError(f'no "text" or "caption" for {row["file_name"]}; add the caption as a string')
    image = Path(os.path.normpath(folder / row["file_name"]))
    if image not in images:
        raise InputError(f"no such image: {row['file_name']}; correct file_name or remove the line")
    return image, caption.strip()


def _with_trigger(caption: str, trigger: str) -> str:
    if not trigger:
        return caption
    if TRIGGER_PLACE in caption:
        return caption.replace(TRIGGER_PLACE, trigger)
    return f"{trigger}, {caption}" if caption else trigger


def _upright_size(path: Path) -> tuple[int, int]:
    """(width, height) as a viewer shows the image, from its header. Raises InputError."""
    try:
        with _open(path) as image:
            # The PNG reader's own getexif decodes all pixels to look for an orientation behind them.
            orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
            width, height = image.size
    except _DECODER_ERRORS as error:
        raise _unreadable(path, error) from error
    is_on_its_side = orientation in (5, 6, 7, 8)
    return (height, width) if is_on_its_side else (width, height)


def _open(path: Path) -> Image.Image:
    image = Image.open(path)
    if image.mode in ("I", "F"):
        image.close()
        raise ValueError("its pixels have 32 bits and no fixed white; save it with 8 or 16 bits")
    return image


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # convert() would clip: everything above 255 of 65535 became white.
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _unreadable(path: Path, error: Exception) -> InputError:
    if isinstance(error, UnidentifiedImageError):
        reason = "no image of a known format"
    else:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return InputError(f"{path}: cannot be read ({reason}); replace or remove it")
