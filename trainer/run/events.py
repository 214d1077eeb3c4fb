"""What happens in a run, as lines of JSON that are appended by the trainer and followed by any number of readers.

`events.jsonl` holds the events below, written by rank 0 and by the launcher; `ranks/rank<k>.jsonl` holds RankLines.
Paths in events are relative to the run folder. A number that is not finite is `null` in the file and NaN in Python.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from trainer.config import files

State = Literal[
    "created",  # the folder exists, nothing was started
    "starting",  # torchrun is on its way
    "encoding",  # captions and images go through the encoders; done / total count them
    "loading",  # weights are read, adapters made, everything sharded
    "training",
    "sampling",
    "saving",
    "exporting",
    "finished",  # all steps done, export written and read back
    "stopped",  # asked to stop
    "failed",
]
ENDS: frozenset[State] = frozenset({"finished", "stopped", "failed"})

MOST_BYTES = 2**30
"""That are read of a file at once. A million steps take 0.4 GiB."""
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True, kw_only=True)
class Event:
    """step: optimizer steps finished so far.  time: unix seconds."""

    step: int = 0
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class StatusEvent(Event):
    """The run enters a state, or moves on in it. done, total: progress of a state that can count."""

    state: State
    message: str = ""
    done: int = 0
    total: int = 0
    type: Literal["status"] = "status"


@dataclass(frozen=True, kw_only=True)
class StageEvent(Event):
    """A stage of the run begins. step: of all stages before it, as the steps of all events are.  number: from 1."""

    name: str
    number: int
    count: int
    type: Literal["stage"] = "stage"


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """One optimizer step. grad_norm: global norm before clipping.  seconds: whole step, then its split.

    seconds_communication: time the compute waited for other ranks.  images_per_second, tokens_per_second: of all
    ranks together, the one that the model is trained on; tokens that are learned.  losses: of a model that is trained
    with several, those that the step had, by name.
    """

    loss: Number
    lr: Number
    grad_norm: Number
    seconds: Number
    seconds_data: Number
    seconds_forward: Number
    seconds_backward: Number
    seconds_optimizer: Number
    seconds_communication: Number
    images_per_second: Number = math.nan
    tokens_per_second: Number = math.nan
    losses: dict[str, float] = field(default_factory=dict)
    type: Literal["step"] = "step"

    @property
    def speed(self) -> tuple[float, str]:
        """How much is trained per second, and what: images or tokens."""
        if math.isnan(self.tokens_per_second):
            return self.images_per_second, "images"
        return self.tokens_per_second, "tokens"


@dataclass(frozen=True, kw_only=True)
class SampleEvent(Event):
    """A sample was written. index: position of the prompt in `sample.prompts`.

    text: what the file begins with, where it is text; empty for an image.
    """

    prompt: str
    index: int
    path: str
    text: str = ""
    type: Literal["sample"] = "sample"

    @property
    def is_text(self) -> bool:
        """Whether it was written and not drawn. A model may have written nothing."""
        return self.path.endswith(".txt")


@dataclass(frozen=True, kw_only=True)
class ValidationEvent(Event):
    """Loss on the held-out examples. perplexity: of text.  losses: as of a step."""

    loss: Number
    perplexity: Number = math.nan
    losses: dict[str, float] = field(default_factory=dict)
    type: Literal["validation"] = "validation"


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """A checkpoint is complete on disk."""

    path: str
    type: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class ExportEvent(Event):
    """An export was written and read back. what: adapter, merged or full.

    difference: of what was read from what was trained, relative to its norm; of an adapter, to that of its update.
    """

    path: str
    what: str
    format: str
    difference: Number = math.nan
    type: Literal["export"] = "export"


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    """Something the user should know although the run goes on."""

    message: str
    type: Literal["warning"] = "warning"


@dataclass(frozen=True, kw_only=True)
class ErrorEvent(Event):
    """Why the run ended. rank: the first that failed, None when it was none of them.

    log: file with the details.  exit_code: 2 for the user's mistake, 1 for anything else.  retry: fields as
    `key=value` with which another run may do better.
    """

    message: str
    remedy: str = ""
    retry: tuple[str, ...] = ()
    rank: int | None = None
    log: str | None = None
    exit_code: int = 1
    type: Literal["error"] = "error"


AnyEvent = (
    StatusEvent
    | StageEvent
    | StepEvent
    | SampleEvent
    | ValidationEvent
    | CheckpointEvent
    | ExportEvent
    | WarningEvent
    | ErrorEvent
)
Emit = Callable[[AnyEvent], None]
"""Who takes an event: a run's file, or a list in a test."""


@dataclass(frozen=True, kw_only=True)
class RankLine:
    """Heartbeat of one rank. phase: what the run does.

    allocated, reserved, peak, limit: bytes of device memory (of the process on a CPU).
    """

    rank: int
    step: int
    phase: State
    allocated: int
    reserved: int
    peak: int
    limit: int
    time: float = field(default_factory=time.time)


class EventWriter:
    """Appends events or RankLines to a file, each by one write, so that lines of several processes never mix."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._torn = self._ends_inside_a_line()

    def write(self, record: AnyEvent | RankLine) -> None:
        """Append one line. Raises OSError when the disk is full; what was torn by that never spoils the next line."""
        line = (b"\n" if self._torn else b"") + _encode(record)
        self._torn = True
        if os.write(self._file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ends_inside_a_line(self) -> bool:
        size = os.fstat(self._file).st_size
        return size > 0 and os.pread(self._file, 1, size - 1) != b"\n"


class LossyWriter:
    """Appends to a file as EventWriter does, but a full disk costs lines and not the run that writes them.

    Before the first line that finds room again stands a warning with the number of those that found none.
    """

    def __init__(self, path: Path) -> None:
        self._writer = EventWriter(path)
        self._lost = 0

    def write(self, event: AnyEvent) -> None:
        """Append one line, or count it as lost."""
        try:
            if self._lost:
                message = f"{self._lost} events before this found no room on the disk"
                self._writer.write(WarningEvent(step=event.step, message=message))
                self._lost = 0
            self._writer.write(event)
        except OSError:
            self._lost += 1


def _encode(record: AnyEvent | RankLine) -> bytes:
    values = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in vars(record).items()
    }
    return json.dumps(values, allow_nan=False).encode() + b"\n"


T = TypeVar("T")


class _Follower(Generic[T]):
    """Yields each whole line of a growing file once, from where the last `read` ended.

    A half-written last line waits for its end. A line that is damaged, or of a type this version does not know, is
    passed over: one bad line must not take the view of the whole run away. offset: the byte up to which it has read.
    passed_over: the number of such lines.
    """

    def __init__(self, path: Path, kind: TypeAdapter[T], offset: int) -> None:
        self._path = path
        self._kind = kind
        self.offset = offset
        self.passed_over = 0

    def read(self) -> list[T]:
        """What was appended since the last call; nothing while the file does not exist.

        Raises InputError for what is not a file, or cannot be read.
        """
        records = []
        for line in self._new_lines():
            try:
                records.append(self._kind.validate_json(line))
            except ValidationError:
                self.passed_over += bool(line)  # an empty one is what a full disk left of one
        return records

    def _new_lines(self) -> list[bytes]:
        try:
            with files.opened(self._path) as file:
                new = max(0, os.fstat(file.fileno()).st_size - self.offset)
                file.seek(self.offset)
                data = file.read(min(new, MOST_BYTES))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise files.unreadable(self._path, error) from error
        whole = data[: data.rfind(b"\n") + 1]
        if b"\0" in data[len(whole) :]:  # what a power cut leaves, which becomes no line
            whole = data
        self.offset += len(whole)
        return whole.splitlines()


_EVENT: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="type")])
_RANK_LINE = TypeAdapter(RankLine)


class EventReader(_Follower[AnyEvent]):
    """Follows `events.jsonl`."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        super().__init__(path, _EVENT, offset)


class RankReader(_Follower[RankLine]):
    """Follows `ranks/rank<k>.jsonl`."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        super().__init__(path, _RANK_LINE, offset)


def format_speed(rate: float, unit: str) -> str:
    """A speed in words. rate, unit: as `StepEvent.speed` has them."""
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.2f} {unit}/s"


def latest_steps(events: Iterable[AnyEvent]) -> list[StepEvent]:
    """The steps in order, each once: a resumed run repeats steps, and what it did last is what counts."""
    steps: list[StepEvent] = []
    for event in events:
        if isinstance(event, StepEvent):
            while steps and steps[-1].step >= event.step:
                steps.pop()
            steps.append(event)
    return steps


def losses_by_name(steps: Iterable[StepEvent]) -> dict[str, list[float]]:
    """{name: of each step, NaN where it had none} of a model that is trained with several losses; else nothing."""
    steps = list(steps)
    names = dict.fromkeys(name for step in steps for name in step.losses)
    return {name: [step.losses.get(name, math.nan) for step in steps] for name in names}


def format_losses(losses: Mapping[str, float]) -> str:
    """` (images 0.5000, text 1.2000)`, and nothing where there is only one loss."""
    return f" ({', '.join(f'{name} {loss:.4f}' for name, loss in losses.items())})" if losses else ""


def last_state(events: Iterable[AnyEvent]) -> State:
    """State of the last status event, `created` without one."""
    return next((event.state for event in reversed(list(events)) if isinstance(event, StatusEvent)), "created")


def smoothed(values: Iterable[float], decay: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start (as in Adam, arXiv 1412.6980); NaN is left out of it."""
    mean = weight = 0.0
    means = []
    for value in values:
        if math.isfinite(value):
            mean = decay * mean + (1 - decay) * value
            weight = decay * weight + (1 - decay)
        means.append(mean / weight if weight else math.nan)
    return means
