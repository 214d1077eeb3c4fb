"""The ladder of what saves memory: each rung needs less, and the result stays as long as it can."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.common import NOWHERE, run
from trainer.config.load import load_config, load_config_text, stage_configs
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.plan.hardware import CARDS, Card, like
from trainer.plan.memory import MemoryPlan, plan_of
from trainer.plan.search.decide import TIGHT, decided, thriftiest
from trainer.plan.search.fixes import changed, planned
from trainer.plan.search.ladder import (
    CPU,
    EFFECTS,
    LEAST_MISSING,
    LEAST_SAVED,
    Rung,
    next_rung,
    nothing_left,
    ways_to_fit,
)
from trainer.plan.store import known_model
from trainer.system.amounts import GIB
from trainer.system.installation import PRESETS

QUICK = ("flux2-dev-lora-nf4-1x24gb", "flux1-dev-lora-nf4-1x12gb", "sdxl-full-4gpu")
ON_DISK = "demo-base-cpu"
"""The preset whose model is a folder that is made first."""
NAMES = sorted({file.stem for file in PRESETS.glob("*.yaml")} - {ON_DISK})
MOST_RUNGS = 60


def preset(name: str, *fields: str) -> RunConfig:
    """A preset of one stage, or the last stage of one."""
    return stage_configs(load_config(PRESETS / f"{name}.yaml", fields).config)[-1]


def plan(cfg: RunConfig, card: Card) -> MemoryPlan:
    found = planned(cfg, card, NOWHERE)
    assert found is not None
    return found


def climbed(cfg: RunConfig, rung: Rung) -> RunConfig:
    """The config as somebody gets it who types the rung."""
    text = cfg.model_dump_json()
    return load_config_text(text, rung.settings, Path("run.yaml")).config


def walk(cfg: RunConfig, card: Card) -> Iterator[tuple[RunConfig, MemoryPlan, Rung]]:
    """Yield (config that ran out of memory, its plan, the next rung) until nothing is left."""
    for _ in range(MOST_RUNGS):
        now = plan(cfg, card)
        cfg = decided(cfg, now.checkpointing, now.offload_blocks)
        rung = next_rung(cfg, card, NOWHERE)
        if rung is None:
            return
        yield cfg, now, rung
        cfg = climbed(cfg, rung)
    raise AssertionError(f"more than {MOST_RUNGS} rungs")


def least_with_the_same_result(cfg: RunConfig, card: Card) -> float:
    """The least that training needs with any combination of what leaves the result, tried one by one."""
    groups = {
        "parallel.strategy": (None, "full"),
        "train.micro_batch": (None, 1),
        "parallel.prefetch_forward": (None, 0),
        "train.checkpointing": (None, "full", "auto"),
        "parallel.offload_blocks": (None, 1.0) if card.name != CPU else (None,),
        "parallel.cpu_offload": (None, True) if card.name != CPU else (None,),
    }
    needs = []
    for values in itertools.product(*groups.values()):
        choice = {field: value for field, value in zip(groups, values, strict=True) if value is not None}
        if choice.get("parallel.cpu_offload"):
            choice["parallel.offload_blocks"] = 0
        if "parallel.prefetch_forward" in choice:
            choice["parallel.prefetch_backward"] = 0
        other = changed(cfg, choice)
        model = known_model(cfg, NOWHERE)
        if other and model:
            found = plan_of(thriftiest(other, model), model, card)
            if found.need <= max(plan(cfg, card).need, TIGHT * card.memory):
                needs.append(found.training.need)
    return min(needs)


def check_walk(cfg: RunConfig, card: Card) -> int:
    """Walk down and check each rung. Returns how many there are."""
    count = 0
    for count, (before, now, rung) in enumerate(walk(cfg, card), 1):  # noqa: B007
        after = plan(climbed(before, rung), card)
        assert after.training.need == pytest.approx(rung.need)
        assert after.training.need < now.training.need - LEAST_SAVED * now.training.peak
        assert after.need <= max(now.need, TIGHT * card.memory)
        assert {setting.partition("=")[0] for setting in rung.settings} >= {
            "train.checkpointing",
            "parallel.offload_blocks",
        }
        assert not any(setting.endswith("=auto") for setting in rung.settings)
        if rung.effect != "same":
            least = least_with_the_same_result(before, card)
            assert least >= now.training.need - LEAST_SAVED * now.training.peak, rung.settings
    return count


@pytest.mark.parametrize("card", ["12gb", pytest.param("24gb", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", QUICK)
def test_each_rung_needs_less_and_changes_the_result_only_where_nothing_else_is_left(name: str, card: str) -> None:
    assert check_walk(preset(name), CARDS[card]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", NAMES)
def test_each_preset_goes_down_the_ladder_on_each_card(name: str, card: str) -> None:
    assert check_walk(preset(name), CARDS[card])


@pytest.mark.parametrize(
    ("name", "memory"), [("flux2-dev-lora-nf4-1x24gb", 23.50), ("flux1-dev-lora-nf4-1x12gb", 11.77)]
)
def test_after_memory_ran_out_the_change_saves_what_was_missing(name: str, memory: float) -> None:
    """`train.checkpointing=full` alone left fewer blocks offloaded: 21.23 GiB became 21.57, and 10.83 stayed 10.83."""
    cfg, card, missing = preset(name), like("a GPU", int(memory * GIB)), 2 * GIB
    before = plan(cfg, card)
    rung = next_rung(cfg, card, NOWHERE, missing)
    assert rung is not None
    after = plan(load_config(PRESETS / f"{name}.yaml", rung.settings).config, card)
    assert after.training.need <= min(TIGHT * card.memory, before.training.need) - missing
    assert rung.effect == "same"


@pytest.mark.parametrize(
    "name",
    [
        "flux2-dev-lora-4gpu",
        "flux2-dev-lora-nf4-1x24gb",
        "sdxl-full-4gpu",
        "z-image-lora-1gpu",
        "bagel-7b-mot-lora-nf4-1x24gb",
        "qwen3-8b-qlora-1x24gb",
    ],
)
def test_pictures_and_texts_stay_as_large_while_weights_can_be_offloaded(name: str) -> None:
    """With full recompute and one sample per pass the next change was smaller pictures, or shorter texts."""
    cfg = preset(name, "train.checkpointing=full", "train.micro_batch=1", "parallel.offload_blocks=0")
    rung = next_rung(cfg, CARDS["24gb"], NOWHERE)
    assert rung is not None and rung.effect == "same"


def test_no_more_is_recomputed_than_is_missing() -> None:
    """A few GiB were missing on an H100, and the retry saved 47."""
    card = CARDS["80gb"]
    before = plan(preset("flux2-dev-lora-4gpu"), card)
    rung = next_rung(preset("flux2-dev-lora-4gpu"), card, NOWHERE, 5 * GIB)
    assert rung is not None
    assert 5 * GIB <= before.training.need - rung.need < 8 * GIB


def test_where_it_is_not_known_what_was_missing_a_share_of_the_memory_is_saved() -> None:
    card = CARDS["80gb"]
    before = plan(preset("flux2-dev-lora-4gpu"), card)
    rung = next_rung(preset("flux2-dev-lora-4gpu"), card, NOWHERE)
    assert rung is not None
    assert rung.need <= before.training.need - LEAST_MISSING * card.memory


def test_where_samples_ran_out_of_memory_their_part_of_the_run_needs_less() -> None:
    alone = ("parallel.devices=1", "parallel.strategy=none", "train.checkpointing=full")
    drawn = ("sample.every=250", "sample.prompts=[a fox]", "sample.size=[2048,2048]")
    cfg, card = run("flux2 klein-4b", *alone, *drawn), CARDS["24gb"]
    needs = {phase.name: phase.need for phase in plan(cfg, card).phases}
    found = next_rung(cfg, card, NOWHERE, state="sampling")
    assert found is not None and found.plan is not None
    assert found.need == next(phase.need for phase in found.plan.phases if phase.name == "sampling")
    assert found.need < needs["sampling"]


def test_a_retry_without_asking_never_changes_the_result() -> None:
    cfg, card = preset("flux1-dev-lora-nf4-1x12gb"), CARDS["12gb"]
    while rung := next_rung(cfg, card, NOWHERE, most="same"):
        cfg = climbed(cfg, rung)
    other = next_rung(cfg, card, NOWHERE)
    assert other is None or EFFECTS.index(other.effect) > 0


def test_a_card_that_is_too_small_for_the_last_rung_is_told_what_else_there_is() -> None:
    small = replace(CARDS["12gb"], memory=2 * GIB)
    cfg = preset("sdxl-full-4gpu")
    assert isinstance(cfg.adapter, NoAdapter)
    assert ways_to_fit(cfg, small, NOWHERE) == []
    assert nothing_left(cfg) == (
        "nothing that is searched makes it fit: take more GPUs, larger ones, a smaller model, or an adapter in place "
        "of all weights (adapter.type: lora)"
    )


def test_a_run_on_the_cpu_is_told_of_host_memory_in_place_of_gpus() -> None:
    cfg = preset("quickstart", "parallel.device=cpu", "parallel.devices=2")
    assert nothing_left(cfg).endswith(
        ": take more host memory, fewer ranks on this machine (parallel.devices), or a smaller model"
    )
    alone = nothing_left(preset("quickstart", "parallel.device=cpu", "parallel.devices=1"))
    assert alone.endswith(": take more host memory, or a smaller model")


def test_on_the_cpu_nothing_is_offloaded_for_it_would_stay_in_host_memory() -> None:
    cfg, card = preset("quickstart", "train.micro_batch=4", "train.batch_size=4"), like(CPU, 2 * GIB)
    settings = [setting for _, _, rung in walk(cfg, card) for setting in rung.settings]
    assert settings
    assert not any(setting == "parallel.cpu_offload=true" for setting in settings)
    assert all(setting == "parallel.offload_blocks=0" for setting in settings if "offload_blocks" in setting)


def test_without_a_plan_all_is_recomputed_and_offloaded_and_then_passes_become_smaller() -> None:
    fields = ("model.family=flux2", "model.path=tiny", "train.batch_size=6", "train.micro_batch=6")
    cfg = load_config_text("data: {path: .}", fields, Path("run.yaml")).config

    def rungs(card: Card) -> Iterator[tuple[str, ...]]:
        now = cfg
        while rung := next_rung(now, card, NOWHERE):
            assert rung.plan is None
            yield rung.settings
            now = climbed(now, rung)

    both = ("train.checkpointing=full", "parallel.offload_blocks=1.0")
    sizes = [f"train.micro_batch={size}" for size in (3, 2, 1)]
    alone = ("train.checkpointing=full", "parallel.offload_blocks=0")
    last = ("parallel.cpu_offload=true", *alone)
    assert list(rungs(CARDS["24gb"])) == [both, *((size, *both) for size in sizes), last]
    assert list(rungs(like(CPU, GIB))) == [alone, *((size, *alone) for size in sizes)]
