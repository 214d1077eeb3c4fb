"""The least recompute with which a run fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.common import NOWHERE, run
from trainer.config.recompute import checkpointing_of
from trainer.plan.hardware import CARDS, Card
from trainer.plan.memory import MemoryPlan, plan_of
from trainer.plan.search import decide
from trainer.plan.search.decide import TIGHT
from trainer.plan.simulate.steps import ModelPass, PassInput
from trainer.plan.simulate.timeline import Memory, Sharding, simulate
from trainer.plan.store import known_model

AUTO = "train.checkpointing=auto"


def planned(model: str, card: Card, *fields: str) -> MemoryPlan:
    cfg = run(model, *fields)
    found = known_model(cfg, NOWHERE)
    assert found is not None
    return plan_of(cfg, found, card)


@pytest.mark.parametrize(
    ("model", "card", "fields"),
    [
        ("flux2 klein-4b", "80gb", ()),
        ("flux2 dev", "24gb", ("quantize.format=nf4", "data.resolution=512")),
        ("flux2 dev", "80gb", ("data.resolution=1024",)),
        ("flux2 dev", "32gb", ("quantize.format=int8", "data.resolution=1024")),
        ("sdxl base", "12gb", ("parallel.devices=1", "parallel.strategy=none")),
        ("causal_lm qwen3-8b", "24gb", ("quantize.format=nf4", "parallel.devices=1", "parallel.strategy=none")),
    ],
)
def test_auto_fits_and_one_block_less_does_not(model: str, card: str, fields: tuple[str, ...]) -> None:
    gpu = CARDS[card]
    found = planned(model, gpu, *fields, AUTO)
    assert found.training.need <= TIGHT * gpu.memory
    known = known_model(run(model, *fields), NOWHERE)
    assert known is not None
    blocks = sum(not unit.is_root for unit in known.table.training(PassInput(1, 1), 16, "none").units)
    amounts = {checkpointing_of(amount, blocks): amount for amount in range(2 * blocks + 1)}
    amount = amounts[str(found.checkpointing)]
    assert found == planned(model, gpu, *fields, f"train.checkpointing={found.checkpointing}")
    if amount:
        less = planned(model, gpu, *fields, f"train.checkpointing={checkpointing_of(amount - 1, blocks)}")
        assert less.training.need > TIGHT * gpu.memory


def test_auto_goes_from_nothing_to_everything_as_memory_shrinks() -> None:
    levels = [
        str(planned("flux2 dev", replace(CARDS["80gb"], memory=gib << 30), "quantize.format=nf4", AUTO).checkpointing)
        for gib in (140, 60, 50, 40, 12)
    ]
    assert levels[0] == "none" and levels[-1] == "full"
    assert [level.partition(" ")[0] for level in levels[1:-1]] == ["selective", "selective", "full"]


def test_without_a_gpu_a_plan_says_what_the_run_takes_at_least() -> None:
    cfg = run("flux2 dev", AUTO)
    found = known_model(cfg, NOWHERE)
    assert found is not None
    assert plan_of(cfg, found, None) == plan_of(run("flux2 dev", "train.checkpointing=full"), found, None)


def test_offloaded_blocks_are_decided_alone_and_together_with_recompute() -> None:
    alone = ("quantize.format=nf4", "quantize.encoders=true", "parallel.devices=1", "parallel.strategy=none")
    gpu = CARDS["24gb"]
    full = planned("flux2 dev", gpu, *alone, "train.checkpointing=full", "parallel.offload_blocks=auto")
    assert full.verdict == "fits" and isinstance(full.offload_blocks, int)
    fewer = f"parallel.offload_blocks={full.offload_blocks - 1}"
    assert planned("flux2 dev", gpu, *alone, "train.checkpointing=full", fewer).verdict != "fits"
    both = planned("flux2 dev", gpu, *alone, AUTO, "parallel.offload_blocks=auto")
    assert both.verdict == "fits"
    assert both.time is not None and full.time is not None
    assert both.time.low + both.time.high <= full.time.low + full.time.high
    assert planned("flux2 dev", CARDS["141gb"], *alone, AUTO, "parallel.offload_blocks=auto").offload_blocks == 0


def test_where_nothing_fits_everything_that_may_be_is_recomputed_and_offloaded() -> None:
    small = replace(CARDS["12gb"], memory=4 << 30)
    found = planned("flux2 dev", small, AUTO, "parallel.offload_blocks=auto")
    assert (found.checkpointing, found.offload_blocks, found.verdict) == ("full", 56, "does not fit")


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_blocks_are_offloaded_that_sampling_has_no_room_for(base: str) -> None:
    alone = (f"quantize.format={base}", "quantize.encoders=true", "parallel.devices=1", "parallel.strategy=none")
    drawn = ("sample.every=250", "sample.prompts=[a fox]")
    found = planned("qwen_image qwen-image", CARDS["24gb"], *alone, *drawn, AUTO, "parallel.offload_blocks=auto")
    assert found.verdict == "fits"  # training alone would fit with fewer


def test_two_decisions_take_few_simulated_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[ModelPass] = []

    def count(model_pass: ModelPass, sharding: Sharding) -> Memory:
        played.append(model_pass)
        return simulate(model_pass, sharding)

    monkeypatch.setattr(decide, "simulate", count)
    alone = ("quantize.format=nf4", "quantize.encoders=true", "parallel.devices=1", "parallel.strategy=none")
    for card in ("16gb", "24gb", "48gb"):
        played.clear()
        planned("flux2 dev", CARDS[card], *alone, AUTO, "parallel.offload_blocks=auto")
        assert 1 <= len(played) <= 40, card  # one by one, 57 blocks and 9 amounts of recompute would be 500


def test_a_step_has_the_passes_that_the_folder_of_the_largest_images_asks_for() -> None:
    """A folder's own number of images in a pass counts for the time of a step as that of all folders does."""
    fields = ("data.path=null", "train.batch_size=16", "train.checkpointing=full", "parallel.devices=1")
    own = "data.folders=[{path: closeups, micro_batch: 2}]"
    found = planned("flux2 klein-4b", CARDS["80gb"], *fields, own, "train.micro_batch=8")
    expected = planned(
        "flux2 klein-4b", CARDS["80gb"], *fields, "data.folders=[{path: closeups}]", "train.micro_batch=2"
    )
    assert (found.time, found.need) == (expected.time, expected.need)
    assert found.time is not None
