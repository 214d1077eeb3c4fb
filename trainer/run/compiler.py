"""Where torch.compile keeps what it has compiled, so that the second start of a run need not wait. Imports no torch."""

from __future__ import annotations

import os
import tempfile

from trainer.config.schema import RunConfig
from trainer.system import files

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Environment variables that torch reads. What the user has set is left alone."""
MOST_THREADS = 8
"""Processes with which a rank compiles."""


def environment(cfg: RunConfig) -> tuple[dict[str, str], str]:
    """Return (the variables for the ranks, why what they compile is not kept; empty if it is).

    Ranks share the machine's cores.
    """
    if not cfg.train.compiles_on("cpu" if cfg.parallel.device == "cpu" else "cuda"):
        return {}, ""
    threads = min(MOST_THREADS, max(1, (os.cpu_count() or 1) // cfg.parallel.devices))
    found = {} if THREADS in os.environ else {THREADS: str(threads)}
    return found, cache_environment()[1]


def cache_environment() -> tuple[dict[str, str], str]:
    """Return (the variable that says where compiled code is kept, why it is not the user's own cache folder).

    torch unpickles what it finds there, which runs code: only this user may ever have written to the folder, by a
    program of this machine. No config, preset or run folder names it, as these come from strangers with the files next
    to them. Without the variable, torch takes a folder in /tmp that any user can make first.
    """
    if FOLDER in os.environ:
        return {}, ""
    problem = ""
    for home in files.own_folders():
        place = home / "compiled"
        try:
            files.make_own(home)
            files.make_own(place)
        except OSError as error:
            kept = "torch.compile's cache is in the temporary folder, and may have to be built again"
            problem = problem or f"{place}: cannot be used ({error.strerror}); {kept}"
        else:
            return {FOLDER: str(place)}, problem
    return {FOLDER: tempfile.mkdtemp(prefix="shardstudio-")}, problem
