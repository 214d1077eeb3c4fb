"""Runs next to each other: which settings differ, in words, and which samples belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.runs import run_comparison
from app.runs.monitor import Follower
from app.runs.run_comparison import EMPTY, differing, labels, missing, result, same_prompts, value_in_words
from tests.app.browser import recorded
from tests.runs import run_config
from trainer.config.schema import RunConfig
from trainer.run.events import EventWriter, SampleEvent


def config(**changes: Any) -> RunConfig:
    return run_config(Path("/images"), **changes)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("optim.lr", 0.05, "0.05"),
        ("train.steps", 12000, "12000"),
        ("quantize.cache", True, "yes"),
        ("quantize.cache", False, "no"),
        ("adapter.type", "diag-oft", "Diag-OFT"),
        ("model.path", "demo", "Demo model"),
        ("model.path", "/models/own", "/models/own"),
        ("adapter.block_size", None, EMPTY),
        ("optim.clip_norm", None, EMPTY),
        ("data.trigger", "", EMPTY),
        ("sample.steps", None, "the model's own, 28"),
        ("sample.guidance", None, "the model's own, 4"),
        ("model.options.max_tokens", None, "the model's own"),
        ("sample.size", [64, 96], "64 × 96"),
        ("sample.prompts", ["a cat", "a dog"], "a cat\na dog"),
        ("sample.prompts", [], EMPTY),
        ("model.train", {"transformer": "full", "vae": "frozen"}, "transformer: full, vae: frozen"),
        ("data.folders", [{"path": "/a", "weight": 2.0}], "path: /a, weight: 2"),
    ],
)  # fmt: skip
def test_a_value_is_said_as_the_form_says_it(field: str, value: Any, words: str):
    assert value_in_words(field, value, config()) == words


def test_settings_that_differ_are_named_in_words_and_equal_ones_are_left_out():
    one = config(name="one", optim__lr=1e-4, sample__size=[64, 64])
    other = config(name="other", optim__lr=1e-3, adapter={"type": "boft", "block_size": 8})
    rows = {setting.field: (setting.label, setting.values) for setting in differing([one, other])}
    assert rows == {
        "adapter.type": ("Method", ("LoRA", "BOFT")),
        "adapter.init": ("Initialization", ("default", EMPTY)),
        "adapter.rank": ("Rank", ("4", EMPTY)),
        "adapter.block_size": ("Block size (outputs)", (EMPTY, "8")),
        "optim.lr": ("Learning rate", ("0.0001", "0.001")),
        "sample.size": ("Sample size (pixels)", ("64 × 64", "1024 × 1024")),
    }


def test_samples_pair_by_the_prompt_before_the_trigger_is_put_in(tmp_path: Path):
    prompts = {"sample__prompts": ["fox face [trigger]", "a [trigger] cup"]}
    views, configs = [], []
    for name, trigger in (("a", "sks"), ("b", "qqq"), ("c", "")):
        own = prompts if trigger else {"sample__prompts": ["a dog", "fox face sks"]}
        run = recorded(tmp_path / "runs", name, data__trigger=trigger, **own)
        with EventWriter(run.events_file) as events:
            for index, prompt in enumerate(run.config().sample.prompts):
                text = prompt.replace("[trigger]", trigger)
                events.write(SampleEvent(step=60, prompt=text, index=index, path=f"samples/{index}.png"))
        follower = Follower(run)
        views.append(follower.view())
        configs.append(follower.config)
    pairs = same_prompts(views, configs)
    assert list(pairs) == ["fox face [trigger]", "a [trigger] cup"]
    assert [sample and (sample.prompt, sample.step) for sample in pairs["fox face [trigger]"]] == [
        ("fox face sks", 60), ("fox face qqq", 60), None,
    ]  # fmt: skip


def test_samples_of_prompts_that_the_config_has_no_more_pair_by_their_words(tmp_path: Path):
    views, configs = [], []
    for name in ("a", "b"):
        run = recorded(tmp_path / "runs", name, sample__prompts=["a cat"])
        run.config_file.write_text(run.config_file.read_text().replace("a cat", f"a dog of {name}"))
        views.append(Follower(run).view())
        configs.append(run.config())
    assert list(same_prompts(views, configs)) == ["a cat"]


def test_the_result_of_a_run_has_its_best_loss_time_speed_and_memory(tmp_path: Path):
    found = result(Follower(recorded(tmp_path / "runs", "one")))
    assert (found.state, found.step, found.num_steps, found.unit, found.speed) == ("finished", 40, 40, "images", 8.0)
    assert found.best == (pytest.approx(1 / 40 + 1e-4), 40)
    assert found.peak == 11 * 2**30


def test_runs_that_are_not_there_are_named_in_one_sentence():
    why = "Deleted or moved, or the address has a typing error."
    assert missing([]) == ""
    assert missing(["fox"]) == f"This run is not there: fox. {why}"
    many = [f"g{number}" for number in range(400)]
    assert missing(many) == f"These runs are not there: g0, g1, g2, g3, g4 and 395 more. {why}"
    assert len(missing(["x" * 10_000])) < 200


def test_runs_of_equal_short_names_keep_their_whole_names():
    short = {"fox-20261124-211219-aebff6": "fox", "fox-20261125-211219-aebff7": "fox", "cup-1": "cup"}
    assert labels(short) == {**{run: run for run in list(short)[:2]}, "cup-1": "cup"}


def test_the_losses_are_laid_over_each_other_by_name(tmp_path: Path):
    followers = [Follower(recorded(tmp_path / "runs", name)) for name in ("a", "b")]
    lines = run_comparison.overlaid(followers, ["one", "other"])
    assert [(line.label, line.look, len(line.points)) for line in lines] == [
        ("one", "smoothed", 40),
        ("other", "smoothed", 40),
    ]
