"""Runs in stages: each from the weights of the one before, resumed in the middle, refused where they cannot follow."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.form import draft as form
from app.studio import Studio
from tests.commands import Started, launch_py
from tests.runs import (
    alone,
    difference,
    make_pictures,
    make_run,
    make_text,
    run_config,
    steps_of,
    text_config,
    train,
)
from trainer.config import yaml12
from trainer.config.load import ConfigError, load_config, stage_config
from trainer.config.schema import RunConfig
from trainer.config.sections import ModelConfig
from trainer.export.card import model_card
from trainer.export.export import hand_over
from trainer.launcher import preflight
from trainer.models import families
from trainer.models.state_dict import BaseWeights
from trainer.run import process, stages
from trainer.run.events import CheckpointEvent, EventReader, StageEvent, StepEvent, latest_steps
from trainer.run.failure import diagnose
from trainer.run.folder import RunDir, weights_of
from trainer.system.errors import InputError

PRESET = """\
name: two
model:
  family: causal_lm
adapter:
  type: none
data:
  path: text
  length: 48
train:
  steps: 4
  batch_size: 2
  precision: fp32
parallel:
  device: cpu
checkpoint:
  every: 1
export:
  dtype: fp32
stages:
  - name: pretrain
    set:
      optim.lr: 1e-3
  - name: tune
    set:
      adapter: {type: lora, rank: 2}
      data: {path: other, shuffle_window: 4}
      train.steps: 6
"""
"""Two stages that differ in what is trained, in data, steps and learning rate, for a file beside `text` and `other`."""


def staged_folder(folder: Path) -> Path:
    make_text(folder / "text")
    make_text(folder / "other", count=7)
    (folder / "preset.yaml").write_text(PRESET, encoding="utf-8")
    return folder


def losses(run: RunDir) -> list[tuple[int, float]]:
    return [(event.step, event.loss) for event in latest_steps(EventReader(run.events_file).read())]


# From the first step to the last


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = staged_folder(tmp_path_factory.mktemp("straight"))
    done = launch_py(folder, "--headless", "preset.yaml", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    return RunDir.open(folder / "run")


@pytest.mark.slow
def test_steps_are_counted_through_all_stages_and_each_is_told(straight: RunDir) -> None:
    told = [event for event in EventReader(straight.events_file).read() if isinstance(event, StageEvent)]
    assert [(event.number, event.count, event.name, event.step) for event in told] == [
        (1, 2, "pretrain", 0),
        (2, 2, "tune", 4),
    ]
    assert [step for step, _ in losses(straight)] == list(range(1, 11))


@pytest.mark.slow
def test_each_stage_keeps_its_own_checkpoints_and_the_last_one_exports(straight: RunDir) -> None:
    folders = straight.stage_folders
    assert [folder.name for folder in folders] == ["1-pretrain", "2-tune"]
    assert all((folder / "checkpoints").is_dir() for folder in folders)
    assert straight.checkpoints == folders[1] / "checkpoints"
    assert [path.name for path in straight.export.iterdir()] == ["two"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_the_base_of_an_adapter_is_found_from_its_readme_after_the_run_was_moved(
    straight: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = shutil.copytree(straight.path, tmp_path / "moved") / "export" / "two"
    code = (moved / "README.md").read_text(encoding="utf-8").split("```python\n")[1].partition("```")[0]
    monkeypatch.chdir(moved)
    found: dict[str, Any] = {}
    exec(code, found)
    assert Path(found["model"].get_base_model().name_or_path).is_relative_to(tmp_path / "moved")
    names = load_file(moved / "adapter_model.safetensors").keys()
    assert {name.replace(".default.", ".") for name in found["model"].state_dict() if ".lora_" in name} == set(names)


@pytest.mark.slow
def test_the_card_of_an_adapter_on_a_stages_result_names_that_as_its_base(straight: RunDir) -> None:
    card = model_card(straight)
    assert "Replace `BASE` with the folder of the base model, the result of stage pretrain of this run." in card
    assert "base_model" not in card


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_second_stage_goes_on_to_the_same_end(straight: RunDir, tmp_path: Path) -> None:
    folder = staged_folder(tmp_path)
    started = Started(folder, "--headless", "preset.yaml", "--run-dir", "run", run=folder / "run")
    try:
        while started.wait_for(CheckpointEvent).step < 6:
            pass
        latest = process.Launch.read(started.run)
        assert latest is not None
        process.end_family(latest.pid)
        assert started.end()[0] == 1
    finally:
        started.kill()
    done = launch_py(folder, "--resume", "run")
    assert done.returncode == 0, done.stderr
    run = RunDir.open(folder / "run")
    assert losses(run) == losses(straight)
    ours, theirs = (load_file(one.export / "two" / "adapter_model.safetensors") for one in (run, straight))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    told = [event.number for event in EventReader(run.events_file).read() if isinstance(event, StageEvent)]
    assert told == [1, 2, 2]


@pytest.mark.slow
def test_a_finished_run_goes_on_in_its_last_stage_and_exports_again(straight: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(straight.path, tmp_path / "runs" / "run"))
    studio = Studio(run.path.parent)
    with pytest.raises(InputError, match="0 steps; give at least 1 more"):
        studio.extend(run, 0)
    studio.extend(run, 3)
    deadline = time.monotonic() + 240
    while (view := studio.follower(run).view()).is_running or view.is_alive:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (view.state, view.step, view.num_steps) == ("finished", 13, 13), view.sentence
    assert losses(run)[:10] == losses(straight)
    assert run.config().stage_steps == (4, 9)
    assert [event.step for event in view.exports] == [10, 13]
    begun = [event.number for event in EventReader(run.events_file).read() if isinstance(event, StageEvent)]
    assert begun == [1, 2, 2]


@pytest.mark.slow
def test_a_stage_whose_folder_was_deleted_is_trained_again(straight: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(straight.path, tmp_path / "run"))
    shutil.rmtree(run.path / "stages" / "2-tune")
    done = launch_py(tmp_path, "--resume", "run")
    assert done.returncode == 0, done.stderr
    assert losses(run) == losses(straight)


@pytest.mark.slow
def test_a_run_that_is_stopped_in_its_first_stage_does_not_begin_the_second(tmp_path: Path) -> None:
    folder = staged_folder(tmp_path)
    preset = folder / "preset.yaml"
    preset.write_text(preset.read_text().replace("optim.lr: 1e-3", "train.steps: 10000"))
    one_rank = ("parallel.devices=1", "parallel.strategy=none")
    started = Started(folder, "--headless", "preset.yaml", *one_rank, "--run-dir", "run", run=folder / "run")
    try:
        started.wait_for(StepEvent)
        started.press_ctrl_c()
        assert started.end()[0] == 130
    finally:
        started.kill()
    assert process.status(started.run) == "stopped"
    assert started.run.current_stage == 0
    assert not process.alive(started.run)


# What the next stage begins with


def handed_over(tmp_path: Path, cfg: RunConfig) -> tuple[dict[str, Any], stages.Stage]:
    """Train the first stage here. Returns its trained weights and the second one."""
    run = make_run(tmp_path, cfg, "run")
    first = stages.current(run, cfg)
    weights = train(alone(), first.config, run).weights
    hand_over(first, run, tmp_path / "cache", weights)
    second = stages.current(run, cfg)
    assert (second.number, second.before) == (2, first.config.train.steps)
    return weights, second


def two(*sets: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "set": fields} for name, fields in zip(("one", "two"), sets, strict=True)]


def test_an_adapter_goes_on_as_it_is(tmp_path: Path) -> None:
    cfg = run_config(make_pictures(tmp_path / "pictures", 4), train__steps=2, stages=two({}, {"optim.lr": 1e-30}))
    weights, second = handed_over(tmp_path, cfg)
    assert second.config.model == cfg.model
    found = train(alone(), second.config, make_run(tmp_path, second.config, "second")).weights
    assert difference(found, weights) <= 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_modules_that_are_trained_whole_go_on_with_their_adapter(tmp_path: Path) -> None:
    adapter = {"type": "lora", "rank": 4, "modules_to_save": ["lm_head", r"model\.norm"]}
    changes: dict[str, Any] = {"train__steps": 2, "stages": two({}, {"optim.lr": 1e-30})}
    cfg = text_config(make_text(tmp_path / "text"), adapter=adapter, **changes)
    weights, second = handed_over(tmp_path, cfg)
    assert second.config.model == cfg.model
    found = train(alone(), second.config, make_run(tmp_path, second.config, "second")).weights
    assert difference(found, weights) <= 1e-6


@pytest.mark.slow
def test_an_adapter_from_singular_values_begins_anew_on_the_base_with_the_former_in_it(tmp_path: Path) -> None:
    adapter = {"type": "lora", "rank": 4, "init": "pissa"}
    changes: dict[str, Any] = {"train__steps": 2, "stages": two({}, {"optim.lr": 1e-4})}
    cfg = text_config(make_text(tmp_path / "text"), adapter=adapter, **changes)
    _, second = handed_over(tmp_path, cfg)
    assert second.config.model.path.endswith("tiny-merged")
    assert second.config.adapter == cfg.adapter
    first, following = (BaseWeights(families.make(one, tmp_path / "cache")) for one in (cfg, second.config))
    layer = "language_model.model.layers.0.mlp.up_proj"
    assert not torch.equal(first.layer(layer), following.layer(layer))
    train(alone(), second.config, make_run(tmp_path, second.config, "second"))


@pytest.mark.parametrize("family", ["flux2", "causal_lm", pytest.param("bagel", marks=pytest.mark.slow)])
def test_another_adapter_begins_on_the_base_with_the_former_in_it(tmp_path: Path, family: str) -> None:
    changes: dict[str, Any] = {"train__steps": 2, "stages": two({}, {"adapter.type": "dora"})}
    cfg = (
        text_config(make_text(tmp_path / "text"), **changes)
        if family == "causal_lm"
        else run_config(make_pictures(tmp_path / "pictures", 4), model__family=family, **changes)
    )
    _, second = handed_over(tmp_path, cfg)
    former, now = (BaseWeights(families.make(one, tmp_path / "cache")) for one in (cfg, second.config))
    component = families.get(family).components[0]
    changed = [
        name
        for name in former.shapes(component)
        if not torch.equal(former.tensor(component, name).float(), now.tensor(component, name).float())
    ]
    assert changed
    assert all(
        families.make(cfg, tmp_path / "cache").is_target(f"{component}.{n}".removesuffix(".weight")) for n in changed
    )
    train(alone(), second.config, make_run(tmp_path, second.config, "second"))


def test_preference_training_compares_with_the_adapter_of_the_stage_before(tmp_path: Path) -> None:
    preference = {"objective.dpo_beta": 0.1, "data.path": str(tmp_path / "pairs.jsonl")}
    rows = [{"prompt": f"{n}? ", "chosen": f"{n}.", "rejected": "No."} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    cfg = text_config(
        make_text(tmp_path / "text"), train__steps=3, optim__lr=1e-2, sample__every=0, stages=two({}, preference)
    )
    weights, second = handed_over(tmp_path, cfg)
    assert any(weight.any() for name, weight in weights.items() if ".lora_B." in name)
    assert (second.config.adapter.type, second.config.adapter.model_dump()["start"]) == ("lora", None)
    outcome = train(alone(), second.config, make_run(tmp_path, second.config, "second"))
    first = steps_of(outcome.events)[0]
    assert first.loss == pytest.approx(math.log(2), abs=1e-6)
    former, now = (BaseWeights(families.make(one, tmp_path / "cache")) for one in (cfg, second.config))
    name = next(name for name in former.shapes("language_model") if name.endswith("q_proj.weight"))
    assert not torch.equal(former.tensor("language_model", name), now.tensor("language_model", name))


def test_a_model_that_was_trained_whole_is_the_base_of_the_next_stage(tmp_path: Path) -> None:
    options = {"architecture": "llama-3.1-8b"}
    changes: dict[str, Any] = {"adapter__type": "none", "train__steps": 2, "model__options": options}
    cfg = text_config(make_text(tmp_path / "text"), **changes, stages=two({}, {"adapter": {"type": "lora"}}))
    weights, second = handed_over(tmp_path, cfg)
    base = BaseWeights(families.make(second.config, tmp_path / "cache"))
    assert {name: base.tensor("language_model", name) for name in base.shapes("language_model")}.keys() == {
        name.removeprefix("language_model.") for name in weights
    }
    assert all(torch.equal(base.tensor(*name.split(".", 1)), tensor) for name, tensor in weights.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_an_adapter_goes_on_on_the_model_that_its_own_stage_was_given(tmp_path: Path) -> None:
    lora = {"adapter": {"type": "lora", "rank": 2}, "optim.lr": 1e-2}
    cfg = text_config(
        make_text(tmp_path / "text"),
        adapter__type="none",
        model__options={"architecture": "llama-3.1-8b"},
        train__steps=2,
        sample__every=0,
        stages=[{"name": name, "set": fields} for name, fields in (("a", {}), ("b", lora), ("c", lora), ("d", {}))],
    )
    run = make_run(tmp_path, cfg, "run")
    ends = []
    for number in range(3):
        stage = stages.current(run, cfg)
        assert (stage.number, stage.before) == (number + 1, 2 * number)
        ends.append(train(alone(), stage.config, run).weights)
        hand_over(stage, run, tmp_path / "cache", ends[-1])
    folders = run.stage_folders
    third = stage.config
    assert Path(third.model.path).parent == weights_of(folders[0])
    assert Path(str(third.adapter.model_dump()["start"])).parent == weights_of(folders[1])
    assert third.model.options.architecture is None
    begun = train(
        alone(),
        third.model_copy(update={"optim": third.optim.model_copy(update={"lr": 1e-30})}),
        make_run(tmp_path, third, "third"),
    )
    assert difference(begun.weights, ends[1]) <= 1e-6
    last = stages.current(run, cfg)
    assert (last.config.adapter.type, Path(last.config.model.path).parent) == ("none", weights_of(folders[2]))


def test_what_is_handed_over_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = run_config(make_pictures(tmp_path / "pictures", 4), train__steps=1, stages=two({}, {}))
    run = make_run(tmp_path, cfg, "run")
    first = stages.current(run, cfg)
    weights = train(alone(), first.config, run).weights
    with monkeypatch.context() as patched:
        patched.setattr("trainer.export.export.write_handover", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hand_over(first, run, tmp_path / "cache", weights)
    assert not weights_of(first.folder).exists()
    assert run.current_stage == 0


# The config


def loaded(tmp_path: Path, *changes: tuple[str, str]) -> RunConfig:
    text = PRESET
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "preset.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file).config


def test_fields_of_a_stage_may_be_nested_and_their_paths_are_relative_to_the_preset(tmp_path: Path) -> None:
    cfg = loaded(tmp_path)
    assert cfg.stages[1].set == {
        "adapter.type": "lora",
        "adapter.rank": 2,
        "data.path": str(tmp_path / "other"),
        "data.shuffle_window": 4,
        "train.steps": 6,
    }
    assert cfg.stage_steps == (4, 6)
    second = stage_config(cfg, 1)
    assert (second.adapter.type, second.data.length, second.stages) == ("lora", 48, ())


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "name: tune",
            "name: pretrain",
            "23: stages[1].name: 'pretrain' is the name of two stages; give each its own name",
        ),
        ("train.steps: 6", "train.steps: 0", "27: stages[1].set.train.steps: is 0, must be >= 1 and <= 10000000 steps"),
        (
            "train.steps: 6",
            "train.stepps: 6",
            "27: stages[1].set.train.stepps: unknown field; did you mean 'train.steps'?",
        ),
        (
            "train.steps: 6",
            "parallel.devices: 2",
            "27: stages[1].set.parallel.devices: must be the same for all stages; set it outside of them",
        ),
        ("train.steps: 6", "model.path: tiny", "27: stages[1].set.model.path: comes from stage pretrain; leave it out"),
        (
            "train.steps: 6",
            "quantize.keep: [a]",
            "27: stages[1].set.quantize.keep: needs quantize.format nf4, int8 or fp8, but it is none; set it, or leave "
            "this out",
        ),
    ],
)
def test_what_is_wrong_with_a_stage_is_told_with_its_line(tmp_path: Path, old: str, new: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, (old, new))
    assert str(caught.value) == f"{tmp_path / 'preset.yaml'}:{problem}"


def test_files_of_every_stage_are_looked_for_before_a_rank_is_started(tmp_path: Path) -> None:
    make_text(tmp_path / "text")
    cfg = loaded(tmp_path)
    with pytest.raises(InputError) as caught:
        preflight.new_run(load_config(tmp_path / "preset.yaml"), tmp_path / "runs")
    assert "stage tune: data.path: no file or folder" in str(caught.value)
    assert cfg.stages


def test_a_stage_that_contradicts_its_models_folder_is_refused_before_a_rank_is_started(tmp_path: Path) -> None:
    pictures, model = make_pictures(tmp_path / "pictures", 1), tmp_path / "model"
    (model / "transformer").mkdir(parents=True)
    (model / "transformer" / "config.json").write_text('{"_class_name": "Flux2Transformer2DModel"}')
    (model / "model_index.json").write_text('{"is_distilled": true}')
    (tmp_path / "preset.yaml").write_text(
        f"model: {{family: flux2, path: {model}}}\ndata: {{path: {pictures}}}\n"
        "stages: [{name: a}, {name: b, set: {model.options.distilled: false}}]\n"
    )
    with pytest.raises(InputError) as caught:
        preflight.new_run(load_config(tmp_path / "preset.yaml"), tmp_path / "runs")
    assert "stage b: model.options.distilled: false, but" in str(caught.value)


def test_an_override_changes_one_field_of_one_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = loaded(tmp_path)
    given = ("stages.tune.adapter.rank=4", "stages.tune.data.path=more", "stages.tune.data.trigger=2024")
    cfg = load_config(tmp_path / "preset.yaml", given).config
    changed = {"adapter.rank": 4, "data.path": str(tmp_path / "more"), "data.trigger": "2024"}
    assert cfg.stages[1].set == before.stages[1].set | changed
    assert cfg.stages[0] == before.stages[0]
    assert load_config(tmp_path / "preset.yaml").config == before


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("stages.tune.train.steps=0", "stages[1].set.train.steps: is 0, must be >= 1 and <= 10000000 steps"),
        ("stages.tune.train.steps=[", "stages[1].set.train.steps: not YAML"),
        ('stages.tune.data.trigger="a\\0"', "stages[1].set.data.trigger: holds a null byte; remove it"),
        ("stages.tune.train.stepps=5", "stages.tune.train.stepps: unknown field"),
        ("stages.other.train.steps=5", "stages.other.train.steps: unknown field"),
        ("stages.tune.parallel.devices=2", "stages[1].set.parallel.devices: must be the same for all stages"),
    ],
)
def test_a_wrong_override_of_a_stage_is_refused(tmp_path: Path, override: str, problem: str) -> None:
    loaded(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "preset.yaml", [override])
    assert str(caught.value).startswith(f"command line: {problem}")


def test_less_memory_after_it_ran_out_is_for_the_stage_that_is_under_way(tmp_path: Path) -> None:
    cfg = stages.changed(loaded(tmp_path), 1, ["train.micro_batch=1", "train.checkpointing=full 2, selective"])
    assert "train.micro_batch" not in cfg.stages[0].set
    train = stage_config(cfg, 1).train
    assert (train.micro_batch, train.checkpointing) == (1, "full 2, selective")


def test_after_a_loss_that_is_not_finite_the_rate_of_the_stage_that_failed_is_lowered(tmp_path: Path) -> None:
    loaded(tmp_path)
    cfg = load_config(
        tmp_path / "preset.yaml", ["optim.lr=0.5", "stages.pretrain.optim.lr=0.001", "stages.tune.optim.lr=0.02"]
    ).config
    run = RunDir.create(tmp_path, cfg, at=tmp_path / "run")
    (run.logs / "launch-1.log").write_text("FloatingPointError: step 7: the loss is not finite on 1 of 2 ranks\n")
    assert diagnose(run, []).retry == ("stages.pretrain.optim.lr=0.0001",)
    weights_of(run.stage_folders[0]).mkdir()
    assert diagnose(run, []).retry == ("stages.tune.optim.lr=0.002",)
    run.config_file.write_text("train: 5\n")
    found = diagnose(run, [])
    assert (found.message[:18], found.retry) == ("FloatingPointError", ())


def test_a_stage_that_has_ended_keeps_its_steps_whatever_its_config_says_now(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, loaded(tmp_path), at=tmp_path / "run")
    weights_of(run.stage_folders[0]).mkdir()
    (run.stage_folders[0] / "ended-0").write_text("7")
    stages.write_handover(weights_of(run.stage_folders[0]), {"model.path": "model"})
    later = load_config(run.config_file, ["stages.pretrain.train.steps=2"]).config
    assert stages.current(run, later).before == stages.current(run, run.config()).before == 7


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("stages.pretrain.optim.lr=0.5", "optim.lr"),
        ("stages.pretrain.sample.prompts=[a cat]", "sample.prompts"),
        ("stages=[{name: pretrain}]", "optim.lr"),
    ],
)
def test_an_override_of_a_stage_that_has_ended_is_refused(tmp_path: Path, change: str, field: str) -> None:
    run = RunDir.create(tmp_path, loaded(tmp_path), at=tmp_path / "run")
    weights_of(run.stage_folders[0]).mkdir()
    with pytest.raises(ConfigError) as caught:
        preflight.continued_run(run, [change])
    assert f"stages[0].set.{field}: stage pretrain has ended; leave the change out" in str(caught.value)


@pytest.mark.parametrize("has_ended", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_override_mends_a_value_that_is_wrong_in_the_config_of_a_run(tmp_path: Path, has_ended: bool) -> None:
    staged_folder(tmp_path)
    run = RunDir.create(tmp_path, loaded(tmp_path), at=tmp_path / "run")
    if has_ended:
        weights_of(run.stage_folders[0]).mkdir()
        stages.write_handover(weights_of(run.stage_folders[0]), {})
    tree = yaml12.parse(run.config_file.read_text()).value
    tree["train"]["batch_size"] = 0
    run.config_file.write_text(yaml12.dump(tree))
    assert preflight.continued_run(run, ["train.batch_size=2"]).config.train.batch_size == 2


def test_an_override_of_a_whole_field_with_free_keys_replaces_all_of_it(tmp_path: Path) -> None:
    loaded(tmp_path)
    given = [f"stages.tune.adapter.rank_pattern{one}" for one in ("={to_q: 4}", ".to_k=8", "={to_v: 2}")]
    cfg = load_config(tmp_path / "preset.yaml", given).config
    assert stage_config(cfg, 1).adapter.rank_pattern == {"to_v": 2}


def test_an_override_hides_no_mistake_in_the_file(tmp_path: Path) -> None:
    loaded(tmp_path)
    preset = tmp_path / "preset.yaml"
    tree = yaml12.parse(preset.read_text()).value
    tree["stages"][1]["set"] = 5
    preset.write_text(yaml12.dump(tree))
    with pytest.raises(ConfigError, match=r"stages\[1\]\.set: needs"):
        load_config(preset, ["stages.tune.train.steps=4"])


def test_later_stages_are_checked_with_the_model_that_the_current_one_was_given(tmp_path: Path) -> None:
    """A tiny model imitates an architecture; what was trained of it is handed over without that."""
    model = {"family": "causal_lm", "path": "tiny", "options": {"architecture": "qwen3-1.7b"}}
    cfg = text_config(tmp_path, model=model, stages=[{"name": name, "set": {}} for name in "abc"])
    handed = ModelConfig(family="causal_lm", path=str(tmp_path))
    assert stages.before_handover(cfg, 2).model == cfg.model
    assert stages.before_handover(cfg, 2, handed).model == handed


def test_a_handover_names_what_lies_beside_it(tmp_path: Path) -> None:
    cfg = loaded(tmp_path)
    run = RunDir.create(tmp_path, cfg, at=tmp_path / "run")
    folder = weights_of(run.stage_folders[0])
    folder.mkdir()
    stages.write_handover(folder, {"model.path": "two-full", "model.base": None})
    assert json.loads((folder / stages.HANDOVER).read_text()) == {"model.path": "two-full", "model.base": None}
    (folder / "two-full").mkdir()
    found = stages.current(run, cfg)
    assert (found.config.model.path, found.config.model.base) == (str(folder / "two-full"), None)


def test_the_page_shows_the_command_that_starts_a_run_in_stages(tmp_path: Path) -> None:
    run = tmp_path / "two-<time>-<random>"
    assert form.torchrun_command(loaded(tmp_path), tmp_path).split()[1:] == [
        *("-m", "trainer.launcher.supervisor", "0", "-m", "trainer", f"'{run}'")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "row", "why"),
    [
        (
            "rank: 2",
            "rank: 512",
            "",
            ":25: stages[1].set.adapter.rank: 512 is too large for 'language_model.model.layers.0.self_attn.k_proj', "
            "whose weight is 32 x 64; at most 32. Lower it, or give such layers their own in adapter.rank_pattern "
            "(stage tune)",
        ),
        ("rank: 2", "rank: 2, targets: [qq]", "", ":25: stages[1].set.adapter.targets: 'qq' matches no layer of "),
        ("rank: 2", "rank: 2", '{"prompt": 5}', ": stage tune: other/b.jsonl:8: "),
    ],
    ids=["a rank", "a layer", "a row"],
)
def test_a_mistake_of_a_later_stage_is_named_before_the_first_one_starts(
    tmp_path: Path, old: str, new: str, row: str, why: str
) -> None:
    file = staged_folder(tmp_path) / "preset.yaml"
    file.write_text(PRESET.replace(old, new), encoding="utf-8")
    with (tmp_path / "other" / "b.jsonl").open("a", encoding="utf-8") as rows:
        rows.write(row)
    with pytest.raises(InputError) as caught:
        preflight.new_run(load_config(file), tmp_path / "runs")
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(f"preset.yaml{why}")
    assert not (tmp_path / "runs").exists()
