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
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from trainer.config import files
from trainer.config.errors import InputError
from trainer.config.load import dump_config, load_config_text
from trainer.config.schema import RunConfig
from trainer.launcher import preflight, torchrun
from trainer.run import process
from trainer.run.folder import RunDir, is_run

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
    run: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]*)?$")] = ""
    error: str = ""


_ENTRY = TypeAdapter(Entry)


@dataclass(frozen=True)
class Settings:
    """after_failure: what becomes of the others when a run fails.  is_paused: whether none is started now.

    noted: the number of the latest entry that paused the queue by its failure.
    """

    after_failure: AfterFailure = "go on"
    is_paused: bool = False
    noted: int = 0


_SETTINGS = TypeAdapter(Settings)


class Queue:
    """The queue of a folder of runs. Every change is on disk when the method returns. module: what torchrun starts.

    A damaged file harms nothing but itself: `problems` names it, and all else is read past it.
    """

    def __init__(self, runs: Path, module: str = "trainer") -> None:
        self.runs = runs.absolute()
        self._module = module
        self._folder = self.runs / "queue"
        self._waiting, self._taken = self._folder / "waiting", self._folder / "taken"
        self._settings = self._folder / "settings.json"

    def add(self, config: RunConfig, gpus: Sequence[int] = ()) -> Entry:
        """Put a run at the end. The config is kept as it is now. Raises InputError where nothing can be written."""
        with self._changing():
            numbers = [*_files(self._waiting), *_files(self._taken)]
            entry = Entry(max(numbers, default=0) + 1, config.name, dump_config(config), tuple(gpus))
            self._write(self._waiting, entry)
        return entry

    def waiting(self) -> list[Entry]:
        """In the order they will be started."""
        return _read_all(self._waiting)[0]

    def taken(self) -> list[Entry]:
        """Those that had their turn, the oldest first."""
        return _read_all(self._taken)[0]

    def problems(self) -> list[str]:
        """A sentence per file of the queue that is damaged."""
        damaged = (_read_all(self._waiting)[1] | _read_all(self._taken)[1]).values()
        return [problem for problem in (self._read_settings()[1], *damaged) if problem]

    def running(self) -> list[Entry]:
        """Those whose run is under way. A run that cannot be read keeps no other from being started."""
        return [entry for entry in self.taken() if entry.run and self._is_alive(entry)]

    def _is_alive(self, entry: Entry) -> bool:
        try:
            return process.alive(self.run_of(entry))
        except (InputError, OSError):  # its row and `has_failed` say so
            return False

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
        """As they were last changed. Where their file is damaged nothing is started until they are changed."""
        return self._read_settings()[0]

    def change(self, settings: Settings) -> None:
        """Keep other settings, in place of a file that is damaged too."""
        with self._changing():
            if self._read_settings()[1]:
                files.put_aside(self._settings)
            _replace(self._settings, asdict(settings))

    def require_settings(self) -> None:
        """Raises InputError where their file is damaged."""
        if problem := self._read_settings()[1]:
            raise InputError(problem)

    def _read_settings(self) -> tuple[Settings, str]:
        """The settings, and what is wrong with their file."""
        try:
            return files.read_json(self._settings, _SETTINGS, "remove it, or change a setting in the page"), ""
        except FileNotFoundError:
            return Settings(), ""
        except (InputError, OSError) as error:
            return Settings(is_paused=True), _explained(error)

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
        begun = self._put_damaged_aside()
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
        frozen = self._folder / "config.yaml"  # nothing lies there: what is wrong is named by the entry
        try:
            run = preflight.new_run(load_config_text(entry.config, (), frozen), self.runs)
            torchrun.start(run.config(), run, self._module, entry.gpus)
            entry = replace(entry, run=run.path.name)
        except InputError as error:
            entry = replace(entry, error=str(error).replace(f"{frozen}:", f"{entry.name}:"))
        self._write(self._taken, entry)
        return entry

    def _put_damaged_aside(self) -> list[Entry]:
        """What waits and cannot be read gives its place free. Returns it as entries that could not be started."""
        entries: list[Entry] = []
        if not _read_all(self._waiting)[1]:
            return entries
        with self._changing():
            for file, problem in _read_all(self._waiting)[1].items():
                aside = files.put_aside(file, self._folder / "damaged")
                error = f"{problem}; it was put aside as queue/damaged/{aside.name}"
                entries.append(Entry(int(file.stem), f"number {int(file.stem)}", "", error=error))
                self._write(self._taken, entries[-1])
        return entries

    def _put_back_interrupted(self) -> None:
        """A starter that was killed at the wrong moment left an entry that had its turn and was not started."""
        with self._changing():
            for entry in self.taken():
                if not entry.run and not entry.error:
                    self._write(self._waiting, entry)
                    _file(self._taken, entry.number).unlink()

    def _note_failures(self) -> None:
        """Pause after a failure where that is wanted, once for each."""
        settings, problem = self._read_settings()
        if problem:  # which of them were noted is not known
            return
        failed = [entry.number for entry in self.taken() if entry.number > settings.noted and self.has_failed(entry)]
        if failed:
            is_paused = settings.is_paused or settings.after_failure == "pause"
            self.change(replace(settings, is_paused=is_paused, noted=max(failed)))

    def has_failed(self, entry: Entry) -> bool:
        """Whether a run that had its turn could not be started, or failed."""
        if entry.error:
            return True
        try:
            process.settle(self.run_of(entry))
        except (InputError, OSError):
            return is_run(self.run_of(entry).path)  # else it was deleted
        return self.state_of(entry) == "failed"

    def state_of(self, entry: Entry) -> str:
        """What a run that had its turn does now, or why it cannot be told."""
        if entry.error or not entry.run:
            return entry.error or "starting"
        run = self.run_of(entry)
        if not is_run(run.path):
            return "deleted"
        try:
            return process.status(run)
        except (InputError, OSError) as error:
            return f"damaged: {_explained(error)}"

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Only one process at a time changes the queue."""
        self._make_folders()
        with files.locked(self._folder / "changes.lock"):
            yield

    def _make_folders(self) -> None:
        try:
            for folder in (self._folder, self._waiting, self._taken):
                files.make_private(folder)
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
        queue.require_settings()
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


def _files(folder: Path) -> dict[int, Path]:
    """{number: file} of the entries in a folder, in their order."""
    return {int(file.stem): file for file in sorted(folder.glob("*.json")) if file.stem.isdecimal()}


def _read_all(folder: Path) -> tuple[list[Entry], dict[Path, str]]:
    """The entries in a folder, and of each damaged file what is wrong with it."""
    entries, damaged = [], {}
    for number, file in _files(folder).items():
        try:
            entries.append(replace(files.read_json(file, _ENTRY, "remove it"), number=number))
        except FileNotFoundError:  # it had its turn, or was taken out, a moment ago
            continue
        except (InputError, OSError) as error:
            damaged[file] = _explained(error)
    return entries, damaged


def _explained(error: InputError | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: cannot be read ({error.strerror}); remove it"
    return str(error)


def _replace(file: Path, values: object) -> None:
    files.replace(file, json.dumps(values, indent=1))
