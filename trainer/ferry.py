"""Files carried between ranks, for machines that do not see the run folder of rank 0."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

CHUNK = 32 * 2**20
"""Bytes per message, and the memory it takes on either side."""


def send(file: Path, target: int, group: dist.ProcessGroup) -> None:
    """Send a file to another rank, which calls `receive`."""
    with file.open("rb") as stream:
        left = os.fstat(stream.fileno()).st_size
        dist.send(torch.tensor([left]), target, group)
        while left:
            chunk = stream.read(min(CHUNK, left))
            dist.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), target, group)
            left -= len(chunk)


def receive(file: Path, source: int, group: dist.ProcessGroup) -> None:
    """Write a file that another rank sends, through to the disk.

    Raises OSError when it cannot be written, after all of it has come: the sender must not wait for ever.
    """
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group)
    left, failure = int(size), None
    try:
        stream = file.open("wb")
    except OSError as error:
        stream, failure = None, error
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
