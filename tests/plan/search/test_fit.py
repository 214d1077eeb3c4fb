"""The search for the fastest config that fits finds what trying everything finds, and keeps what it must."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from tests.plan.common import NOWHERE, run
from trainer.config import yaml12
from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.plan.hardware import named
from trainer.plan.memory import MemoryPlan
from trainer.plan.search import choices
from trainer.plan.search.choices import BLOCKS_APART, KEPT, SHARES, kept_fields
from trainer.plan.search.fit import Fit, Target, fit
from trainer.plan.search.fixes import planned
from trainer.plan.store import recorded_formats
from trainer.system.amounts import GIB
from trainer.system.errors import InputError
from trainer.system.installation import PRESETS

TEN = (
    "flux2-dev-lora-4gpu",
    "flux2-dev-lora-nf4-2x24gb",
    "flux2-klein-9b-lora-2gpu",
    "flux2-klein-4b-lora-1gpu",
    "flux1-dev-lora-nf4-1x12gb",
    "qwen-image-lora-2gpu",
    "bagel-7b-mot-full-8x80gb",
    "sdxl-full-4gpu",
    "sdxl-locon-text-encoders-2gpu",
    "qwen3-8b-qlora-1x24gb",
)
MACHINES = {"12gb": (1,), "24gb": (4, 2, 1), "80gb": (8, 4)}
"""{card: numbers of them in a machine, the most first}"""
FEW = (
    ("flux2-klein-4b-lora-1gpu", "1x12gb"),
    ("sdxl-full-4gpu", "1x24gb"),
)
SOME_FIRST = (
    "full 4, none",
    "full 40, none",
    "selective 16",
    "selective 52",
    "full 28, selective",
    "full 40, selective",
)
"""Some mixtures of recompute, in pairs of kind and number of blocks: the search takes all, and not all can be tried."""
OFFLOAD = frozenset({"parallel.cpu_offload", "parallel.offload_blocks"})
WITHIN = 1.02
"""Times the least time of a step that a proposal may take."""


def preset(name: str) -> RunConfig:
    return load_config(PRESETS / f"{name}.yaml").config


def searched(cfg: RunConfig, machine: str, **more: Any) -> Fit:
    hardware = named(machine)
    assert hardware.count is not None
    return fit(cfg, Target(hardware.card, hardware.count, more.pop("kept", kept_fields(KEPT)), **more), NOWHERE)


def everything(cfg: RunConfig, machine: str) -> Iterator[MemoryPlan]:
    """The plans of all configs with the same result, from the definition of the space: no bounds, no bisection.

    They are those of fewer such GPUs too, where the machine has 2, 4 or 8.
    """
    hardware = named(machine)
    own = cfg.quantize
    assert hardware.count is not None and cfg.parallel.nodes == 1
    quantized = [own.model_copy(update={"format": "int8", "formats": formats}) for formats in ({}, own.formats)]
    if own.format == "nf4":
        quantized += [own.model_copy(update={"formats": formats}) for formats in ({}, own.formats)]
    bases = [own] if own.format == "none" else []
    bases += [type(own)()] + ([] if isinstance(cfg.adapter, NoAdapter) else quantized)
    devices = [number for number in range(1, hardware.count + 1) if hardware.count % number == 0]
    blocks = ("none", "full", *BLOCKS_APART, *SOME_FIRST)
    axes = (devices, ("none", "full", "grad_op", "ddp"), bases, (False, True), blocks, (0, *SHARES, True))
    for number, strategy, base, encoders, every, offload in itertools.product(*axes):
        of_a_rank = math.ceil(cfg.train.batch_size / number)
        for size in [size for size in range(1, of_a_rank + 1) if of_a_rank % size == 0]:
            tree = cfg.model_dump()
            tree["quantize"] = base.model_dump() | {"encoders": base.encoders or encoders}
            tree["train"] |= {"checkpointing": every, "micro_batch": size}
            tree["parallel"] |= {"devices": number, "strategy": strategy, "cpu_offload": offload is True}
            tree["parallel"]["offload_blocks"] = 0 if offload is True else offload
            tree["parallel"] |= {"prefetch_forward": 0, "prefetch_backward": 0}
            try:
                plan = planned(RunConfig.model_validate(tree), hardware.card, NOWHERE)
            except ValidationError:
                continue
            if plan is not None:
                yield plan


@pytest.mark.slow
@pytest.mark.parametrize("card", MACHINES)
@pytest.mark.parametrize("name", TEN)
def test_no_config_of_ten_presets_that_fits_six_machines_is_faster(name: str, card: str) -> None:
    cfg, (most, *_) = preset(name), MACHINES[card]
    fitting = [plan for plan in everything(cfg, f"{most}x{card}") if plan.verdict == "fits" and plan.time]
    for count in MACHINES[card]:
        proposals = searched(cfg, f"{count}x{card}").proposals
        seconds = [plan.time.middle for plan in fitting if plan.time and plan.ranks <= count]
        assert bool(proposals) == bool(seconds)
        if proposals:
            assert proposals[0].seconds <= WITHIN * min(seconds)
            assert proposals[0].plan.verdict == "fits"


def changed(found: Fit) -> set[str]:
    return {field for proposal in found.proposals for field in proposal.changes}


@pytest.mark.parametrize(("name", "machine"), FEW)
def test_the_plan_of_a_proposal_is_that_of_its_config_and_of_what_it_says_to_change(name: str, machine: str) -> None:
    cfg, card = preset(name), named(machine).card
    for proposal in searched(cfg, machine).proposals:
        assert planned(proposal.config, card, NOWHERE) == proposal.plan
        tree = cfg.model_dump()
        for field, (before, now) in proposal.changes.items():
            section, key = field.split(".")
            assert (tree[section][key], before) == (before, tree[section][key]) and before != now
            tree[section][key] = now
        assert RunConfig.model_validate(tree) == proposal.config
        assert proposal.config.train.batch_size == cfg.train.batch_size


def test_the_proposals_are_different_ways_and_the_fastest_comes_first() -> None:
    proposals = searched(preset("flux2-dev-lora-8gpu"), "8x80gb").proposals
    assert len(proposals) == 3
    assert [proposal.seconds for proposal in proposals] == sorted(proposal.seconds for proposal in proposals)
    ways = {
        (p.plan.strategy, p.config.quantize.format, p.config.parallel.cpu_offload, p.config.train.checkpointing)
        for p in proposals
    }
    assert len(ways) == 3
    first = proposals[0]
    assert first.per_second == pytest.approx(8 / first.seconds)
    assert first.hours(1000) == pytest.approx(first.seconds / 3.6)
    assert first.price(1000, 2.5) == pytest.approx(first.hours(1000) * 8 * 2.5)


def test_what_changes_the_result_is_kept() -> None:
    tight = ("parallel.devices=1", "parallel.strategy=none")
    for machine in ("1x12gb", "1x24gb"):
        found = searched(run("flux2 klein-9b", *tight), machine)
        assert found.proposals
        assert not changed(found) & {"data.resolution", "adapter.rank"}
        assert all(proposal.config.quantize.format in ("none", "int8") for proposal in found.proposals)


def test_a_base_of_4_bits_is_proposed_where_the_preset_has_one_or_the_user_allows_it() -> None:
    cfg = run("flux2 klein-9b", "parallel.devices=1", "parallel.strategy=none")
    fixed = OFFLOAD
    assert searched(cfg, "1x12gb", given=fixed).proposals == ()
    allowed = searched(cfg, "1x12gb", given=fixed, kept=kept_fields(["resolution", "rank"])).proposals
    assert {proposal.config.quantize.format for proposal in allowed} == {"nf4"}
    own = cfg.model_copy(update={"quantize": cfg.quantize.model_copy(update={"format": "nf4"})})
    assert searched(own, "1x12gb", given=fixed).proposals[0].config.quantize.format == "nf4"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"format": "int8", "formats": {".*proj_out.*": "nf4"}}, {"none", "int8"}),
        ({"format": "nf4", "formats": {".*attn.*": "int8"}}, {"none", "int8", "nf4, int8"}),
    ],
)
def test_no_layer_loses_bits_where_layers_have_formats_of_their_own(own: dict[str, Any], expected: set[str]) -> None:
    cfg = preset("flux1-dev-lora-nf4-1x12gb")
    cfg = cfg.model_copy(update={"quantize": cfg.quantize.model_copy(update=own)})
    bases = choices.bases(cfg, recorded_formats(cfg), keeps_bits=True)
    mixed = {", ".join((base["quantize.format"], *base["quantize.formats"].values())) for base in bases}
    assert mixed >= expected and "nf4" not in mixed
    assert all(
        base["quantize.formats"] == own["formats"] or "nf4" not in base["quantize.formats"].values() for base in bases
    )
    assert choices.can_lose_bits(cfg)


def test_gpus_that_would_have_nothing_to_do_are_not_taken() -> None:
    cfg = preset("flux2-dev-lora-4gpu")
    assert [choice["parallel.devices"] for choice in choices.devices(cfg, 6)] == [6, 4, 3, 2, 1]
    assert cfg.train.batch_size == 4
    assert searched(cfg, "6x24gb").proposals[0].config.parallel.devices == 4
    assert searched(cfg, "3x24gb").proposals[0].config.parallel.devices == 2


def test_an_optimizer_on_the_cpu_takes_the_time_of_its_thread() -> None:
    cfg = preset("sdxl-full-4gpu")
    best = searched(cfg, "4x24gb").proposals[0]
    assert best.config.parallel.devices == 4 and not best.config.parallel.cpu_offload


def test_images_become_smaller_only_where_allowed_and_no_smaller_than_needed() -> None:
    cfg = run("flux2 klein-4b", "parallel.devices=1", "parallel.strategy=none", "data.resolution=2048")
    fixed = OFFLOAD | {"quantize.format", "train.checkpointing"}
    assert searched(cfg, "1x24gb", given=fixed).proposals == ()
    found = searched(cfg, "1x24gb", given=fixed, kept=frozenset({"adapter.rank"})).proposals
    assert {proposal.config.data.resolution for proposal in found} == {768}
    larger = cfg.model_copy(update={"data": cfg.data.model_copy(update={"resolution": 1024})})
    assert searched(larger, "1x24gb", given=fixed).proposals == ()


def test_what_the_user_gave_stays() -> None:
    cfg = run(
        "flux2 dev", "parallel.strategy=full", "train.checkpointing=4", "train.batch_size=8", "train.micro_batch=2"
    )
    fields = {"parallel.strategy", "train.checkpointing", "train.micro_batch", "parallel.devices", "quantize.format"}
    for field in fields:
        found = searched(cfg, "8x80gb", given=frozenset({field}))
        assert found.proposals and field not in changed(found)
    assert changed(searched(cfg, "8x80gb", given=frozenset(fields))) <= OFFLOAD


def test_the_next_faster_config_would_be_faster_and_does_not_fit() -> None:
    cfg = preset("flux2-klein-9b-lora-2gpu")
    found = searched(cfg, "1x24gb")
    assert found.faster
    changes, _, rest = found.faster.partition(" would take ")
    seconds, _, need = rest.partition(" s, but needs ")
    tree = found.proposals[0].config.model_dump()
    for change in shlex.split(changes):
        field, _, value = change.partition("=")
        section, key = field.split(".")
        tree[section][key] = yaml12.parse(value).value
    plan = planned(RunConfig.model_validate(tree), named("1x24gb").card, NOWHERE)
    assert plan is not None and plan.time is not None
    assert plan.verdict != "fits" and plan.time.middle < found.proposals[0].seconds
    assert (f"{plan.time.middle:.3g}", f"{plan.need / GIB:.1f}") == (seconds, need.split()[0])


def test_less_recompute_that_does_not_fit_is_named() -> None:
    found = searched(preset("flux2-dev-lora-8gpu"), "2x80gb")
    assert "train.checkpointing" in changed(found) and "train.checkpointing=" in found.faster


def test_nothing_is_said_to_be_faster_than_the_fastest_of_all() -> None:
    assert searched(preset("flux1-dev-lora-2gpu"), "8x80gb").faster == ""


def test_where_nothing_fits_the_least_that_would_help_is_named() -> None:
    cfg = run("flux2 klein-9b", "parallel.devices=1", "parallel.strategy=none")
    fixed = OFFLOAD
    found = searched(cfg, "1x12gb", given=fixed)
    assert found.remedy == (
        "would fit with parallel.cpu_offload=true: leave parallel.cpu_offload out of the command line"
    )
    kept = kept_fields([*KEPT, "cpu_offload", "offload_blocks"])
    assert searched(cfg, "1x12gb", kept=kept).remedy == (
        "would fit with parallel.cpu_offload=true: allow it with --keep format,rank,resolution,offload_blocks"
    )
    alone = run("flux2 klein-9b", "parallel.devices=1", "parallel.strategy=none", "data.resolution=2048")
    assert searched(alone, "1x12gb", given=fixed, kept=kept_fields(["rank", "format"])).remedy == (
        "would fit with parallel.cpu_offload=true: leave parallel.cpu_offload out of the command line"
    )
    huge = run("flux2 dev", "data.resolution=4096", "train.checkpointing=full")
    assert searched(huge, "1x12gb").remedy.startswith("would fit with data.resolution=")
    whole = run("flux2 dev", "adapter.type=none")
    assert searched(whole, "1x12gb", host=float(64 * GIB)).remedy == (
        "nothing that is searched makes it fit: take more GPUs, larger ones, a smaller model, or an adapter in place "
        "of all weights (adapter.type: lora)"
    )


@pytest.mark.slow
def test_offload_that_the_machines_memory_cannot_hold_is_not_proposed() -> None:
    cfg = preset("flux2-dev-lora-4gpu")
    free = searched(cfg, "1x24gb").proposals[0]
    assert free.host > 30 * GIB
    small = searched(cfg, "1x24gb", host=free.host - GIB)
    assert all(proposal.host <= free.host - GIB for proposal in small.proposals)
    assert searched(cfg, "1x24gb", host=float(GIB)).proposals == ()


def test_formats_without_a_table_are_left_out_and_named() -> None:
    found = searched(preset("sdxl-loha-1gpu"), "1x12gb")
    assert found.notes == ("quantize.format=int8 was left out: it is not recorded for this model; --plan records it",)
    assert {proposal.config.quantize.format for proposal in found.proposals} == {"none"}


def test_fields_may_be_named_in_short_and_an_unknown_one_is_refused() -> None:
    assert kept_fields(["rank", "data.resolution"]) == {"adapter.rank", "data.resolution", "data.length"}
    assert kept_fields(["format"]) == {"quantize.format"}
    assert kept_fields([]) == frozenset()
    with pytest.raises(InputError, match=r"--keep: 'resolutoin' is not a field; did you mean 'resolution'\?"):
        kept_fields(["resolutoin"])


def test_all_blocks_are_not_taken_for_one_block() -> None:
    """1.0 and 1 are equal, and a run of one offloaded block may need all of them."""
    cfg = run("flux2 dev", "parallel.offload_blocks=1", "parallel.devices=4", "parallel.strategy=ddp")
    changes = [
        proposal.changes.get("parallel.offload_blocks")
        for proposal in searched(cfg, "4x24gb").proposals
        if proposal.config.parallel.offload_blocks == 1.0 and isinstance(proposal.config.parallel.offload_blocks, float)
    ]
    assert changes and all(change is not None for change in changes)
    kept = frozenset({"parallel.offload_blocks"})
    for proposal in searched(cfg, "4x24gb", given=kept).proposals:
        assert repr(proposal.config.parallel.offload_blocks) == "1"
