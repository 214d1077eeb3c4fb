"""How a process that computes with torch ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ABORTED_BY_TORCH = """
import datetime, sys, threading, time
import torch.distributed as dist
from trainer.system.process_exit import run_and_exit

class Lingering:
    def __del__(self):
        time.sleep(1)  # Python's finalization lasts longer than torch's wait below

lingering = Lingering()

def main():
    within = datetime.timedelta(seconds=0.5)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=within)
    threading.Thread(target=store.get, args=("absent",), daemon=True).start()
    time.sleep(0.2)
    return 0

"""
PLAIN = """
import atexit, sys, tempfile, threading, time
from trainer.system.process_exit import run_and_exit

def late():
    time.sleep(0.3)
    print("a thread ended", end=" ")

def main():
    kept.append(tempfile.TemporaryDirectory())
    print(kept[0].name, end=" ")
    atexit.register(print, "a handler ran", end=" ")
    threading.Thread(target=late).start()
    END

kept = []
run_and_exit(main)
"""


def result(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_a_thread_of_torch_that_outlives_the_interpreter_aborts_no_process() -> None:
    assert result(ABORTED_BY_TORCH + "sys.exit(main())").returncode == -signal.SIGABRT
    assert result(ABORTED_BY_TORCH + "run_and_exit(main)").returncode == 0


@pytest.mark.parametrize(
    ("end", "code", "last_line"),
    [
        ("return 0", 0, ""),
        ("return 2", 2, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no such folder')", 1, "no such folder"),
        ("raise OSError('the disk is full')", 1, "OSError: the disk is full"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_a_process_ends_with_its_code_after_its_threads_and_exit_handlers(end: str, code: int, last_line: str) -> None:
    ended = result(PLAIN.replace("END", end))
    folder, _, told = ended.stdout.partition(" ")
    assert (ended.returncode, told) == (code, "a thread ended a handler ran ")
    assert (ended.stderr.splitlines() or [""])[-1] == last_line
    assert not Path(folder).exists()


CUT = """
import os, threading
from trainer.system.process_exit import run_and_exit

class Kept:
    def __del__(self):
        os.write(2, b"finalized")

def main():
    print("not flushed yet")
    END

kept = Kept()
run_and_exit(main)
"""


@pytest.mark.parametrize(
    ("end", "redirection", "code"),
    [
        ("return 0", ">&-", 0),
        ("raise ValueError", ">&-", 1),
        ("raise ValueError", "2>&-", 1),
        ("return 0", ">/dev/full", 1),
        ("return 3", ">/dev/full", 3),
        ("threading.Timer(1, os.kill, (os.getpid(), 2)).start(); threading.Timer(3, print).start(); return 0", "", 130),
    ],
)
def test_a_process_whose_output_or_end_is_cut_is_not_finalized_either(end: str, redirection: str, code: int) -> None:
    command = [
        "sh",
        "-c",
        f'PYTHONUNBUFFERED= exec "$0" -c "$1" {redirection}',
        sys.executable,
        CUT.replace("END", end),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "finalized" in ended.stderr) == (code, False), ended.stderr


def test_output_that_nobody_reads_is_no_success() -> None:
    command = [sys.executable, "-c", PLAIN.replace("END", "return 0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        process.stdout.close()
    assert process.returncode != 0
