"""What an adapter's parameters start from."""

from __future__ import annotations

import pytest
import torch

from trainer.adapters import initial_value


@pytest.mark.parametrize(
    "name", ["lora_A.default.weight", "hada_w1_a.default", "hada_w2_a.default", "lokr_w1.default", "lokr_w2_a.default"]
)
def test_start_values_depend_on_seed_and_name_only(name: str) -> None:
    first = initial_value(f"blocks.0.to_q.{name}", (96, 64), seed=1)
    assert torch.equal(first, initial_value(f"blocks.0.to_q.{name}", (96, 64), seed=1))
    assert not torch.equal(first, initial_value(f"blocks.0.to_q.{name}", (96, 64), seed=2))
    assert not torch.equal(first, initial_value(f"blocks.1.to_q.{name}", (96, 64), seed=1))
    assert float(first.abs().max()) <= 1 / 8
    assert float(first.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.1)


def test_the_bound_counts_the_kernel_of_a_convolution() -> None:
    kernel = initial_value("conv.lora_A.default.weight", (4, 16, 2, 2), seed=0)
    assert 0.9 / 8 < float(kernel.abs().max()) <= 1 / 8


@pytest.mark.parametrize(
    "name",
    [
        "lora_B.default.weight",
        "lora_magnitude_vector.default.weight",
        "hada_w2_b.default",
        "lokr_w2.default",
        "lokr_w2_b.default",
        "oft_blocks.default",
    ],
)
def test_one_factor_of_each_adapter_starts_at_zero(name: str) -> None:
    assert not initial_value(f"blocks.0.to_q.{name}", (8, 8), seed=1).any()
