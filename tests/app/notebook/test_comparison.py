"""Trials as tables: what is told of them, and against what it is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.notebook import comparison
from app.notebook.lessons import Bars
from trainer.launcher.jobs.variants import Cost, Trial
from trainer.plan.simulate.zero import ModelBytes, expected
from trainer.run.folder import RunDir

MILLION = 10**6
MODEL = ModelBytes(
    weights=40 * MILLION,
    gradients=40 * MILLION,
    optimizer_state=80 * MILLION,
    computed=40 * MILLION,
    root=4 * MILLION,
    block=9 * MILLION,
)


def trial(label: str, strategy: str, ranks: int = 4, is_offloaded: bool = False, shard_size: int = 2) -> Trial:
    """A trial whose ranks did exactly what the formula says."""
    formula = expected(MODEL, strategy, ranks, shard_size)
    cost = Cost(
        strategy=strategy, shard_size=shard_size, images=1, num_parameters=10 * MILLION, num_trained=10 * MILLION,
        is_offloaded=is_offloaded, model=MODEL, ranks=(formula,) * ranks, activations=(5 * MILLION,) * ranks,
        formula=formula,
    )  # fmt: skip
    return Trial(label, RunDir(Path("runs")), cost, 0.5, (2.0, 1.0), (1.5, 0.5))


ALL = [*(trial(name, name) for name in ("ddp", "grad_op", "full")), trial("offload", "full", is_offloaded=True)]
ALL.append(trial("hybrid", "hybrid"))


def test_the_summary_tells_bytes_saving_time_and_losses_of_each_strategy() -> None:
    assert str(comparison.summary(ALL)).splitlines() == [
        "strategy  ranks  MB per rank  in host memory  saved  s per step  loss before  loss after",
        "--------  -----  -----------  --------------  -----  ----------  -----------  ----------",
        "ddp           4       160.00                     0%       0.500        1.500       0.500",
        "grad_op       4        40.00                    75%       0.500        1.500       0.500",
        "full          4        40.00                    75%       0.500        1.500       0.500",
        "offload       4         0.00           40.00   100%       0.500        1.500       0.500",
        "hybrid        4        80.00                    50%       0.500        1.500       0.500",
    ]


def test_a_saving_is_against_ddp_on_as_many_ranks() -> None:
    two = [trial("ddp", "ddp", 2), trial("full", "full", 2)]
    assert comparison.saving(two, "full") == 0.5
    assert comparison.saving(two + ALL, "full") == 0.75


def test_what_is_counted_stands_beside_the_formula() -> None:
    head, _, _, grad_op, full, *_ = str(comparison.against_formula(ALL)).splitlines()
    assert head.split("  ")[-1] == "deviation"
    assert (
        " ".join(grad_op.split()) == "grad_op 4 10.00, 10.00 10.00, 10.00 20.00, 20.00 40.00, 40.00 60.00, 60.00 0.000%"
    )
    assert " ".join(full.split()) == "full 4 10.00, 10.00 10.00, 10.00 20.00, 20.00 13.00, 13.00 87.00, 87.00 0.000%"


@pytest.mark.parametrize("field", ["weights", "gradients", "optimizer_state", "gathered", "sent"])
def test_the_deviation_is_that_of_the_worst_rank_in_any_kind_of_bytes(field: str) -> None:
    ours = ALL[2]
    last = replace(ours.cost.ranks[-1], **{field: getattr(ours.cost.formula, field) * 1.05})
    worse = replace(ours, cost=replace(ours.cost, ranks=(*ours.cost.ranks[:-1], last)))
    assert comparison.deviation(ours) == 0
    assert comparison.deviation(worse) == pytest.approx(0.05)


def test_bytes_that_should_not_be_there_are_a_whole_deviation() -> None:
    alone = trial("none", "none", ranks=1)
    sends = replace(alone, cost=replace(alone.cost, ranks=(replace(alone.cost.ranks[0], sent=8.0),)))
    assert comparison.deviation(sends) == 1


def test_zero_s_table_of_seven_billion_parameters() -> None:
    rows = [line.split() for line in str(comparison.zero_table(7_000_000_000, (1, 8))).splitlines()[2:]]
    assert [row[-2:] for row in rows] == [["112.0", "112.0"], ["112.0", "26.2"], ["112.0", "14.0"]]


def test_activations_are_told_per_rank_and_per_image() -> None:
    first = str(comparison.activations(ALL)).splitlines()[2]
    assert " ".join(first.split()) == "ddp 4 1 5.00 5.00"


def test_levers_are_told_with_what_they_cost() -> None:
    first = str(comparison.levers([ALL[2]])).splitlines()[2]
    assert " ".join(first.split()) == "full 5.00 13.00 87.00 0.500 1.500 0.500"


def test_a_run_without_held_out_pictures_has_no_losses_of_them() -> None:
    quiet = replace(ALL[0], validation=())
    assert str(comparison.summary([quiet])).splitlines()[2].split()[-1] == "0.500"


def test_bars_are_as_long_as_their_parts_together() -> None:
    bars = comparison.memory(ALL[:3])
    assert " ".join(str(bars).splitlines()[-1].split()) == "full, 4 ranks 10.00 10.00 20.00 13.00 5.00 58.00"
    page = bars._repr_html_()
    assert page.count('role="img"') == 3
    assert 'title="optimizer state: 20.00 MB"' in page
    assert "58.0 MB" in page


def test_the_longest_bar_is_as_wide_as_there_is_room() -> None:
    page = Bars({"a <b>": {"x & y": 30.0, "z": 10.0}, "c": {"z": 20.0}}, 10.0, "MB")._repr_html_()
    widths = [float(piece.split("%")[0]) for piece in page.split("width: ")[1:] if "%" in piece[:8]]
    assert widths == [75.0, 25.0, 50.0]
    assert "a &lt;b&gt;" in page
    assert "x &amp; y" in page
