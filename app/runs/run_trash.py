"""Deleted runs: moved into a hidden folder next to the others, where nothing looks for runs, until they are restored.

A deletion is a folder `.trash-shardstudio/<time>-<number>/` with the run folder in it, as `app.data.trash` has it for
images. Only `empty` removes bytes from the disk.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from app.data import trash
from app.data.data_folders import Missing, is_taken, opened
from app.runs.run_table import size
from trainer.run import process
from trainer.run.folder import TRASH, RunDir, is_run
from trainer.system import files
from trainer.system.errors import InputError

GONE = "nothing to restore: it was restored or removed meanwhile"


@dataclass(frozen=True)
class DeletedRun:
    """A run in the trash.

    Attributes:
        name: Names the deletion.
        run: Name of the run folder.
        title: Its name for people.
        deleted_at: Seconds since 1970.
        size: Bytes.
    """

    name: str
    run: str
    title: str
    deleted_at: float
    size: int


def delete(run: RunDir) -> str:
    """Move a run into the trash and return the name of the deletion.

    Raises:
        InputError: The run is running or gone, or a link or file is in the place of the trash.
        OSError: The folder of runs cannot be written.
    """
    real = run.path.parent.resolve()
    with trash.CHANGES:  # another window may be emptying it
        name = trash.begin(real)
        try:
            process.put_away(run, real / TRASH / name / run.path.name)
        except (InputError, OSError):
            trash.forget(real, name)
            raise
    return name


def deletions(runs: Path) -> list[DeletedRun]:
    """Return what can be restored, newest first."""
    real, found = runs.resolve(), []
    for name in trash.names(real):
        try:
            found.append(_deleted(real, name))
        except (InputError, OSError):  # not a run, or restored a moment ago
            continue
    return found


def restore(runs: Path, name: str) -> str:
    """Move a run back to where it was and return the name of its folder. Tags, notes and its name are as they were.

    Raises:
        InputError: Another run has its name now, or another window has restored or removed it.
        OSError: The folder of runs cannot be written.
    """
    if not trash.NAME.fullmatch(name):
        raise InputError("not a deletion; reload the page")
    real = runs.resolve()
    with trash.CHANGES:
        run = _run(real, name)
        with opened(real, ()) as folder:
            if is_taken(folder, run):
                raise InputError(f"{runs / run}: is there again; delete or move that one first. Nothing was restored")
        try:
            files.rename(real / TRASH / name / run, real / run)
        except FileNotFoundError as error:  # by another process
            raise InputError(GONE) from error
        trash.forget(real, name)
    return run


def empty(runs: Path, chosen: Collection[str] | None = None) -> int:
    """Remove deleted runs for good, and whatever else lies in their trash. Returns the number of removed folders.

    Args:
        chosen: Names of deletions; None for all. Other runs stay.

    Raises:
        InputError: Files cannot be removed.
    """
    real = runs.resolve()
    with trash.CHANGES:
        kept = set() if chosen is None else {one.name for one in deletions(runs)} - set(chosen)
        found = [real / TRASH / name for name in trash.names(real) if name not in kept]
        removed = [folder for folder in found if folder.is_dir() and not folder.is_symlink()]
        for folder in removed:
            with suppress(FileNotFoundError):  # another process empties it too
                process.remove(folder)
    return len(removed)


@lru_cache(maxsize=10_000)
def _deleted(real: Path, name: str) -> DeletedRun:
    """Return a deletion, whose files nothing changes. Raises InputError where no run is in it."""
    run = RunDir(real / TRASH / name / _run(real, name))
    return DeletedRun(name, run.path.name, run.title, trash.deleted_at(name), size(run))


def _run(real: Path, name: str) -> str:
    """Return the name of the run folder in a deletion. Raises InputError where there is none."""
    try:
        with opened(real, (TRASH, name)) as deletion:
            names = sorted(os.listdir(deletion))
    except Missing as error:
        raise InputError(GONE) from error
    for run in names:
        path = real / TRASH / name / run
        if is_run(path) and not path.is_symlink():
            return run
    raise InputError(GONE)
