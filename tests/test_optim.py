"""Learning rates, clipping, averages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.config.errors import InputError
from trainer.config.sections import OptimConfig
from trainer.optim import EXTRAS, Ema, evaluation_weights, learning_rate, make_optimizer, scale_gradients


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
    with evaluation_weights(make_optimizer([module.weight], OptimConfig()), [module.weight], ema):
        assert module.weight.unique().tolist() == [1.0]
    assert module.weight.unique().tolist() == [3.0]
    assert ema.average["weight"].unique().tolist() == [1.0]


def test_an_optimizer_whose_package_is_missing_names_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "adamw8bit", ("no_such_package", "eightbit"))
    with pytest.raises(InputError) as error:
        make_optimizer([layer().weight], OptimConfig(type="adamw8bit"))
    assert str(error.value) == (
        "optim.type: adamw8bit needs the package no_such_package; pip install 'shardstudio[eightbit]', or use adamw"
    )


def test_schedule_free_evaluates_other_weights_and_gives_the_trained_ones_back_bit_for_bit() -> None:
    module = layer()
    optimizer = make_optimizer([module.weight], OptimConfig(type="schedulefree", lr=0.1))
    for _ in range(3):
        module.weight.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        optimizer.step()
    trained = module.weight.detach().clone()
    with evaluation_weights(optimizer, [module.weight], None):
        assert not torch.equal(module.weight, trained)
    assert torch.equal(module.weight, trained)
