"""Killed while it steps, saves and exports, a run loses nothing. `make survive` kills it 200 times."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.run.test_events import file_size_limit
from tests.runs import alone, make_pictures, make_run, run_config, train
from tests.survival.chain import Aim, Chain, Kill, Target, make_reference, survival_config
from tests.survival.checks import LOSS
from trainer.data.images.image_source import ImageSource
from trainer.data.mixed.mixed_source import MixedSource
from trainer.data.text.text_source import TextSource
from trainer.run.events import EventReader, LossyWriter, StatusEvent, WarningEvent

KILLS: Sequence[tuple[Aim, Target]] = (("step", "rank"), ("save", "run"), ("export", "torchrun"))


@pytest.fixture
def killed(tmp_path: Path) -> tuple[list[Kill], list[str]]:
    """Three kills and what they broke."""
    cfg = survival_config(make_pictures(tmp_path / "pictures", 6), steps=20)
    reference = make_reference(tmp_path / "reference", cfg)
    outcome = Chain(tmp_path / "chain", cfg, reference, KILLS, random.Random(0)).go()
    return outcome.kills, outcome.problems


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_ends_bit_for_bit_where_it_would_have(
    killed: tuple[list[Kill], list[str]],
) -> None:
    kills, problems = killed
    assert problems == []
    assert sorted(kill.target for kill in kills) == sorted(target for _, target in KILLS)


@pytest.mark.slow
def test_pictures_that_a_kill_cost_are_drawn_when_the_run_goes_on(tmp_path: Path) -> None:
    pictures = make_pictures(tmp_path / "pictures", 4)
    sample = {"every": 2, "prompts": ("a fox",), "size": (64, 64), "steps": 1}
    cfg = run_config(pictures, train__steps=4, checkpoint__every=2, checkpoint__keep=2, sample=sample)
    run = make_run(tmp_path, cfg, "run")
    train(alone(), cfg, run)
    drawn = {picture.name: picture.read_bytes() for picture in run.samples.iterdir()}
    # As if it was killed while it drew: a step is saved before its pictures are drawn.
    shutil.rmtree(run.checkpoints / "step-000004")
    for step in (2, 4):
        (run.samples / f"step-{step:06d}-0.png").unlink()
    train(alone(), cfg, run)
    assert {picture.name: picture.read_bytes() for picture in run.samples.iterdir()} == drawn


def test_the_warnings_of_lost_events_and_changed_data_are_recognized(tmp_path: Path) -> None:
    """The kill test finds a loss by the words of these warnings."""
    assert [kind for kind in (ImageSource, MixedSource, TextSource) if not LOSS.search(kind.changed_message)] == []
    file = tmp_path / "events.jsonl"
    writer = LossyWriter(file)
    with file_size_limit(10):
        writer.write(StatusEvent(state="training"))
    writer.write(StatusEvent(state="training"))
    warning, _ = EventReader(file).read()
    assert isinstance(warning, WarningEvent) and LOSS.search(warning.message)
