"""The events of a run, as lines of JSON that the trainer appends and any number of readers follow.

Rank 0 and the launcher write the events below to `events.jsonl`; each rank writes RankLines to `ranks/rank<k>.jsonl`.
Paths in events are relative to the run folder. A number that is not finite is `null` in the file and NaN in Python.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from trainer.run.samples import SampleKind, kind_of
from trainer.system import files
from trainer.system.gpus.load import GpuLoad, Load

State = Literal[
    "created",  # the run folder exists, nothing was started
    "starting",  # torchrun is starting the ranks
    "encoding",  # captions and images go through the encoders; done / total count them
    "loading",  # weights are loaded, adapters created, everything sharded
    "training",
    "sampling",
    "saving",
    "exporting",
    "finished",  # all steps done, export written and verified
    "stopped",  # stopped on request
    "failed",
]
ENDS: frozenset[State] = frozenset({"finished", "stopped", "failed"})

MOST_BYTES = 2**30
"""Most bytes that one `read` takes from a file. A million steps take 0.4 GiB."""
SMOOTHED_STEPS = 1000
"""A value more than this many steps ago has no visible part in a smoothed one: 0.99**1000 is 4e-5."""
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Time = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]
"""Unix seconds that a calendar can show."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events.

    Attributes:
        step: Optimizer steps finished so far, over all stages.
        time: Unix seconds.
    """

    step: Count = 0
    time: Time = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class StatusEvent(Event):
    """The run enters a state, or makes progress in it.

    Attributes:
        state: The state.
        message: A detail, in words.
        done: Items done, in a state that counts them.
        total: Items in total; 0 in a state that does not count.
    """

    state: State
    message: str = ""
    done: Count = 0
    total: Count = 0
    type: Literal["status"] = "status"


@dataclass(frozen=True, kw_only=True)
class StageEvent(Event):
    """A stage of the run begins.

    Attributes:
        name: Name of the stage.
        number: Its number, from 1.
        count: Number of stages.
    """

    name: str
    number: Count
    count: Count
    type: Literal["stage"] = "stage"


@dataclass(frozen=True, kw_only=True)
class LengthEvent(Event):
    """The data were read, and the length of the run, or of its current stage, is known.

    Attributes:
        steps: Optimizer steps of the run, or of the stage.
        epoch_steps: Optimizer steps of one pass over the data from here on; NaN where they are not counted.
        epoch: Passes over the data so far.
    """

    steps: Count
    epoch_steps: Number = math.nan
    epoch: Number = 0.0
    type: Literal["length"] = "length"


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """One optimizer step.

    Attributes:
        loss: Mean loss over the batch.
        lr: Learning rate.
        grad_norm: Global gradient norm before clipping.
        seconds: Duration of the whole step; the next four are parts of it (see `view.steps.step_parts`).
        seconds_communication: Time that the computation waited for other ranks, within these parts.
        images_per_second: Throughput of all ranks together; NaN for a model that is trained on text.
        tokens_per_second: Tokens in the loss per second of all ranks together; NaN for a model trained on images.
        losses: {name: loss} of this step, for a model with several losses.
        metrics: {name: value} of what the objective measures in addition to its loss.
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
    losses: dict[str, Number] = field(default_factory=dict)
    metrics: dict[str, Number] = field(default_factory=dict)
    type: Literal["step"] = "step"

    @property
    def speed(self) -> tuple[float, str]:
        """The throughput and its unit: (per second, "images" or "tokens")."""
        if math.isnan(self.tokens_per_second):
            return self.images_per_second, "images"
        return self.tokens_per_second, "tokens"


@dataclass(frozen=True, kw_only=True)
class SampleEvent(Event):
    """A sample was written.

    Attributes:
        prompt: Its prompt.
        index: Position of the prompt among those that samples were generated from.
        path: The file.
        text: Beginning of a text sample; empty for other kinds.
        references: The copies in the run folder of the reference images that the model was shown.
    """

    prompt: str
    index: Count
    path: str
    text: str = ""
    references: tuple[str, ...] = ()
    type: Literal["sample"] = "sample"

    @property
    def kind(self) -> SampleKind:
        """Its kind, by the file's name: a text can be empty."""
        return kind_of(self.path)

    @property
    def picture(self) -> str:
        """The path of the image that shows it, in the run folder; empty if it has none."""
        return self.kind.picture(self.path)


@dataclass(frozen=True, kw_only=True)
class PromptsEvent(Event):
    """From here on, samples are generated from other prompts, which were requested during the run.

    Attributes:
        prompts: The prompts, as they were requested: with [trigger].
        instead_of: The config's own `sample.prompts`, which they replace. A run that goes on with other prompts in its
            config samples those.
    """

    prompts: tuple[str, ...]
    instead_of: tuple[str, ...] = ()
    type: Literal["prompts"] = "prompts"


@dataclass(frozen=True, kw_only=True)
class ValidationEvent(Event):
    """The loss on the held-out examples.

    Attributes:
        loss: Mean loss.
        perplexity: Perplexity of text; NaN for images and where the loss is not a cross-entropy.
        losses: {name: loss}, for a model with several losses.
        metrics: {name: value} of what the objective measures in addition to its loss.
    """

    loss: Number
    perplexity: Number = math.nan
    losses: dict[str, Number] = field(default_factory=dict)
    metrics: dict[str, Number] = field(default_factory=dict)
    type: Literal["validation"] = "validation"


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """A checkpoint is complete on disk."""

    path: str
    type: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class ExportEvent(Event):
    """An export was written and verified.

    Attributes:
        path: The file or folder.
        what: adapter, merged or full.
        format: `export.format` of the file.
        difference: Norm of the difference between the reloaded and the trained weights, relative to the norm of the
            trained weights; for an adapter, of its update.
        dtype: `export.dtype` of the file.
    """

    path: str
    what: str
    format: str
    difference: Number = math.nan
    dtype: str = ""
    type: Literal["export"] = "export"


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    """Something the user should know although the run goes on."""

    message: str
    type: Literal["warning"] = "warning"


@dataclass(frozen=True, kw_only=True)
class ErrorEvent(Event):
    """Why the run failed.

    Attributes:
        message: What went wrong.
        remedy: What to do about it.
        retry: Changes as `key=value` with which another run may succeed.
        rank: The rank that failed first; None if it was not a rank.
        log: File with the details.
        exit_code: 2 for the user's mistake, 1 for anything else.
    """

    message: str
    remedy: str = ""
    retry: tuple[str, ...] = ()
    rank: Count | None = None
    log: str | None = None
    exit_code: Count = 1
    type: Literal["error"] = "error"


AnyEvent = (
    StatusEvent
    | StageEvent
    | LengthEvent
    | StepEvent
    | SampleEvent
    | PromptsEvent
    | ValidationEvent
    | CheckpointEvent
    | ExportEvent
    | WarningEvent
    | ErrorEvent
)
Emit = Callable[[AnyEvent], None]
"""A function that receives an event: it writes to the run's file, or to a list in a test."""


@dataclass(frozen=True, kw_only=True)
class RankLine:
    """Heartbeat of one rank.

    Attributes:
        rank: The rank.
        step: Optimizer steps finished so far, over all stages.
        phase: State of the run.
        allocated: Bytes of device memory; on a CPU, bytes of the process. The same holds for reserved, peak and limit.
        time: Unix seconds.
    """

    rank: Count
    step: Count
    phase: State
    allocated: Count
    reserved: Count
    peak: Count
    limit: Count
    time: Time = field(default_factory=time.time)


def is_start(event: AnyEvent) -> bool:
    """Return whether the ranks are started here, for the first time or again."""
    return isinstance(event, StatusEvent) and event.state == "starting"


def since_start(events: Sequence[AnyEvent]) -> Sequence[AnyEvent]:
    """Return the events since the latest start; all of them where there was none."""
    starts = [at for at, event in enumerate(events) if is_start(event)]
    return events[starts[-1] :] if starts else events


class EventWriter:
    """Appends events, RankLines or loads of a machine to a file.

    Each line is one write, so that lines of several processes never mix.
    """

    def __init__(self, path: Path) -> None:
        self._file = files.opened_to_append(path)
        size = os.fstat(self._file).st_size
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def write(self, record: AnyEvent | RankLine | Load) -> None:
        """Append one line. Raises OSError if the disk is full; a line torn by that never damages the next one."""
        values = {key: _as_json(value) for key, value in vars(record).items()}
        line = (b"\n" if self._torn else b"") + (json.dumps(values, allow_nan=False).encode() + b"\n")
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


class LossyWriter:
    """Appends to a file as EventWriter does, but on a full disk it loses lines instead of failing the run.

    Before the first line that can be written again, it writes a warning with the number of lost events.
    """

    def __init__(self, path: Path) -> None:
        self._writer = EventWriter(path)
        self._lost = 0

    def write(self, event: AnyEvent) -> None:
        """Append one line, or count it as lost."""
        try:
            if self._lost:
                message = f"{self._lost} events before this one were lost: disk full"
                self._writer.write(WarningEvent(step=event.step, message=message))
                self._lost = 0
            self._writer.write(event)
        except OSError:
            self._lost += 1


def _as_json(value: object) -> object:
    if isinstance(value, dict):
        return {key: _as_json(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [_as_json(vars(part) if isinstance(part, GpuLoad) else part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


T = TypeVar("T")


class LineFollower(Generic[T]):
    """Reads each complete line of a growing file once, continuing where the last `read` ended.

    An incomplete last line is left for a later read. A line that is damaged or of an unknown type is skipped: one bad
    line must not hide the whole run.

    Attributes:
        offset: Number of bytes read so far.
        num_skipped: Number of skipped lines.
    """

    def __init__(self, path: Path, kind: TypeAdapter[T], offset: int, at_most: int = MOST_BYTES) -> None:
        self._path = path
        self._at_most = at_most
        self._kind = kind
        self.offset = offset
        self.num_skipped = 0

    def read(self) -> list[T]:
        """Return the records appended since the last call; none while the file does not exist.

        Raises:
            InputError: The path is not a file, or cannot be read.
        """
        records = []
        for line in self._new_lines():
            try:
                records.append(self._kind.validate_json(line))
            except ValidationError:
                self.num_skipped += bool(line)  # a full disk can leave an empty line, which does not count
        return records

    def _new_lines(self) -> list[bytes]:
        try:
            with files.opened(self._path) as file:
                new = max(0, os.fstat(file.fileno()).st_size - self.offset)
                file.seek(self.offset)
                data = file.read(min(new, self._at_most))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise files.unreadable(self._path, error) from error
        whole = data[: data.rfind(b"\n") + 1]
        if b"\0" in data[len(whole) :]:  # left by a power cut; it will never become a complete line
            whole = data
        self.offset += len(whole)
        return whole.splitlines()


_EVENT: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="type")])
_RANK_LINE = TypeAdapter(RankLine)
_LOAD = TypeAdapter(Load)


class EventReader(LineFollower[AnyEvent]):
    """Follows `events.jsonl`. at_most: bytes that one `read` takes."""

    def __init__(self, path: Path, offset: int = 0, at_most: int = MOST_BYTES) -> None:
        super().__init__(path, _EVENT, offset, at_most)


class RankReader(LineFollower[RankLine]):
    """Follows `ranks/rank<k>.jsonl`."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        super().__init__(path, _RANK_LINE, offset)


class LoadReader(LineFollower[Load]):
    """Follows `ranks/machine<k>.jsonl`."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        super().__init__(path, _LOAD, offset)


def latest_steps(events: Iterable[AnyEvent]) -> list[StepEvent]:
    """Return the steps in order, each once. A resumed run repeats steps; the latest one counts."""
    steps: list[StepEvent] = []
    for event in events:
        if isinstance(event, StepEvent):
            while steps and steps[-1].step >= event.step:
                steps.pop()
            steps.append(event)
    return steps


def by_prompt(samples: Iterable[SampleEvent]) -> dict[tuple[int, str], dict[int, SampleEvent]]:
    """Return {(position of the prompt, prompt): {step: its latest sample}}, in this order.

    All samples of one row start from equal noise. A position has several rows where its prompt was changed.
    """
    rows: dict[tuple[int, str], dict[int, SampleEvent]] = {}
    for sample in samples:
        rows.setdefault((sample.index, sample.prompt), {})[sample.step] = sample
    return dict(sorted(rows.items(), key=lambda row: (row[0][0], min(row[1]))))


def newest_picture(samples: Iterable[SampleEvent]) -> str:
    """Return the path of the newest sample's picture in the run folder, of the first prompt; "" where there is none."""
    pictures = [sample for sample in samples if sample.picture]
    newest = max(pictures, key=lambda sample: (sample.step, -sample.index), default=None)
    return newest.picture if newest else ""


def last_state(events: Iterable[AnyEvent]) -> State:
    """Return the state of the last status event, or `created` if there is none."""
    return next((event.state for event in reversed(list(events)) if isinstance(event, StatusEvent)), "created")
