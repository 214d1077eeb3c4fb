"""8-bit AdamW on shards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from trainer.config.sections import OptimConfig, ParallelConfig
from trainer.distributed.world import World
from trainer.optim import make_optimizer
from trainer.parallel.mesh import device_mesh
from trainer.parallel.parallelize import blocks_of, shard_units

WIDTH, STEPS, LR = 256, 5, 1e-4


def trained(world: World) -> tuple[dict[str, Tensor], int]:
    """Weights after some steps on this rank's half of the batch, and how many states have 8 bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))
    if world.size > 1:
        mesh = device_mesh(ParallelConfig(devices=world.size), world, "full")
        assert mesh is not None
        shard_units(model, blocks_of(model, ["Linear"]), mesh, True, torch.float32, OffloadPolicy())
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters, OptimConfig(type="adamw8bit", lr=LR))
    for step in range(STEPS):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        model(batch.chunk(world.size)[world.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [local(state["exp_avg"]) for state in optimizer.state.values()]
    whole = {name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in parameters.items()}
    return whole, sum(type(state).__name__ == "OptimState8bit" for state in states)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow  # torchao compiles its step: 30 s of C++ compiler
def test_eight_bit_states_on_two_ranks_train_what_they_train_on_one() -> None:
    """Where a shard is whole blocks of 256 numbers, at least 4096 of them: smaller shards keep fp32 states, and then
    differ from one process by what 8 bits cost: two weights of three by more than 1e-6. Here a code of 8 bits may turn
    where sums are rounded in another order, and moves one weight by less than a step."""
    (alone, quantized_alone), *_ = run_ranks(1, trained)
    (shared, quantized_shared), *_ = run_ranks(2, trained)
    assert quantized_alone == quantized_shared == 2
    for name in alone:
        difference = (alone[name] - shared[name]).abs()
        assert float((difference > 1e-6).float().mean()) <= 1e-4, name
        assert float(difference.max()) <= LR, name


def trained_unevenly(world: World, cache: Path) -> list[Tensor]:
    """Weights of three rows and of one after some steps: two ranks hold two rows and one, and one and none."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 3, bias=False), nn.Linear(3, 1, bias=False))
    if world.size > 1:
        mesh = device_mesh(ParallelConfig(devices=world.size), world, "full")
        assert mesh is not None
        shard_units(model, blocks_of(model, ["Linear"]), mesh, True, torch.float32, OffloadPolicy())
    optimizer = make_optimizer(dict(model.named_parameters()), OptimConfig(type="adamw8bit", lr=LR))
    for step in range(STEPS):
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@pytest.mark.slow
def test_ranks_with_shards_of_other_sizes_do_not_run_the_code_compiled_for_one_another(tmp_path: Path) -> None:
    """torch keeps compiled code by the shape of the whole parameter: a rank with fewer rows once took the code of
    another one from the cache, and died of it."""
    expected, *_ = run_ranks(1, trained_unevenly, tmp_path)
    for _ in range(2):  # the second time all of it is in the cache
        for weights in run_ranks(2, trained_unevenly, tmp_path):
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


def decayed(world: World) -> list[float]:
    """The mean of a matrix and of a norm that were one, after a step without a gradient."""
    named = {"up.weight": nn.Parameter(torch.ones(64, 64)), "norm.weight": nn.Parameter(torch.ones(4096))}
    optimizer = make_optimizer(named, OptimConfig(type="adamw8bit", lr=0.1, weight_decay=0.5))
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert type(optimizer).__name__ == "AdamW8bit"  # checkpoints hold it
    return [round(float(parameter.detach().mean()), 4) for parameter in named.values()]


@pytest.mark.slow
def test_weight_decay_leaves_norms_as_they_are() -> None:
    assert run_ranks(1, decayed) == [[0.95, 1.0]]
