"""Progress of a run in a terminal: a line every few seconds, or a live bar."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, Self

from trainer.run.events import (
    SMOOTHED_STEPS,
    AnyEvent,
    CheckpointEvent,
    ErrorEvent,
    ExportEvent,
    LengthEvent,
    PromptsEvent,
    SampleEvent,
    StageEvent,
    State,
    StatusEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
    is_start,
)
from trainer.run.length import RunLength
from trainer.run.pace import Pace
from trainer.system.amounts import memory_size
from trainer.system.terminal import printable, say
from trainer.view.numbers import default_decay, format_losses, format_metrics, format_speed, smoothed
from trainer.view.steps import losses_by_name, metrics_by_name

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 5.0
WIDE, BAR = 110, 20
"""Columns of a terminal from which there is room for a bar, and its own."""
MessageEvent = (
    StatusEvent
    | StageEvent
    | LengthEvent
    | ValidationEvent
    | SampleEvent
    | PromptsEvent
    | CheckpointEvent
    | ExportEvent
    | WarningEvent
    | ErrorEvent
)
"""Every event but StepEvent. Steps are too many to print each."""


class StepSummary:
    """The latest steps in one line: smoothed loss, speed, time left, memory per rank.

    Attributes:
        length: Steps of the whole run, as far as they are known.
        peaks: {rank: peak of its device memory in bytes}.
    """

    def __init__(self, length: RunLength) -> None:
        self.length = length
        self.peaks: dict[int, int] = {}
        self._recent: deque[StepEvent] = deque(maxlen=SMOOTHED_STEPS)
        self._pace = Pace()

    def add(self, event: AnyEvent) -> None:
        """Take the next event of the run; only its length, steps and starts count."""
        self.length.add(event)
        if is_start(event):
            self._pace = Pace()  # the time until the first step is not a pause between steps
        if isinstance(event, StepEvent):
            self._recent.append(event)
            self._pace.add(event)

    @property
    def step(self) -> int:
        return self._recent[-1].step if self._recent else 0

    def __str__(self) -> str:
        return "  ".join(self.parts())

    def parts(self, names_rank: bool = True) -> list[str]:
        """Return the figures in words, the most important one first. names_rank: say which of several has the peak."""
        if not self._recent:
            return []
        decay = default_decay(self.length.typical)
        loss = smoothed((event.loss for event in self._recent), decay)[-1]
        num_left = self.length.num_steps - self.step
        seconds = num_left * self._pace.seconds() if num_left >= 0 else math.nan
        left = str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "unknown"
        means = {name: smoothed(losses, decay)[-1] for name, losses in losses_by_name(self._recent).items()}
        metrics = {name: smoothed(values, decay)[-1] for name, values in metrics_by_name(self._recent).items()}
        epoch = self.length.epoch_in_words(self.step)
        measured = f"loss {loss:.4f}{format_losses(means)}{format_metrics(metrics)}"
        parts = [*([epoch] if epoch else []), measured, format_speed(*self._recent[-1].speed), f"ETA {left}"]
        if self.peaks:
            rank = max(self.peaks, key=self.peaks.__getitem__)
            where = f" on rank {rank}" if names_rank and len(self.peaks) > 1 else ""
            parts.append(f"peak {memory_size(self.peaks[rank])}{where}")
        return parts


class ProgressDisplay(Protocol):
    """Shows the events of a run in a terminal."""

    summary: StepSummary

    def show(self, event: AnyEvent) -> None: ...
    def say(self, text: str) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...


def progress_display(length: RunLength) -> ProgressDisplay:
    """Return a live bar for a terminal, and lines for any other output. length: that of the run until now."""
    return BarDisplay(length) if sys.stdout.isatty() else LineDisplay(length)


class LineDisplay:
    """Prints lines for a log file: every change of state and every result; steps and counts every few seconds."""

    def __init__(self, length: RunLength) -> None:
        self.summary = StepSummary(length)
        self._state: State = "created"
        self._next_line = 0.0
        self._has_unshown_step = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def say(self, text: str) -> None:
        say(text)

    def show(self, event: AnyEvent) -> None:
        self.summary.add(event)
        if isinstance(event, StepEvent):
            self._has_unshown_step = True
            if self._is_line_due():
                self._say_step()
            return
        if isinstance(event, StatusEvent) and not self._is_worth_a_line(event):
            return
        if isinstance(event, LengthEvent) and not self.summary.length.epochs:
            return
        if self._has_unshown_step:
            self._say_step()
        self.say(sentence(event))

    def _is_worth_a_line(self, event: StatusEvent) -> bool:
        is_new_state = event.state != self._state
        self._state = event.state
        if is_new_state or event.done < event.total:
            return is_new_state or self._is_line_due()
        return bool(event.message or event.total)

    def _say_step(self) -> None:
        self._has_unshown_step = False
        total = self.summary.length.num_steps or self.summary.length
        self.say(f"step {self.summary.step}/{total}  {self.summary}")

    def _is_line_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_line:
            return False
        self._next_line = now + LINE_EVERY_S
        return True


class BarDisplay:
    """Draws a bar that stays at the bottom of the terminal; results scroll above it."""

    def __init__(self, length: RunLength) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        self.summary = StepSummary(length)
        self._has_bar = shutil.get_terminal_size().columns >= WIDE  # numbers first
        self._bar: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            *([BarColumn(bar_width=BAR)] if self._has_bar else []),
            MofNCompleteColumn(),
            TextColumn("{task.fields[details]}", markup=False, table_column=Column(no_wrap=False)),
        )
        self._task: TaskID = self._bar.add_task("starting", total=self._total, details="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self._bar.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def show(self, event: AnyEvent) -> None:
        self.summary.add(event)
        if isinstance(event, StepEvent):
            self._show_steps("training")
            return
        if isinstance(event, StatusEvent) and event.total:
            self._bar.update(
                self._task,
                description=event.state,
                completed=event.done,
                total=event.total,
                details=printable(event.message),
            )
            return
        if isinstance(event, StatusEvent):
            self._show_steps(event.state)
        if isinstance(event, LengthEvent) and not self.summary.length.epochs:
            return
        if not isinstance(event, StatusEvent) or event.message:
            self.say(sentence(event))

    @property
    def _total(self) -> int | None:
        return self.summary.length.num_steps or None

    def _show_steps(self, state: State) -> None:
        self._bar.update(
            self._task,
            description=state,
            completed=self.summary.step,
            total=self._total,
            details=self._fitting(f"{state} {self._total}/{self._total} "),
        )

    def _fitting(self, before: str) -> str:
        """The figures that fit into the line behind what stands before them: a line that wraps is hard to read."""
        room = shutil.get_terminal_size().columns - len(before) - (BAR + 1 if self._has_bar else 0)
        whole, parts = str(self.summary), self.summary.parts(names_rank=False)
        if len(whole) <= room:
            return whole
        while parts and len("  ".join(parts)) > room:
            parts.pop()
        return "  ".join(parts)


def sentence(event: MessageEvent) -> str:
    """Return an event as a line of text."""
    match event:
        case StatusEvent():
            progress = f"{event.done}/{event.total}" if event.total else ""
            return "  ".join(part for part in (event.state, progress, event.message) if part)
        case StageEvent():
            return f"stage {event.number} of {event.count}: {event.name}"
        case LengthEvent():
            per_epoch = f"{event.epoch_steps:,.1f}".removesuffix(".0")
            counted = f", {per_epoch} per epoch" if math.isfinite(event.epoch_steps) else ""
            return f"length: {event.steps:,} steps{counted}"
        case ValidationEvent():
            perplexity = f", perplexity {event.perplexity:.3f}" if math.isfinite(event.perplexity) else ""
            measured = f"{perplexity}{format_losses(event.losses)}{format_metrics(event.metrics)}"
            return f"step {event.step}: validation loss {event.loss:.4f}{measured}"
        case SampleEvent():
            text = f": {' '.join(event.text.split())}" if event.kind.is_text else ""
            shown = f", of {' and '.join(event.references)}" if event.references else ""
            return f"step {event.step}: sample {event.path}{shown}{text}"
        case PromptsEvent():
            prompts = "; ".join(" ".join(prompt.split()) for prompt in event.prompts)
            return f"step {event.step}: samples from other prompts: {prompts}"
        case CheckpointEvent():
            return f"step {event.step}: checkpoint {event.path}"
        case ExportEvent():
            is_verified = math.isfinite(event.difference)
            checked = f"; verified: reloaded, relative difference {event.difference:.1e}" if is_verified else ""
            return f"exported {event.what} ({event.format}): {event.path}{checked}"
        case WarningEvent() | ErrorEvent():
            return f"{event.type}: {event.message}"
