"""Threads of a rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def worker_threads(count: int, name: str, device: torch.device) -> ThreadPoolExecutor:
    """Threads whose current GPU is this rank's.

    That of a new thread is GPU 0, where its first stream makes a context: every rank of a machine would take half a GiB
    of that GPU, which is then the first to run out of memory.

    Args:
        device: Of this rank.
    """
    if device.type != "cuda":
        return ThreadPoolExecutor(count, name)
    return ThreadPoolExecutor(count, name, initializer=torch.cuda.set_device, initargs=(device,))
