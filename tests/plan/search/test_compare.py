"""The plan compared with a run, and what plans learn from runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.gpu_report import Place
from tests.benchmarks.gpu_steps import Variant, learn
from tests.benchmarks.workload import KLEIN_4B, Bench
from tests.plan.common import run
from trainer.launcher.plan_command import lines
from trainer.plan.calibration import Measured, calibrate, keep, tells_speed
from trainer.plan.hardware import CARDS, Card, MeasuredStep, like
from trainer.plan.memory import Time
from trainer.plan.search.compare import describe_measured, describe_plan, plan_here, warning
from trainer.plan.search.fixes import planned
from trainer.plan.simulate.phases import Reserve
from trainer.system.amounts import GIB

CARD = CARDS["24gb"]
ONE = Measured(CARD.name, 1, 10 * GIB, 10 * GIB, 12 * GIB, 13 * GIB, 1.5)


def test_without_measurements_the_reserve_is_assumed(tmp_path: Path) -> None:
    assert calibrate(tmp_path, CARD)[1] == Reserve()
    assert calibrate(tmp_path, None) == (None, Reserve())


def test_what_runs_took_in_addition_to_their_tensors_is_what_plans_reserve(tmp_path: Path) -> None:
    for reserved in (11 * GIB, 12 * GIB, 15 * GIB):
        keep(tmp_path, replace(ONE, reserved=reserved, used=reserved + GIB))
    keep(tmp_path, replace(ONE, ranks=4, used=14 * GIB))
    keep(tmp_path, replace(ONE, gpu="another", reserved=40 * GIB))
    learned = calibrate(tmp_path, CARD)[1]
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
    assert calibrate(tmp_path, CARD)[1].share == pytest.approx(0.2)


def test_a_run_logs_its_plan_and_is_warned_when_it_will_not_fit(tmp_path: Path) -> None:
    cfg = run("flux2 dev", "train.checkpointing=full")
    found = plan_here(cfg, tmp_path, "some GPU", 24 * GIB)
    assert found is not None
    assert describe_plan(found) == (
        "plan: 23.50 GiB of tensors on each GPU at most in training; at most 25.89 in all, in training, of 24.00"
    )
    assert warning(cfg, found, tmp_path) == (
        "the plan needs 25.89 GiB on each GPU, which has 24.00: memory will probably run out; "
        "it would fit with train.checkpointing=auto parallel.offload_blocks=auto"
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


KLEIN = ("parallel.devices=1", "parallel.strategy=none", "train.checkpointing=none", "train.compile=false")
STEP = replace(ONE, seconds=0.5, flops=80e12)


def time_of(cache: Path, card: Card, *fields: str) -> Time:
    found = planned(run("flux2 klein-4b", *KLEIN, *fields), card, cache)
    assert found is not None and found.time is not None
    return found.time


def test_the_time_of_a_step_is_that_of_steps_like_it_on_this_machine(tmp_path: Path) -> None:
    assumed = time_of(tmp_path, CARD)
    assert assumed.source == "assumed"
    for seconds in (0.4, 0.5, 0.9):
        keep(tmp_path, replace(STEP, seconds=seconds))
    keep(tmp_path, replace(STEP, seconds=60.0, ranks=2))  # the ranks waited for each other
    keep(tmp_path, replace(STEP, seconds=70.0, flops=8000e12))  # another model
    keep(tmp_path, replace(STEP, seconds=80.0, flops=0.0))  # tells no speed
    keep(tmp_path, replace(STEP, seconds=90.0, gpu="another"))
    keep(tmp_path, replace(STEP, seconds=0.3, is_compiled=True))
    learned = time_of(tmp_path, CARD)
    assert learned.source == "measured here"
    assert learned.low == learned.high == pytest.approx(0.5, rel=0.01)
    assert time_of(tmp_path, CARD, "train.compile=true").low == pytest.approx(0.3, rel=0.01)
    assert str(learned) == "0.50 s per step"


def test_speeds_of_some_gpus_come_with_the_program_and_those_of_this_machine_win(tmp_path: Path) -> None:
    card = like("NVIDIA H100 80GB HBM3", 80 * GIB)
    assert (time_of(tmp_path, card).source, time_of(tmp_path, card).low) == ("measured", pytest.approx(0.294, rel=0.03))
    assert time_of(tmp_path, card, "train.compile=true").low == pytest.approx(0.204, rel=0.05)
    assert time_of(tmp_path, like("NVIDIA H100 PCIe", 80 * GIB)).source == "assumed"
    keep(tmp_path, replace(STEP, gpu=card.name, seconds=0.7))
    assert time_of(tmp_path, card).low == pytest.approx(0.7, rel=0.01)


@pytest.mark.parametrize(
    ("field", "strategy", "expected"),
    [
        ("train.compile=true", "none", True),
        ("quantize.format=nf4", "none", False),
        ("train.precision=fp32", "none", False),
        ("parallel.cpu_offload=true", "full", False),
        ("train.compile=true", "full", False),
    ],
)
def test_only_steps_that_do_nothing_else_tell_how_fast_a_gpu_computes(
    field: str, strategy: str, expected: bool
) -> None:
    assert (
        tells_speed(run("flux2 klein-4b", "parallel.devices=1", "parallel.strategy=auto", field), strategy) is expected
    )


def test_between_measured_steps_the_speed_follows_their_sizes_and_beyond_it_stays() -> None:
    steps = (MeasuredStep(10e12, 1.0), MeasuredStep(1000e12, 25.0), MeasuredStep(1000e12, 100.0, is_compiled=True))
    card = replace(CARD, measured=steps)
    speeds = [card.speed(flops, False) for flops in (1e12, 10e12, 100e12, 1000e12, 9000e12)]
    assert [(pytest.approx(rate / 1e12), source) for rate, source in filter(None, speeds)] == [
        (10, "scaled"),
        (10, "measured"),
        (20, "scaled"),
        (40, "measured"),
        (40, "scaled"),
    ]
    assert CARD.speed(1e12, False) is None


@pytest.mark.parametrize("model", ["sd3 sd3-medium", "flux2 klein-4b", "flux1 dev", "flux2 dev"])
def test_recompute_never_looks_faster(tmp_path: Path, model: str) -> None:
    card = like("NVIDIA H100 80GB HBM3", 80 * GIB)
    plain, again = (
        planned(
            run(model, "parallel.devices=1", "parallel.strategy=none", f"train.checkpointing={how}"), card, tmp_path
        )
        for how in ("none", "full")
    )
    assert plain and again and plain.time and again.time
    assert plain.time.low < again.time.low


def test_the_check_for_gpus_teaches_plans_the_speed_of_the_card(tmp_path: Path) -> None:
    place = Place("cpu", True, tmp_path)
    found = {"together_s": 0.45, "peak": 20.0 * GIB}
    for fields in ({}, {"quantize": {"format": "nf4"}}, {"parallel": {"strategy": "full"}}):
        cfg = Bench(tmp_path, KLEIN_4B).config(**Variant(fields).config_fields(place))
        learn(cfg, found, CARD.name, place)
    learned = time_of(place.cache, CARD)
    assert (learned.source, learned.low) == ("measured here", pytest.approx(0.45, rel=0.01))
    card, _ = calibrate(place.cache, CARD)
    assert card is not None and len(card.measured) == 1


def test_the_plan_in_words_says_where_a_speed_is_from(tmp_path: Path) -> None:
    cfg = run("flux2 klein-4b", *KLEIN)
    for source, said in (("assumed", "by an assumed speed"), ("measured here", "as measured in runs here")):
        found = planned(cfg, CARD, tmp_path)
        assert found is not None and found.time is not None and found.time.source == source
        assert f"s per step, {said}; computing decides" in "\n".join(lines(cfg, found))
        keep(tmp_path, STEP)
