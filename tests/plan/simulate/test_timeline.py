"""The simulated pass: what must hold for every model, and figures that were traced."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.plan.common import NOWHERE, every_table, planned, run, shipped
from trainer.parallel.offload_order import offloaded_blocks
from trainer.plan.hardware import CARDS
from trainer.plan.search import fixes
from trainer.plan.simulate.steps import ModelPass, Parameter, PassInput, Unit, grains
from trainer.plan.simulate.tables import PassTable
from trainer.plan.simulate.timeline import Memory, Sharding, _groups, _Simulation, least, simulate
from trainer.system.amounts import GIB

TABLES = shipped()
EVERY = every_table()
SIZES = (PassInput(512 * 512, 1), PassInput(1024 * 1024, 1), PassInput(1024 * 1024, 4), PassInput(1536 * 1536, 1))
FULL = Sharding(ranks=4)


def peak(model_pass: ModelPass, sharding: Sharding = FULL) -> float:
    return simulate(model_pass, sharding).peak


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("table", EVERY)
def test_more_ranks_that_share_a_copy_never_need_more_memory_each(table: PassTable, checkpointing: str) -> None:
    for size in SIZES:
        model_pass = table.training(size, 16, checkpointing)
        peaks = [peak(model_pass, Sharding(ranks=ranks)) for ranks in (2, 4, 8)]
        assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("table", EVERY)
def test_recomputing_never_needs_more_than_one_block_s_input_above_keeping(table: PassTable) -> None:
    for size in SIZES:
        again = table.training(size, 16, "full")
        largest_input = max(mark.change for mark in again.marks if mark.moment == "forward_end")
        assert peak(again) <= peak(table.training(size, 16, "none")) + largest_input


@pytest.mark.parametrize("checkpointing", ["none", "full", 2])
@pytest.mark.parametrize("table", EVERY)
def test_a_larger_batch_never_needs_less_memory(table: PassTable, checkpointing: str | int) -> None:
    for pixels in (256 * 256, 1024 * 1024):
        peaks = [peak(table.training(PassInput(pixels, batch), 16, checkpointing)) for batch in (1, 2, 4, 8)]
        # Every n-th block is put together from two traces, which is about a thousandth off.
        room = 1e-3 if checkpointing == 2 else 0.0
        assert all(later >= earlier * (1 - room) for earlier, later in pairwise(peaks))


@pytest.mark.parametrize("table", EVERY)
def test_what_makes_up_the_peak_adds_up_to_it(table: PassTable) -> None:
    memory = simulate(table.training(SIZES[1], 16, "full"), FULL)
    assert sum(memory.items.values()) == pytest.approx(memory.peak)


@pytest.mark.parametrize("table", EVERY)
def test_a_pass_gives_back_all_that_it_took_but_the_gradients(table: PassTable) -> None:
    model_pass = table.training(SIZES[0], 16, "none")
    twice = simulate(model_pass, Sharding(ranks=2, passes=2, is_reduced_each_pass=True))
    assert twice.flops == pytest.approx(2 * simulate(model_pass, Sharding(ranks=2)).flops)
    thrice = simulate(model_pass, Sharding(ranks=2, passes=3, is_reduced_each_pass=True))
    assert thrice.peak == pytest.approx(twice.peak)


# Of a tracer of another program. It split norms and activation functions, which are one kernel on CUDA, into several:
# what it counted is an upper bound where they decide the peak.
@pytest.mark.parametrize(
    ("fields", "gib", "least"),
    [
        ((), 93.6, 0.87),
        (("train.checkpointing=full",), 24.2, 0.96),
        (("data.resolution=512",), 43.7, 0.91),
        (("data.resolution=512", "train.checkpointing=full"), 22.5, 0.99),
        (("train.checkpointing=full", "parallel.cpu_offload=true"), 8.9, 0.92),
    ],
)
def test_the_figures_of_an_independent_tracer_for_the_largest_model_on_four_ranks(
    fields: tuple[str, ...], gib: float, least: float
) -> None:
    assert least <= planned("flux2 dev", *fields).training.peak / GIB / gib <= 1.01


@pytest.mark.parametrize(
    ("model", "fields", "gib"),
    [
        ("flux2 dev", ("train.checkpointing=full",), 23.43),
        ("flux2 dev", ("parallel.devices=8", "train.checkpointing=full"), 15.84),
        ("flux2 klein-4b", ("parallel.devices=1", "parallel.strategy=none"), 21.99),
    ],
)
def test_what_was_allocated_on_an_h100_was_planned_within_half_a_percent(
    model: str, fields: tuple[str, ...], gib: float
) -> None:
    """Measured on 2026-11-26 (tests/benchmarks/RESULTS.md, GPU)."""
    assert planned(model, *fields).training.peak / GIB == pytest.approx(gib, rel=0.005)


@pytest.mark.parametrize(
    ("fields", "mib"),
    [
        ((), 9367.2),
        (("adapter.rank=256",), 14091.5),
        (("adapter.rank=128", "train.batch_size=8"), 12357.4),
        (("parallel.devices=1", "parallel.nodes=2", "parallel.rendezvous=first:29500"), 9322.7),
    ],
)
def test_copies_that_train_little_hold_what_a_traced_step_held(fields: tuple[str, ...], mib: float) -> None:
    """Traced on 2026-11-27 (DECISIONS 189): one group, whose gradients wait for the root; a group of each block."""
    usual = ("parallel.devices=2", "parallel.strategy=ddp", "train.batch_size=2", "train.checkpointing=full")
    given = {field.partition("=")[0] for field in fields}
    kept = [field for field in usual if field.partition("=")[0] not in given]
    assert planned("flux2 klein-4b", *kept, *fields).training.peak / 2**20 == pytest.approx(mib, rel=0.003)


BASE, TRAINED = Parameter(64, 64, 2, 2, False), Parameter(4, 64, 4, 2, True)
CAST = Parameter(64, 64, 4, 2, False)
"""A frozen weight that FSDP rounds, as one of those that get no gradient in a full fine-tune."""


@pytest.mark.parametrize(
    ("base", "expected"),
    [((BASE,), {0: 1}), ((BASE, CAST), {0: 1}), ((CAST,), {}), ((), {})],
    ids=["frozen", "some rounded", "all rounded", "all trained"],
)
def test_only_the_first_component_is_one_group_and_only_if_fsdp_leaves_weights_alone(
    base: tuple[Parameter, ...], expected: dict[int, int]
) -> None:
    """As `parallelize.trains_few_parameters`; states of text encoders are taken by hooks."""
    units = [
        Unit(name, (*base, TRAINED), is_root)
        for component in ("unet", "text_encoder")
        for name, is_root in ((f"{component}.block", False), (component, True))
    ]
    assert _groups(ModelPass(tuple(units), (), 0), Sharding(ranks=1, replicas=2)).roots == expected


def test_the_bytes_that_are_gathered_are_those_of_the_model_twice_but_the_root() -> None:
    found = planned("flux2 dev", "train.checkpointing=full")
    assert found.received / GIB == pytest.approx(0.75 * (120.4 - 1.52 + 0.37), rel=0.01)


def test_gathered_blocks_stay_under_grad_op_and_go_under_full() -> None:
    full, grad_op = (
        planned("flux2 dev", f"parallel.strategy={strategy}", "train.checkpointing=full")
        for strategy in ("full", "grad_op")
    )
    assert grad_op.training.peak > full.training.peak + 40 * GIB
    assert grad_op.received < 0.6 * full.received


def test_blocks_kept_on_some_ranks_lie_between_freed_and_kept_ones() -> None:
    kept = [
        planned("flux2 klein-4b", "train.checkpointing=full", f"parallel.reshard_after_forward={value}").training.peak
        for value in ("true", "2", "false")
    ]
    assert kept == sorted(kept)
    assert kept[0] < kept[1] < kept[2]


ONE = Sharding(is_sharded=False)


def frozen_bytes(model_pass: ModelPass, numbers: Iterable[int]) -> float:
    """The frozen bytes of some units on one rank."""
    units = [model_pass.units[number] for number in numbers]
    return sum(p.count * grains(p.rows * p.row * p.stored) for u in units for p in u.parameters if not p.is_trained)


def blocks_of(model_pass: ModelPass) -> list[int]:
    """The units with frozen weights but the roots."""
    units = enumerate(model_pass.units)
    return [n for n, unit in units if not unit.is_root and any(not p.is_trained for p in unit.parameters)]


@pytest.mark.parametrize("sharding", [ONE, FULL, replace(FULL, reshard=False)], ids=["one", "full", "grad_op"])
@pytest.mark.parametrize("table", EVERY)
def test_more_offloaded_blocks_never_need_more_memory_and_only_a_few_blocks_less_than_all(
    table: PassTable, sharding: Sharding
) -> None:
    model_pass = table.training(SIZES[0], 16, "full")
    blocks = blocks_of(model_pass)
    none, *some, everything = (
        peak(model_pass, replace(sharding, offload_blocks=share)) for share in (0, 0.25, 0.5, 0.75, 1.0)
    )
    largest = max((frozen_bytes(model_pass, [block]) for block in blocks), default=0)
    assert all(value <= none for value in (*some, everything))
    saved = none - everything
    assert saved <= frozen_bytes(model_pass, blocks) / sharding.ranks * 1.01
    if sharding is ONE and blocks:
        assert saved >= frozen_bytes(model_pass, blocks) - 2 * largest - 1  # peaks are sums of fractions of a byte


def test_what_is_offloaded_is_pinned_once_and_copied_twice_in_a_step_but_for_the_two_that_are_kept() -> None:
    (table,) = (
        table for model, key, table in shipped() if model == "flux2-klein-4b" and "nf4" in key and "lora" in key
    )
    model_pass = table.training(SIZES[0], 16, "full")
    chosen = [blocks_of(model_pass)[number] for number in offloaded_blocks(5, len(blocks_of(model_pass)))]
    for passes in (1, 3):
        found = simulate(model_pass, replace(ONE, offload_blocks=5, pins_exactly=True, passes=passes))
        kept = frozen_bytes(model_pass, [chosen[0], chosen[-1]])
        assert found.copied == passes * (2 * frozen_bytes(model_pass, chosen) - kept)
        assert found.host == pytest.approx(frozen_bytes(model_pass, chosen), rel=0.15)
    gathered = simulate(model_pass, Sharding(2, reshard=False, offload_blocks=5))
    whole = frozen_bytes(model_pass, chosen)
    assert 2 * gathered.copied == pytest.approx(whole, rel=1e-4), "backward reads what forward gathered"


def test_a_model_of_32_billion_weights_in_nf4_is_trained_on_one_card_of_24_gb_with_half_its_blocks_offloaded() -> None:
    one = ("parallel.devices=1", "parallel.strategy=none", "quantize.format=nf4", "quantize.encoders=true")
    verdicts = {}
    for share in (0, 0.5):
        cfg = run("flux2 dev", *one, "train.checkpointing=full", f"parallel.offload_blocks={share}")
        plan = fixes.planned(cfg, CARDS["24gb"], NOWHERE)
        assert plan is not None and plan.time is not None
        verdicts[share] = plan.verdict
    assert verdicts == {0: "does not fit", 0.5: "fits"}
    host = next(item for item in plan.host if item.name == "offloaded")
    assert host.size / GIB == pytest.approx(7.8, rel=0.02)
    assert plan.time.high - plan.time.low == pytest.approx(
        (2 * host.size - 0.7 * GIB) / CARDS["24gb"].host_link, rel=0.05
    )


def test_every_way_of_sharding_computes_the_same() -> None:
    found = [
        planned("flux2 klein-4b", f"parallel.strategy={strategy}", "train.batch_size=4").flops
        for strategy in ("full", "grad_op", "hybrid", "ddp")
    ]
    assert all(a == pytest.approx(b) for a, b in itertools.pairwise(found))


SPREAD = (
    Sharding(),
    Sharding(is_sharded=False),
    Sharding(ranks=4),
    Sharding(ranks=4, reshard=False),
    Sharding(ranks=1, replicas=4),
    Sharding(ranks=2, replicas=2, is_reduced_each_pass=True),
    Sharding(ranks=4, offload=True, is_reduced_each_pass=True),
    Sharding(ranks=1, offload=True),
    Sharding(ranks=2, offload_blocks=0.5),
    Sharding(is_sharded=False, offload_blocks=5),
)


def one_by_one(model_pass: ModelPass, sharding: Sharding) -> Memory:
    simulation = _Simulation(model_pass, sharding)
    for _ in range(2 if simulation.residency else 1):
        simulation.restart()
        for number in range(sharding.passes):
            simulation.one_pass(is_last=number == sharding.passes - 1)
    return simulation.memory


@pytest.mark.parametrize("sharding", SPREAD)
def test_passes_that_repeat_are_counted_as_if_each_were_simulated(sharding: Sharding) -> None:
    for _, key, table in TABLES[::9]:
        model_pass = table.training(SIZES[0], 16, 2)
        for passes in (1, 2, 3, 4, 5, 9):
            spread = replace(sharding, passes=passes)
            found, wanted = vars(simulate(model_pass, spread)), vars(one_by_one(model_pass, spread))
            assert (found.pop("when"), found.pop("items")) == (wanted.pop("when"), pytest.approx(wanted.pop("items")))
            assert found == pytest.approx(wanted), key


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("sharding", SPREAD)
def test_no_simulation_is_below_the_least(sharding: Sharding, passes: int) -> None:
    for _, key, table in TABLES[::4]:
        model_pass = table.training(SIZES[1], 16, "full")
        spread = replace(sharding, passes=passes)
        found, bound = simulate(model_pass, spread), least(model_pass, spread)
        assert bound.flops == pytest.approx(found.flops), key
        for name in ("peak", "gathered", "scattered", "reduced", "copied"):
            assert vars(bound)[name] <= vars(found)[name] * (1 + 1e-9), (key, name)


@pytest.mark.parametrize("ranks", [1, 4])
def test_offloaded_shards_are_copied_once_for_each_time_that_a_block_is_gathered(ranks: int) -> None:
    (table,) = [table for model, key, table in TABLES if (model, key) == ("flux2-klein-4b", "lora none bf16")]
    model_pass = table.training(SIZES[0], 16, "full")
    found = simulate(model_pass, Sharding(ranks=ranks, offload=True))
    times = [(1 if unit.is_root else 2, unit) for unit in model_pass.units]
    shards = sum(n * p.count * p.shard_rows(ranks) * p.row * p.stored for n, unit in times for p in unit.parameters)
    assert found.copied == pytest.approx(shards, rel=1e-4)
