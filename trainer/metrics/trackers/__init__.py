"""Experiment trackers (TensorBoard, wandb, trackio). Each reads the run folder in a process of its own, next to rank 0.

Training starts these processes and never waits for one. `python -m trainer.metrics.trackers RUN_DIR NAME` is such a
process; started by hand, it sends what the tracker has not received yet. See DECISIONS 113.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import RunConfig
from trainer.config.sections import TrackersConfig
from trainer.run.events import Emit, WarningEvent
from trainer.run.folder import RunDir
from trainer.run.process import worker_environment
from trainer.system.errors import InputError, Problem
from trainer.system.files import opened_to_append

PATIENCE_S = 300
"""How long one item may take to send, and how long a tracker may take to finish after the run's end. wandb alone waits
90 s for its server before it gives up."""
ALREADY_REPORTED = 3
"""Exit code of a tracker's process that already wrote into the events why it ended."""
WATCH_SECONDS = 1.0
_SECRET = re.compile(
    r"""(?ix)
    ( (?:token|key|password|secret|authorization) (?!error) \w* [\\"']* \s* [=:] \s* [\\"']* (?:(?:bearer|basic)\s+)?
    | \b bearer \s+
    ) [^\s&'"\\]+
    | (?<=//) [^\s/@]+ @                       # user:password@ in an address
    | \b (?: hf_[a-z0-9]{20,} | [0-9a-f]{40} | wandb_v\d_\w+ ) \b  # of the Hub, of wandb
    """
)


@dataclass(frozen=True)
class Files:
    """The files of one tracker in the run folder."""

    run: RunDir
    name: str

    @property
    def position(self) -> Path:
        """How far the tracker has read, and the name its program gave the run."""
        return self.run.path / "trackers" / f"{self.name}.json"

    @property
    def lock(self) -> Path:
        """Held by the one process that sends; its modification time says when that process was last at work."""
        return self.position.with_suffix(".lock")

    @property
    def log(self) -> Path:
        """The output of the process and of the tracker's own code."""
        return self.run.logs / f"tracker-{self.name}.log"


def missing(cfg: TrackersConfig) -> list[Problem]:
    """A problem for every tracker of the config whose package is not installed."""
    return [
        Problem(f"trackers.{name}", f"true needs the package {package}; pip install {package}")
        for name in cfg.wanted
        if (package := cfg.packages[name]) and not _is_installed(package)
    ]


def require(cfg: TrackersConfig) -> None:
    """Raise InputError with the command that installs a tracker's package, if one is missing."""
    for problem in missing(cfg):
        raise InputError(str(problem))


def without_secrets(text: str) -> str:
    """A library's message with `***` in place of tokens, keys and passwords."""
    return _SECRET.sub(r"\1***", text)


def short(text: str) -> str:
    """A library's message in one line of at most 500 characters, without secrets."""
    return " ".join(without_secrets(text).split())[:500]


def shown_config(cfg: RunConfig) -> dict[str, Any]:
    """The config as trackers get it: without `cluster`, which names accounts, volumes and registries of a site."""
    return cfg.model_dump(mode="json", exclude={"cluster"})


def stopped(run: RunDir, name: str, reason: str) -> WarningEvent:
    """The warning about a tracker that ended early."""
    log = Files(run, name).log.relative_to(run.path)
    rest = f"python -m trainer.metrics.trackers {run.path} {name}"
    return WarningEvent(message=f"trackers.{name} stopped: {reason}; see {log}, and send the rest with: {rest}")


@contextmanager
def following(cfg: TrackersConfig, run: RunDir, emit: Emit, patience_s: int = PATIENCE_S) -> Iterator[None]:
    """Start the trackers of the config: they follow the run's events until after this process has ended.

    A tracker that fails, hangs or is killed is a WarningEvent. Raises InputError when its package is not installed.
    """
    require(cfg)
    processes = {}
    for name in cfg.wanted:
        try:
            processes[name] = _start(run, name, patience_s)
        except OSError as error:
            emit(stopped(run, name, f"its process could not be started ({error.strerror})"))
    if processes:
        watch = threading.Thread(target=_watch, args=(processes, run, emit, patience_s), name="trackers", daemon=True)
        watch.start()
    yield


def _is_installed(package: str) -> bool:
    """Whether the package exists. A mere folder of that name, such as wandb makes, is found too but has no origin."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _start(run: RunDir, name: str, patience_s: int) -> subprocess.Popen[bytes]:
    files = Files(run, name)
    files.lock.parent.mkdir(exist_ok=True)
    files.lock.touch()
    argv = [sys.executable, "-m", "trainer.metrics.trackers", str(run.path), name]
    argv += ["--parent", str(os.getpid()), "--patience", str(patience_s)]
    with open(opened_to_append(files.log), "ab") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,  # nothing may ask for a login
            stdout=log,
            stderr=subprocess.STDOUT,
            env=worker_environment(),
            start_new_session=True,  # what ends the ranks does not end it
        )


def _watch(processes: Mapping[str, subprocess.Popen[bytes]], run: RunDir, emit: Emit, patience_s: int) -> None:
    """Report a tracker that ended and could not report it itself; kill one that hangs."""
    running = dict(processes)
    timers = {name: IdleTimer(Files(run, name).lock) for name in running}
    while running:
        time.sleep(WATCH_SECONDS)
        for name, process in list(running.items()):
            code = process.poll()
            # A process notices by itself that it hangs, unless it was stopped or hangs inside C.
            hangs = code is None and timers[name].idle_s() > 1.2 * patience_s + 5
            if hangs:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                emit(stopped(run, name, f"it did nothing for {timers[name].idle_s():.0f} s"))
            elif code not in (None, 0, ALREADY_REPORTED):
                emit(stopped(run, name, _ended_by(code)))
            if hangs or code is not None:
                del running[name]


class IdleTimer:
    """Measures how long a file has not been touched, by the monotonic clock, which is never set."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._touched = file.stat().st_mtime_ns
        self._seen = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since a touch was last seen."""
        touched = self._file.stat().st_mtime_ns
        if touched != self._touched:
            self._touched, self._seen = touched, time.monotonic()
        return time.monotonic() - self._seen


def _ended_by(code: int | None) -> str:
    assert code is not None
    return f"its process ended with code {code}" if code > 0 else f"{signal.Signals(-code).name} ended its process"
