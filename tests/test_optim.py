"""Learning rates, clipping, averages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from trainer.config.sections import OptimConfig
from trainer.distributed.world import World
from trainer.optim import (
    AdamW,
    Ema,
    decays,
    evaluation_weights,
    learning_rate,
    local,
    make_optimizer,
    scale_gradients,
    state_tensors,
)
from trainer.system.errors import InputError
from trainer.system.installation import EXTRAS


def rates(steps: int, **fields: object) -> list[float]:
    cfg = OptimConfig.model_validate({"lr": 1.0, **fields})
    return [round(learning_rate(step, cfg, steps), 4) for step in range(steps)]


def test_the_learning_rate_is_constant() -> None:
    assert rates(4) == [1.0, 1.0, 1.0, 1.0]


def test_warm_up_reaches_the_learning_rate_at_its_last_step() -> None:
    assert rates(6, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_learning_rate_falls_in_a_line_to_zero_after_the_last_step() -> None:
    assert rates(6, warmup=2, schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_the_learning_rate_falls_along_half_a_cosine() -> None:
    assert rates(4, schedule="cosine") == [1.0, 0.8536, 0.5, 0.1464]


def layer(gradient: float = 1.0) -> nn.Linear:
    module = nn.Linear(4, 4, bias=False)
    nn.init.ones_(module.weight)
    module.weight.grad = torch.full((4, 4), gradient)
    return module


def test_clipping_returns_the_norm_before_and_scales_to_the_limit() -> None:
    module = layer(2.0)
    assert scale_gradients([module.weight], None, 1.0) == 8.0
    assert module.weight.grad is not None
    assert float(module.weight.grad.norm()) == pytest.approx(1.0, abs=1e-6)


def test_without_a_limit_gradients_stay() -> None:
    module = layer(2.0)
    assert scale_gradients([module.weight], None, None) == 8.0
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, torch.full((4, 4), 2.0))


def test_the_average_follows_with_a_decay_that_grows_from_a_tenth() -> None:
    module = layer()
    ema = Ema({"weight": module.weight}, decay=0.5)
    with torch.no_grad():
        module.weight.fill_(2.0)
    ema.update(0)
    assert ema.average["weight"].unique().tolist() == pytest.approx([0.1 * 1 + 0.9 * 2])
    ema.update(100)
    assert ema.average["weight"].unique().tolist() == pytest.approx([0.5 * 1.9 + 0.5 * 2])


def test_the_average_is_in_the_model_inside_and_the_trained_weights_are_back_afterwards() -> None:
    module = layer()
    ema = Ema({"weight": module.weight}, decay=0.9)
    with torch.no_grad():
        module.weight.fill_(3.0)
    with evaluation_weights(make_optimizer({"weight": module.weight}, OptimConfig()), [module.weight], ema):
        assert module.weight.unique().tolist() == [1.0]
    assert module.weight.unique().tolist() == [3.0]
    assert ema.average["weight"].unique().tolist() == [1.0]


def test_an_optimizer_whose_package_is_missing_names_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "adamw8bit", ("no_such_package", "eightbit"))
    with pytest.raises(InputError) as error:
        make_optimizer({"weight": layer().weight}, OptimConfig(type="adamw8bit"))
    assert str(error.value) == (
        "optim.type: adamw8bit needs the package no_such_package; pip install 'shardstudio[eightbit]', or use adamw"
    )


def test_schedule_free_evaluates_other_weights_and_gives_the_trained_ones_back_bit_for_bit() -> None:
    module = layer()
    optimizer = make_optimizer({"weight": module.weight}, OptimConfig(type="schedulefree", lr=0.1))
    for _ in range(3):
        module.weight.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        optimizer.step()
    trained = module.weight.detach().clone()
    with evaluation_weights(optimizer, [module.weight], None):
        assert not torch.equal(module.weight, trained)
    assert torch.equal(module.weight, trained)


def steps_of_both(world: World, decay_norms: bool) -> tuple[bool, bool, list[float], list[float]]:
    """Two optimizers over the same shards, torch's own and ours. Returns whether weights and states are equal, and the
    norms that torch and we find."""
    mesh = init_device_mesh("cpu", (world.size,))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))
        fully_shard(model, mesh=mesh)
        models.append(model)
    theirs, ours = (list(model.parameters()) for model in models)
    made = make_optimizer(dict(models[1].named_parameters()), OptimConfig(lr=0.1, decay_norms=decay_norms))
    assert isinstance(made, AdamW)
    groups: list[dict[str, Any]] = [{"params": theirs}]
    if not decay_norms:
        matrices, vectors = (theirs[::4], [theirs[i] for i in (1, 2, 3, 5)])
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    usual = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.01, fused=True)
    norms: tuple[list[float], list[float]] = ([], [])
    for step in range(3):
        torch.manual_seed(step + 10 * world.rank)
        batch = torch.randn(3, 5)
        for model in models:
            model(batch).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        norms[0].append(float(norm.full_tensor()))  # type: ignore[attr-defined]
        norms[1].append(float(scale_gradients(ours, None, 0.5)))
        for optimizer in (usual, made):
            optimizer.step()
            optimizer.zero_grad()
    states = zip(state_tensors(usual), state_tensors(made), strict=True)
    return (
        all(torch.equal(local([a])[0], local([b])[0]) for a, b in zip(theirs, ours, strict=True)),
        all(isinstance(b, DTensor) and torch.equal(local([a])[0], local([b])[0]) for a, b in states),
        *norms,
    )


@pytest.mark.parametrize(("ranks", "decay_norms"), [(1, False), (2, False), (2, True)])
def test_adamw_and_clipping_on_shards_are_those_of_torch_on_distributed_tensors_bit_for_bit(
    ranks: int, decay_norms: bool
) -> None:
    for weights, states, theirs, ours in run_ranks(ranks, steps_of_both, decay_norms):
        assert weights and states
        assert ours == theirs


@pytest.mark.parametrize("kind", ["adamw", "schedulefree"])
@pytest.mark.parametrize("decay_norms", [False, True])
def test_weight_decay_leaves_norms_and_biases_as_they_are_unless_it_is_asked_to(kind: str, decay_norms: bool) -> None:
    shapes = {
        "block.linear.weight": (4, 4),
        "embed.weight": (6, 4),
        "block.norm.weight": (4,),
        "block.linear.bias": (4,),
    }
    named = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optim = {"type": kind, "lr": 0.1, "weight_decay": 0.5, "decay_norms": decay_norms}
    optimizer = make_optimizer(named, OptimConfig.model_validate(optim))
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = {name: round(float(parameter.detach().mean()), 4) for name, parameter in named.items()}
    vector = 0.95 if decay_norms else 1.0
    assert list(found.values()) == [0.95, 0.95, vector, vector]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", (8, 4), True),
        ("model.embed_tokens.weight", (8, 4), True),
        ("down.0.conv.weight", (8, 4, 3, 3), True),
        ("transformer.blocks.0.norm1.linear.weight", (24, 4), True),  # a modulation: a matrix inside of a norm's module
        ("transformer.blocks.0.attn.to_q.lora_A.default.weight", (4, 8), True),
        ("transformer.blocks.0.attn.to_q.lora_magnitude_vector.default.weight", (8,), False),
        ("model.layers.0.self_attn.q_norm.weight", (4, 8), False),  # a norm for each head
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (2, 8), False),  # a bias of each expert
        ("scale", (), False),
    ],
)
def test_matrices_and_embeddings_decay(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert decays(name, torch.zeros(shape)) is expected


def test_adamw_changes_nothing_where_the_device_says_so() -> None:
    module = layer()
    optimizer = make_optimizer({"weight": module.weight}, OptimConfig(lr=0.1))
    assert isinstance(optimizer, AdamW)
    optimizer.step()
    kept = module.weight.detach().clone(), [tensor.clone() for tensor in optimizer.state[module.weight].values()]
    module.weight.grad = torch.full((4, 4), torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(module.weight, kept[0])
    assert all(map(torch.equal, optimizer.state[module.weight].values(), kept[1]))
    module.weight.grad = torch.ones(4, 4)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not torch.equal(module.weight, kept[0])
