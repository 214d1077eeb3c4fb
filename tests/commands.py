"""`python launch.py` as a person starts it: a process of its own, watched from outside."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import TypeVar

import psutil

from tests.runs import make_pictures
from trainer.run.events import AnyEvent, EventReader
from trainer.run.folder import RunDir
from trainer.run.process import Launch, terminate

LAUNCH = Path(__file__).parents[1] / "launch.py"
TIMEOUT_S = 500

E = TypeVar("E")


def takes_no_arguments(doc: str | None) -> None:
    """Print the docstring of a command for --help, and refuse other arguments: what takes long starts by no mistake."""
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=doc, formatter_class=form).parse_args()


PRESET = """\
name: fox
model:
  family: flux2
  path: tiny
adapter:
  rank: 4
data:
  path: pictures
  resolution: 64
train:
  steps: 2
  batch_size: 2
  precision: fp32
parallel:
  device: cpu
  devices: 2
  strategy: full
"""
"""A run of seconds on two ranks, for a file beside a folder `pictures`."""


def preset_folder(folder: Path) -> Path:
    """Make `preset.yaml` with PRESET and its dataset in a folder, which is returned."""
    make_pictures(folder / "pictures", count=4)
    (folder / "preset.yaml").write_text(PRESET)
    return folder


def launch_py(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run it to its end in `folder`."""
    argv = [sys.executable, str(LAUNCH), *map(str, arguments)]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


class Started:
    """launch.py while it runs a run folder that is known, new or not."""

    def __init__(self, folder: Path, *arguments: object, run: Path) -> None:
        self.run = RunDir(run)
        self._reader = EventReader(self.run.events_file)
        self._reader.read()
        self._unseen: deque[AnyEvent] = deque()
        argv = [sys.executable, str(LAUNCH), *map(str, arguments)]
        self._process = subprocess.Popen(argv, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def wait_for(self, kind: type[E], within: float = TIMEOUT_S) -> E:
        """The next event of a kind since the start or the last wait, as soon as it is written. within: seconds."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            has_ended = self._process.poll() is not None
            self._unseen += self._reader.read()
            while self._unseen:
                if isinstance(event := self._unseen.popleft(), kind):
                    return event
            assert not has_ended, self._process.communicate()
            time.sleep(0.01)
        raise TimeoutError(kind.__name__)

    def seconds_without_processor(self) -> float:
        """Seconds that its main thread was ready to run while others had the processors (run_delay, proc(5))."""
        _, waited_ns, _ = Path(f"/proc/{self._process.pid}/schedstat").read_text().split()
        return int(waited_ns) / 1e9

    def rank(self, number: int) -> psutil.Process:
        """The process of one rank."""
        torchrun = psutil.Process(Launch.read(self.run).pid)
        return next(rank for rank in torchrun.children() if rank.environ()["RANK"] == str(number))

    def press_ctrl_c(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, list[str], str]:
        """Wait for it. Returns exit code, lines of stdout and stderr."""
        out, err = self._process.communicate(timeout=TIMEOUT_S)
        return self._process.returncode, out.splitlines(), err

    def kill_launcher(self) -> None:
        """SIGKILL to launch.py alone: the run goes on, and nothing watches it."""
        self._process.kill()

    def lose_power(self) -> None:
        """SIGKILL to launch.py, torchrun and the process groups of all ranks, at one moment."""
        torchrun = psutil.Process(Launch.read(self.run).pid)
        groups = {os.getpgid(process.pid) for process in (torchrun, *torchrun.children(recursive=True))}
        self._process.kill()
        for group in groups:
            os.killpg(group, signal.SIGKILL)
        self._process.communicate()

    def kill(self) -> None:
        """End the run, if it still runs, and everything that belongs to it."""
        if self.run.path.is_dir():
            terminate(self.run)
        self._process.kill()
        self._process.communicate()
