"""The length of a run, before and after its data were read."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.schema import RunConfig
from trainer.run.events import AnyEvent, LengthEvent, StageEvent, StatusEvent
from trainer.run.length import RunLength

START = StatusEvent(state="starting")


def config(train: dict[str, Any], *stages: dict[str, Any]) -> RunConfig:
    named = [{"name": f"s{number}", "set": values} for number, values in enumerate(stages)]
    model, data = {"family": "causal_lm"}, {"path": "/text"}
    return RunConfig.model_validate({"model": model, "data": data, "train": train, "stages": named})


def stage(number: int, before: int) -> StageEvent:
    return StageEvent(name=f"s{number}", number=number, count=3, step=before)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"steps": 1200}, "1,200"),
        ({"epochs": 3}, "3 epochs"),
        ({"epochs": 1}, "1 epoch"),
        ({"epochs": 0.5}, "0.5 epochs"),
    ],
)
def test_until_the_data_are_read_epochs_are_the_length(train: dict[str, Any], words: str) -> None:
    length = RunLength(config(train))
    assert str(length) == words
    assert length.num_steps == train.get("steps", 0)
    assert (length.epoch(5), length.epoch_in_words(5)) == (None, "")


def test_the_event_gives_steps_and_the_epoch_of_each_step() -> None:
    length = RunLength.of(
        config({"epochs": 4}), [START, LengthEvent(step=100, steps=1200, epoch=0.25, epoch_steps=300)]
    )
    assert (str(length), length.num_steps, length.stages) == ("1,200", 1200, (1200,))
    assert [length.epoch(step) for step in (100, 340, 1225)] == pytest.approx([0.25, 1.05, 4.0])
    assert length.epoch_in_words(340) == "epoch 1.1 of 4"


def test_a_run_in_steps_has_an_epoch_but_no_number_of_them() -> None:
    length = RunLength.of(config({"steps": 50}), [LengthEvent(steps=50, epoch_steps=20)])
    assert (str(length), length.epoch_in_words(30)) == ("50", "epoch 1.5")
    uncounted = RunLength.of(config({"steps": 50}), [LengthEvent(steps=50)])
    assert uncounted.epoch_in_words(30) == ""


def test_stages_become_known_one_after_the_other_and_stay_known_when_a_run_goes_on() -> None:
    cfg = config({"epochs": 2}, {}, {"train.steps": 40}, {"train.epochs": 1})
    assert (cfg.stage_steps, cfg.stage_epochs) == ((None, 40, None), (2, None, 1))
    story: list[AnyEvent] = [stage(1, 0), START]
    assert str(RunLength.of(cfg, story)) == "40 + 2 epochs + 1 epoch"
    story.append(LengthEvent(steps=100, epoch_steps=50))
    first = RunLength.of(cfg, story)
    assert (str(first), first.num_steps, first.stages) == ("140 + 1 epoch", 0, (100, 40, 0))
    story += [stage(2, 100), START, LengthEvent(step=100, steps=40)]
    story += [stage(3, 140), START, LengthEvent(step=140, steps=30, epoch_steps=30)]
    last = RunLength.of(cfg, story)
    assert (str(last), last.stages, last.epoch_in_words(155)) == ("170", (100, 40, 30), "epoch 0.5 of 1")
    again = RunLength.of(cfg, [*story, stage(3, 140), START])
    assert (str(again), again.stages) == ("140 + 1 epoch", (100, 40, 0))


def test_a_run_that_goes_on_with_another_length_has_that_one() -> None:
    length = RunLength.of(config({"epochs": 2}), [START, LengthEvent(steps=100, epoch_steps=50)])
    length.cfg = config({"epochs": 2, "steps": 70}).model_copy(update={"train": config({"steps": 70}).train})
    length.add(START)
    assert (str(length), length.num_steps) == ("70", 70)
