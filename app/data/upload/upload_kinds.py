"""Decides by its bytes whether an uploaded file is an image or caption that a run reads, and which suffix it gets."""

from __future__ import annotations

import mmap
import os
import threading
from io import BufferedReader
from pathlib import Path

from app.data.upload.upload_names import CAPTION, METADATA, parts
from trainer.data.images.image_files import MAX_CAPTION, by_name, metadata_row, too_long
from trainer.data.images.image_io import IMAGE_SUFFIXES, MOST_SHOWN, ImageFile, load_preview, read_header
from trainer.data.text.text_files import rows
from trainer.system.errors import InputError
from trainer.system.files import MOST_BYTES, opened

MOST_IMAGE = 2 * 2**30
"""Bytes of an image: one of the most pixels that a run reads, with 16 bits each, has 1.6 GiB."""
MOST_SCANS = 100
"""Scans of a JPEG: programs write up to a dozen. Each may take 0.1 s to decode and less than 100 bytes of the file."""
HEAD = 64
"""Bytes from which the kind of a file is known."""
TAIL = 64 * 1024
_SUFFIXES = {
    "jpeg": (".jpg", ".jpeg"),
    "png": (".png",),
    "webp": (".webp",),
    "bmp": (".bmp",),
    "tiff": (".tif", ".tiff"),
}
_STARTS = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"BM", "bmp"),
    *((magic, "tiff") for magic in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
)
_AS_JPEG = "export it as JPEG or PNG"
_STILL = "save one image of it as PNG or JPEG"
_HEIC = "a HEIC photo, which is not read here; export it as JPEG (iPhone: Settings, Camera, Formats, Most Compatible)"
_MOVIE = f"a movie; {_STILL}"
_RAW = f"a raw photo, which is not read here; {_AS_JPEG}"
_ARCHIVE = "an archive; unpack it and choose the images"
_TABLE = "a table, which is not taken here; copy it to this machine and name it in data.path"
_DOCUMENT = f"a document, not an image; {_AS_JPEG}"
_MARKUP = f"HTML, SVG or other markup, not an image; {_AS_JPEG}"
_OTHERS = (
    (b"GIF8", f"a GIF, which is not read here; {_STILL}"),
    (b"PAR1", _TABLE),
    (b"%PDF", _DOCUMENT),
    (b"\xd0\xcf\x11\xe0", _DOCUMENT),
    *((magic, _ARCHIVE) for magic in (b"PK\3\4", b"PK\5\6", b"\x1f\x8b", b"7z\xbc\xaf", b"Rar!", b"BZh", b"\xfd7zXZ")),
    *((magic, _MOVIE) for magic in (b"\x1aE\xdf\xa3", b"\0\0\1\xba", b"\0\0\1\xb3", b"OggS")),
    *((magic, _RAW) for magic in (b"FUJIFILMCCD-RAW", b"IIU\0", b"IIRO", b"IIRS", b"MMOR")),
    *(
        (magic, f"an image of a kind that is not read here; {_AS_JPEG}")
        for magic in (b"\xff\x0a", b"\0\0\0\x0cJXL ", b"\0\0\0\x0cjP  ", b"8BPS", b"\x76\x2f\x31\x01")
    ),
)
_HEIC_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_decoding = threading.Lock()


def most_bytes(name: str) -> int:
    """Return the largest size of a file of this name."""
    if name == METADATA:
        return MOST_BYTES
    return MAX_CAPTION if parts(name)[1] == CAPTION else MOST_IMAGE


def check_start(name: str, size: int, head: bytes) -> None:
    """Raise InputError for a file that is refused before the rest of it is sent.

    Args:
        name: The name to keep it under.
        size: Its bytes.
        head: Its first HEAD bytes, or nothing where they are not known.
    """
    if size < 1:
        raise InputError(f"{name}: empty; choose the file again, it may not have been copied to its end")
    if size > (most := most_bytes(name)):
        text = (
            too_long(size)
            if most == MAX_CAPTION
            else f"{size} bytes are more than the limit of {most}; save it smaller"
        )
        raise InputError(f"{name}: {text}")
    if parts(name)[1] == ".jsonl" and name != METADATA:
        raise InputError(f"{name}: of .jsonl files only {METADATA} holds captions; rename it, or leave it out")
    if head and not is_text(name):
        image_suffix(name, head)


def is_text(name: str) -> bool:
    """Whether it is uploaded as a caption or as rows of captions."""
    return name == METADATA or parts(name)[1] == CAPTION


def image_suffix(name: str, head: bytes) -> str:
    """Return the suffix of a name as its content wants it. Raises InputError for what is not an image that is read."""
    suffix = os.path.splitext(name)[1]
    kind = "webp" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else ""
    kind = kind or next((kind for magic, kind in _STARTS if head.startswith(magic)), "")
    if kind == "tiff" and suffix.lower() not in IMAGE_SUFFIXES | {""}:  # raw photos are TIFF with a small preview
        raise InputError(f"{name}: {_RAW}")
    if not kind:
        raise InputError(f"{name}: {_refusal(head)}")
    return suffix if suffix.lower() in _SUFFIXES[kind] else _SUFFIXES[kind][0]


def _refusal(head: bytes) -> str:
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        if brand in (b"avif", b"avis"):
            return f"an AVIF image, which is not read here; {_AS_JPEG}"
        return _HEIC if brand in _HEIC_BRANDS else _RAW if brand == b"crx " else _MOVIE
    if head[:4] == b"RIFF":
        return _MOVIE
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<"):
        return _MARKUP
    expected = " ".join(sorted(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES))
    return next(
        (why for magic, why in _OTHERS if head.startswith(magic)), f"not an image; expected {expected}, or {CAPTION}"
    )


def check_image(file: Path, name: str) -> str:
    """Return the suffix that the name of a complete image gets.

    The header is read by the reader of a run, with its limits, and the pixels are decoded once, so that a file that was
    not copied to its end is found now. Of images that are too large to show, only the end is looked at.

    Raises:
        InputError: It is not an image that a run reads. The message names `name`.
    """
    with opened(file) as stream:
        suffix = image_suffix(name, stream.read(HEAD))
        if suffix.lower() in _SUFFIXES["jpeg"] and _num_scans(stream) > MOST_SCANS:
            raise InputError(f"{name}: more than {MOST_SCANS} scans, which take hours to decode; save it again as JPEG")
    try:
        header = read_header(file)
        with _decoding:  # one at a time: a large one takes half a gigabyte of memory
            if header.width * header.height <= MOST_SHOWN // (2 if suffix.lower() == ".webp" else 1):
                load_preview(header, HEAD)
            else:
                _check_end(header, suffix)
    except InputError as error:
        raise InputError(str(error).replace(str(file), name)) from error
    return suffix


def _num_scans(stream: BufferedReader) -> int:
    """The number of scans of a JPEG up to its end mark, at most MOST_SCANS + 1. A video may follow the mark."""
    at, scans = 2, 0
    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while scans <= MOST_SCANS and 0 <= (at := data.find(b"\xff", at)) < len(data) - 3:
            mark = data[at + 1]
            if mark == 0xD9:
                break
            if mark == 0xFF:  # padding
                at += 1
            elif mark in (0x00, 0x01) or 0xD0 <= mark <= 0xD8:  # marks within a scan, which have no length
                at += 2
            else:
                scans += mark == 0xDA
                at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return scans


def _check_end(image: ImageFile, suffix: str) -> None:
    mark = {".jpg": b"\xff\xd9", ".jpeg": b"\xff\xd9", ".png": b"IEND"}.get(suffix.lower(), b"")
    with opened(image.path) as stream:
        stream.seek(-min(TAIL, os.fstat(stream.fileno()).st_size), os.SEEK_END)
        if mark not in stream.read():
            raise InputError(f"{image.path}: cannot be read (its end is missing); replace or remove it")


def check_caption(file: Path, name: str) -> None:
    """Raise InputError, naming `name`, for a caption that a run would refuse."""
    with opened(file) as stream:
        content = stream.read(MAX_CAPTION + 1)
    if len(content) > MAX_CAPTION:
        raise InputError(f"{name}: {too_long(os.path.getsize(file))}")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} (0x{content[error.start]:02x}) is not UTF-8"
        raise InputError(f"{name}: {wrong}; save the file as UTF-8") from error
    if "\0" in text:
        raise InputError(f"{name}: holds the character NUL, which no caption has; save it as plain text")


def check_metadata(file: Path, images: frozenset[str]) -> None:
    """Raise InputError, naming the line, for rows that a run would refuse. images: names in the folder."""
    folder = Path("/data")  # a row leads to an image relative to its file
    known = by_name(folder / name for name in images)
    found = False
    try:
        for number, _, line in rows(file):
            found = True
            try:
                text = line.decode().removeprefix("\ufeff")
                metadata_row(text, folder, known)
            except (InputError, UnicodeDecodeError) as error:
                raise InputError(f"{METADATA}:{number}: {error}") from error
    except InputError as error:
        raise InputError(str(error).replace(str(file), METADATA)) from error
    if not found:
        raise InputError(f"{METADATA}: has no rows; each line is a JSON object with file_name and text")
