"""Other programs' views of a run, fed from the run folder: training neither waits for them nor fails with them."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
from PIL import Image

from trainer.config import InputError, TrackersConfig
from trainer.events import AnyEvent, EventReader, SampleEvent, StepEvent, ValidationEvent, WarningEvent
from trainer.rundir import RunDir

FOLLOW_SECONDS = 1.0
FIGURES = tuple(field.name for field in fields(StepEvent) if field.name not in ("step", "time", "type"))


@contextmanager
def following(cfg: TrackersConfig, run: RunDir, say: Callable[[Any], None]) -> Iterator[None]:
    """Inside, the trackers of the config follow the run's events, on a thread; at the end they have seen all of them.

    A tracker that fails is a WarningEvent. Raises InputError when its package is not installed.
    """
    if not cfg.tensorboard:
        yield
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError("trackers.tensorboard: true needs the package tensorboard; pip install tensorboard")
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(run, ended, say), name="trackers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(run: RunDir, ended: threading.Event, say: Callable[[Any], None]) -> None:
    try:
        _write_tensorboard(run, ended)
    except Exception as error:  # noqa: BLE001 - whatever a tracker does, the run goes on
        say(WarningEvent(message=f"trackers.tensorboard stopped: {type(error).__name__}: {error}"))


def _write_tensorboard(run: RunDir, ended: threading.Event) -> None:
    from torch.utils.tensorboard import SummaryWriter

    reader = EventReader(run.events_file)
    with SummaryWriter(str(run.path / "tensorboard")) as writer:
        last = False
        while not last:
            last = ended.wait(FOLLOW_SECONDS)
            for event in reader.read():
                _add(writer, event, run)


def _add(writer: Any, event: AnyEvent, run: RunDir) -> None:
    if isinstance(event, StepEvent):
        for name in FIGURES:
            writer.add_scalar(name, vars(event)[name], event.step, event.time)
    elif isinstance(event, ValidationEvent):
        writer.add_scalar("validation_loss", event.loss, event.step, event.time)
    elif isinstance(event, SampleEvent):
        with Image.open(run.path / event.path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        writer.add_image(f"{event.index} {event.prompt}", pixels, event.step, event.time, dataformats="HWC")
