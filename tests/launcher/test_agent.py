"""torchrun as our own module starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trainer.run.process import TORCHRUN, worker_environment

RANK = """\
import json, os, sys, torch
found = [sys.argv[1:], os.environ["WORLD_SIZE"], torch.empty(2, 3, device="meta").softmax(1).shape[1]]
sys.stdout.write(json.dumps(found) + "\\n")  # at once: the other rank writes to the same pipe
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
