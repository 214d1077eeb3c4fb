"""Drawings and uploads that another process started, as the page before its restart: they are found, cheaply."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.runs.results import Results
from tests.app.browser import recorded
from trainer.run.folder import RunDir

STAND_IN = "import sys, time\nprint('begun', file=sys.stderr, flush=True)\ntime.sleep(100)\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return recorded(tmp_path / "runs", "drawn")


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each scan of the machine's processes."""
    done: list[int] = []
    scan = psutil.process_iter

    def counted(*args: Any) -> Iterator[psutil.Process]:
        done.append(1)
        return scan(*args)

    monkeypatch.setattr(psutil, "process_iter", counted)
    return done


@contextmanager
def drawing(run: RunDir, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the command line of a drawing, begun as another page begins it."""
    package = folder / "trainer" / "train"
    package.mkdir(parents=True, exist_ok=True)
    (package / "draw.py").write_text(STAND_IN)
    (run.logs / "draw-answer.txt").write_bytes(b"")
    argv = [sys.executable, "-m", "trainer.train.draw", str(run.path), "a fox"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(argv, cwd=folder, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stderr and process.stderr.readline() == b"begun\n"
        try:
            yield process
        finally:
            process.kill()


def age(file: Path) -> None:
    """Make a file older than what is being written."""
    then = file.stat().st_mtime - 60
    os.utime(file, (then, then))


def test_where_nothing_was_drawn_or_uploaded_the_processes_are_looked_at_once(run: RunDir, scans: list[int]):
    results = Results()
    for _ in range(20):
        assert not results.drawing(run).is_running and not results.uploaded(run).is_running
    assert len(scans) == 2


def test_after_a_drawing_of_an_earlier_page_the_processes_are_looked_at_once(run: RunDir, scans: list[int]):
    (run.logs / "draw-answer.txt").write_text("/folder\n")
    age(run.logs / "draw-answer.txt")
    results = Results()
    for _ in range(20):
        assert not results.drawing(run).is_running
    assert len(scans) == 1


def test_a_drawing_that_another_page_starts_is_found_and_its_end(run: RunDir, scans: list[int], tmp_path: Path):
    results = Results()
    assert not results.drawing(run).is_running
    with drawing(run, tmp_path) as process:
        for _ in range(20):
            assert results.drawing(run).is_running
        assert len(scans) == 2
        assert [(one.path, *rest) for one, *rest in results.running()] == [(run.path, "drawing", None)]
        results.stop("drawing", run)
        process.wait(10)
    assert results.running() == []
    for _ in range(20):
        assert results.drawing(run).is_stopped
    age(run.logs / "draw-answer.txt")
    assert results.drawing(run).is_stopped
    before = len(scans)
    for _ in range(20):
        assert results.drawing(run).is_stopped
    assert len(scans) == before
    with drawing(run, tmp_path):
        assert results.drawing(run).is_running


def test_a_process_that_appears_just_after_its_file_is_found(run: RunDir, tmp_path: Path):
    (run.logs / "draw-answer.txt").write_bytes(b"")
    results = Results()
    assert not results.drawing(run).is_running
    os.utime(run.logs / "draw-answer.txt")
    stamp = (run.logs / "draw-answer.txt").stat()
    assert not results.drawing(run).is_running
    with drawing(run, tmp_path):
        os.utime(run.logs / "draw-answer.txt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        assert results.drawing(run).is_running
