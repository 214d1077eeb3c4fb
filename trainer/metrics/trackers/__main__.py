"""The process of one tracker: `python -m trainer.metrics.trackers RUN_DIR NAME`.

Started by rank 0 (`--parent PID`), it follows the run until that process is gone and the end was written, or a bounded
time after. Started by hand, it sends what is there and ends. It never imports torch.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from trainer.config.sections import TrackersConfig
from trainer.metrics.trackers import (
    ALREADY_REPORTED,
    PATIENCE_S,
    Files,
    require,
    short,
    stopped,
    without_secrets,
)
from trainer.metrics.trackers.feed import Feed, Figures, Item, Position, SampleImage, Tracker
from trainer.run.events import LossyWriter, WarningEvent
from trainer.run.folder import RunDir
from trainer.run.preemption import PREEMPTION_SIGNALS
from trainer.system.errors import InputError
from trainer.system.terminal import complain

FOLLOW_SECONDS = 1.0
LATE_SECONDS = 30.0
"""How long the launcher may take to write why rank 0 is gone, or rank 0 may live after the end of the run."""


def main() -> int:
    """Exit code 0: everything was sent; 1: failed, see the output; 2: the user's mistake; 3: failed, see the events."""
    arguments = _parser().parse_args()
    try:
        run = RunDir.open(arguments.run_dir)
        require(TrackersConfig.model_validate({arguments.tracker: True}))
    except InputError as error:
        complain(error)
        return 2
    os.nice(10)  # the ranks and their loaders come first
    work = _Work(run, arguments.tracker, arguments.parent, arguments.patience)
    try:
        work.do()
    except Exception as error:  # noqa: BLE001 - whatever a tracker raises, it is reported and the run goes on
        complain(without_secrets(traceback.format_exc()).rstrip())
        if not arguments.parent:
            return 1
        work.emit(stopped(run, arguments.tracker, f"{type(error).__name__}: {short(str(error))}"))
        return ALREADY_REPORTED
    return 0


class _Work:
    """Sends a run to one tracker.

    Args:
        parent: Id of the process whose run is followed; None to send what is there.
        patience_s: See `PATIENCE_S`.
    """

    def __init__(self, run: RunDir, name: str, parent: int | None, patience_s: int) -> None:
        self._run = run
        self._name = name
        self._files = Files(run, name)
        self._parent = parent
        self._patience_s = patience_s
        self._events = LossyWriter(run.events_file)

    def emit(self, event: WarningEvent) -> None:
        """Write into the run's events, as nobody may read the output of this process."""
        self._events.write(event)
        complain(event.message)

    def do(self) -> None:
        self._files.lock.parent.mkdir(exist_ok=True)
        with self._locked() as show_life:
            position = Position.read(self._files.position)
            feed = Feed(self._run, position)
            tracker = self._open(position)
            for _ in self._until_over(feed):
                for item in feed.items():
                    show_life()
                    _send(tracker, item)
                tracker.flush()
                show_life()
            tracker.finish(feed.state == "failed")
            position.save()

    @contextmanager
    def _locked(self) -> Iterator[Callable[[], None]]:
        """Wait until no other process sends this run's events to this tracker. Yields a call that shows life."""
        if self._parent:
            signal.signal(signal.SIGALRM, self._give_up)
            # A scheduler signals every process of a job; this one leaves after the ranks.
            for number in PREEMPTION_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        lock = os.open(self._files.lock, os.O_RDWR | os.O_CREAT, 0o600)

        def show_life() -> None:
            os.utime(lock)
            if self._parent:
                signal.alarm(self._patience_s)

        try:
            # Where ranks start again, the process of the former rank 0 may still finish.
            deadline = time.monotonic() + (self._patience_s + LATE_SECONDS if self._parent else 0)
            while not _try_lock(lock):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        "another process sends this run's events; they will be complete without this one"
                    )
                os.utime(lock)
                time.sleep(0.2)
            show_life()
            yield show_life
        finally:
            signal.alarm(0)
            os.close(lock)

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        """Handle the alarm: end, with all processes that the tracker's program started."""
        traceback.print_stack(frame)
        self.emit(stopped(self._run, self._name, f"it made no progress for {self._patience_s} s"))
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(ALREADY_REPORTED)

    def _open(self, position: Position) -> Tracker:
        module = importlib.import_module(f"trainer.metrics.trackers.{self._name}")
        tracker: Tracker = module.connect(self._run, self._run.config(), position, self.emit)
        position.save()
        return tracker

    def _until_over(self, feed: Feed) -> Iterator[None]:
        """Yield each time the folder is to be read, a last time when everything was written."""
        over_since = None
        while self._parent:
            # Checked before the folder is read, so that the rank's last events are read too.
            gone = os.getppid() != self._parent
            yield
            if not gone and not feed.ended:
                over_since = None
            elif over_since is None:
                over_since = time.monotonic()
            if (gone and feed.ended) or (over_since and time.monotonic() - over_since > LATE_SECONDS):
                return
            time.sleep(FOLLOW_SECONDS)
        yield


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _send(tracker: Tracker, item: Item) -> None:
    if isinstance(item, Figures):
        tracker.figures(item)
    elif isinstance(item, SampleImage):
        tracker.image(item)
    else:
        tracker.note(item)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.metrics.trackers", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run folder")
    parser.add_argument("tracker", choices=tuple(TrackersConfig.packages))
    parser.add_argument("--parent", type=int, metavar="PID", help="follow the run as long as this parent process lives")
    parser.add_argument("--patience", type=int, default=PATIENCE_S, metavar="SECONDS", help="longest time for one item")
    return parser


if __name__ == "__main__":
    sys.exit(main())
