"""The plan compared with a run, and what plans learn from runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.common import run
from trainer.config.amounts import GIB
from trainer.plan.calibration import Measured, keep, reserve_of
from trainer.plan.compare import describe_measured, describe_plan, plan_here, warning
from trainer.plan.fixes import planned
from trainer.plan.hardware import CARDS
from trainer.plan.phases import Reserve

CARD = CARDS["24gb"]
ONE = Measured(CARD.name, 1, 10 * GIB, 10 * GIB, 12 * GIB, 13 * GIB, 1.5)


def test_without_measurements_the_reserve_is_assumed(tmp_path: Path) -> None:
    assert reserve_of(tmp_path, CARD) == Reserve()
    assert reserve_of(tmp_path, None) == Reserve()


def test_what_runs_took_in_addition_to_their_tensors_is_what_plans_reserve(tmp_path: Path) -> None:
    for reserved in (11 * GIB, 12 * GIB, 15 * GIB):
        keep(tmp_path, replace(ONE, reserved=reserved, used=reserved + GIB))
    keep(tmp_path, replace(ONE, ranks=4, used=14 * GIB))
    keep(tmp_path, replace(ONE, gpu="another", reserved=40 * GIB))
    learned = reserve_of(tmp_path, CARD)
    assert learned.share == pytest.approx(0.2)  # the middle of 0.1, 0.2, 0.2 and 0.5
    assert (learned.context, learned.communication) == (GIB, GIB)
    cfg = run("flux2 klein-4b", "train.checkpointing=full")
    found = planned(cfg, CARD, tmp_path)
    assert found is not None
    for phase in found.phases:
        assert phase.need == pytest.approx(1.2 * phase.peak + 2 * GIB)
        assert phase.items[-1].sentence.endswith("as measured here")


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    keep(tmp_path, ONE)
    file = tmp_path / "plans" / "measured.jsonl"
    file.write_bytes(file.read_bytes() + file.read_bytes()[:30])
    assert reserve_of(tmp_path, CARD).share == pytest.approx(0.2)


def test_a_run_logs_its_plan_and_is_warned_when_it_will_not_fit(tmp_path: Path) -> None:
    cfg = run("flux2 dev", "train.checkpointing=full")
    found = plan_here(cfg, tmp_path, "some GPU", 24 * GIB)
    assert found is not None
    assert describe_plan(found) == (
        "plan: 24.19 GiB of tensors on each GPU at most in training; at most 26.61 in all, in training, of 24.00"
    )
    assert warning(cfg, found, tmp_path) == (
        "the plan needs 26.61 GiB on each GPU, which has 24.00: memory will probably run out; "
        "it would fit with quantize.format=nf4"
    )
    roomy = plan_here(cfg, tmp_path, "some GPU", 80 * GIB)
    assert roomy is not None
    assert warning(cfg, roomy, tmp_path) == ""


def test_a_model_that_was_not_traced_has_no_plan_and_stops_no_run(tmp_path: Path) -> None:
    cfg = run("flux2 dev", "model.path=nobody/nothing", "model.options.architecture=null")
    assert plan_here(cfg, tmp_path, "some GPU", 24 * GIB) is None


def test_after_some_steps_plan_and_measurement_are_in_one_line() -> None:
    assert describe_measured(replace(ONE, allocated=11 * GIB)) == (
        "memory: 10.00 GiB planned, 11.00 allocated at most (+10.0%), 12.00 reserved; 1.50 s per step"
    )
