"""Metadata of PNG files that stand behind the pixels, found without reading the pixels."""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_left
from typing import IO

_SIGNATURE_BYTES = 8
_AROUND = 12
"""Bytes of a chunk around its data: length, kind, checksum."""
_METADATA = frozenset({b"eXIf", b"iTXt", b"tEXt", b"zTXt"})


def with_late_metadata(file: IO[bytes]) -> bytes | None:
    """A PNG's header with the EXIF and texts from behind the pixels before them; None where nothing is there.

    A chunk table that is damaged is read up to the damage, as by Pillow. Raises OSError for metadata that is cut off.
    """
    size = os.fstat(file.fileno()).st_size
    place, pixels_at, pixels_length, late = _SIGNATURE_BYTES, None, None, []
    while (found := _chunk(file, place)) is not None:
        length, kind = found
        if kind == b"IEND" or (kind == b"fcTL" and pixels_at is not None):  # Pillow stops at the second frame
            break
        if kind == b"IDAT":
            pixels_at = pixels_at or place
            place = _behind_equal(file, place, length, size) if length == pixels_length else place + length + _AROUND
            pixels_length = length
            continue
        if pixels_at is not None and kind in _METADATA:
            late.append(_whole(file, place, length, kind))
        place += length + _AROUND
    if not late or pixels_at is None:
        return None
    file.seek(0)
    return b"".join((file.read(pixels_at), *late, _written(b"IDAT", b"")))


def _chunk(file: IO[bytes], place: int) -> tuple[int, bytes] | None:
    """Length and kind of the chunk at a place; None where none begins."""
    file.seek(place)
    header = file.read(8)
    if len(header) < 8 or not header[4:].isalpha():
        return None
    return int.from_bytes(header[:4], "big"), header[4:]


def _behind_equal(file: IO[bytes], place: int, length: int, size: int) -> int:
    """The place behind all chunks of pixels of one length.

    Encoders write such chunks, of 8 KiB in libpng, up to a shorter last one: found by bisection, since a look at every
    header would read the file.
    """
    step = length + _AROUND
    places = range(place, size, step)
    count = bisect_left(places, True, key=lambda at: _chunk(file, at) != (length, b"IDAT"))
    return place + count * step


def _whole(file: IO[bytes], place: int, length: int, kind: bytes) -> bytes:
    file.seek(place + 8)
    data = file.read(length)
    if len(data) < length:
        raise OSError(f"its {kind.decode()} chunk is cut off")
    return _written(kind, data)


def _written(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
