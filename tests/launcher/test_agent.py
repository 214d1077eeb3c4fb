"""torchrun as our own module starts it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from trainer.launcher import agent
from trainer.run.events import LoadReader
from trainer.run.process import TORCHRUN, worker_environment

RANK = """\
import json, os, sys, torch
found = [sys.argv[1:], os.environ["WORLD_SIZE"], torch.empty(2, 3, device="meta").softmax(1).shape[1]]
sys.stdout.write(json.dumps(found) + "\\n")  # at once: the other rank writes to the same pipe
"""
AGENT = """\
import os, subprocess, sys, psutil
from trainer.launcher import agent
rank, agent.LOOKS_EVERY_S, listed = subprocess.Popen(["sleep", "100"]), 0.01, psutil.Process.children
def children(self, recursive):
    found = listed(self, recursive=recursive)
    rank.kill()
    rank.wait()
    return found
psutil.Process.children = children
agent._end_with(sys.argv[1])
"""


def test_it_starts_ranks_that_have_all_of_torch(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
    argv = [sys.executable, "-m", TORCHRUN, "--standalone", "--nproc-per-node", "2", str(tmp_path / "rank.py"), "word"]
    done = subprocess.run(argv, env=worker_environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ['[["word"], "2", 3]'] * 2


def test_a_failing_rank_gives_it_the_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("raise SystemExit(3)", encoding="utf-8")
    argv = [sys.executable, "-m", TORCHRUN, "--standalone", "--nproc-per-node", "1", str(tmp_path / "rank.py")]
    done = subprocess.run(argv, env=worker_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "exitcode  : 3" in done.stderr


@pytest.mark.slow
def test_it_ends_also_when_a_rank_has_ended_just_before(tmp_path: Path):
    ended = subprocess.run([sys.executable, "-c", AGENT, tmp_path / "gone"], capture_output=True, timeout=20)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ETIMEDOUT])
def test_a_folder_of_a_share_that_does_not_answer_is_not_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number):
    def fails(path: str) -> os.stat_result:
        raise OSError(number, os.strerror(number), path)

    assert agent._is_gone(str(tmp_path / "gone"))
    assert not agent._is_gone(str(tmp_path))
    monkeypatch.setattr(os, "stat", fails)
    assert not agent._is_gone(str(tmp_path))


LOOKING = """\
import sys, threading, time
from pathlib import Path
from trainer.launcher import agent
agent.LOAD_EVERY_S, agent.WRITTEN_TOGETHER, agent.DETAILED = 0.005, 4, 3
threading.Thread(target=agent._write_load, args=(sys.argv[-1],), daemon=True).start()
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    for file in Path(sys.argv[-1]).glob("ranks/*.jsonl"):
        if len(file.read_text().splitlines()) > 4:
            sys.exit()
    time.sleep(0.01)
"""


def test_it_writes_what_its_machine_does_first_often_and_then_seldom(tmp_path: Path):
    (tmp_path / "ranks").mkdir()
    argv = [sys.executable, "-c", LOOKING, "--node-rank", "1", str(tmp_path)]
    subprocess.run(argv, env=worker_environment(), check=True, timeout=60)
    loads = LoadReader(tmp_path / "ranks" / "machine1.jsonl").read()
    assert all(0 < load.host_used < load.host_total for load in loads)
    between = [second.time - first.time for first, second in pairwise(loads)]
    assert max(between[:2]) < 0.015 <= min(between[2:4])


def test_a_load_that_cannot_be_written_is_a_line_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "ranks" / "machine0.jsonl").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "LOAD_EVERY_S", 0.0)
        agent._write_load(str(tmp_path))
    assert capsys.readouterr().err.startswith("the load of this machine is not written: ")
