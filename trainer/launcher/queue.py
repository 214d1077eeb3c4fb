"""The queue of runs, in the folder `runs/queue/`. It outlives the process that filled it.

A waiting run is `waiting/<number>.json`, which holds its config. Once taken, it is `taken/<number>.json`, with its run
folder or the reason why it could not be started. One process at a time starts runs, a page or `--queue`: it
holds the lock of the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from trainer.config.load import dump_config, load_config_text
from trainer.config.schema import RunConfig
from trainer.launcher import preflight, torchrun
from trainer.run import process
from trainer.run.events import ENDS, EventReader, State, last_state
from trainer.run.folder import RunDir, is_run
from trainer.system import files
from trainer.system.errors import InputError

FORMAT = 1
"""Version of the files of a queue."""
POLL_S = 1.0
AfterFailure = Literal["go on", "pause"]
_Versions = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class Entry:
    """A run in the queue.

    Attributes:
        number: Its place in the queue.
        name: `name` of its config.
        config: The whole config as YAML.
        gpus: nvidia-smi's indices of the GPUs it may use; empty for all.
        run: Name of its run folder, once it was started.
        error: Why it could not be started.
        queued_at: Unix seconds.
        taken_at: Unix seconds of its start; 0 while it waits.
    """

    number: int
    name: str
    config: str
    gpus: tuple[int, ...] = ()
    run: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]*)?$")] = ""
    error: str = ""
    queued_at: float = 0.0
    taken_at: float = 0.0


_ENTRY = TypeAdapter(Entry)


@dataclass(frozen=True)
class Settings:
    """Settings of the queue.

    Attributes:
        after_failure: Whether the queue goes on or pauses when a run fails.
        is_paused: Whether no runs are started now.
        noted: Number of the latest failed entry that `after_failure` was applied to.
    """

    after_failure: AfterFailure = "go on"
    is_paused: bool = False
    noted: int = 0


_SETTINGS = TypeAdapter(Settings)


class Queue:
    """The queue of a folder of runs. When a method returns, its change is on disk.

    A damaged file affects only its own entry: `problems` names it, and everything else works.

    Args:
        runs: Folder of the runs.
        module: Python module that torchrun executes.
    """

    def __init__(self, runs: Path, module: str = "trainer") -> None:
        self.runs = runs.absolute()
        self._module = module
        self._folder = self.runs / "queue"
        self._waiting, self._taken = self._folder / "waiting", self._folder / "taken"
        self._settings = self._folder / "settings.json"
        self._ends: dict[str, tuple[_Versions, State]] = {}  # {run: (its files when they were read, how it ended)}

    def add(self, config: RunConfig, gpus: Sequence[int] = ()) -> Entry:
        """Append a run, with a copy of its config. Raises InputError if the queue cannot be written."""
        with self._changing():
            numbers = [*_files(self._waiting), *_files(self._taken)]
            number = max(numbers, default=0) + 1
            entry = Entry(number, config.name, dump_config(config), tuple(gpus), queued_at=time.time())
            self._write(self._waiting, entry)
        return entry

    def waiting(self) -> list[Entry]:
        """The waiting runs, in the order in which they will be started."""
        return _read_all(self._waiting)[0]

    def taken(self) -> list[Entry]:
        """The runs that were taken from the queue, oldest first."""
        return _read_all(self._taken)[0]

    def problems(self) -> list[str]:
        """One sentence for each damaged file of the queue."""
        damaged = (_read_all(self._waiting)[1] | _read_all(self._taken)[1]).values()
        return [problem for problem in (self._read_settings()[1], *damaged) if problem]

    def running(self) -> list[Entry]:
        """The taken runs that are running. A run folder that cannot be read counts as not running."""
        return [entry for entry in self.taken() if entry.run and self._is_alive(entry)]

    def _is_alive(self, entry: Entry) -> bool:
        run = self.run_of(entry)
        try:
            with run.boundary():
                return process.alive(run)
        except (InputError, OSError):  # `state_of` and `has_failed` report it
            return False

    def run_of(self, entry: Entry) -> RunDir:
        """Return the run of a taken entry. Nothing may be written to it before its `guard`."""
        return RunDir(self.runs / entry.run)

    def remove(self, number: int) -> None:
        """Remove a waiting run. Does nothing if it was taken in the meantime."""
        with self._changing():
            _file(self._waiting, number).unlink(missing_ok=True)

    def move(self, number: int, places: int) -> None:
        """Move a waiting run by `places` toward the end, or toward the front if negative."""
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
        """The current settings. If their file is damaged, the queue is paused until they are changed."""
        return self._read_settings()[0]

    def change(self, settings: Settings) -> None:
        """Save other settings. A damaged settings file is put aside."""
        with self._changing():
            if self._read_settings()[1]:
                files.put_aside(self._settings)
            _replace(self._settings, asdict(settings))

    def require_settings(self) -> None:
        """Raise InputError if the settings file is damaged."""
        if problem := self._read_settings()[1]:
            raise InputError(problem)

    def _read_settings(self) -> tuple[Settings, str]:
        """Return the settings, and the problem with their file (empty if it is fine)."""
        try:
            remedy = "remove it, or change a setting in the page"
            return files.read_json(self._settings, _SETTINGS, remedy, reads=FORMAT), ""
        except FileNotFoundError:
            return Settings(), ""
        except (InputError, OSError) as error:
            return Settings(is_paused=True), _explained(error)

    @contextlib.contextmanager
    def starting(self) -> Iterator[bool]:
        """Yield whether this process may start runs. If so, no other process may while the block runs."""
        self._make_folders()
        lock = files.opened_to_append(self._folder / "starter.lock")
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
            yield False
        finally:
            os.close(lock)

    def start_next(self) -> list[Entry]:
        """Start every waiting run whose GPUs are free, in order. A run that must wait holds up all runs behind it.

        Call it inside `starting`.

        Returns:
            The runs that were taken, including those that could not be started.
        """
        taken = self._put_damaged_aside()
        self._put_back_interrupted()
        # The process that made the run folders of these was killed before it started them.
        for entry in self.taken():
            if self._is_interrupted(entry) and not self.settings.is_paused and not self.blockers(entry):
                self._start(entry)
        self._note_failures()
        while (waiting := self.waiting()) and not self.settings.is_paused and not self.blockers(waiting[0]):
            taken.append(self._take(waiting[0]))
            self._note_failures()
        return taken

    def blockers(self, entry: Entry) -> list[Entry]:
        """Return the running runs that use a GPU of this one. A run without a list of GPUs uses all.

        A run of the folder that something else started counts as well: a page, a notebook or a command.
        """
        queued = {other.run for other in self.taken()}
        beside = [
            Entry(0, folder.name, "", run=folder.name)
            for folder in (self.runs.iterdir() if self.runs.is_dir() else ())
            if folder.name not in queued and is_run(folder) and self._takes_gpus(RunDir(folder))
        ]
        return [
            other for other in self.running() if not entry.gpus or not other.gpus or set(other.gpus) & set(entry.gpus)
        ] + beside

    def _takes_gpus(self, run: RunDir) -> bool:
        """Whether a run is running on this machine: one of another machine uses no GPU of it, nor does a rehearsal."""
        if run.is_rehearsal:
            return False
        try:
            with run.boundary():
                launch = process.Launch.read(run)
                return (launch is None or launch.is_on_this_machine) and process.alive(run)
        except (InputError, OSError):
            return False

    def _take(self, entry: Entry) -> Entry:
        entry = replace(entry, taken_at=time.time())
        with self._changing():
            self._write(self._taken, entry)
            _file(self._waiting, entry.number).unlink()
        path = self._folder / "config.yaml"  # does not exist: errors show the name of the entry instead
        try:
            run = preflight.new_run(load_config_text(entry.config, (), path), self.runs, gpus=entry.gpus)
        except (InputError, OSError) as error:
            entry = replace(entry, error=str(error).replace(f"{path}:", f"{entry.name}:"))
            self._write(self._taken, entry)
            return entry
        return self._start(replace(entry, run=run.path.name))

    def _start(self, entry: Entry) -> Entry:
        """Start a taken entry in its run folder, which is noted first: a page killed meanwhile never makes a second."""
        self._write(self._taken, entry)
        run = self.run_of(entry)
        try:
            torchrun.start(run.config(), run, self._module, entry.gpus)
        except (InputError, OSError) as error:
            entry = replace(entry, run="", error=str(error))
            self._write(self._taken, entry)
        return entry

    def _put_damaged_aside(self) -> list[Entry]:
        """Move damaged waiting entries out of the way. Returns them as entries that could not be started."""
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
        """Put back taken entries that have no run folder: the process that took them was killed before it made one."""
        with self._changing():
            for entry in self.taken():
                if not entry.run and not entry.error:
                    self._write(self._waiting, entry)
                    _file(self._taken, entry.number).unlink()

    def _is_interrupted(self, entry: Entry) -> bool:
        return bool(entry.run) and not entry.error and self._was_never_started(self.run_of(entry))

    def _was_never_started(self, run: RunDir) -> bool:
        """Whether a run has no process. One that runs and has no record yet gets it."""
        if run.launch_file.exists() or not is_run(run.path):
            return False
        try:
            with run.boundary():
                state = last_state(EventReader(run.events_file).read())
                return state not in ENDS and not process.adopt(run) and state in ("created", "starting")
        except (InputError, OSError):  # `state_of` reports it
            return False

    def _note_failures(self) -> None:
        """Pause the queue after each new failure, if `after_failure` says so."""
        settings, problem = self._read_settings()
        if problem:  # `noted` is unknown
            return
        new = [entry for entry in self.taken() if entry.number > settings.noted and not self._is_interrupted(entry)]
        failed = [entry.number for entry in new if self.has_failed(entry)]
        if failed:
            is_paused = settings.is_paused or settings.after_failure == "pause"
            self.change(replace(settings, is_paused=is_paused, noted=max(failed)))

    def has_failed(self, entry: Entry) -> bool:
        """Whether a taken run could not be started, or failed."""
        if entry.error:
            return True
        run = self.run_of(entry)
        try:
            with run.boundary():
                if self._ended(run) is None:
                    run.guard()
                    process.record_end(run)
        except (InputError, OSError):
            return is_run(run.path)  # a deleted run has not failed
        return self.state_of(entry) == "failed"

    def state_of(self, entry: Entry) -> str:
        """Return the state of a taken run, or why it is unknown."""
        if entry.error or not entry.run:
            return entry.error or "starting"
        run = self.run_of(entry)
        if not is_run(run.path):
            return "deleted"
        try:
            with run.boundary():
                run.guard()
                return self._status(run)
        except (InputError, OSError) as error:
            return f"damaged: {_explained(error)}"

    def _status(self, run: RunDir) -> State:
        """Return the state of a run. One that has ended is read once: its events may be many."""
        if (ended := self._ended(run)) is not None:
            return ended
        files_read = _versions(run)
        state = process.status(run)
        if state in ENDS:
            self._ends[run.path.name] = files_read, state
        return state

    def _ended(self, run: RunDir) -> State | None:
        """Return how a run has ended, as it was read before; None where that is not known, or may have changed."""
        known = self._ends.get(run.path.name)
        return known[1] if known and known[0] == _versions(run) else None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock for changes to the queue."""
        self._make_folders()
        with files.locked(self._folder / "changes.lock"):
            yield

    def _make_folders(self) -> None:
        try:
            for folder in (self._folder, self._waiting, self._taken):
                files.make_private(folder)
        except OSError as error:
            raise InputError(f"{self._folder}: cannot be written ({error.strerror}); choose another --runs") from error

    def _write(self, folder: Path, entry: Entry) -> None:
        _replace(_file(folder, entry.number), asdict(entry))


def run_queue(runs: Path, say: Callable[[str], None], module: str = "trainer") -> int:
    """Start all waiting runs in order, and wait until none is waiting or running.

    Args:
        runs: Folder of the runs.
        say: Prints a line.
        module: Python module that torchrun executes.

    Returns:
        1 if a run failed, else 0.

    Raises:
        InputError: Another process already starts the runs of this queue.
    """
    queue = Queue(runs, module)
    with queue.starting() as may_start:
        if not may_start:
            raise InputError(f"{runs}: a page, notebook or --queue already starts runs from this queue; let it finish")
        queue.require_settings()
        taken: list[Entry] = []
        while not queue.settings.is_paused and (queue.waiting() or queue.running()):
            # Asked again each time: the page may add runs, or reorder and pause them, meanwhile.
            for entry in queue.start_next():
                taken.append(entry)
                say(f"{entry.name}: {entry.error or queue.run_of(entry).path}")
            time.sleep(POLL_S)
        if queue.settings.is_paused:
            say("the queue is paused; resume it in the page, or set is_paused: false in queue/settings.json")
        return int(any(queue.has_failed(entry) for entry in taken))


def _versions(run: RunDir) -> _Versions:
    """(modification time, bytes) of the files that tell the state of a run; None for one that is missing."""
    found = [file.stat() if file.exists() else None for file in (run.events_file, run.launch_file)]
    return tuple((one.st_mtime_ns, one.st_size) if one else None for one in found)


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _files(folder: Path) -> dict[int, Path]:
    """{number: file} of the entries in a folder, in their order."""
    return {int(file.stem): file for file in sorted(folder.glob("*.json")) if file.stem.isdecimal()}


def _read_all(folder: Path) -> tuple[list[Entry], dict[Path, str]]:
    """Return the entries in a folder, and {damaged file: what is wrong with it}."""
    entries, damaged = [], {}
    for number, file in _files(folder).items():
        try:
            entries.append(replace(files.read_json(file, _ENTRY, "remove it", reads=FORMAT), number=number))
        except FileNotFoundError:  # it was taken or removed a moment ago
            continue
        except (InputError, OSError) as error:
            damaged[file] = _explained(error)
    return entries, damaged


def _explained(error: InputError | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: cannot be read ({error.strerror}); remove it"
    return str(error)


def _replace(file: Path, values: Mapping[str, Any]) -> None:
    files.replace(file, json.dumps({"format": FORMAT, **values}, indent=1))
