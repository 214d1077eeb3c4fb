"""Finds metadata that a PNG file stores after its pixels, without reading the pixels."""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_left
from typing import IO

_SIGNATURE_BYTES = 8
_AROUND = 12
"""Bytes of a chunk without its data: length, kind, checksum."""
_METADATA = frozenset({b"eXIf", b"iTXt", b"tEXt", b"zTXt"})


def with_late_metadata(file: IO[bytes]) -> bytes | None:
    """Build the header of a PNG with the EXIF and texts that the file stores after its pixels; None if there are none.

    Damaged chunks end the search, as in Pillow. Raises OSError for metadata that is cut off.
    """
    size = file.seek(0, os.SEEK_END)
    offset, pixels_at, pixels_length, late = _SIGNATURE_BYTES, None, None, []
    while (chunk := _chunk(file, offset)) is not None:
        length, kind = chunk
        if kind == b"IEND" or (kind == b"fcTL" and pixels_at is not None):  # Pillow stops at the second frame
            break
        if kind == b"IDAT":
            pixels_at = pixels_at or offset
            offset = _behind_equal(file, offset, length, size) if length == pixels_length else offset + length + _AROUND
            pixels_length = length
            continue
        if pixels_at is not None and kind in _METADATA:
            late.append(_whole(file, offset, length, kind))
        offset += length + _AROUND
    if not late or pixels_at is None:
        return None
    file.seek(0)
    return b"".join((file.read(pixels_at), *late, _written(b"IDAT", b"")))


def _chunk(file: IO[bytes], offset: int) -> tuple[int, bytes] | None:
    """Length and kind of the chunk at an offset; None if no chunk begins there."""
    file.seek(offset)
    header = file.read(8)
    if len(header) < 8 or not header[4:].isalpha():
        return None
    return int.from_bytes(header[:4], "big"), header[4:]


def _behind_equal(file: IO[bytes], offset: int, length: int, size: int) -> int:
    """The offset after all consecutive pixel chunks of one length.

    Encoders write equal chunks, 8 KiB in libpng, and a shorter last one. The end is found by bisection, since visiting
    every header would read the whole file.
    """
    step = length + _AROUND
    offsets = range(offset, size, step)
    count = bisect_left(offsets, True, key=lambda at: _chunk(file, at) != (length, b"IDAT"))
    return offset + count * step


def _whole(file: IO[bytes], offset: int, length: int, kind: bytes) -> bytes:
    file.seek(offset + 8)
    data = file.read(length)
    if len(data) < length:
        raise OSError(f"its {kind.decode()} chunk is cut off")
    return _written(kind, data)


def _written(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
