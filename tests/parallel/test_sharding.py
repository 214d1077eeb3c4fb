"""Who holds what: shards, copies, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_ranks
from tests.runs import Outcome, alone, make_pictures, make_run, run_config, train
from trainer.config.schema import RunConfig
from trainer.config.sections import ParallelConfig
from trainer.distributed.world import World
from trainer.models import families
from trainer.models.build import build_model, reshard, shard_model
from trainer.optim import scale_gradients
from trainer.parallel.mesh import device_mesh, resolve_strategy
from trainer.parallel.parallelize import blocks_of, gathered_for_samples, shard_units
from trainer.parallel.replicas import check_reduced, diverged
from trainer.parallel.strategy import Strategy
from trainer.run.folder import RunDir
from trainer.train import loop
from trainer.train.loop import Trainer

GIB = 2**30
BLOCKS = 3
"""Of the tests' FLUX.2."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("sharding") / "pictures", 4)


def outcomes(pictures: Path, ranks: int, name: str, **changes: Any) -> list[Outcome]:
    cfg = run_config(pictures, train__steps=1, parallel__devices=ranks, **changes)
    return run_ranks(ranks, train, cfg, make_run(pictures.parent, cfg, f"{name}-{ranks}"))


@pytest.mark.parametrize(("ranks", "most"), [(2, 0.51), pytest.param(4, 0.26, marks=pytest.mark.slow)])
def test_a_rank_holds_its_share_of_the_parameters(pictures: Path, ranks: int, most: float) -> None:
    for found in outcomes(pictures, ranks, "share", parallel__strategy="full"):
        assert found.local_bytes <= most * found.full_bytes


def test_copies_hold_everything(pictures: Path) -> None:
    for found in outcomes(pictures, 2, "copies", parallel__strategy="ddp"):
        assert found.local_bytes == found.full_bytes


def groups_of(world: World, cfg: RunConfig) -> int:
    """How many groups of parameters FSDP makes of a model."""
    family = families.make(cfg, Path(cfg.data.path).parent / "cache")
    strategy: Strategy = cfg.parallel.strategy  # type: ignore[assignment]
    model = build_model(cfg, family).module
    shard_model(model, cfg, family, strategy, device_mesh(cfg.parallel, world, strategy))
    return sum(isinstance(module, FSDPModule) for module in model.modules())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1),
        ({"train__precision": "bf16"}, 1),
        ({"quantize__format": "nf4", "train__precision": "bf16"}, 1),
        ({"parallel__strategy": "full"}, BLOCKS + 1),
        ({"model__train": {"transformer": "full"}, "adapter__type": "none"}, BLOCKS + 1),
        ({"parallel__strategy": "hybrid", "parallel__shard_size": 1}, 1),
    ],
)
def test_copies_that_train_little_are_one_group(pictures: Path, fields: dict[str, Any], expected: int) -> None:
    changes = {"parallel__devices": 2, "parallel__strategy": "ddp"} | fields
    assert run_ranks(2, groups_of, run_config(pictures, **changes)) == [expected] * 2


def gradients(world: World, cfg: RunConfig, run: RunDir) -> dict[str, int]:
    """{component: how many of its trained parameters have a gradient of a step}."""
    found: Counter[str] = Counter()
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)

    def count(parameters: Any, *arguments: Any) -> Tensor:
        found.update(name.partition(".")[0] for name, p in trainer.trainables.items() if p.grad is not None)
        return scale_gradients(parameters, *arguments)

    try:
        with mock.patch.object(loop, "scale_gradients", count):
            trainer.train_step()
        return dict(found)
    finally:
        trainer.close()


def test_text_encoders_whose_states_are_taken_by_hooks_get_gradients_on_copies(pictures: Path) -> None:
    """Nothing that is trained sees what the first encoder of SDXL returns."""
    train = {"unet": "adapter", "text_encoder": "adapter", "text_encoder_2": "adapter"}
    changes = {"model": {"family": "sdxl", "train": train}, "train__batch_size": 2}
    found = []
    for strategy in ("none", "ddp"):
        cfg = run_config(pictures, parallel__strategy=strategy, **changes)
        found.append(gradients(alone(), cfg, make_run(pictures.parent, cfg, f"encoders-{strategy}")))
    assert found[0].keys() == train.keys()
    assert found[1] == found[0]


class Copied(TorchDispatchMode):
    """Counts the bytes that are copied into tensors which exist already, as FSDP fills what it gathers.

    Attributes:
        num_bytes: Their number.
    """

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.num_bytes += out.nbytes
        return out


def copied(world: World, cfg: RunConfig, run: RunDir) -> tuple[int, int, int]:
    """(bytes copied in a step, bytes that are trained, bytes of the frozen base)."""
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    try:
        trainer.train_step()
        with Copied() as seen:
            trainer.train_step()
        frozen: list[Tensor] = [p for p in trainer.model.parameters() if not p.requires_grad]
        return seen.num_bytes, sum(p.nbytes for p in trainer.parameters), sum(p.nbytes for p in frozen)
    finally:
        trainer.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_step_of_ddp_copies_the_frozen_base(pictures: Path, precision: str) -> None:
    """Torch copies a group of one rank twice a step. That was 3.4 times the base, with what is trained."""
    cfg = run_config(pictures, parallel__devices=2, parallel__strategy="ddp", train__precision=precision)
    for found, trained, frozen in run_ranks(2, copied, cfg, make_run(pictures.parent, cfg, f"copied-{precision}")):
        assert frozen > 8 * trained
        assert trained <= found <= 6 * trained


def strategy_for(parallel: ParallelConfig, size: int, local_size: int, state_gib: float) -> str:
    """The strategy that is chosen on ranks of 100 GiB."""
    world = World(0, size, 0, local_size, torch.device("cpu"), alone().background, alone().store)
    return resolve_strategy(parallel, world, int(state_gib * GIB), 100 * GIB)


@pytest.mark.parametrize(
    ("nodes", "devices", "state_gib", "offload", "expected"),
    [
        (1, 1, 10, False, "none"),
        (1, 1, 10, True, "full"),
        (1, 4, 59, False, "ddp"),
        (1, 4, 61, False, "full"),
        (1, 4, 10, True, "full"),
        (2, 4, 59, False, "hybrid"),
        (2, 4, 200, False, "hybrid"),
        (2, 4, 200, True, "hybrid"),
        (2, 1, 59, False, "ddp"),
        (2, 1, 61, False, "full"),
        (2, 4, 400, False, "full"),
    ],
)
def test_auto_keeps_copies_on_one_node_shards_inside_several_and_over_all_ranks_what_fits_on_none(
    nodes: int, devices: int, state_gib: float, offload: bool, expected: str
) -> None:
    parallel = ParallelConfig(nodes=nodes, devices=devices, cpu_offload=offload)
    assert strategy_for(parallel, nodes * devices, devices, state_gib) == expected


def test_a_strategy_that_is_named_is_taken() -> None:
    assert strategy_for(ParallelConfig(strategy="full", devices=2), 2, 2, 1) == "full"


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def sharded(world: World, strategy: Any) -> nn.Module:
    model = small_model()
    mesh = device_mesh(ParallelConfig(devices=world.size, strategy=strategy), world, strategy)
    assert mesh is not None
    from torch.distributed.fsdp import OffloadPolicy

    shard_units(model, blocks_of(model, ["Linear"]), mesh, True, torch.float32, OffloadPolicy())
    return model


def gathers(world: World, is_small: bool) -> tuple[int, int]:
    """How often blocks are gathered in three calls while sampling, and in two calls after that."""
    model = nn.ModuleDict({"transformer": sharded(world, "full")})
    parallel, batch = ParallelConfig(devices=2, strategy="full"), torch.ones(1, 8)
    gather = mock.Mock(wraps=_fsdp_param_group.foreach_all_gather)
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", gather), torch.no_grad():
        with (
            mock.patch("trainer.parallel.strategy.GATHERED_BYTES", GIB if is_small else 1),
            gathered_for_samples(model, parallel, "full", world.size),
        ):
            for _ in range(3):
                model["transformer"](batch)
        inside = gather.call_count
        reshard(model)
        for _ in range(2):
            model["transformer"](batch)
    return inside, gather.call_count - inside


@pytest.mark.parametrize(("is_small", "expected"), [(True, (2, 4)), (False, (6, 4))])
def test_blocks_of_a_small_model_are_gathered_once_for_all_calls_of_its_samples(
    is_small: bool, expected: tuple[int, int]
) -> None:
    assert run_ranks(2, gathers, is_small) == [expected] * 2


def refusal_of_an_adapter_added_after_sharding(world: World) -> str:
    model = sharded(world, "full")
    model.late = nn.Linear(8, 8)
    trainables = dict(model.named_parameters())
    try:
        check_reduced(trainables, trainables.values(), world)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_a_trainable_that_is_neither_sharded_nor_reduced_is_refused_by_name() -> None:
    assert (
        run_ranks(2, refusal_of_an_adapter_added_after_sharding)
        == [
            "late.weight is neither sharded nor reduced across the 2 ranks; "
            "inject it into a block before the block is sharded"
        ]
        * 2
    )


def refusal_of_an_optimizer_made_before_sharding(world: World) -> str:
    model = sharded(world, "full")
    try:
        check_reduced(dict(model.named_parameters()), small_model().parameters(), world)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_an_optimizer_over_other_parameters_than_the_models_is_refused() -> None:
    assert (
        run_ranks(2, refusal_of_an_optimizer_made_before_sharding)
        == ["the optimizer holds a parameter that the model does not train; make it after sharding"] * 2
    )


def divergence(world: World, strategy: str, damaged_rank: int | None) -> str | None:
    model = sharded(world, strategy)
    parameters: dict[str, Any] = dict(model.named_parameters())
    if world.rank == damaged_rank:
        with torch.no_grad():
            parameters["1.weight"].to_local()[0, 0] += 1e-3
    return diverged(parameters, world)


@pytest.mark.parametrize(
    ("strategy", "damaged_rank", "expected"),
    [("ddp", None, None), ("ddp", 0, "1.weight"), ("ddp", 1, "1.weight"), ("full", 1, None)],
)
def test_copies_that_drifted_apart_are_found_by_every_rank(
    strategy: str, damaged_rank: int | None, expected: str | None
) -> None:
    assert run_ranks(2, divergence, strategy, damaged_rank) == [expected] * 2


def train_with_a_drifting_copy(world: World, cfg: RunConfig, run: RunDir) -> str:
    trainer = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None)
    name, parameter = next(iter(trainer.trainables.items()))
    try:
        trainer.train_step()
        if world.rank == 1:
            with torch.no_grad():
                parameter.to_local().add_(1e-3)  # type: ignore[operator]
        trainer.train()
    except RuntimeError as error:
        return str(error).replace(name, "NAME")
    finally:
        trainer.close()
    return "trained on"


def test_a_run_whose_copies_drift_apart_ends_with_the_name_of_the_parameter(pictures: Path) -> None:
    cfg = run_config(pictures, parallel__devices=2, parallel__strategy="ddp", train__check_replicas=2)
    run = make_run(pictures.parent, cfg, "drift")
    assert (
        run_ranks(2, train_with_a_drifting_copy, cfg, run)
        == ["step 2: NAME differs between ranks that must hold equal copies"] * 2
    )
