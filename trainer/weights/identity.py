"""Identity of model files by all of their bytes, remembered for as long as a file does not change. Imports no torch.

See DECISIONS 76.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from pydantic import TypeAdapter

from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.files import Stamp

FOLDER = "digests"
"""In the user's own cache: nothing that came with a model, a preset or a run is believed."""
SMALL_BYTES = 4 << 20
"""Files up to this size are read each time."""
THREADS = 4
"""Files that are read at once: one core sums 1 GB/s."""
_KNOWN = TypeAdapter(tuple[Stamp, str])


def digest(paths: Iterable[Path]) -> str:
    """A digest of files, and of all files in folders, from the name and all bytes of each, in hex.

    Bytes of a large file are read once, by one of the ranks that ask at the same moment; the others wait for it. They
    are read again when the file's size, inode or time stamps change.

    Raises:
        OSError: A file cannot be read.
    """
    found = [
        (str(file.relative_to(path.parent)), file)
        for path in paths
        for file in sorted(inside for inside in (path, *path.rglob("*")) if inside.is_file())
    ]
    total = hashlib.sha256()
    with ThreadPoolExecutor(THREADS) as pool:
        for (name, _), of_bytes in zip(found, pool.map(_digest, [file for _, file in found]), strict=True):
            total.update(f"{name} {of_bytes}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def _digest(file: Path) -> str:
    """A digest of the file's bytes."""
    file = file.resolve()  # a name in the Hugging Face cache is a link to a file that several models may share
    if file.stat().st_size <= SMALL_BYTES:
        return _read(file)
    name = hashlib.sha256(str(file).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    memories: list[Path] = []
    with ExitStack() as locks:
        for folder in files.own_folders():  # a later one where the first is full, read-only or of others
            with suppress(OSError):
                files.make_own(folder)
                files.make_own(folder / FOLDER)
                locks.enter_context(files.locked(folder / FOLDER / f"{name}.lock"))
                memories.append(folder / FOLDER / f"{name}.json")
        stamp, began = Stamp.of(file), time.time_ns()
        for memory in memories:
            with suppress(OSError, InputError):
                known_stamp, known = files.read_json(memory, _KNOWN)
                if known_stamp == stamp:
                    return known
        found = _read(file)
        if stamp.is_safe(began) and Stamp.of(file) == stamp:
            for memory in memories:
                with suppress(OSError):
                    files.replace(memory, _KNOWN.dump_json((stamp, found)))
                    break
    return found


def _read(file: Path) -> str:
    with files.opened(file) as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()
