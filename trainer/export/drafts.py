"""Files and folders that get their final name only when they are complete and verified."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.run.folder import DRAFT, FORMER
from trainer.system import files


@dataclass(frozen=True)
class Exported:
    """An exported file or folder that was reloaded and compared.

    Attributes:
        path: The file or folder.
        difference: Distance from the trained values, relative to their norm: for an adapter over all updates together,
            for a model of its worst tensor.
    """

    path: Path
    difference: float


@contextmanager
def draft(final: Path) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to `final` when the block succeeds and removed when it fails.

    A draft left by an earlier process is removed first. A file or folder at `final` is replaced only at the end.
    """
    path = final.with_name(f"{DRAFT}{final.name}")
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
    former = final.with_name(f"{final.name}{FORMER}")
    _remove(former)
    files.rename(final, former)
    files.rename(path, final)
    _remove(former)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
