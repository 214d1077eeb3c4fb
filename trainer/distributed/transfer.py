"""Send files between ranks, for machines that do not see the run folder of rank 0. See DECISIONS 108."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
import torch.distributed as dist

CHUNK = 32 * 2**20
"""Bytes per message, and the memory that a transfer takes on either side."""


def send(file: Path, target: int, group: dist.ProcessGroup) -> None:
    """Send a file to another rank, which calls `receive`. Both raise OSError when it cannot be read."""
    try:
        data = memoryview(_mapped(file))
    except OSError:
        dist.send(torch.tensor([-1]), target, group)
        raise
    dist.send(torch.tensor([len(data)]), target, group)
    for start in range(0, len(data), CHUNK):
        dist.send(torch.frombuffer(bytearray(data[start : start + CHUNK]), dtype=torch.uint8), target, group)


def _mapped(file: Path) -> mmap.mmap | bytes:
    with file.open("rb") as stream:
        is_empty = os.fstat(stream.fileno()).st_size == 0
        return b"" if is_empty else mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def receive(file: Path, source: int, group: dist.ProcessGroup) -> None:
    """Write a file that another rank sends, and flush it to the disk.

    Raises OSError when it cannot be written, but only after the whole file was received: the sender must not wait for
    ever.
    """
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group)
    left, failure = int(size), None
    if left < 0:
        raise OSError(f"{file.name} could not be read by rank {source}")
    try:
        stream = file.open("wb")
    except OSError as error:
        stream, failure = None, error
    # Received to the end even where it cannot be written: the sender would wait for ever.
    while left:
        chunk = torch.empty(min(CHUNK, left), dtype=torch.uint8)
        dist.recv(chunk, source, group)
        left -= chunk.numel()
        try:
            if stream and not failure:
                stream.write(chunk.numpy().tobytes())
        except OSError as error:
            failure = error
    try:
        if stream:
            with stream:
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as error:
        failure = failure or error
    if failure:
        raise failure
