"""What trackers are given, read from the run folder: everything once, also over resumed runs."""

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

from trainer.config import files
from trainer.config.errors import InputError
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

FIGURES = tuple(each.name for each in fields(StepEvent) if each.name not in ("step", "time", "type", "losses"))
SAMPLES = ("PNG",)
"""What samples are stored as. A foreign run folder may hold anything under their names."""
_UNTOLD = {"images": ("tokens_per_second",), "tokens": ("images_per_second",)}


@dataclass(frozen=True)
class Figures:
    """Numbers of one step, by name."""

    step: int
    time: float
    values: dict[str, float]


@dataclass(frozen=True)
class Picture:
    """A sample image. index: position of its prompt."""

    step: int
    time: float
    index: int
    prompt: str
    path: Path

    def image(self) -> Image.Image:
        """The picture. Raises OSError for a file of any other kind than samples are."""
        with Image.open(self.path, formats=SAMPLES) as image:
            image.load()
            return image


@dataclass(frozen=True)
class Note:
    """Something in words: a new state of the run, a warning, an error, or a sample of a language model."""

    step: int
    time: float
    kind: Literal["state", "warning", "error", "sample"]
    text: str


Item = Figures | Picture | Note


class Tracker(Protocol):
    """Another program's view of the run. Whatever a method raises ends the tracker, not the run."""

    def figures(self, item: Figures) -> None:
        """Show numbers."""

    def picture(self, item: Picture) -> None:
        """Show a sample image."""

    def note(self, item: Note) -> None:
        """Show a sentence."""

    def flush(self) -> None:
        """Nothing more comes for a moment."""

    def finish(self, failed: bool) -> None:
        """Nothing more comes; return when everything is where it belongs."""


@dataclass
class Place:
    """How far a tracker came. Kept in a file, so that a resumed run goes on in the same place.

    run: id or name its program gave the run, "" before the first time.  given: how many things were.  offset: bytes of
    `events.jsonl` done with, and skip: events done with behind them.  ranks: bytes of each rank's file.  sent: the
    latest step of each kind of thing.  state: of the run, as last told.
    """

    file: Path
    run: str = ""
    given: int = 0
    offset: int = 0
    skip: int = 0
    ranks: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    state: State = "created"

    @classmethod
    def read(cls, file: Path) -> Place:
        """The place as last saved, the beginning without a file."""
        return cls(file, **json.loads(file.read_text(encoding="utf-8"))) if file.exists() else cls(file)

    def save(self) -> None:
        values = asdict(self)
        del values["file"]
        files.replace(self.file, json.dumps(values))

    def is_new(self, kind: str, step: int) -> bool:
        """Whether this step of this kind comes for the first time; a resumed run repeats steps."""
        if step <= self.sent.get(kind, -1):
            return False
        self.sent[kind] = step
        return True


class Feed:
    """The run folder as a stream of things to show, from where `place` is."""

    def __init__(self, run: RunDir, place: Place) -> None:
        self._run = run
        self._place = place
        self._events = EventReader(run.events_file, place.offset)
        self._ranks: dict[str, RankReader] = {}
        self.state: State = place.state
        self.step = 0

    @property
    def ended(self) -> bool:
        """Whether the last that was read of the run's state is an end."""
        return self.state in ENDS

    def items(self) -> Iterator[Item]:
        """What is new since the last call.

        The place is saved before a thing is given out: what is interrupted then is lost rather than shown twice.
        """
        yield from self._from_events()
        yield from self._memory()

    def _from_events(self) -> Iterator[Item]:
        place = self._place
        events = self._events.read()
        for event in events[place.skip :]:
            place.skip += 1
            self.step = max(self.step, event.step)
            item = self._item(event)
            if item:
                self._will_give()
                yield item
        if events:
            place.offset, place.skip = self._events.offset, 0
            place.save()

    def _item(self, event: AnyEvent) -> Item | None:
        place, step, when = self._place, event.step, event.time
        if isinstance(event, StepEvent) and place.is_new("step", step):
            names = (name for name in FIGURES if name not in _UNTOLD[event.speed[1]])
            return Figures(step, when, {name: vars(event)[name] for name in names} | _named("loss", event.losses))
        if isinstance(event, ValidationEvent) and place.is_new("validation", step):
            perplexity = {} if math.isnan(event.perplexity) else {"validation_perplexity": event.perplexity}
            losses = _named("validation_loss", event.losses)
            return Figures(step, when, {"validation_loss": event.loss, **perplexity, **losses})
        if isinstance(event, SampleEvent) and place.is_new(f"sample {event.index}", step):
            if event.is_text:
                return Note(step, when, "sample", event.text)
            try:
                return Picture(step, when, event.index, event.prompt, self._run.own_file(event.path))
            except (InputError, OSError, ValueError):  # a stranger's run folder
                return Note(step, when, "sample", f"{event.path}: no picture")
        if isinstance(event, StatusEvent):
            self.state = event.state
            return self._new_state(event)
        if isinstance(event, WarningEvent):
            return Note(step, when, "warning", event.message)
        if isinstance(event, ErrorEvent):
            return Note(step, when, "error", f"{event.message}. {event.remedy}" if event.remedy else event.message)
        return None

    def _new_state(self, event: StatusEvent) -> Note | None:
        """A state that counts its progress is told once."""
        if event.state == self._place.state:
            return None
        self._place.state = event.state
        return Note(
            event.step, event.time, "state", f"{event.state}: {event.message}" if event.message else event.state
        )

    def _memory(self) -> Iterator[Figures]:
        """`memory/rank<k>`: the most memory of each rank since its start, in bytes, once per step."""
        place = self._place
        by_step: dict[int, dict[str, float]] = defaultdict(dict)
        for file in sorted(self._run.ranks.glob("rank*.jsonl")):
            reader = self._ranks.setdefault(file.name, RankReader(file, place.ranks.get(file.name, 0)))
            for line in reader.read():
                by_step[line.step][f"memory/rank{line.rank}"] = line.peak
            place.ranks[file.name] = reader.offset
        for step, values in sorted(by_step.items()):
            new = {name: value for name, value in values.items() if place.is_new(name, step)}
            if new:
                self._will_give()
                yield Figures(step, time.time(), new)

    def _will_give(self) -> None:
        self._place.given += 1
        self._place.save()


def _named(what: str, losses: Mapping[str, float]) -> dict[str, float]:
    return {f"{what}_{name}": loss for name, loss in losses.items()}
