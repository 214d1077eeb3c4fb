"""Changes of the config when a run continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runs import run_config
from trainer.checkpoint.config_changes import changes, refused


def config(tmp_path: Path, **other: Any) -> dict[str, Any]:
    return run_config(tmp_path, **other).model_dump(mode="json")


def test_every_changed_field_is_told_with_both_values(tmp_path: Path) -> None:
    before = config(tmp_path, sample__prompts=["a fox"], sample__every=5)
    after = config(tmp_path, optim__lr=2e-4, parallel__devices=4, sample__prompts=["a fox"])
    assert list(map(str, changes(before, after))) == [
        "optim.lr: 0.0001 -> 0.0002",
        "parallel.devices: 1 -> 4",
        "sample.every: 5 -> 0",
    ]
    assert changes(after, after) == []


def test_another_batch_size_is_told_with_what_it_does(tmp_path: Path) -> None:
    (change,) = changes(config(tmp_path), config(tmp_path, train__batch_size=8))
    assert str(change) == (
        "train.batch_size: 4 -> 8 (the data go on at the next sample, and none is skipped or repeated; "
        "optim.lr and train.steps stay as they are)"
    )


def test_a_field_that_an_earlier_version_did_not_have_had_its_default(tmp_path: Path) -> None:
    before = config(tmp_path)
    for section, name in (("checkpoint", "keep_best"), ("adapter", "rank_stabilized"), ("objective", "dpo_beta")):
        del before[section][name]
    assert changes(before, config(tmp_path)) == []
    other = {"adapter__rank_stabilized": True, "objective__dpo_beta": 2000, "checkpoint__keep_best": 2}
    changed = changes(before, config(tmp_path, **other))
    assert list(map(str, changed)) == [
        "adapter.rank_stabilized: False -> True",
        "objective.dpo_beta: nothing -> 2000.0",
        "checkpoint.keep_best: 1 -> 2",
    ]
    assert {problem.field for problem in refused(changed, 10)} == {"adapter.rank_stabilized", "objective.dpo_beta"}


def test_a_config_that_today_is_not_taken_is_compared_as_it_is(tmp_path: Path) -> None:
    before = config(tmp_path)
    before["train"]["gone"] = 1
    assert list(map(str, changes(before, config(tmp_path)))) == ["train.gone: 1 -> nothing"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"adapter__rank": 8}, "adapter.rank"),
        ({"adapter": {"type": "dora", "rank": 4}}, "adapter.type"),
        ({"adapter": {"type": "lora", "rank": 4, "alpha": 8}}, "adapter.alpha"),
        ({"model": {"family": "sd3"}}, "model.family"),
        ({"optim__type": "schedulefree"}, "optim.type"),
        ({"optim__ema": 0.9}, "optim.ema"),
    ],
)
def test_what_a_checkpoint_does_not_go_with_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    problem, *_ = refused(changes(config(tmp_path), config(tmp_path, **change)), 100)
    assert problem.field == field
    assert " in the checkpoint of step 100, not " in problem.message
    assert problem.message.endswith(("start a new run", "to begin from what this one exported"))


@pytest.mark.parametrize(
    "change",
    [
        {"adapter__dropout": 0.1},
        {"model__path": "demo"},
        {"optim__lr": 1e-5},
        {"train__batch_size": 8},
        {"parallel__devices": 2, "parallel__strategy": "full"},
        {"data__caption_dropout": 0.5},
    ],
)
def test_what_a_run_can_go_on_with_is_not(tmp_path: Path, change: dict[str, Any]) -> None:
    changed = changes(config(tmp_path), config(tmp_path, **change))
    assert changed
    assert list(refused(changed, 100)) == []


def test_the_decay_of_an_average_may_change(tmp_path: Path) -> None:
    before, after = (config(tmp_path, optim__ema=decay) for decay in (0.9, 0.99))
    assert list(refused(changes(before, after), 1)) == []
