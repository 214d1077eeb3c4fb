"""The debug log of a rank: what it holds, and what it leaves as it was."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch.distributed.fsdp  # noqa: F401 - torch's loggers exist

from tests.runs import run_config
from trainer.config.sections import TrackersConfig
from trainer.metrics.debug_log import debug_log
from trainer.run.folder import RunDir

OURS = logging.getLogger("trainer.somewhere")
TORCH = logging.getLogger("torch.distributed.elastic")
FSDP = logging.getLogger("torch.distributed.fsdp")  # passes nothing on, and has a handler of its own
DEBUG = TrackersConfig(debug=True)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, run_config(tmp_path))


def lines(run: RunDir, rank: int = 0) -> list[str]:
    return (run.logs / f"debug-rank{rank}.log").read_text(encoding="utf-8").splitlines()


def state() -> list[object]:
    names = ["", *(name for name in logging.root.manager.loggerDict if name.startswith(("trainer", "torch")))]
    loggers = [logging.getLogger(name) for name in names]
    handlers = [handler for logger in loggers for handler in logger.handlers]
    return [[(each.level, each.propagate, list(each.handlers)) for each in loggers], [h.filters[:] for h in handlers]]


def test_our_details_and_torchs_messages_stand_there_with_time_rank_and_thread(run: RunDir) -> None:
    with debug_log(DEBUG, run, 3):
        OURS.debug("gathered %d bytes", 5)
        TORCH.info("rendezvous")
        TORCH.debug("too much")
        FSDP.info("sharded")
    found = [
        re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} rank 3 MainThread (.*)", line) for line in lines(run, 3)
    ]
    assert [match and match[1] for match in found] == [
        "DEBUG trainer.somewhere: gathered 5 bytes",
        "INFO torch.distributed.elastic: rendezvous",
        "INFO torch.distributed.fsdp: sharded",
    ]


def test_stderr_and_the_root_logger_get_what_they_got_before(
    run: RunDir, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with debug_log(DEBUG, run, 0):
        OURS.debug("mine")
        TORCH.info("rendezvous")
        FSDP.info("sharded")
        quiet = capfd.readouterr().err
        OURS.warning("careful")
    assert quiet == ""
    assert caplog.messages == ["careful"]
    assert len(lines(run)) == 4


def test_at_the_end_all_loggers_are_as_they_were_and_a_second_start_appends(run: RunDir) -> None:
    before = state()
    for message in ("first", "second"):
        with debug_log(DEBUG, run, 0):
            OURS.debug(message)
        OURS.debug("outside")
    assert state() == before
    assert [line.rpartition(" ")[2] for line in lines(run)] == ["first", "second"]


def test_a_full_disk_costs_lines_and_nothing_else(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    (run.logs / "debug-rank0.log").symlink_to("/dev/full")
    with debug_log(DEBUG, run, 0):
        OURS.debug("lost")
    assert capfd.readouterr().err == ""


def test_without_the_field_there_is_no_file(run: RunDir) -> None:
    with debug_log(TrackersConfig(), run, 0):
        OURS.debug("nothing")
    assert list(run.logs.iterdir()) == []
