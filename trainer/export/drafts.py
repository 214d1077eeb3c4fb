"""Files and folders that get their name only when they are complete and verified."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.config import files


@dataclass(frozen=True)
class Exported:
    """A file or folder that was read back. difference: from what was trained, relative to its norm.

    Of an adapter that is the norm of all updates together, of a model the one of its worst tensor.
    """

    path: Path
    difference: float


@contextmanager
def draft(final: Path) -> Iterator[Path]:
    """A path to write to. It becomes `final` when the block ends well, and is removed when anything goes wrong in it.

    What an earlier process left of a draft is removed first. A file or folder at `final` is replaced only at the end.
    """
    path = final.with_name(f"draft-{final.name}")
    _remove(path)
    try:
        yield path
    except BaseException:
        _remove(path)
        raise
    _replace(path, final)


def _replace(path: Path, final: Path) -> None:
    files.flush_all(path)
    if not final.is_dir():
        files.rename(path, final)
        return
    former = final.with_name(f"{final.name}.former")
    _remove(former)
    files.rename(final, former)
    files.rename(path, final)
    _remove(former)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
