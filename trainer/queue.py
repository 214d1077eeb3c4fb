"""Runs that wait for their turn, in a folder: `runs/queue/`. It outlives whoever filled it.

A waiting run is `waiting/<number>.json`, its config frozen in it; one that had its turn is `taken/<number>.json` with
the folder of its run, or why it could not be started. One process at a time, a page or `launch.py --queue`, starts
them: it holds the lock of the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from trainer import configfile, launch, prepare
from trainer.config import InputError, RunConfig
from trainer.rundir import RunDir

POLL_S = 1.0
AfterFailure = Literal["go on", "pause"]


@dataclass(frozen=True)
class Entry:
    """A run that waits or had its turn. number: its place.  config: YAML of the whole config.

    gpus: the GPUs it may use, by index; none for all of them.  run: name of its folder, once it was started.
    error: why it could not be started.
    """

    number: int
    name: str
    config: str
    gpus: tuple[int, ...] = ()
    run: str = ""
    error: str = ""


@dataclass(frozen=True)
class Settings:
    """after_failure: what becomes of the others when a run fails.  is_paused: whether none is started now.

    noted: the number of the latest entry that paused the queue by its failure.
    """

    after_failure: AfterFailure = "go on"
    is_paused: bool = False
    noted: int = 0


class Queue:
    """The queue of a folder of runs. Every change is on disk when the method returns. module: what torchrun starts."""

    def __init__(self, runs: Path, module: str = "trainer") -> None:
        self.runs = runs.absolute()
        self._module = module
        self._folder = self.runs / "queue"
        self._waiting, self._taken = self._folder / "waiting", self._folder / "taken"

    def add(self, config: RunConfig, gpus: Sequence[int] = ()) -> Entry:
        """Put a run at the end. The config is kept as it is now. Raises InputError where nothing can be written."""
        with self._changing():
            numbers = [entry.number for entry in (*self.waiting(), *self.taken())]
            entry = Entry(max(numbers, default=0) + 1, config.name, configfile.dump(config), tuple(gpus))
            self._write(self._waiting, entry)
        return entry

    def waiting(self) -> list[Entry]:
        """In the order they will be started."""
        return _read_all(self._waiting)

    def taken(self) -> list[Entry]:
        """Those that had their turn, the oldest first."""
        return _read_all(self._taken)

    def running(self) -> list[Entry]:
        """Those whose run is under way."""
        return [entry for entry in self.taken() if entry.run and launch.alive(self.run_of(entry))]

    def run_of(self, entry: Entry) -> RunDir:
        return RunDir(self.runs / entry.run)

    def remove(self, number: int) -> None:
        """Take a waiting run out. Nothing happens when it had its turn meanwhile."""
        with self._changing():
            _file(self._waiting, number).unlink(missing_ok=True)

    def move(self, number: int, places: int) -> None:
        """Move a waiting run so many places towards the end, or the front where negative."""
        with self._changing():
            entries = self.waiting()
            numbers = [entry.number for entry in entries]
            if number not in numbers:
                return
            moved = entries.pop(numbers.index(number))
            entries.insert(max(0, numbers.index(number) + places), moved)
            for place, entry in zip(numbers, entries, strict=True):
                self._write(self._waiting, replace(entry, number=place))

    @property
    def settings(self) -> Settings:
        file = self._folder / "settings.json"
        return Settings(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else Settings()

    def change(self, settings: Settings) -> None:
        with self._changing():
            _replace(self._folder / "settings.json", asdict(settings))

    @contextlib.contextmanager
    def starting(self) -> Iterator[bool]:
        """Whether this process is the one that starts runs; it stays so inside the block."""
        self._make_folders()
        lock = os.open(self._folder / "starter.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
            yield False
        finally:
            os.close(lock)

    def start_next(self) -> list[Entry]:
        """Start every waiting run whose GPUs are free, in order; one that does not fit holds up those behind it.

        To be called inside `starting`. Returns those that had their turn, also the ones that could not be started.
        """
        begun: list[Entry] = []
        self._put_back_interrupted()
        self._note_failures()
        while (waiting := self.waiting()) and not self.settings.is_paused and self._has_room(waiting[0]):
            begun.append(self._take(waiting[0]))
            self._note_failures()
        return begun

    def _has_room(self, entry: Entry) -> bool:
        """Whether no run under way uses a GPU of this one; without a list it wants all of them."""
        others = self.running()
        return not others or (bool(entry.gpus) and all(o.gpus and not set(o.gpus) & set(entry.gpus) for o in others))

    def _take(self, entry: Entry) -> Entry:
        with self._changing():
            self._write(self._taken, entry)
            _file(self._waiting, entry.number).unlink()
        frozen = self._folder / "config.yaml"
        frozen.write_text(entry.config, encoding="utf-8")
        try:
            run = prepare.new_run(configfile.load(frozen), self.runs)
            launch.start(run.config(), run, self._module, entry.gpus)
            entry = replace(entry, run=run.path.name)
        except InputError as error:
            entry = replace(entry, error=str(error).replace(f"{frozen}:", f"{entry.name}:"))
        self._write(self._taken, entry)
        return entry

    def _put_back_interrupted(self) -> None:
        """A starter that was killed at the wrong moment left an entry that had its turn and was not started."""
        with self._changing():
            for entry in self.taken():
                if not entry.run and not entry.error:
                    self._write(self._waiting, entry)
                    _file(self._taken, entry.number).unlink()

    def _note_failures(self) -> None:
        """Pause after a failure where that is wanted, once for each."""
        settings = self.settings
        failed = [entry.number for entry in self.taken() if entry.number > settings.noted and self.has_failed(entry)]
        if failed:
            is_paused = settings.is_paused or settings.after_failure == "pause"
            self.change(replace(settings, is_paused=is_paused, noted=max(failed)))

    def has_failed(self, entry: Entry) -> bool:
        """Whether a run that had its turn could not be started, or failed."""
        if entry.error:
            return True
        launch.settle(self.run_of(entry))
        return launch.status(self.run_of(entry)) == "failed"

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Only one process at a time changes the queue."""
        self._make_folders()
        lock = os.open(self._folder / "changes.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _make_folders(self) -> None:
        try:
            for folder in (self._waiting, self._taken):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self._folder}: cannot be written ({error.strerror}); use another --runs") from error

    def _write(self, folder: Path, entry: Entry) -> None:
        _replace(_file(folder, entry.number), asdict(entry))


def work_off(runs: Path, say: Callable[[str], None], module: str = "trainer") -> int:
    """Start what waits, one after the other, until nothing waits and nothing runs. Returns 1 when a run failed, else 0.

    Raises InputError when another process is doing it.
    """
    queue = Queue(runs, module)
    with queue.starting() as may_start:
        if not may_start:
            raise InputError(f"{runs}: another page or --queue starts its runs already; leave it to that one")
        begun: list[Entry] = []
        while not queue.settings.is_paused and (queue.waiting() or queue.running()):
            for entry in queue.start_next():
                begun.append(entry)
                say(f"{entry.name}: {entry.error or queue.run_of(entry).path}")
            time.sleep(POLL_S)
        if queue.settings.is_paused:
            say("the queue is paused; go on in the page, or set is_paused: false in queue/settings.json")
        return int(any(queue.has_failed(entry) for entry in begun))


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _read_all(folder: Path) -> list[Entry]:
    return [_entry(file) for file in sorted(folder.glob("*.json"))]


def _entry(file: Path) -> Entry:
    values = json.loads(file.read_text(encoding="utf-8"))
    return Entry(**values | {"gpus": tuple(values["gpus"])})


def _replace(file: Path, values: object) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(values, indent=1), encoding="utf-8")
    draft.replace(file)
