"""What is proposed fits, and what is called largest is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.common import NOWHERE, run
from trainer.config.schema import RunConfig
from trainer.plan.hardware import CARDS
from trainer.plan.search.fixes import STEPS, largest, planned
from trainer.plan.search.ladder import Rung, ways_to_fit

TOO_LARGE = (
    ("flux2 dev", "24gb", ("parallel.devices=4",)),
    ("flux2 dev", "80gb", ("parallel.devices=1", "parallel.strategy=none")),
    ("flux2 dev", "24gb", ("parallel.devices=8", "train.micro_batch=4", "train.batch_size=32")),
    ("flux2 klein-4b", "12gb", ("parallel.devices=1", "parallel.strategy=none")),
    ("flux2 klein-9b", "24gb", ("parallel.devices=2", "parallel.strategy=ddp")),
    ("flux1 dev", "24gb", ("parallel.devices=2", "data.resolution=1536")),
    ("qwen_image qwen-image", "24gb", ("parallel.devices=2",)),
    ("sdxl base", "12gb", ("parallel.devices=4", "adapter.type=none", "train.micro_batch=4", "train.batch_size=16")),
    ("z_image z-image", "16gb", ("parallel.devices=1", "parallel.strategy=none")),
)


def applied(model: str, fields: tuple[str, ...], fix: Rung) -> RunConfig:
    """The run as somebody gets it who types the fix behind it."""
    names = [part.partition("=")[0] for part in str(fix).split()]
    kept = [field for field in fields if field.partition("=")[0] not in names]
    return run(model, *kept, *str(fix).split())


@pytest.mark.parametrize(("model", "card", "fields"), TOO_LARGE)
def test_every_proposed_fix_fits_when_it_is_applied(model: str, card: str, fields: tuple[str, ...]) -> None:
    cfg, gpu = run(model, *fields), CARDS[card]
    before = planned(cfg, gpu, NOWHERE)
    assert before is not None
    assert before.verdict == "does not fit"
    proposed = ways_to_fit(cfg, gpu, NOWHERE)
    assert proposed
    assert len({fix.effect for fix in proposed}) == 1
    for fix in proposed:
        after = planned(applied(model, fields, fix), gpu, NOWHERE)
        assert after is not None
        assert (after.verdict, after.need) == ("fits", fix.plan.need)


@pytest.mark.parametrize(("model", "card", "fields"), TOO_LARGE)
def test_the_fastest_fix_comes_first(model: str, card: str, fields: tuple[str, ...]) -> None:
    proposed = ways_to_fit(run(model, *fields), CARDS[card], NOWHERE)
    times = [fix.plan.time.low + fix.plan.time.high for fix in proposed if fix.plan.time]
    assert times == sorted(times)


def test_a_run_that_fits_needs_no_fix() -> None:
    assert ways_to_fit(run("flux2 klein-4b"), CARDS["80gb"], NOWHERE) == []


def test_pictures_are_made_smaller_only_where_nothing_else_helps() -> None:
    cfg = run("flux2 dev", "parallel.devices=1", "parallel.strategy=none", "adapter.type=none")
    assert "data.resolution" in ways_to_fit(cfg, CARDS["12gb"], NOWHERE)[0].changes
    for model, card, fields in TOO_LARGE:
        assert all(
            "data.resolution" not in fix.changes for fix in ways_to_fit(run(model, *fields), CARDS[card], NOWHERE)
        )


def test_the_result_is_changed_by_no_more_than_what_keeps_it_cannot_do() -> None:
    cfg = run("flux2 dev", "data.resolution=2048", "train.checkpointing=auto")
    assert [str(fix) for fix in ways_to_fit(cfg, CARDS["16gb"], NOWHERE)] == [
        "parallel.cpu_offload=true data.resolution=1024",
        "parallel.offload_blocks=auto data.resolution=1024",
    ]


@pytest.mark.parametrize("field", [field for field in STEPS if field != "data.length"])
def test_the_largest_value_fits_and_the_next_does_not(field: str) -> None:
    fields = ["train.checkpointing=full", "parallel.devices=2"]
    most = largest(run("flux2 klein-9b", *fields), CARDS["24gb"], NOWHERE)[field]
    for value, verdicts in ((most, {"fits"}), (most + STEPS[field], {"tight", "does not fit"})):
        more = [f"{field}={value}"] + ([f"train.batch_size={2 * value}"] if field == "train.micro_batch" else [])
        plan = planned(run("flux2 klein-9b", *fields, *more), CARDS["24gb"], NOWHERE)
        assert plan is not None
        assert plan.verdict in verdicts


def test_the_largest_value_is_found_where_a_block_less_takes_less_memory() -> None:
    """In full, backward of the last block is the fullest moment: `auto` leaves that block selective."""
    fields = ["train.checkpointing=auto", "parallel.devices=2", "parallel.strategy=full", "parallel.cpu_offload=true"]
    fields += ["train.micro_batch=2", "train.batch_size=24"]
    card = replace(CARDS["80gb"], memory=71_715_303_992)
    most = largest(run("causal_lm qwen3-1.7b", *fields), card, NOWHERE)["data.length"]
    for length, is_fitting in ((most, True), (most + STEPS["data.length"], False)):
        plan = planned(run("causal_lm qwen3-1.7b", *fields, f"data.length={length}"), card, NOWHERE)
        assert plan is not None
        assert (plan.verdict == "fits") == is_fitting
