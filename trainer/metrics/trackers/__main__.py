"""The process of one tracker: `python -m trainer.metrics.trackers RUN_DIR tensorboard|wandb|trackio`.

Beside a rank (`--beside PID`) it follows the run until that process has gone and the end was written, or a bounded
time after. By hand it sends what is there and ends. It never imports torch.
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

from trainer.config.errors import InputError
from trainer.config.sections import TrackersConfig
from trainer.config.terminal import complain
from trainer.metrics.trackers import ALREADY_SAID, NAMES, PATIENCE_S, Files, require, short, stopped, without_secrets
from trainer.metrics.trackers.feed import Feed, Figures, Item, Picture, Place, Tracker
from trainer.run.events import LossyWriter, WarningEvent
from trainer.run.folder import RunDir
from trainer.run.preemption import PREEMPTION_SIGNALS

FOLLOW_SECONDS = 1.0
LATE_SECONDS = 30.0
"""How long after rank 0 has gone the launcher may take to write why; or how long a rank may stay after its end."""


def main() -> int:
    """Exit code 0: everything was given to the tracker; 1: it failed and says why; ALREADY_SAID: so do the events."""
    arguments = _parser().parse_args()
    try:
        run = RunDir.open(arguments.run_dir)
        require(TrackersConfig.model_validate({arguments.tracker: True}))
    except InputError as error:
        complain(error)
        return 2
    os.nice(10)  # the ranks and their loaders come first
    work = _Work(run, arguments.tracker, arguments.beside, arguments.patience)
    try:
        work.do()
    except Exception as error:  # noqa: BLE001 - whatever a tracker raises, it is told and the run goes on
        complain(without_secrets(traceback.format_exc()).rstrip())
        if not arguments.beside:
            return 1
        work.say(stopped(run, arguments.tracker, f"{type(error).__name__}: {short(str(error))}"))
        return ALREADY_SAID
    return 0


class _Work:
    """beside: id of the process whose run is followed, None to send what is there.  patience_s: see `PATIENCE_S`."""

    def __init__(self, run: RunDir, name: str, beside: int | None, patience_s: int) -> None:
        self._run = run
        self._name = name
        self._files = Files(run, name)
        self._beside = beside
        self._patience_s = patience_s
        self._events = LossyWriter(run.events_file)

    def say(self, event: WarningEvent) -> None:
        """Write into the run's events; nobody need read this process's output."""
        self._events.write(event)
        complain(event.message)

    def do(self) -> None:
        self._files.lock.parent.mkdir(exist_ok=True)
        with self._alone() as alive:
            place = Place.read(self._files.place)
            feed = Feed(self._run, place)
            tracker = self._open(place)
            for _ in self._until_over(feed):
                for item in feed.items():
                    alive()
                    _show(tracker, item)
                tracker.flush()
                alive()
            tracker.finish(feed.state == "failed")
            place.save()

    @contextmanager
    def _alone(self) -> Iterator[Callable[[], None]]:
        """Wait until no other process sends this run's events to this tracker. Gives a call that shows life."""
        if self._beside:
            signal.signal(signal.SIGALRM, self._give_up)
            for number in (
                PREEMPTION_SIGNALS
            ):  # a scheduler tells every process of a job; the ranks leave, and this one after them
                signal.signal(number, signal.SIG_IGN)
        lock = os.open(self._files.lock, os.O_RDWR | os.O_CREAT, 0o600)

        def alive() -> None:
            os.utime(lock)
            if self._beside:
                signal.alarm(self._patience_s)

        try:
            # Where ranks start again, the process of the former rank 0 may still finish.
            deadline = time.monotonic() + (self._patience_s + LATE_SECONDS if self._beside else 0)
            while not _locked(lock):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        "another process sends this run's events; they will be complete without this one"
                    )
                os.utime(lock)
                time.sleep(0.2)
            alive()
            yield alive
        finally:
            signal.alarm(0)
            os.close(lock)

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        """The alarm: end, with whatever the tracker's program started."""
        traceback.print_stack(frame)
        self.say(stopped(self._run, self._name, f"it did not get on for {self._patience_s} s"))
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(ALREADY_SAID)

    def _open(self, place: Place) -> Tracker:
        module = importlib.import_module(f"trainer.metrics.trackers.{self._name}")
        tracker: Tracker = module.connect(self._run, self._run.config(), place, self.say)
        place.save()
        return tracker

    def _until_over(self, feed: Feed) -> Iterator[None]:
        """Yields as often as the folder is to be read, a last time when everything was written."""
        over_since = None
        while self._beside:
            # Asked before the folder is read: what the rank wrote at last is seen.
            gone = os.getppid() != self._beside
            yield
            if not gone and not feed.ended:
                over_since = None
            elif over_since is None:
                over_since = time.monotonic()
            if (gone and feed.ended) or (over_since and time.monotonic() - over_since > LATE_SECONDS):
                return
            time.sleep(FOLLOW_SECONDS)
        yield


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _show(tracker: Tracker, item: Item) -> None:
    if isinstance(item, Figures):
        tracker.figures(item)
    elif isinstance(item, Picture):
        tracker.picture(item)
    else:
        tracker.note(item)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.metrics.trackers", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run folder")
    parser.add_argument("tracker", choices=NAMES)
    parser.add_argument("--beside", type=int, metavar="PID", help="follow the run as long as this parent process lives")
    parser.add_argument(
        "--patience", type=int, default=PATIENCE_S, metavar="SECONDS", help="longest time for one thing"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
