"""Another run that goes on from a checkpoint of a run. The run it comes from stays as it is."""

from __future__ import annotations

import shutil

from trainer.run import manifest
from trainer.run.events import (
    AnyEvent,
    CheckpointEvent,
    ErrorEvent,
    EventReader,
    EventWriter,
    ExportEvent,
    SampleEvent,
    StatusEvent,
)
from trainer.run.folder import INITIAL_ADAPTER, RunDir
from trainer.system import files
from trainer.system.errors import InputError


def branch(run: RunDir, wanted: manifest.Wanted) -> RunDir:
    """Make a run folder next to a run's: its config, a copy of a checkpoint, its events and samples until then.

    The events are written last: a copy that was interrupted has none, and may be deleted or started.

    Raises:
        InputError: The checkpoint is missing, damaged or being removed, or the run has stages.
        OSError: The disk is full.
    """
    cfg = run.config()
    if cfg.stages:
        raise InputError(
            f"{run.path.name}: has stages, and goes on from its newest checkpoint only; resume it without a step"
        )
    checkpoint = manifest.to_export(run, wanted)
    events = _until(EventReader(run.events_file).read(), manifest.step_of(checkpoint))
    new = RunDir.create(run.path.parent, cfg)
    try:
        for sample in (event for event in events if isinstance(event, SampleEvent)):
            for path in {sample.path, sample.picture, *sample.references} - {""}:
                if run.own_file(path).is_relative_to(run.samples.resolve()):  # an event of a stranger names any file
                    _copy(run, path, new)
        _copy(run, INITIAL_ADAPTER, new)
        copy = new.checkpoints / f".{checkpoint.name}.copy"
        shutil.copytree(checkpoint, copy, symlinks=True)
        if found := manifest.wrong_sum(copy):
            raise manifest.damaged(checkpoint, found)
        files.rename(copy, new.checkpoints / checkpoint.name)
        with EventWriter(new.events_file) as writer:
            for event in events:
                writer.write(event)
            step = events[-1].step if events else manifest.step_of(checkpoint)
            message = f"goes on from step {step:,} of {run.path.name}"
            writer.write(StatusEvent(state="stopped", step=step, message=message))
    except FileNotFoundError as error:  # a running run removes older checkpoints
        shutil.rmtree(new.path)
        raise InputError(f"{checkpoint}: was removed meanwhile; choose another checkpoint") from error
    except BaseException:
        shutil.rmtree(new.path)
        raise
    return new


def _until(events: list[AnyEvent], step: int) -> list[AnyEvent]:
    """Return the events until a checkpoint was saved, for the last time, without errors and exports.

    It is written while training goes on, so steps after it may come before its event.
    """
    saved = [at for at, event in enumerate(events) if isinstance(event, CheckpointEvent) and event.step == step]
    until = events[: saved[-1] + 1] if saved else events
    return [event for event in until if event.step <= step and not isinstance(event, ErrorEvent | ExportEvent)]


def _copy(run: RunDir, path: str, new: RunDir) -> None:
    """Copy a file of a run to the same place of another one; none where it is gone."""
    source, target = run.own_file(path), new.own_file(path)
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
