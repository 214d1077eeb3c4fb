"""Whether `train.steps` or `train.epochs` decides how long a run is."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.load import ConfigError, dump_config, load_config_text, stage_config
from trainer.config.schema import RunConfig
from trainer.launcher.capacity import num_checkpoints

BASE = "model: {family: causal_lm}\ndata: {path: /text}\n"
PATH = Path("preset.yaml")


def load(text: str, *overrides: str) -> tuple[RunConfig, tuple[str, ...]]:
    loaded = load_config_text(f"{BASE}{text}", overrides, PATH)
    return loaded.config, loaded.notes


@pytest.mark.parametrize(
    ("text", "overrides", "length"),
    [
        ("train: {steps: 70}\n", (), (70, None)),
        ("train: {epochs: 3}\n", (), (None, 3)),
        ("train: {steps: 70, epochs: 3}\n", (), (None, 3)),
        ("train: {steps: 70}\n", ("train.epochs=2",), (None, 2)),
        ("train: {epochs: 3}\n", ("train.steps=70",), (70, None)),
        ("train: {epochs: 3}\n", ("train={steps: 70}",), (70, None)),
        ("train: {epochs: 3}\n", ("train.epochs=null",), (1000, None)),
        ("train: {epochs: 3}\n", ("train.steps=70", "train.epochs=null"), (70, None)),
        ("train: {num_train_epochs: 3}\n", (), (None, 3)),
    ],
)
def test_epochs_decide_unless_steps_are_given_later(
    text: str, overrides: tuple[str, ...], length: tuple[int | None, float | None]
) -> None:
    cfg, _ = load(text, *overrides)
    assert (*cfg.stage_steps, *cfg.stage_epochs) == length
    again = load_config_text(dump_config(cfg), (), PATH).config
    assert again == cfg


def test_what_is_left_out_or_has_no_effect_is_said() -> None:
    assert load("train: {epochs: 3}\n", "train.steps=70")[1] == (
        "preset.yaml:3: train.epochs is left out: train.steps is 70",
    )
    assert load("train: {epochs: 3, steps: 70}\n")[1] == (
        "preset.yaml:3: train.steps: 70 has no effect, because train.epochs is 3; set train.epochs: null to train that "
        "many steps",
    )
    assert load("train: {epochs: 3}\n")[1] == ()


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            "",
            ("train.steps=70", "train.epochs=3"),
            "command line: train.epochs: cannot be combined with train.steps 70; leave one of them out",
        ),
        (
            "stages:\n- name: a\n  set: {train.steps: 70, train.epochs: 3}\n",
            (),
            "preset.yaml:5: stages[0].set.train.epochs: cannot be combined with train.steps 70; leave one of them out",
        ),
        ("train: {epochs: 0}\n", (), "preset.yaml:3: train.epochs: is 0, must be > 0 and <= 100000 epochs"),
        ("train: {epochs: many}\n", (), "preset.yaml:3: train.epochs: needs a number, not 'many'"),
        ("train: {epochs: true}\n", (), "preset.yaml:3: train.epochs: needs a number, not true"),
    ],
)
def test_a_wrong_length_is_refused(text: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(text, *overrides)
    assert str(refused.value) == message


def test_the_steps_of_a_stage_replace_the_epochs_of_its_run_and_the_other_way_round() -> None:
    cfg, _ = load(
        "train: {epochs: 2}\nstages:\n- {name: a, set: {}}\n- {name: b, set: {train.steps: 5}}\n"
        "- {name: c, set: {train.epochs: 0.5}}\n- {name: d, set: {train.epochs: null}}\n"
    )
    assert cfg.stage_steps == (None, 5, None, 1000)
    assert cfg.stage_epochs == (2, None, 0.5, None)
    parts = [stage_config(cfg, index) for index in range(4)]
    assert [(*part.stage_steps, *part.stage_epochs) for part in parts] == list(
        zip(cfg.stage_steps, cfg.stage_epochs, strict=True)
    )


def test_a_warm_up_is_compared_with_steps_only_where_they_decide() -> None:
    falling = "optim: {schedule: cosine, warmup: 50}\n"
    with pytest.raises(ConfigError, match=r"optim\.warmup: must be less than train\.steps 20, not 50"):
        load(f"{falling}train: {{steps: 20}}\n")
    assert load(f"{falling}train: {{steps: 20, epochs: 9}}\n")[0].optim.warmup == 50


def test_a_run_of_unknown_length_may_keep_every_checkpoint_that_it_is_allowed_to() -> None:
    saves = "checkpoint: {every: 500, keep: 3, keep_best: 1}\n"
    assert num_checkpoints(load(f"{saves}train: {{steps: 600}}\n")[0]) == 2
    assert num_checkpoints(load(f"{saves}train: {{epochs: 2}}\n")[0]) == 5
    assert num_checkpoints(load("checkpoint: {every: 0}\ntrain: {epochs: 2}\n")[0]) == 1
