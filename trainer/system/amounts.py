"""Bytes as text: memory in GiB, as cards are sold and PyTorch counts; files in GB, as disks and the hub count."""

from __future__ import annotations

GIB, MIB = 2**30, 2**20
GB, MB, KB = 10**9, 10**6, 10**3


def memory_size(size: float) -> str:
    """Return bytes of memory as text: `1.12 GiB`, or `17.00 MiB` below a tenth of a GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.2f} MiB"


def file_size(size: float) -> str:
    """Return bytes of files as text: `3.10 GB`, `1.1 MB`, `0.9 kB`."""
    return f"{size / GB:.2f} GB" if size >= GB else f"{size / MB:.1f} MB" if size >= MB / 10 else f"{size / KB:.1f} kB"


def rounded_size(size: float) -> str:
    """Return bytes of files as text with at most two digits below ten: `113 GB`, `3.1 GB`, `14 MB`, `9 B`."""
    for unit, one in (("GB", GB), ("MB", MB), ("kB", KB)):
        if size >= one:
            return f"{size / one:.1f} {unit}" if size < 10 * one else f"{size / one:.0f} {unit}"
    return f"{size:.0f} B"


def counted(count: int, one: str) -> str:
    """Return a number with its noun: `1 image`, `2,000 images`."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"
