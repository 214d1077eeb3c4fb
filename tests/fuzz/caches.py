"""The folder of compiled code: whatever others have made in its place, code is kept where only this user ever wrote."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st

from tests.fuzz.target import Target
from trainer.run import compiler

PLACES = (
    "home",
    "home/shardstudio",
    "home/shardstudio/compiled",
    "tmp/shardstudio-{uid}",
    "tmp/shardstudio-{uid}/compiled",
)
MODES = st.sampled_from([0o700, 0o755, 0o770, 0o777, 0o1777, 0o2770, 0o500, 0o000])
VALUES = st.tuples(
    st.sampled_from(["home", "relative", "", "tmp"]),
    st.lists(
        st.tuples(st.sampled_from(PLACES), st.sampled_from(["folder", "link", "file", "pipe"]), MODES), max_size=4
    ),
)
"""What XDG_CACHE_HOME says, and what lies where."""


@contextmanager
def _prepared(folder: Path) -> Iterator[Callable[[Any], None]]:
    def answer(value: Any) -> None:
        setting, made = value
        work = folder / "work"
        _make_removable(work)
        shutil.rmtree(work, ignore_errors=True)
        for name in ("tmp", "strangers/shardstudio/compiled", "strangers/compiled"):
            (work / name).mkdir(parents=True)
        (work / "tmp").chmod(0o1777)
        for name in ("compiled", "shardstudio/compiled"):
            (work / "strangers" / name / "code.py").write_text("code of a stranger")
        for place, kind, mode in made:
            _make(work / place.format(uid=os.getuid()), kind, mode, work / "strangers")
        cache = str(work / setting) if setting in ("home", "tmp") else setting
        without = {name: text for name, text in os.environ.items() if name != compiler.FOLDER}
        variables = without | {"XDG_CACHE_HOME": cache, "HOME": str(work / "home")}
        with (
            patch.dict(os.environ, variables, clear=True),
            patch.object(tempfile, "tempdir", str(work / "tmp")),
        ):
            found = Path(compiler.cache_environment()[0][compiler.FOLDER])
        for place in (found, found.parent) if found.name == "compiled" else (found,):
            status = place.lstat()
            assert stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid(), place
            assert stat.S_IMODE(status.st_mode) == 0o700, place
        assert not found.resolve().is_relative_to((work / "strangers").resolve())
        assert not (found / "code.py").exists()

    yield answer


def _make(path: Path, kind: str, mode: int, strangers: Path) -> None:
    """Lay something there, unless what is above it cannot hold it, or something is there already."""
    above = [folder for folder in path.parents if os.path.lexists(folder)]
    is_taken = os.path.lexists(path) or any(folder.is_symlink() or not folder.is_dir() for folder in above)
    if is_taken or (kind == "link" and path.name == "home"):  # where a user's own cache folder leads is the user's will
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    match kind:
        case "folder":
            path.mkdir()
            path.chmod(mode)
        case "link":
            path.symlink_to(strangers)
        case "file":
            path.touch()
        case "pipe":
            os.mkfifo(path)


def _make_removable(path: Path) -> None:
    for folder in (path, *path.rglob("*")) if path.exists() else ():
        if folder.is_dir() and not folder.is_symlink():
            folder.chmod(0o700)


CACHES = Target("caches", VALUES, _prepared)
