"""Sends a run to its trackers: on rank 0 while it trains, each in a thread, or once by hand."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from threading import Event, Thread

from trainer.config.sections import TrackersConfig
from trainer.metrics.trackers import require, short, without_secrets
from trainer.metrics.trackers.feed import Feed, Figures, Position, SampleImage, Tracker
from trainer.run.events import WarningEvent
from trainer.run.folder import RunDir
from trainer.system.files import locked_by_one
from trainer.system.terminal import complain

FOLLOW_SECONDS = 1.0
PATIENCE_S = 300.0
"""How long one item may take to send before a warning; wandb alone waits 90 s for its server before it gives up."""
END_SECONDS = 30.0
"""How long the end of a run waits for its trackers, all together."""
Warn = Callable[[WarningEvent], None]


class Trackers:
    """The trackers of a run, on rank 0: each gets it in a thread of its own.

    One that raises, hangs or is late at the end is one WarningEvent, which says how to send the rest.
    """

    def __init__(self, patience_s: float = PATIENCE_S, end_s: float = END_SECONDS) -> None:
        self._patience_s, self._end_s = patience_s, end_s
        self._over = Event()
        self._threads: dict[Sender, Thread] = {}

    def start(self, cfg: TrackersConfig, run: RunDir, emit: Warn) -> None:
        """Start those of the config. Raises InputError when the package of one is not installed."""
        require(cfg)
        for name in cfg.wanted:
            sender = Sender(run, name, emit)
            # A daemon: one that hangs ends with the process.
            self._threads[sender] = Thread(target=sender.follow, args=(self._over,), name=name, daemon=True)
            self._threads[sender].start()
        if self._threads:
            Thread(target=self._watch, name="trackers", daemon=True).start()

    def end(self, code: int) -> None:
        """Send what is left. code: that with which the process exits; other than 0, the run has failed."""
        deadline = time.monotonic() + self._end_s
        for sender in self._threads:
            sender.has_failed = code != 0
        self._over.set()
        for sender, thread in self._threads.items():
            thread.join(0 if sender.is_reported else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                sender.report(f"it was not done {self._end_s:g} s after the end of the run")
        if any(thread.is_alive() for thread in self._threads.values()):
            # Libraries wait in exit handlers for what they still have to send, without a limit. The newest handler
            # runs first, and with this one the process ends.
            atexit.register(os._exit, code)
            atexit.register(sys.stdout.flush)  # runs before it

    def _watch(self) -> None:
        """Report a tracker that makes no progress, while the run goes on."""
        while not self._over.wait(FOLLOW_SECONDS):
            for sender in self._threads:
                if time.monotonic() - sender.progress_at > self._patience_s:
                    sender.report(f"it made no progress for {self._patience_s:g} s")


class Sender:
    """Sends a run to one tracker.

    Args:
        run: The run.
        name: Field of the tracker in TrackersConfig, which is also its module.
        emit: Takes its warnings.

    Attributes:
        file: Keeps how far the tracker has read, and the name its program gave the run.
        has_failed: Whether the run has failed although its events may not say so.
        is_reported: Whether the warning was emitted that it stopped.
        progress_at: When it sent something last, by the monotonic clock.
    """

    def __init__(self, run: RunDir, name: str, emit: Warn) -> None:
        self.file = run.path / "trackers" / f"{name}.json"
        self.has_failed = False
        self.is_reported = False
        self.progress_at = time.monotonic()
        self._run, self._name, self._emit = run, name, emit
        self._command = f"python -m trainer.metrics.trackers {run.path} {name}"

    def send(self, rounds: Iterable[None] = (None,)) -> None:
        """Send what the tracker has not received, in each round what is new.

        Raises:
            InputError: Another process sends this run's events.
            Exception: Whatever the tracker's library raises.
        """
        self.file.parent.mkdir(exist_ok=True)
        lock = self.file.with_suffix(".lock")
        with locked_by_one(lock, f"{lock}: another process sends this run's events; wait until it has ended"):
            position = Position.read(self.file)
            feed = Feed(self._run, position)
            module = importlib.import_module(f"trainer.metrics.trackers.{self._name}")
            tracker: Tracker = module.connect(self._run, self._run.config(), position, self._emit)
            position.save()
            if position.command:
                self._command += f" and {position.command}"
            for _ in rounds:
                for item in feed.items():
                    self.progress_at = time.monotonic()
                    if isinstance(item, Figures):
                        tracker.figures(item)
                    elif isinstance(item, SampleImage):
                        tracker.image(item)
                    else:
                        tracker.note(item)
                tracker.flush()
                self.progress_at = time.monotonic()
            tracker.finish(self.has_failed or feed.state == "failed")
            position.save()

    def follow(self, over: Event) -> None:
        """Send a run while it goes on, and what was written until `over` was set."""

        def rounds() -> Iterator[None]:
            while not over.wait(FOLLOW_SECONDS):
                yield
            yield

        try:
            self.send(rounds())
        # A library may call sys.exit; a thread that ends by that says nothing.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises is reported and the run goes on
            complain(without_secrets(traceback.format_exc()).rstrip())
            self.report(f"{type(error).__name__}: {short(str(error))}")

    def report(self, reason: str) -> None:
        """Emit the one warning that the tracker stopped."""
        if not self.is_reported:
            self.is_reported = True
            message = f"trackers.{self._name} stopped: {reason}; send the rest with: {self._command}"
            self._emit(WarningEvent(message=message))
