"""Variants of a run, trained by the same ranks: what each rank holds and sends is what the formulas say."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.pool import run_ranks
from tests.runs import alone, make_pictures, run_config
from trainer.benchmark import worker
from trainer.benchmark.probe import Probe
from trainer.config.load import ConfigError, ConfigFile, dump_config, load_config
from trainer.distributed.world import World
from trainer.launcher.jobs import variants as trials
from trainer.launcher.jobs.variants import Trial
from trainer.plan.simulate.zero import ModelBytes, RankBytes, expected
from trainer.run import process
from trainer.run.folder import RunDir
from trainer.system.errors import InputError

GB = 1e9
STRATEGIES = {
    "ddp": ("parallel.strategy=ddp",),
    "grad_op": ("parallel.strategy=grad_op",),
    "full": ("parallel.strategy=full",),
    "offload": ("parallel.strategy=full", "parallel.cpu_offload=true"),
}
HYBRID = {"hybrid": ("parallel.strategy=hybrid", "parallel.shard_size=2")}
KINDS: dict[str, dict[str, Any]] = {
    "full fine-tune": {"adapter": {"type": "none"}, "model": {"family": "flux2", "train": {"transformer": "full"}}},
    "lora on bf16": {"train__precision": "bf16"},
    "unet": {"model": {"family": "sdxl"}},
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("trials") / "pictures")


def config_file(pictures: Path, folder: Path, ranks: int, **changes: Any) -> ConfigFile:
    settings: dict[str, Any] = {
        "parallel__devices": ranks,
        "train__steps": 4,
        "train__micro_batch": 2,
        "data__validation": 2,
        "data__max_aspect": 1,  # pictures of one size: activations are theirs
        "optim__lr": 1e-3,
    }
    cfg = run_config(pictures, **(settings | changes))
    file = folder / "config.yaml"
    file.write_text(dump_config(cfg), encoding="utf-8")
    return load_config(file)


def measured(world: World, run: RunDir) -> None:
    for trial in trials.folders(run).values():
        cost = worker.measure(trial, world, run.path.parent / "cache")
        if world.rank == 0:
            trials.write(cost, trial)


QUICK = (("lora on bf16", 2),)
PARAMS = [
    pytest.param(case, marks=() if case in QUICK else pytest.mark.slow, id=f"{case[0]}, {case[1]} ranks")
    for case in itertools.product(KINDS, (2, 4))
]


@pytest.fixture(scope="module", params=PARAMS)
def trained(request: pytest.FixtureRequest, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Trial]:
    kind, ranks = request.param
    folder = tmp_path_factory.mktemp("runs")
    variants = STRATEGIES | (HYBRID if ranks == 4 else {})
    run = trials.create(config_file(pictures, folder, ranks, **KINDS[kind]), variants, folder)
    run_ranks(ranks, measured, run)
    return trials.read(run)


def test_every_rank_holds_gathers_and_sends_what_the_formula_says(trained: list[Trial]) -> None:
    for trial in trained:
        for rank in trial.cost.ranks:
            for field in fields(RankBytes):
                wanted = getattr(trial.cost.formula, field.name)
                assert getattr(rank, field.name) == pytest.approx(wanted, rel=0.02), f"{trial.label}: {field.name}"


def test_no_strategy_changes_what_backward_needs_of_an_image(trained: list[Trial]) -> None:
    first = trained[0].cost.activations[0]
    assert first > 100_000
    for trial in trained:
        assert trial.cost.activations == pytest.approx([first] * len(trial.cost.ranks), rel=0.02), trial.label


def test_every_strategy_learns_the_same(trained: list[Trial]) -> None:
    for trial in trained:
        assert len(trial.losses) == 4
        assert trial.validation[-1] < trial.validation[0]
        assert trial.validation == pytest.approx(trained[0].validation, rel=1e-3)


def test_the_strategies_are_those_that_were_asked_for(trained: list[Trial]) -> None:
    found = {trial.label: (trial.cost.strategy, trial.cost.shard_size, trial.cost.is_offloaded) for trial in trained}
    ranks = len(trained[0].cost.ranks)
    wanted = {"ddp": ("ddp", 1, False), "grad_op": ("grad_op", ranks, False), "full": ("full", ranks, False)}
    wanted |= {"offload": ("full", ranks, True)} | ({"hybrid": ("hybrid", 2, False)} if ranks == 4 else {})
    assert found == wanted


def test_adam_keeps_eight_bytes_for_each_trained_weight_and_four_for_its_gradient(trained: list[Trial]) -> None:
    cost = trained[0].cost
    assert cost.model.optimizer_state == pytest.approx(8 * cost.num_trained, rel=1e-3)
    assert cost.model.gradients == 4 * cost.num_trained


def test_the_paper_s_example_of_7_5_billion_parameters_on_64_ranks() -> None:
    """ZeRO, figure 1: 120 GB, and 1.9 GB with everything sharded."""
    model = ModelBytes.of_parameters(7_500_000_000)
    assert expected(model, "ddp", 64, 64).allocated == 120 * GB
    assert expected(model, "full", 64, 64).allocated == pytest.approx(1.9 * GB, rel=0.02)


def test_sharding_everything_sends_half_as_much_again_as_copies() -> None:
    """ZeRO, section 7.2.2: 3 times the parameters against 2."""
    model = ModelBytes.of_parameters(7_500_000_000)
    sent = {strategy: expected(model, strategy, 64, 64).sent for strategy in ("ddp", "grad_op", "full")}
    assert sent["full"] == pytest.approx(1.5 * sent["ddp"])
    assert sent["grad_op"] == pytest.approx(sent["ddp"])


def test_one_process_holds_everything_and_sends_nothing(pictures: Path, tmp_path: Path) -> None:
    run = trials.create(
        config_file(pictures, tmp_path, 1),
        {"alone": ("parallel.strategy=none",), "again": ("optim.lr=2e-3",)},
        tmp_path,
    )
    run_ranks(1, measured, run)
    alone, again = trials.read(run)
    assert alone.cost.ranks[0].sent == alone.cost.ranks[0].gathered == 0
    assert alone.cost.ranks[0].weights == alone.cost.model.weights
    assert again.run.config().optim.lr == 2e-3
    assert again.run.report.is_file()


def test_checkpointing_keeps_a_fraction_of_the_activations(pictures: Path, tmp_path: Path) -> None:
    variants = {"none": (), "every second": ("train.checkpointing=2",), "full": ("train.checkpointing=full",)}
    run = trials.create(config_file(pictures, tmp_path, 1), variants, tmp_path)
    run_ranks(1, measured, run)
    kept = {trial.label: trial.cost.activations[0] for trial in trials.read(run)}
    assert kept["full"] < kept["every second"] < kept["none"]
    assert kept["full"] < 0.5 * kept["none"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full fine-tune", "lora on bf16"])
def test_a_step_of_several_passes_gathers_in_each_and_has_the_activations_of_one(
    kind: str, pictures: Path, tmp_path: Path
) -> None:
    one_by_one = ("train.micro_batch=1",)
    variants = {"at once": ()} | {name: (*one_by_one, *changes) for name, changes in STRATEGIES.items()}
    run = trials.create(config_file(pictures, tmp_path, 2, **KINDS[kind]), variants, tmp_path)
    run_ranks(2, measured, run)
    at_once, *others = trials.read(run)
    for trial in others:
        assert (at_once.cost.images, trial.cost.images) == (2, 1)
        assert trial.cost.activations[0] == pytest.approx(at_once.cost.activations[0] / 2, rel=0.02)
        assert trial.cost.ranks[0].sent == pytest.approx(trial.cost.formula.sent, rel=0.02), trial.label


@pytest.mark.slow
def test_torchrun_trains_every_variant_and_says_which_one_it_is_at(pictures: Path, tmp_path: Path) -> None:
    run = trials.create(config_file(pictures, tmp_path, 2), {"a/b: lr": (), "": ("optim.lr=5e-4",)}, tmp_path)
    trials.start(run)
    assert process.wait(run, 120) == "finished"
    found = trials.read(run)
    assert [(trial.label, trial.run.path.name) for trial in found] == [("a/b: lr", "01-a-b-lr"), ("", "02-trial")]
    assert all(0 < trial.seconds < 60 and math.isfinite(trial.losses[-1]) for trial in found)


def test_trials_must_have_the_same_number_of_ranks(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^variant 'four': 4 ranks, but the others have 2; compare them in a run of"):
        trials.create(config_file(pictures, tmp_path, 2), {"four": ("parallel.devices=4",)}, tmp_path)


def test_two_steps_are_too_few_to_measure(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train\.steps: 2 steps are too few to compare; set 3 or more$"):
        trials.create(config_file(pictures, tmp_path, 2, train__steps=2), {"a": ()}, tmp_path)


def test_a_wrong_variant_is_refused_before_anything_starts(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.stepz: unknown field"):
        trials.create(config_file(pictures, tmp_path, 2), {"good": (), "wrong": ("train.stepz=3",)}, tmp_path)
    assert not list(tmp_path.glob("*/config.yaml"))


def test_a_view_of_what_was_there_is_no_activation() -> None:
    linear = nn.Linear(64, 64, bias=False)
    images = torch.zeros(8, 64)
    optimizer = torch.optim.SGD(linear.parameters())
    with Probe(linear, [], optimizer) as probe:
        linear(images.view(4, 2, 64)).sum().backward()
        optimizer.step()
    assert probe.activations == 8 * 64 * 4
    assert probe.gradients == 64 * 64 * 4
    assert probe.gathered == probe.sent == 0


def test_what_a_collective_wrote_is_no_activation_while_its_thread_still_holds_it() -> None:
    alone()
    summed = []

    class Sums(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            summed.append(torch.ones(4096))
            dist.all_reduce(summed[-1])
            return super().forward(images)

    linear = Sums(64, 64, bias=False)
    with Probe(linear, [], torch.optim.SGD(linear.parameters())) as probe:
        linear(torch.zeros(8, 64))
    assert probe.activations == 8 * 64 * 4
