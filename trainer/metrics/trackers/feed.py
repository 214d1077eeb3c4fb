"""The items that trackers get, read from the run folder: each exactly once, also across resumed runs."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, Protocol

from PIL import Image

from trainer.run.events import (
    ENDS,
    AnyEvent,
    ErrorEvent,
    EventReader,
    RankReader,
    SampleEvent,
    State,
    StatusEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
)
from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.errors import InputError

NOT_FIGURES = ("step", "time", "type", "losses", "metrics")
FIGURES = tuple(each.name for each in fields(StepEvent) if each.name not in NOT_FIGURES)
PICTURES = ("PNG",)
"""The format of the pictures of samples. A run folder from elsewhere may hold anything under their names."""
_OTHER_UNIT = {"images": ("tokens_per_second",), "tokens": ("images_per_second",)}


@dataclass(frozen=True)
class Figures:
    """Numbers of one step, by name."""

    step: int
    time: float
    values: dict[str, float]


@dataclass(frozen=True)
class SampleImage:
    """The picture of a sample. index: number of its prompt."""

    step: int
    time: float
    index: int
    prompt: str
    path: Path

    def image(self) -> Image.Image:
        """Read the image. Raises OSError for a file that is not of the format of samples."""
        with Image.open(self.path, formats=PICTURES) as image:
            image.load()
            return image


@dataclass(frozen=True)
class Note:
    """A text: a new state of the run, a warning, an error, or a sample of a language model."""

    step: int
    time: float
    kind: Literal["state", "warning", "error", "sample"]
    text: str


Item = Figures | SampleImage | Note


class Tracker(Protocol):
    """A tracker that shows the run. Whatever a method raises ends the tracker, not the run."""

    def figures(self, item: Figures) -> None:
        """Show numbers."""

    def image(self, item: SampleImage) -> None:
        """Show a sample image."""

    def note(self, item: Note) -> None:
        """Show a text."""

    def flush(self) -> None:
        """Send what is buffered: nothing more comes for a moment."""

    def finish(self, failed: bool) -> None:
        """Send everything and end: nothing more comes. failed: whether the run failed."""


@dataclass
class Position:
    """How far a tracker has read the run folder. Kept in a file, from which a resumed run continues.

    Attributes:
        run: Id or name that the tracker's program gave the run; "" before the first time.
        command: Sends what the tracker's program was given and has kept; "" where it keeps nothing.
        given: Number of items sent so far.
        offset: Bytes of `events.jsonl` that are done.
        skip: Events after `offset` that are done.
        ranks: Bytes done of each rank's file.
        sent: The latest step of each kind of item.
        state: State of the run that was sent last.
    """

    file: Path
    run: str = ""
    command: str = ""
    given: int = 0
    offset: int = 0
    skip: int = 0
    ranks: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    state: State = "created"

    @classmethod
    def read(cls, file: Path) -> Position:
        """Read the position as last saved; without a file it is the beginning."""
        return cls(file, **json.loads(file.read_text(encoding="utf-8"))) if file.exists() else cls(file)

    def save(self) -> None:
        values = asdict(self)
        del values["file"]
        files.replace(self.file, json.dumps(values))

    def is_new(self, kind: str, step: int) -> bool:
        """Whether this step of this kind is sent for the first time, and note it; a resumed run repeats steps."""
        if step <= self.sent.get(kind, -1):
            return False
        self.sent[kind] = step
        return True


class Feed:
    """The run folder as a stream of items, from `position` on.

    Attributes:
        state: State of the run, as last read.
        step: The highest step that was read.
    """

    def __init__(self, run: RunDir, position: Position) -> None:
        self._run = run
        self._position = position
        self._events = EventReader(run.events_file, position.offset)
        self._ranks: dict[str, RankReader] = {}
        self.state: State = position.state
        self.step = 0

    @property
    def ended(self) -> bool:
        """Whether the last state that was read is an end."""
        return self.state in ENDS

    def items(self) -> Iterator[Item]:
        """Yield what is new since the last call.

        The position is saved before an item is yielded: one that is interrupted then is lost rather than sent twice.
        """
        yield from self._from_events()
        yield from self._memory()

    def _from_events(self) -> Iterator[Item]:
        position = self._position
        events = self._events.read()
        for event in events[position.skip :]:
            position.skip += 1
            self.step = max(self.step, event.step)
            item = self._item(event)
            if item:
                self._count_item()
                yield item
        if events:
            position.offset, position.skip = self._events.offset, 0
            position.save()

    def _item(self, event: AnyEvent) -> Item | None:
        position, step, when = self._position, event.step, event.time
        if isinstance(event, StepEvent) and position.is_new("step", step):
            names = (name for name in FIGURES if name not in _OTHER_UNIT[event.speed[1]])
            values = {name: vars(event)[name] for name in names} | _named("loss", event.losses) | event.metrics
            return Figures(step, when, values)
        if isinstance(event, ValidationEvent) and position.is_new("validation", step):
            perplexity = {} if math.isnan(event.perplexity) else {"validation_perplexity": event.perplexity}
            others = _named("validation_loss", event.losses) | _named("validation", event.metrics)
            return Figures(step, when, {"validation_loss": event.loss, **perplexity, **others})
        if isinstance(event, SampleEvent) and position.is_new(f"sample {event.index}", step):
            if event.kind.is_text:
                return Note(step, when, "sample", event.text)
            if not event.picture:
                return Note(step, when, "sample", event.path)
            try:
                return SampleImage(step, when, event.index, event.prompt, self._run.own_file(event.picture))
            except (InputError, OSError, ValueError):  # a run folder from elsewhere
                return Note(step, when, "sample", f"{event.path}: no image")
        if isinstance(event, StatusEvent):
            self.state = event.state
            return self._new_state(event)
        if isinstance(event, WarningEvent):
            return Note(step, when, "warning", event.message)
        if isinstance(event, ErrorEvent):
            self.state = "failed"  # the status follows when all ranks have ended
            return Note(step, when, "error", f"{event.message}. {event.remedy}" if event.remedy else event.message)
        return None

    def _new_state(self, event: StatusEvent) -> Note | None:
        """A note for a new state; one that only counts its progress is sent once."""
        if event.state == self._position.state:
            return None
        self._position.state = event.state
        return Note(
            event.step, event.time, "state", f"{event.state}: {event.message}" if event.message else event.state
        )

    def _memory(self) -> Iterator[Figures]:
        """`memory/rank<k>`: the peak memory of each rank since its start, in bytes, once per step."""
        position = self._position
        by_step: dict[int, dict[str, float]] = defaultdict(dict)
        for file in sorted(self._run.ranks.glob("rank*.jsonl")):
            reader = self._ranks.setdefault(file.name, RankReader(file, position.ranks.get(file.name, 0)))
            for line in reader.read():
                by_step[line.step][f"memory/rank{line.rank}"] = line.peak
            position.ranks[file.name] = reader.offset
        for step, values in sorted(by_step.items()):
            new = {name: value for name, value in values.items() if position.is_new(name, step)}
            if new:
                self._count_item()
                yield Figures(step, time.time(), new)

    def _count_item(self) -> None:
        self._position.given += 1
        self._position.save()


def _named(what: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{what}_{name}": value for name, value in values.items()}
