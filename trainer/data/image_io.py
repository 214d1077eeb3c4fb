"""Image files: which there are, how large they are, and their pixels. No torch and no numpy, as in `images`."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from trainer.config import files
from trainer.config.errors import InputError
from trainer.config.terminal import shortened
from trainer.data import colour, png_chunks
from trainer.data.colour import Profile
from trainer.data.text_files import MOST_DEEP, too_deep

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})
MAX_PIXELS = 2**28
"""16384 x 16384; telephones take 200 megapixels. Decoding takes at most 1.1 GiB of memory, 3.1 with transparency.

A quarter of it in formats of _BUFFERED: 1.0 GiB, 1.3 with transparency."""
MOST_SHOWN = 2**26
"""Pixels of what `load_preview` decodes, 8192 x 8192, which takes 0.5 GiB meanwhile."""

_BUFFERED = ("WEBP", "AVIF")
"""Formats whose decoders hold a picture four times; half as many pixels of them are shown."""

_FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "GIF", "AVIF")
"""Pillow's names of what IMAGE_SUFFIXES stand for, and of what the web serves under those names. No other of its
readers is tried, whatever a file holds: that of PostScript runs Ghostscript."""


@dataclass(frozen=True)
class Picture:
    """An image file.

    width, height: pixels after the EXIF orientation.  profile: its ICC profile's effect on the colours.
    has_frames: whether the file holds an animation or several pages.  is_turned: whether it lies on its side there.
    """

    path: Path
    width: int
    height: int
    profile: Profile = field(default="none", kw_only=True)
    has_frames: bool = field(default=False, kw_only=True)
    is_turned: bool = field(default=False, kw_only=True)


def files_below(folder: Path, skipped: frozenset[Path]) -> Iterator[Path]:
    """The files below a folder. Links to folders are followed, but none is entered twice.

    Hidden folders, `cache`, `*_cache` and those of `skipped` (resolved paths) are left out. Raises OSError, and
    InputError for folders that lie within each other without an end.
    """
    yield from _walk(folder, folder, Path(os.path.realpath(folder)), set(skipped))


def open_picture(path: Path) -> Picture:
    """The file as its header describes it. Raises InputError when it is no image that can be read."""
    with _named(path), _opened(path) as (image, file):
        width, height = _stored_size(image)
        is_turned = _orientation(image, file) in (5, 6, 7, 8)
        if is_turned:
            width, height = height, width
        profile = colour.effect(image.info.get("icc_profile"), image.mode)
        # Not of MPO, the .jpg of many cameras: its further frames are previews of the first.
        has_frames = isinstance(image, PngImageFile | TiffImageFile | WebPImageFile) and image.is_animated
    return Picture(path, width, height, profile=profile, has_frames=has_frames, is_turned=is_turned)


def load_rgb(picture: Picture, size: tuple[int, int]) -> Image.Image:
    """The image as sRGB of exactly `size` (width, height): oriented, transparency on white, scaled to cover, cropped.

    Raises InputError naming the file when its pixels cannot be decoded, or are of another size than `picture`'s.
    """
    with _named(picture.path):
        return _in_srgb(_upright(picture), picture, size)


def load_preview(picture: Picture, side: int) -> Image.Image:
    """The whole image as `load_rgb` shows it, its longer side at most `side`, to be looked at.

    Raises InputError as `load_rgb`, and for more than MOST_SHOWN pixels.
    """
    scale = min(1, side / max(picture.width, picture.height))
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    with _named(picture.path):
        with _opened(picture.path) as (image, _):
            _require_shown(picture.path, image)
            image.draft(image.mode, (side, side))  # a JPEG is decoded at an eighth, a quarter or half of its size
            image.load()
        small = _reduced(image, max(1, max(image.size) // (2 * side)), keeps_cmyk=picture.profile == "used")
        return _in_srgb(ImageOps.exif_transpose(small), picture, size)


def is_invisible(picture: Picture, loaded: Image.Image) -> bool:
    """Whether every pixel of the file is transparent. loaded: what `load_rgb` made of it."""
    if loaded.getextrema() != ((255, 255),) * 3:
        return False
    with _named(picture.path):
        alpha = _opacity(_upright(picture))
    return alpha is not None and alpha.getextrema() == (0, 0)


def load_mask(picture: Picture, size: tuple[int, int]) -> Image.Image:
    """The image as levels from 0 (black) to 255, mode F: averages over the areas of `load_rgb`'s picture.

    size: (width, height) of the same aspect ratio as that picture. An image with transparent parts is a mask by its
    opacity, another by its brightness, whatever its ICC profile. Raises InputError as `load_rgb`.
    """
    with _named(picture.path):
        image = _upright(picture)
        levels = _opacity(image) or _as_rgb(image).convert("L")
        return ImageOps.fit(levels.convert("F"), size, Image.Resampling.BOX)


def _walk(root: Path, folder: Path, real: Path, seen: set[Path]) -> Iterator[Path]:
    """The files below a folder that was reached from `root`. real: its path without links."""
    if len(folder.parts) - len(root.parts) > MOST_DEEP:
        raise too_deep(root)
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            yield entry
            continue
        place = Path(os.path.realpath(entry)) if entry.is_symlink() else real / entry.name
        if not (entry.name == "cache" or entry.name.endswith("_cache")) and place not in seen:
            seen.add(place)
            yield from _walk(root, entry, place, seen)


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) as the pixels lie in the file. The TIFF reader's `size` has its orientation already."""
    if isinstance(image, TiffImageFile):
        return image.tag_v2[IMAGEWIDTH], image.tag_v2[IMAGELENGTH]
    return image.size


def _orientation(image: ImageFile.ImageFile, file: IO[bytes]) -> int:
    """As `ImageOps.exif_transpose` finds it, from EXIF, else XMP: 1 to 8."""
    # The PNG reader's own getexif decodes all pixels to look for an orientation behind them.
    if isinstance(image, PngImageFile) and (header := png_chunks.with_late_metadata(file)):
        image = PngImageFile(io.BytesIO(header))
    orientation: int = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    return orientation


def _upright(picture: Picture) -> Image.Image:
    with _opened(picture.path) as (image, _):
        if isinstance(image, TiffImageFile):
            # The reader applies Pillow's limit where it makes room for the pixels itself.
            image.im = Image.new(image.mode, _stored_size(image)).im
        ImageOps.exif_transpose(image, in_place=True)
    if image.size != (picture.width, picture.height):
        raise InputError(
            f"{picture.path}: has {image.width} x {image.height} pixels, and had {picture.width} x {picture.height} "
            "when it was found; if it was replaced, start again, else save it anew"
        )
    return image


@contextmanager
def _opened(path: Path) -> Iterator[tuple[ImageFile.ImageFile, IO[bytes]]]:
    """The image as its header describes it, and its file."""
    with files.opened(path) as file:
        image = _identified(file)
        pixels = image.width * image.height
        is_buffered = image.format in _BUFFERED
        limit = MAX_PIXELS // (4 if is_buffered else 1)
        if pixels > limit:
            also = f", the limit of {image.format}; save it as PNG, or" if is_buffered else ";"
            raise ValueError(f"{pixels / 1e6:.1f} megapixels are more than {limit / 1e6:.1f}{also} scale it down")
        if image.mode in ("I", "F"):
            raise ValueError("its pixels have 32 bits and no fixed white; save it with 8 or 16 bits")
        yield image, file


def _identified(file: IO[bytes]) -> ImageFile.ImageFile:
    """As `Image.open`, whose limit of 179 megapixels can be changed for the whole process only.

    Without the file's name Pillow maps no file to memory, which scrambles a TIFF that lies on its side.
    """
    head = file.read(16)
    Image.init()
    for name in _FORMATS:
        reader, accepts = Image.OPEN[name]
        if accepts is not None and accepts(head) is True:
            file.seek(0)
            try:
                return reader(file, "")
            except (SyntaxError, IndexError, TypeError, struct.error) as error:
                raise UnidentifiedImageError from error
    raise UnidentifiedImageError


def _in_srgb(image: Image.Image, picture: Picture, size: tuple[int, int]) -> Image.Image:
    """An upright image as sRGB of exactly this size."""
    profile = image.info.get("icc_profile")
    if picture.profile != "used" or profile is None:
        return ImageOps.fit(_as_rgb(image), size, Image.Resampling.LANCZOS)
    pixels = image if image.mode == "CMYK" else _as_rgb(image)
    # After scaling: a conversion of a megapixel in place of up to MAX_PIXELS.
    return colour.to_srgb(ImageOps.fit(pixels, size, Image.Resampling.LANCZOS), profile)


def _require_shown(path: Path, image: ImageFile.ImageFile) -> None:
    """Raises InputError for more pixels than the page has memory for."""
    pixels, limit = image.width * image.height, MOST_SHOWN // (2 if image.format in _BUFFERED else 1)
    if pixels > limit:
        raise InputError(
            f"{path}: {pixels / 1e6:.1f} megapixels are too many to be shown, the limit is {limit / 1e6:.1f}; "
            "it is trained on all the same, or scale it down"
        )


def _reduced(image: Image.Image, factor: int, keeps_cmyk: bool) -> Image.Image:
    """A decoded image on white, each side divided by `factor`, as RGB; CMYK may stay.

    In strips of a megapixel: RGBA takes four copies on its way to RGB.
    """
    mode = "CMYK" if keeps_cmyk and image.mode == "CMYK" else "RGB"
    small = Image.new(mode, (-(-image.width // factor), -(-image.height // factor)))
    rows = factor * max(1, 2**20 // (image.width * factor))
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        small.paste((strip if mode == "CMYK" else _as_rgb(strip)).reduce(factor), (0, top // factor))
    small.info = {name: value for name, value in image.info.items() if name != "transparency"}
    return small


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # convert() would clip: everything above 255 of 65535 became white.
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    layer = image if image.mode == "RGBA" else image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _opacity(image: Image.Image) -> Image.Image | None:
    """The alpha channel, where it hides anything: many programs write one that does not."""
    if not image.has_transparency_data:
        return None
    alpha = image.convert("RGBA").getchannel("A")
    return None if alpha.getextrema() == (255, 255) else alpha


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raises InputError naming the file for whatever Pillow raises inside."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # its decoders raise all kinds for damaged files, which have no base class in common
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    if isinstance(error, UnidentifiedImageError):
        reason = "no image of a known format"
    else:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        reason = shortened(reason) or type(error).__name__
    return InputError(f"{shortened(str(path), 600)}: cannot be read ({reason}); replace or remove it")


def png(image: Image.Image) -> bytes:
    """The picture as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
