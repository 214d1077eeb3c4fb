"""The page learns from a process of its own what a model cuts of captions."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from app.data import caption_lengths
from app.data.caption_lengths import Lengths, LengthsResult
from tests.runs import make_pictures, run_config
from trainer.config.schema import RunConfig
from trainer.data.images.measured import Measured

pytestmark = pytest.mark.slow  # each loads torch in a process of its own


def known(seen: Lengths, config: RunConfig) -> LengthsResult:
    deadline = time.monotonic() + 120
    while (found := seen.of(config)).is_waiting:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def processes_of(folder: Path) -> list[psutil.Process]:
    """Children that were given a folder of runs in this one."""
    return [child for child in psutil.Process().children() if str(folder / "runs") in child.cmdline()]


def test_one_process_answers_about_all_configs_and_goes_when_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caption_lengths, "IDLE_S", 1.0)
    folder, seen = make_pictures(tmp_path / "pictures", 2), Lengths(tmp_path / "runs")
    (folder / "01.txt").write_text("1" * 40)
    config = run_config(folder, model__family="sdxl")
    assert seen.of(config) == LengthsResult(None, "", is_waiting=True)
    first = known(seen, config)
    processes = processes_of(tmp_path)
    again = run_config(folder, model__family="sdxl", model__options={"text_windows": 2})
    assert known(seen, again).measured == Measured((), ())
    nowhere = known(seen, run_config(folder, model__path=str(tmp_path / "nowhere")))
    assert first.measured
    assert [(cut.image, cut.needed, cut.read, cut.rest) for cut in first.measured.cut] == [
        (str(folder / "01.png"), 42, 32, "1" * 10)
    ]
    assert nowhere.failure.startswith(f"model.path {tmp_path}/nowhere: no transformer/config.json")
    assert processes_of(tmp_path) == processes
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert known(seen, config) == first, "what was found is kept"
    assert seen.of(config, is_fresh=True).is_waiting
    assert known(seen, config) == first


def test_a_process_that_ends_is_reported_and_the_next_question_starts_another(tmp_path: Path) -> None:
    folder, seen = make_pictures(tmp_path / "pictures", 1), Lengths(tmp_path / "runs")
    config = run_config(folder)
    seen.of(config)
    while not (processes := processes_of(tmp_path)):
        time.sleep(0.05)
    processes[0].kill()
    assert known(seen, config).failure == (
        f"cannot measure captions: the process exited; see {tmp_path}/runs/drafts/captions.log"
    )
    seen.of(config, is_fresh=True)
    assert known(seen, config).failure == ""


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    seen, config = Lengths(tmp_path / "runs"), run_config(tmp_path)
    seen.of(config)
    assert known(seen, config).failure == f"[Errno 20] Not a directory: '{tmp_path}/runs/drafts'"
