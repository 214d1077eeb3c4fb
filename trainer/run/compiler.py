"""Where torch.compile keeps what it has compiled, so that the second start of a run need not wait. Imports no torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trainer.config.schema import RunConfig

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Environment variables that torch reads. What the user has set is left alone."""
MOST_THREADS = 8
"""Processes with which a rank compiles."""


def environment(cfg: RunConfig, cache: Path) -> tuple[dict[str, str], str]:
    """Return (the variables for the ranks, why nothing is kept; empty if it is).

    torch reads pickled files from the folder, which run code: it is this user's own, and only they may write to it.
    Ranks share the machine's cores.

    Args:
        cfg: The run's config.
        cache: Folder shared by runs.
    """
    if not cfg.train.compile or cfg.parallel.device == "cpu":
        return {}, ""
    threads = min(MOST_THREADS, max(1, (os.cpu_count() or 1) // cfg.parallel.devices))
    found = {} if THREADS in os.environ else {THREADS: str(threads)}
    if FOLDER in os.environ:
        return found, ""
    folder = cache.absolute() / f"compiled-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        is_safe = _is_own(status) and os.access(folder, os.W_OK)
        problem = "" if is_safe else "others may write to it, or it is not a folder"
    except OSError as error:
        problem = f"{error.strerror}"
    if problem:
        kept = "what torch.compile makes is kept in the temporary folder, and may have to be made again"
        return found, f"{folder}: cannot be used ({problem}); {kept}"
    return found | {FOLDER: str(folder)}, ""


def _is_own(status: os.stat_result) -> bool:
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not others_write
