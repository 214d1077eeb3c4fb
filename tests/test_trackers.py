"""TensorBoard's view of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.runs import run_config
from trainer.config import TrackersConfig
from trainer.events import AnyEvent, EventWriter, SampleEvent, StepEvent, ValidationEvent, WarningEvent
from trainer.rundir import RunDir
from trainer.trackers import following


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, run_config(tmp_path))


def step(number: int, loss: float) -> StepEvent:
    return StepEvent(
        step=number, loss=loss, lr=1e-4, grad_norm=0.5, seconds=0.1, seconds_data=0.01, seconds_forward=0.02,
        seconds_backward=0.03, seconds_optimizer=0.04, seconds_communication=float("nan"), images_per_second=40.0,
    )  # fmt: skip


def follow(run: RunDir, *events: AnyEvent) -> list[AnyEvent]:
    """Write events while the trackers follow; returns what they say."""
    said: list[AnyEvent] = []
    with following(TrackersConfig(tensorboard=True), run, said.append), EventWriter(run.events_file) as writer:
        for event in events:
            writer.write(event)
    return said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_every_figure_the_validation_loss_and_the_samples(run: RunDir) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Image.new("RGB", (4, 4), (255, 0, 0)).save(run.samples / "a.png")
    sample = SampleEvent(step=2, prompt="a fox", index=0, path="samples/a.png")
    assert follow(run, step(1, 3.0), step(2, 2.5), ValidationEvent(step=2, loss=2.75), sample) == []
    shown = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == [(1, 3.0), (2, 2.5)]
    assert [(event.step, event.value) for event in shown.Scalars("validation_loss")] == [(2, 2.75)]
    assert {"lr", "grad_norm", "seconds_forward", "images_per_second"} <= set(shown.Tags()["scalars"])
    assert shown.Tags()["images"] == ["0 a fox"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tracker_that_fails_is_a_warning(run: RunDir) -> None:
    (said,) = follow(run, SampleEvent(step=1, prompt="a fox", index=0, path="samples/missing.png"))
    assert isinstance(said, WarningEvent)
    assert said.message.startswith("trackers.tensorboard stopped: FileNotFoundError: ")


def test_without_trackers_nothing_is_followed(run: RunDir) -> None:
    with following(TrackersConfig(), run, lambda event: None):
        pass
    assert not (run.path / "tensorboard").exists()
