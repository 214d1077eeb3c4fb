"""Finds image files and reads their headers and pixels. Imports neither torch nor numpy. See DECISIONS 78."""

from __future__ import annotations

import io
import os
import struct
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import IO, Annotated, Any, cast
from urllib.parse import quote_from_bytes, unquote_to_bytes

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile as PillowImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile
from pydantic import AfterValidator, PlainSerializer

from trainer.config.size import Size
from trainer.data.images import colour, png_chunks
from trainer.data.images.colour import Profile
from trainer.data.images.image_members import opened_image
from trainer.data.text.text_files import MOST_DEEP, too_deep
from trainer.system.errors import InputError
from trainer.system.terminal import shortened

JPEG_SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".pjpeg", ".pjp"})
"""The names that browsers and Windows give a JPEG."""
IMAGE_SUFFIXES = JPEG_SUFFIXES | {".png", ".webp", ".bmp", ".tif", ".tiff"}
OTHER_IMAGE_SUFFIXES = frozenset({".gif", ".heic", ".heif", ".avif", ".jxl", ".jp2", ".tga", ".psd", ".exr", ".dng"})
"""Images that are not read, and stop a run."""
RUN_FILES = frozenset({"config.yaml", "events.jsonl"})
"""A folder with both is a run: its samples, drawings and exports are not data."""
MOST_LOOKED = 1000
"""Files of a folder that is passed over among which an image is looked for."""
MAX_PIXELS = 2**28
"""16384 x 16384; phones take 200 megapixels. Decoding takes at most 1.1 GiB of memory, 3.1 with transparency.

The limit for formats of _BUFFERED is a quarter: 1.0 GiB, 1.3 with transparency."""
MOST_SHOWN = 2**26
"""Most pixels that `load_preview` decodes, 8192 x 8192, which takes 0.5 GiB meanwhile."""

_BUFFERED = ("WEBP", "AVIF")
"""Formats whose decoders hold an image four times; their limit for previews is half as many pixels."""

_FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "GIF", "AVIF")
"""Pillow's names of the formats of IMAGE_SUFFIXES, and of the formats that the web serves under those names. No other
reader of Pillow is tried, whatever a file holds: its PostScript reader runs Ghostscript."""


def _quoted(text: str) -> str:
    return quote_from_bytes(os.fsencode(text))


def _unquoted(text: str) -> str:
    return os.fsdecode(unquote_to_bytes(text))


NativeText = Annotated[str, PlainSerializer(_quoted, when_used="json"), AfterValidator(_unquoted)]
"""A path, or a sentence with one. It need not be UTF-8, which JSON must be: there it is quoted as in a URL."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file.

    Attributes:
        location: The file's path as text; a Path of each of 100,000 images takes 50 MB.
        width: Pixels, after the EXIF orientation.
        height: Pixels, after the EXIF orientation.
        profile: Effect of its ICC profile on the colours.
        has_frames: Whether the file holds an animation or several pages.
        is_turned: Whether the EXIF orientation swaps width and height.
    """

    location: NativeText
    width: int
    height: int
    profile: Profile = field(default="none", kw_only=True)
    has_frames: bool = field(default=False, kw_only=True)
    is_turned: bool = field(default=False, kw_only=True)

    @property
    def path(self) -> Path:
        return Path(self.location)

    @property
    def size(self) -> Size:
        """Size of the upright image, a still."""
        return Size(self.width, self.height)

    @property
    def values(self) -> dict[str, Any]:
        """The fields above, also of an image that has more."""
        return {one.name: getattr(self, one.name) for one in fields(ImageFile)}


@dataclass(frozen=True, slots=True)
class Framing:
    """How an image is brought to another aspect ratio, and on what.

    Attributes:
        focus: The point (x, y) that a crop keeps in its middle, as far as there is image around it: shares of the
            width from the left and of the height from the top, of the upright image.
        is_padded: Whether the whole image is kept, with borders, rather than cropped.
        is_mirrored: Whether left and right are exchanged, as the last step.
        background: Colour behind transparent pixels and of borders, as #rrggbb.
    """

    focus: tuple[float, float] = (0.5, 0.5)
    is_padded: bool = False
    is_mirrored: bool = False
    background: str = "#ffffff"

    @property
    def content(self) -> tuple[object, ...]:
        """The fields that differ from WHOLE, for keys of a cache."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return tuple((name, value) for name, value in values if value != getattr(WHOLE, name))


WHOLE = Framing()
"""Cropped around its middle, on white."""


def inner_size(width: int, height: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return the (width, height) of a whole image inside borders: the largest inside `size` of its aspect ratio."""
    scale = min(size[0] / width, size[1] / height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def crop_start(focus: float, kept: float) -> float:
    """Return where a crop begins along one side of an image, as a share of that side.

    Args:
        focus: What shall be in its middle, a share of the side.
        kept: The share of the side that it keeps.
    """
    return min(max(focus - kept / 2, 0.0), 1.0 - kept)


def files_below(folder: Path, skipped: frozenset[Path]) -> Iterator[Path]:
    """The files below a folder. Links to folders are followed, but no folder is entered twice.

    Hidden folders, `cache`, `*_cache`, folders of runs and those of `skipped` (resolved paths) are left out.

    Raises:
        OSError: A folder cannot be read.
        InputError: Folders are nested without an end.
    """
    return (Path(entry.path) for entry in entries_below(folder, skipped))


def entries_below(
    folder: Path, skipped: frozenset[Path], passed: list[str] | None = None
) -> Iterator[os.DirEntry[str]]:
    """The same as `files_below`, as `os.scandir` has them.

    passed: takes the folders that are left out, those of `skipped` excepted.
    """
    found = passed if passed is not None else []
    yield from _walk(folder, str(folder), 0, os.path.realpath(folder), set(map(str, skipped)), found)


def folders_with_images(folders: Iterable[str]) -> list[str]:
    """Those of some folders in which an image is soon found. The trash of the page, or of a desktop, does not count."""
    return [
        folder
        for folder in folders
        if not os.path.basename(folder).lower().startswith(".trash") and _holds_images(folder)
    ]


def is_passed_over(name: str) -> bool:
    """Whether a folder of this name is not searched for images."""
    return name[0] == "." or name == "cache" or name.endswith("_cache")


def same_name(path: str) -> str:
    """A path as it is compared: macOS writes accents as characters of their own (NFD), other systems do not (NFC)."""
    return unicodedata.normalize("NFC", path)


def read_header(path: Path) -> ImageFile:
    """Read the header of an image. Raises InputError when the file is not a readable image."""
    with _naming_file(path), _opened(path) as (image, file):
        width, height = _stored_size(image)
        is_turned = _orientation(image, file) in (5, 6, 7, 8)
        if is_turned:
            width, height = height, width
        profile = colour.effect(image.info.get("icc_profile"), image.mode)
        # MPO, the .jpg of many cameras, does not count: its further frames are previews of the first.
        has_frames = isinstance(image, PngImageFile | TiffImageFile | WebPImageFile) and image.is_animated
    return ImageFile(str(path), width, height, profile=profile, has_frames=has_frames, is_turned=is_turned)


def load_rgb(file: ImageFile, size: tuple[int, int], framing: Framing = WHOLE) -> Image.Image:
    """Load as sRGB of exactly `size` (width, height): oriented, on the background, scaled, cropped or with borders.

    Raises:
        InputError: The pixels cannot be decoded, or their size is not that of `file`; the message names the file.
    """
    with _naming_file(file.path):
        scale = _covering(size, framing.focus)
        if framing.is_padded:
            scale = _resizing(inner_size(file.width, file.height, size), Image.Resampling.LANCZOS)
        image = _in_srgb(_upright(file), file, scale, framing.background)
        if framing.is_padded:
            image = _bordered(image, Image.new("RGB", size, framing.background))
        return ImageOps.mirror(image) if framing.is_mirrored else image


def load_resized(
    file: ImageFile,
    size: tuple[int, int],
    background: str = WHOLE.background,
    resample: Image.Resampling = Image.Resampling.BICUBIC,
) -> Image.Image:
    """Load as `load_rgb`, but whole: each side is scaled by itself. For sizes that nearly keep the aspect ratio."""
    with _naming_file(file.path):
        scale = _resizing(size, resample)
        return _in_srgb(_upright(file), file, scale, background)


def load_preview(file: ImageFile, side: int) -> Image.Image:
    """Load the whole image for display, in the colours of `load_rgb`, its longer side at most `side` pixels.

    Raises:
        InputError: As `load_rgb`, and for more than MOST_SHOWN pixels.
    """
    scale = min(1, side / max(file.width, file.height))
    size = max(1, round(file.width * scale)), max(1, round(file.height * scale))
    with _naming_file(file.path):
        with _opened(file.path) as (image, _):
            _require_shown(file.path, image)
            image.draft(image.mode, (side, side))  # a JPEG is decoded at an eighth, a quarter or half of its size
            image.load()
        small = _reduced(image, max(1, max(image.size) // (2 * side)), keeps_cmyk=file.profile == "used")
        return _in_srgb(ImageOps.exif_transpose(small), file, _covering(size))


def load_grey(file: ImageFile, side: int) -> Image.Image:
    """Load the brightness of the whole upright image, mode L, scaled down so that its longer side is `side` pixels.

    It is not enlarged. An ICC profile is ignored, and transparency is on white.

    Raises:
        InputError: As `load_preview`.
    """
    scale = min(1, side / max(file.width, file.height))
    size = max(1, round(file.width * scale)), max(1, round(file.height * scale))
    with _naming_file(file.path):
        with _opened(file.path) as (image, _):
            _require_shown(file.path, image)
            image.draft("L", size[::-1] if file.is_turned else size)  # only the brightness of a JPEG is decoded
            image.load()
        small: Image.Image = image
        if image.mode != "L":
            small = _reduced(image, max(1, max(image.size) // (2 * side)), keeps_cmyk=False).convert("L")
        return ImageOps.exif_transpose(small).resize(size, Image.Resampling.BICUBIC)


def is_invisible(file: ImageFile, loaded: Image.Image) -> bool:
    """Whether every pixel of the file is transparent. loaded: the result of `load_rgb`, with any framing."""
    if any(low != high for low, high in cast("tuple[tuple[int, int], ...]", loaded.getextrema())):
        return False
    with _naming_file(file.path):
        alpha = _opacity(_upright(file))
    return alpha is not None and alpha.getextrema() == (0, 0)


def load_mask(file: ImageFile, size: tuple[int, int], framing: Framing = WHOLE) -> Image.Image:
    """Load as levels from 0 (black) to 255, mode F: averages over the areas of `load_rgb`'s image, if it is cropped.

    The levels are the opacity of an image with transparent parts, else its brightness; ICC profiles are ignored.

    Args:
        file: The mask.
        size: (width, height) with the aspect ratio of `load_rgb`'s image.
        framing: That of the image, without borders.

    Raises:
        InputError: As `load_rgb`.
    """
    with _naming_file(file.path):
        levels = _covering(size, framing.focus, Image.Resampling.BOX)(_levels(file))
        return ImageOps.mirror(levels) if framing.is_mirrored else levels


def highest_level(mask: ImageFile) -> int:
    """The highest level of a mask, as `load_mask` has them, of all of its pixels. Raises InputError as `load_rgb`."""
    with _naming_file(mask.path):
        return max(level for level, count in enumerate(_levels(mask).convert("L").histogram()) if count)


def load_bordered_mask(
    image: ImageFile, mask: ImageFile | None, size: tuple[int, int], outside: float, framing: Framing
) -> Image.Image:
    """Load the weights of an image with borders from 0 to 1, mode F, in the size of `load_rgb`'s image.

    Args:
        image: The image.
        mask: Its mask, white where the weight is 1; None where all of the image has it. Borders have 0.
        size: (width, height) of `load_rgb`'s image.
        outside: The weight where the mask is black.
        framing: That of the image.

    Raises:
        InputError: As `load_rgb`.
    """
    inner = inner_size(image.width, image.height, size)
    weights = Image.new("F", inner, 1.0)
    if mask is not None:
        with _naming_file(mask.path):
            levels = _levels(mask).resize(inner, Image.Resampling.BOX)
            weights = levels.point(lambda level: level * ((1 - outside) / 255) + outside)
    whole = _bordered(weights, Image.new("F", size, 0.0))
    return ImageOps.mirror(whole) if framing.is_mirrored else whole


def _walk(
    root: Path, folder: str, depth: int, real: str, seen: set[str], passed: list[str]
) -> Iterator[os.DirEntry[str]]:
    """The files below a folder that was reached from `root`. real: the folder's path without links."""
    if depth > MOST_DEEP:
        raise too_deep(root)
    with os.scandir(folder) as found:
        entries = sorted(found, key=attrgetter("name"))
    if depth and sum(entry.name in RUN_FILES for entry in entries) == len(RUN_FILES):
        passed.append(folder)
        return
    for entry in entries:
        try:
            is_folder = entry.is_dir()
        except OSError:  # a link to itself, which is named when it is read as a file
            is_folder = False
        if not is_folder:
            if entry.name[0] != ".":
                yield entry
            continue
        real_entry = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real, entry.name)
        if real_entry in seen:
            continue
        if is_passed_over(entry.name):
            passed.append(entry.path)
            continue
        seen.add(real_entry)
        yield from _walk(root, entry.path, depth + 1, real_entry, seen, passed)


def _holds_images(folder: str) -> bool:
    names = (name for _, _, found in os.walk(folder) for name in sorted(found))
    return any(os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name in islice(names, MOST_LOOKED))


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) of the pixels as stored. `size` of the TIFF reader already has the orientation applied."""
    if isinstance(image, TiffImageFile):
        return image.tag_v2[IMAGEWIDTH], image.tag_v2[IMAGELENGTH]
    return image.size


def _orientation(image: PillowImageFile, file: IO[bytes]) -> int:
    """The orientation, 1 to 8, from EXIF, else XMP, as `ImageOps.exif_transpose` finds it."""
    # The PNG reader's own getexif decodes all pixels to look for an orientation after them.
    if isinstance(image, PngImageFile) and (header := png_chunks.with_late_metadata(file)):
        image = PngImageFile(io.BytesIO(header))
    orientation: int = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    return orientation


def _upright(file: ImageFile) -> Image.Image:
    with _opened(file.path) as (image, _):
        if isinstance(image, TiffImageFile):
            # The reader applies Pillow's limit when it allocates the pixels itself.
            image.im = Image.new(image.mode, _stored_size(image)).im
        ImageOps.exif_transpose(image, in_place=True)
    if image.size != (file.width, file.height):
        raise InputError(
            f"{file.path}: has {image.width} x {image.height} pixels, and had {file.width} x {file.height} "
            "when it was found; if it was replaced, start again, else save it again"
        )
    return image


@contextmanager
def _opened(path: Path) -> Iterator[tuple[PillowImageFile, IO[bytes]]]:
    """Open an image and its file; only the header is read, and the limits on its pixels are checked."""
    with opened_image(path) as file:
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


def _identified(file: IO[bytes]) -> PillowImageFile:
    """Replace `Image.open`, whose limit of 179 megapixels can be changed only for the whole process.

    Readers get no file name, so that Pillow does not map the file to memory: that scrambles a TIFF lying on its side.
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


def _in_srgb(
    image: Image.Image,
    file: ImageFile,
    scale: Callable[[Image.Image], Image.Image],
    background: str = WHOLE.background,
) -> Image.Image:
    """Scale an upright image and convert it to sRGB."""
    profile = image.info.get("icc_profile")
    if file.profile != "used" or profile is None:
        return scale(_as_rgb(image, background))
    if image.has_transparency_data and background != WHOLE.background:
        # The background is a colour of sRGB: the image is converted before it is put on it.
        opaque = colour.to_srgb(image.convert("RGB"), profile)
        opaque.putalpha(image.convert("RGBA").getchannel("A"))
        return scale(_as_rgb(opaque, background))
    pixels = image if image.mode == "CMYK" else _as_rgb(image)
    # Convert after scaling: a megapixel instead of up to MAX_PIXELS.
    return colour.to_srgb(scale(pixels), profile)


def _resizing(size: tuple[int, int], resampling: Image.Resampling) -> Callable[[Image.Image], Image.Image]:
    """Scale each side by itself."""
    return lambda image: image.resize(size, resampling)


def _covering(
    size: tuple[int, int],
    focus: tuple[float, float] = WHOLE.focus,
    resampling: Image.Resampling = Image.Resampling.LANCZOS,
) -> Callable[[Image.Image], Image.Image]:
    """Scale to cover `size`, and crop around the focus."""

    def scaled(image: Image.Image) -> Image.Image:
        covered = max(size[0] / image.width, size[1] / image.height)
        kept = size[0] / image.width / covered, size[1] / image.height / covered
        centering = _centering(focus[0], kept[0]), _centering(focus[1], kept[1])
        return ImageOps.fit(image, size, resampling, centering=centering)

    return scaled


def _centering(focus: float, kept: float) -> float:
    """Return the share of what is cut off along a side that is cut off before the crop."""
    if focus == 0.5 or kept >= 1:
        return 0.5
    return crop_start(focus, kept) / (1 - kept)


def _bordered(image: Image.Image, canvas: Image.Image) -> Image.Image:
    """Put an image into the middle of a larger one."""
    canvas.paste(image, ((canvas.width - image.width) // 2, (canvas.height - image.height) // 2))
    return canvas


def _levels(mask: ImageFile) -> Image.Image:
    """The upright mask as levels from 0 to 255, mode F."""
    image = _upright(mask)
    return (_opacity(image) or _as_rgb(image).convert("L")).convert("F")


def _require_shown(path: Path, image: PillowImageFile) -> None:
    """Raise InputError for more pixels than the page has memory for."""
    pixels, limit = image.width * image.height, MOST_SHOWN // (2 if image.format in _BUFFERED else 1)
    if pixels > limit:
        raise InputError(
            f"{path}: {pixels / 1e6:.1f} megapixels are too many to show, the limit is {limit / 1e6:.1f}; "
            "training can still use it, or scale it down"
        )


def _reduced(image: Image.Image, factor: int, keeps_cmyk: bool) -> Image.Image:
    """Put a decoded image on white, with each side divided by `factor`, as RGB or, if `keeps_cmyk`, as CMYK.

    It is converted in strips of a megapixel: RGBA takes four copies on its way to RGB.
    """
    mode = "CMYK" if keeps_cmyk and image.mode == "CMYK" else "RGB"
    small = Image.new(mode, (-(-image.width // factor), -(-image.height // factor)))
    rows = factor * max(1, 2**20 // (image.width * factor))
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        small.paste((strip if mode == "CMYK" else _as_rgb(strip)).reduce(factor), (0, top // factor))
    small.info = {name: value for name, value in image.info.items() if name != "transparency"}
    return small


def _as_rgb(image: Image.Image, background: str = WHOLE.background) -> Image.Image:
    if image.mode.startswith("I;16"):
        # convert() would clip: everything above 255 of 65535 would become white.
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    layer = image if image.mode == "RGBA" else image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, background), layer).convert("RGB")


def _opacity(image: Image.Image) -> Image.Image | None:
    """The alpha channel; None where every pixel is opaque, since many programs write such a channel."""
    if not image.has_transparency_data:
        return None
    alpha = image.convert("RGBA").getchannel("A")
    return None if alpha.getextrema() == (255, 255) else alpha


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Turn any exception of Pillow inside into an InputError that names the file."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # for damaged files, decoders raise exceptions without a common base class
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    if isinstance(error, UnidentifiedImageError):
        reason = "not an image of a known format"
    else:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        reason = shortened(reason) or type(error).__name__
    return InputError(f"{shortened(str(path), 600)}: cannot be read ({reason}); replace or remove it")


def png(image: Image.Image) -> bytes:
    """The bytes of a PNG file of the image."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
