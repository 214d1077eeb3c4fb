"""Image files: which there are, how large they are, and their pixels. No torch and no numpy, as in `images`."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from trainer.config import InputError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})

# Pillow has no common base class for what its decoders raise on damaged files.
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


@dataclass(frozen=True)
class Picture:
    """An image file. width, height: pixels after the EXIF orientation."""

    path: Path
    width: int
    height: int


def files_below(folder: Path, skipped: frozenset[Path]) -> Iterator[Path]:
    """The files below a folder. Links to folders are followed, but none is entered twice.

    Hidden folders, `cache`, `*_cache` and those of `skipped` (resolved paths) are left out.
    """
    yield from _walk(folder, set(skipped))


def open_picture(path: Path) -> Picture:
    """The file as its header describes it. Raises InputError when it is no image that can be read."""
    try:
        with _open(path) as image:
            # The PNG reader's own getexif decodes all pixels to look for an orientation behind them.
            orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
            width, height = image.size
    except _DECODER_ERRORS as error:
        raise _unreadable(path, error) from error
    is_on_its_side = orientation in (5, 6, 7, 8)
    return Picture(path, height, width) if is_on_its_side else Picture(path, width, height)


def load_rgb(picture: Picture, size: tuple[int, int]) -> Image.Image:
    """The image as RGB of exactly `size` (width, height): oriented, transparency on white, scaled to cover, cropped.

    Raises InputError naming the file when its pixels cannot be decoded.
    """
    return ImageOps.fit(_as_rgb(_upright(picture.path)), size, Image.Resampling.LANCZOS)


def load_mask(picture: Picture, size: tuple[int, int]) -> Image.Image:
    """The image as levels from 0 (black) to 255, mode F: averages over the areas of `load_rgb`'s picture.

    size: (width, height) of the same aspect ratio as that picture. An image with transparent parts is a mask by its
    opacity, another by its brightness. Raises InputError naming the file when its pixels cannot be decoded.
    """
    image = _upright(picture.path)
    levels = _opacity(image) or _as_rgb(image).convert("L")
    return ImageOps.fit(levels.convert("F"), size, Image.Resampling.BOX)


def _walk(folder: Path, seen: set[Path]) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            yield entry
        elif not (entry.name == "cache" or entry.name.endswith("_cache")) and entry.resolve() not in seen:
            seen.add(entry.resolve())
            yield from _walk(entry, seen)


def _upright(path: Path) -> Image.Image:
    try:
        with _open(path) as image:
            return ImageOps.exif_transpose(image)
    except _DECODER_ERRORS as error:
        raise _unreadable(path, error) from error


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


def _opacity(image: Image.Image) -> Image.Image | None:
    """The alpha channel, where it hides anything: many programs write one that does not."""
    if not image.has_transparency_data:
        return None
    alpha = image.convert("RGBA").getchannel("A")
    return None if alpha.getextrema() == (255, 255) else alpha


def _unreadable(path: Path, error: Exception) -> InputError:
    if isinstance(error, UnidentifiedImageError):
        reason = "no image of a known format"
    else:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return InputError(f"{path}: cannot be read ({reason}); replace or remove it")


def png(image: Image.Image) -> bytes:
    """The picture as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
