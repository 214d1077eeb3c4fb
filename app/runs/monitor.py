"""The state of a run, read from its folder: step, losses, curves, memory per rank, samples, logs.

A Follower reads only what was appended since its last read, so that a run of any length is cheap to watch. The page and
the notebook display what is read here. See DECISIONS 136.
"""

from __future__ import annotations

import errno
import math
import os
import re
import secrets
import statistics
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from trainer.run import process
from trainer.run.events import (
    ENDS,
    SMOOTHED_STEPS,
    AnyEvent,
    ErrorEvent,
    EventReader,
    ExportEvent,
    LoadReader,
    RankLine,
    RankReader,
    SampleEvent,
    StageEvent,
    State,
    StatusEvent,
    StepEvent,
    ValidationEvent,
)
from trainer.run.folder import RunDir, is_run
from trainer.run.length import RunLength
from trainer.run.pace import AVERAGED_STEPS, Clock, Pace
from trainer.run.prompts import prompts_in_force
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.gpus import load
from trainer.system.gpus.load import Load
from trainer.view.chart import Line, Look
from trainer.view.lines import loss_lines, metric_lines, seconds_lines
from trainer.view.numbers import default_decay, format_duration, format_speed, smoothed
from trainer.view.steps import seconds_waited, step_parts

NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Errors of a write: the disk is full, or closed. The system names no file where an open one is written."""
SILENT_S = 180.0
"""A running rank or run that writes nothing for this long is shown as stuck."""
DRAWN_STEPS = 1000
"""A running run with more steps has its curves redrawn every `steps // DRAWN_STEPS` steps: one step is not visible."""
LAST_LOADS = 12
"""Loads of a machine, a minute at first, by which a GPU is called slow."""
LOG_BYTES = 64 * 1024
Level = Literal["all", "warnings", "errors"]
LEVELS: Mapping[Level, re.Pattern[str]] = {
    "all": re.compile(""),
    "warnings": re.compile(r"(?i)warn|error|exception|traceback|fail|killed"),
    "errors": re.compile(r"(?i)error|exception|traceback|fail|killed"),
}


@dataclass(frozen=True, kw_only=True)
class RankState(RankLine):
    """The last line that one rank wrote, and its age in seconds."""

    age_s: float


@dataclass(frozen=True)
class _Derived:
    """Figures of a view that depend on all steps and events, computed when there are new ones."""

    num_read: tuple[int, int]
    loss: float | None
    speed: tuple[float, str]
    seconds: Mapping[str, float]
    waited_s: float
    diverged_at: int | None
    samples: tuple[SampleEvent, ...]
    prompts: tuple[str, ...]
    exports: tuple[ExportEvent, ...]
    main_export: ExportEvent | None


@dataclass(frozen=True)
class RunView:
    """A run at one moment.

    Attributes:
        stage: The current stage, where the config has stages.
        num_steps: Steps of the whole run; 0 while they are not known (`trainer.run.length`).
        stage_steps: Those of each stage, 0 where they are not known.
        length: Steps of the whole run in words: "1,200", or "3 epochs" while they are not known.
        epoch: Where the run is in its epochs: "epoch 1.1 of 4"; empty where that is not known.
        speed: Images or tokens trained per second, and which of the two.
        seconds: Mean seconds of the parts of the last steps, which add up to the whole step (`events.step_parts`).
        waited_s: Mean seconds within these parts in which the computation waited for other ranks; NaN: not measured.
        eta_s: Seconds until the last step, with the pauses between steps for samples, validation and checkpoints; None
            before the first step and after the end.
        diverged_at: The first of the last steps, all of which have a loss that is not finite; None if there are none.
        duration_s: Seconds that the run has been running, without the pauses before it was resumed.
        last_event_s: Unix seconds of the last event that it wrote while it was running; 0 without one.
        prompts: The prompts of the next samples, as they were configured or requested: with [trigger].
        main_export: The export with which the run ended, whatever was exported after it; the newest where it had none.
        imbalance: Largest peak memory of a rank, relative to the mean of all ranks.
        silent_s: Seconds since the run last wrote anything.
        is_alive: Whether processes of the run exist, which may hold for a moment after its end.
        curves: Changes when the lines of the charts change.
        slow: A sentence for each GPU that is slowed down by heat, hardware or its power limit.
        problems: A sentence for each file, or part of one, that cannot be read and is left out.
    """

    path: Path
    state: State
    message: str
    done: int
    total: int
    stage: StageEvent | None
    step: int
    num_steps: int
    stage_steps: tuple[int, ...]
    length: str
    epoch: str
    loss: float | None
    speed: tuple[float, str]
    seconds: Mapping[str, float]
    waited_s: float
    eta_s: float | None
    diverged_at: int | None
    duration_s: float
    last_event_s: float
    ranks: tuple[RankState, ...]
    imbalance: float
    samples: tuple[SampleEvent, ...]
    prompts: tuple[str, ...]
    exports: tuple[ExportEvent, ...]
    main_export: ExportEvent | None
    error: ErrorEvent | None
    silent_s: float
    is_alive: bool
    curves: tuple[int, ...]
    slow: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Mean seconds of the last steps."""
        return sum(self.seconds.values())

    @property
    def is_running(self) -> bool:
        return self.state not in (*ENDS, "created")

    @property
    def is_stuck(self) -> bool:
        """Whether a running trainer has written nothing for SILENT_S."""
        return self.is_running and self.silent_s > SILENT_S

    @property
    def sentence(self) -> str:
        """The state as one sentence."""
        if self.error is not None and self.state == "failed":
            where = "" if self.error.rank is None else f" on rank {self.error.rank}"
            return f"Failed{where} at step {self.error.step}: {self.error.message}"
        if self.is_stuck:
            silent = [str(rank.rank) for rank in self.ranks if rank.age_s > SILENT_S]
            who = f"; silent: rank {', '.join(silent)}" if silent else ""
            return f"No step for {self.silent_s:.0f} s in state {self.state}{who}"
        match self.state:
            case "created":
                return "Not started yet"
            case "training":
                return self._training
            case "finished":
                exported = f"; exported {self.main_export.path}" if self.main_export else ""
                return f"Finished after {self.step:,} steps{exported}"
            case "stopped":
                return f"Stopped at step {self.step:,} of {self.length}; resume continues it"
            case "failed":
                return f"Failed at step {self.step}"
        counted = f" {self.done} of {self.total}" if self.total else ""
        message = f": {self.message}" if self.message else ""
        return f"{self.state.capitalize()}{counted}{message}"

    @property
    def _training(self) -> str:
        left = "" if self.eta_s is None else f", about {format_duration(self.eta_s)} left"
        stage = f"stage {self.stage.number} of {self.stage.count}, {self.stage.name}, " if self.stage else ""
        epoch = f"{self.epoch}, " if self.epoch else ""
        return f"Training: {stage}step {self.step:,} of {self.length}, {epoch}{format_speed(*self.speed)}{left}"


class Follower:
    """Follows one run. Thread-safe.

    Attributes:
        run: The run.
        config: The config that it was last started with.
        token: Differs between any two followers, so that what was read by one is not mixed with what another reads.

    Raises:
        InputError, OSError: By every method, when the run's config, launch record or events cannot be read.
    """

    def __init__(self, run: RunDir) -> None:
        run.guard()
        self.run = run
        self.config = run.config()
        self.token = secrets.token_hex(4)
        self._folder = run.path.stat().st_ino
        self._lock = threading.Lock()
        self._event_reader = EventReader(run.events_file)
        self._rank_readers: dict[int, RankReader] = {}
        self._lines: dict[int, RankLine] = {}
        self._load_readers: dict[int, LoadReader] = {}
        self._loads: dict[int, list[Load]] = {}
        self._load_charts: set[str] = set()
        self._unread: dict[Path, str] = {}
        self._steps: list[StepEvent] = []
        self._num_read = 0
        self._validations: dict[int, ValidationEvent] = {}
        self._metrics: dict[str, None] = {}
        self._stage: StageEvent | None = None
        self._samples: dict[tuple[int, int, str], SampleEvent] = {}  # a resumed run samples some files again
        self._events: list[AnyEvent] = []
        self._status = StatusEvent(state="created", time=0.0)
        self._error: ErrorEvent | None = None
        self._last_event = 0.0
        self._clock = Clock()
        self._own_exports: tuple[ExportEvent, ...] = ()
        self._pace = Pace()
        self._length = RunLength(self.config)
        self._derived: _Derived | None = None

    def view(self) -> RunView:
        """Read what is new and return the run's state. A process that died silently is first recorded as failed."""
        with self._lock, self.run.boundary():
            self._read()
            is_alive = process.alive(self.run)
            if not is_alive and self._status.state not in (*ENDS, "created"):
                process.record_end(self.run)
                self._read()
            return self._view(process.derive_state(is_alive, self._status.state), is_alive)

    def is_outdated(self) -> bool:
        """Whether the run folder was deleted and made again since, with another run of the same name."""
        try:
            size = self.run.events_file.stat().st_size
        except FileNotFoundError:
            size = 0
        return size < self._event_reader.offset or self.run.path.stat().st_ino != self._folder

    def charts(self) -> Mapping[str, Callable[[Follower], list[Line]]]:
        """Return the charts of this run: CHARTS, and one of each metric of its objective that was read so far."""
        metrics = list(self._metrics)[:MOST_METRICS]
        named = {name.capitalize(): partial(_metric, name) for name in metrics}
        machines = {name: partial(_load_lines, name) for name in LOAD_CHARTS if name in self._load_charts}
        return {**named, **CHARTS, **machines}

    def lines(self, chart: str) -> list[Line]:
        """Return the lines of one of `charts`, with every step as it was measured and its minutes."""
        with self._lock:
            self._read()
            found = [line for line in self.charts()[chart](self) if line.points]
            return [line if line.minutes else replace(line, minutes=self._minutes(line)) for line in found]

    def _minutes(self, line: Line) -> list[float]:
        events: Iterable[StepEvent | ValidationEvent] = self.validations if line.look == "dots" else self._steps
        began = (self._steps or self.validations)[0].time
        return [(event.time - began) / 60 for event in events]

    def events(self) -> list[AnyEvent]:
        """Return all events except steps, oldest first."""
        with self._lock:
            self._read()
            return list(self._events)

    def _read(self) -> None:
        for event in self._event_reader.read():
            self._take(event)
        for file in self.run.ranks.glob("rank*.jsonl"):
            if (number := file.stem.removeprefix("rank")).isdecimal():
                self._read_rank(int(number), file)
        for file in self.run.ranks.glob("machine*.jsonl"):
            if (number := file.stem.removeprefix("machine")).isdecimal():
                self._read_load(int(number), file)

    def _read_rank(self, rank: int, file: Path) -> None:
        reader = self._rank_readers.setdefault(rank, RankReader(file))
        self._unread.pop(file, None)
        try:
            for line in reader.read():
                self._lines[rank] = line
        except (InputError, OSError) as error:
            self._unread[file] = explained(error)

    def _read_load(self, node: int, file: Path) -> None:
        self._unread.pop(file, None)
        try:
            for one in self._load_readers.setdefault(node, LoadReader(file)).read():
                self._loads.setdefault(node, []).append(one)
                self._load_charts.update(name for name in LOAD_CHARTS if any(_values(name, one)))
        except (InputError, OSError) as error:
            self._unread[file] = explained(error)

    def _num_loads(self) -> tuple[int, ...]:
        """Lines of all machines; nothing without any."""
        count = sum(map(len, self._loads.values()))
        return (count,) if count else ()

    def _slow(self) -> Iterator[str]:
        for node, loads in sorted(self._loads.items()):
            where = f"node {node}: " if len(self._loads) > 1 else ""
            yield from (f"{where}{sentence}" for sentence in load.slow(loads[-LAST_LOADS:]))

    @property
    def loads(self) -> Mapping[int, Sequence[Load]]:
        """{node: what its machine did}, oldest first."""
        return self._loads

    def _problems(self) -> tuple[str, ...]:
        readers = {self.run.events_file: self._event_reader.num_skipped}
        readers |= {self.run.rank_file(rank): reader.num_skipped for rank, reader in self._rank_readers.items()}
        readers |= {self.run.machine_file(node): reader.num_skipped for node, reader in self._load_readers.items()}
        passed = (
            f"{file}: {count} lines are damaged or of a later version, and are left out; remove them"
            for file, count in readers.items()
            if count
        )
        return (*self._unread.values(), *passed)

    def _take(self, event: AnyEvent) -> None:
        self._clock.add(event)
        self._last_event = event.time
        if isinstance(event, StepEvent | ValidationEvent) and len(self._metrics) < MOST_METRICS:
            self._metrics.update(dict.fromkeys(event.metrics))
        match event:
            case StepEvent():
                while self._steps and self._steps[-1].step >= event.step:  # a resumed run repeats steps
                    self._steps.pop()
                self._steps.append(event)
                self._pace.add(event)
                self._num_read += 1
                return
            case StatusEvent():
                if event.state == "starting":
                    self.config, self._error = self.run.config(), None
                    self._lines.clear()
                    self._pace = Pace()
                if event.state == "finished":
                    self._own_exports = self._exports()
                self._status = event
            case StageEvent():
                self._stage = event
            case SampleEvent():
                self._samples[event.index, event.step, event.path] = event
            case ValidationEvent():
                self._validations[event.step] = event
            case ErrorEvent():
                self._error = event
        self._length.cfg = self.config
        self._length.add(event)
        self._events.append(event)

    def _view(self, state: State, is_alive: bool) -> RunView:
        found = self._derive()
        now = time.time()
        ranks = tuple(RankState(**vars(line), age_s=now - line.time) for _, line in sorted(self._lines.items()))
        step = self._steps[-1].step if self._steps else 0
        num_steps = self._length.num_steps
        last_written = max([self._last_event, *(line.time for line in self._lines.values())])
        peaks = [rank.peak for rank in ranks]
        stride = 1 if state in ENDS else max(1, len(self._steps) // DRAWN_STEPS)
        return RunView(
            path=self.run.path,
            state=state,
            message=self._status.message,
            done=self._status.done,
            total=self._status.total,
            stage=self._stage,
            step=step,
            num_steps=num_steps,
            stage_steps=self._length.stages,
            length=str(self._length),
            epoch=self._length.epoch_in_words(step),
            loss=found.loss,
            speed=found.speed,
            seconds=found.seconds,
            waited_s=found.waited_s,
            eta_s=None if state in ENDS else self._eta_s(num_steps - step),
            diverged_at=found.diverged_at,
            duration_s=self._clock.seconds,
            last_event_s=self._clock.last,
            ranks=ranks,
            imbalance=max(peaks) / statistics.fmean(peaks) if any(peaks) else 1.0,
            samples=found.samples,
            prompts=found.prompts,
            exports=found.exports,
            main_export=found.main_export,
            error=self._error,
            silent_s=max(0.0, now - last_written) if last_written else 0.0,
            is_alive=is_alive,
            curves=(self._num_read // stride * stride, len(self._validations), *self._num_loads()),
            slow=tuple(self._slow()) if state not in ENDS else (),
            problems=self._problems(),
        )

    def _eta_s(self, num_left: int) -> float | None:
        if num_left <= 0:
            return None
        seconds = num_left * self._pace.seconds()
        return seconds if math.isfinite(seconds) else None

    def _derive(self) -> _Derived:
        num_read = (self._num_read, len(self._events))
        if self._derived is None or self._derived.num_read != num_read:
            recent = self._steps[-AVERAGED_STEPS:]
            losses = (event.loss for event in self._steps[-SMOOTHED_STEPS:])
            self._derived = _Derived(
                num_read=num_read,
                loss=smoothed(losses, self.decay)[-1] if recent else None,
                speed=_speed_of(recent),
                seconds=step_parts(recent),
                waited_s=seconds_waited(recent),
                diverged_at=self._diverged_at(),
                samples=tuple(sample for _, sample in sorted(self._samples.items())),
                prompts=prompts_in_force(self._events, self.config),
                exports=self._exports(),
                main_export=next(reversed(self._own_exports or self._exports()), None),
            )
        return self._derived

    def _exports(self) -> tuple[ExportEvent, ...]:
        return tuple(event for event in self._events if isinstance(event, ExportEvent))

    def _diverged_at(self) -> int | None:
        found = None
        for event in reversed(self._steps):
            if math.isfinite(event.loss):
                break
            found = event.step
        return found

    @property
    def decay(self) -> float:
        """The decay of the smoothed curves of this run."""
        return default_decay(self._length.typical)

    @property
    def num_events(self) -> int:
        """Number of events that were read so far, without steps."""
        return len(self._events)

    @property
    def steps(self) -> Sequence[StepEvent]:
        return self._steps

    @property
    def validations(self) -> list[ValidationEvent]:
        return [event for _, event in sorted(self._validations.items())]


def _speed_of(steps: Sequence[StepEvent]) -> tuple[float, str]:
    """Return what the steps trained on, per second of their whole time, and its unit.

    The mean of the speeds would be too high: one slow step takes the time of many.
    """
    if not steps:
        return 0.0, "images"
    timed = [(event.speed[0], event.seconds) for event in steps]
    known = [(rate, seconds) for rate, seconds in timed if math.isfinite(rate * seconds) and seconds > 0]
    whole = math.fsum(seconds for _, seconds in known)
    speed = math.fsum(rate * seconds for rate, seconds in known) / whole if whole else math.nan
    return speed, steps[-1].speed[1]


def _line(follower: Follower, label: str, value: Callable[[StepEvent], float], look: Look = "line") -> Line:
    return Line(label, [(step.step, value(step)) for step in follower.steps], look, follower.decay)


def _loss(follower: Follower) -> list[Line]:
    validations = [(event.step, event.loss) for event in follower.validations]
    return [*loss_lines(follower.steps, follower.decay), Line("validation", validations, "dots")]


def _learning_rate(follower: Follower) -> list[Line]:
    return [_line(follower, "learning rate", lambda step: step.lr)]


def _grad_norm(follower: Follower) -> list[Line]:
    return [_line(follower, "before clipping", lambda step: step.grad_norm, "noisy")]


def _speed(follower: Follower) -> list[Line]:
    if not follower.steps:
        return []
    unit = follower.steps[-1].speed[1]
    return [_line(follower, f"{unit} per second", lambda step: step.speed[0], "noisy")]


def _seconds(follower: Follower) -> list[Line]:
    return seconds_lines(follower.steps, follower.decay)


def _metric(name: str, follower: Follower) -> list[Line]:
    return metric_lines(name, follower.steps, follower.validations, follower.decay)


LOAD_CHARTS: Mapping[str, str] = {
    "GPU load": "busy",
    "GPU temperature": "celsius",
    "GPU power": "watts",
    "GPU clock": "mhz",
    "Host memory": "host",
}
"""{chart: attribute of a GPU's load}; of the machine itself, its memory."""


def _load_lines(chart: str, follower: Follower) -> list[Line]:
    """Return a line of each GPU, or machine, over the steps that were trained at that time."""
    times = [step.time for step in follower.steps]
    values: dict[str, dict[int, tuple[float, float]]] = {}  # {label: {step: (value, time)}}
    for node, loads in sorted(follower.loads.items()):
        where = f"node {node}" if len(follower.loads) > 1 else ""
        for one in loads:
            at = bisect_right(times, one.time) - 1
            if at < 0:  # before the first step
                continue
            for name, value in _values(chart, one):
                label = " ".join(filter(None, [where, name])) or "in use"
                values.setdefault(label, {})[follower.steps[at].step] = (value, one.time)
    return [
        Line(
            label,
            [(step, value) for step, (value, _) in points.items()],
            minutes=[(time - times[0]) / 60 for _, time in points.values()],
        )
        for label, points in values.items()
    ]


def _values(chart: str, one: Load) -> Iterator[tuple[str, float]]:
    """What a chart shows of a load: (GPU, value) as far as the driver reports it; of the machine, ("", value)."""
    if chart == "Host memory":
        yield "", one.host_used / 2**30
        return
    found = ((f"GPU {gpu.index}", getattr(gpu, LOAD_CHARTS[chart])) for gpu in one.gpus)
    yield from ((name, value) for name, value in found if value >= 0)


MOST_METRICS = 12
"""Metrics that have a chart, at most."""
CHARTS: Mapping[str, Callable[[Follower], list[Line]]] = {
    "Loss": _loss,
    "Learning rate": _learning_rate,
    "Gradient norm": _grad_norm,
    "Speed": _speed,
    "Seconds per step": _seconds,
}


def explained(error: InputError | OSError) -> str:
    """Return the message for a file that cannot be read, or not be written because the disk is full or closed."""
    if isinstance(error, OSError):
        if error.errno in NOT_WRITTEN:
            return f"{error.filename or 'a file'}: cannot be written ({error.strerror}); free some space"
        error = files.unreadable(error.filename, error)
    return str(error)


def find_runs(root: Path) -> list[RunDir]:
    """Return the runs below a folder, newest start first. Some may be damaged."""
    folders = filter(is_run, root.iterdir()) if root.is_dir() else ()
    return [RunDir(path) for path in sorted(folders, key=last_start, reverse=True)]


def last_start(run: Path) -> float:
    """Return when a run was last started or made, from its folder of logs: unix seconds, 0 where there is none."""
    try:
        return files.written(os.stat(f"{run}/logs"))
    except OSError:
        return 0.0


def log_files(run: RunDir) -> dict[str, Path]:
    """Return {source: file} of the latest start: torchrun, and the errors and the output of each rank."""
    launches = {int(number): file for file in run.logs.glob("launch-*.log") if (number := file.stem[7:]).isdecimal()}
    found = {"torchrun": launches[max(launches)]} if launches else {}
    attempts = sorted(run.logs.glob("*/attempt_*"), key=lambda folder: folder.lstat().st_mtime)
    ranks = [folder for folder in (attempts[-1].glob("*") if attempts else ()) if folder.name.isdecimal()]
    for rank in sorted(ranks, key=lambda folder: int(folder.name)):
        found |= {f"rank {rank.name}": rank / "stderr.log", f"rank {rank.name}, output": rank / "stdout.log"}
    return found


@dataclass(frozen=True)
class LogPart:
    """The lines appended to a log.

    Attributes:
        text: Its complete lines at the wanted level, each with its line feed.
        rest: The last line, as far as it is written.
        offset: Bytes of complete lines read so far. The next call continues there.
        is_fresh: Whether it does not continue what was read before: it is the first part, the file was replaced, or
            more than LOG_BYTES were appended.
    """

    text: str = ""
    rest: str = ""
    offset: int = 0
    is_fresh: bool = True


def read_log(file: Path, level: Level, offset: int = 0) -> LogPart:
    """Read what was appended to a log, but at most its last LOG_BYTES. A file that does not exist yet is empty.

    Raises:
        InputError: It is not a file, or cannot be read.
    """
    try:
        with files.opened(file) as log:
            size = os.fstat(log.fileno()).st_size
            start = offset if 0 <= size - offset <= LOG_BYTES else max(0, size - LOG_BYTES)
            log.seek(start)
            data = log.read(size - start)
    except FileNotFoundError:
        return LogPart()
    except OSError as error:
        raise files.unreadable(file, error) from error
    *lines, rest = map(_as_shown, data.split(b"\n"))
    if start not in (0, offset):
        del lines[:1]  # its beginning was not read
    wanted = LEVELS[level].search
    return LogPart(
        text="".join(f"{line}\n" for line in lines if wanted(line)),
        rest=rest if wanted(rest) else "",
        offset=start + data.rfind(b"\n") + 1,
        is_fresh=offset == 0 or start != offset,
    )


def _as_shown(line: bytes) -> str:
    """Return a line as a terminal shows it: progress bars write over their line after a carriage return."""
    return line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
