"""What the plan counts of a mixture's experts, held whole or as bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from trainer.plan.record.fake_device import fake_tensors
from trainer.plan.record.memory_tracker import MemoryTracker
from trainer.weights.quantization import FORMATS
from trainer.weights.quantized_experts import quantize_experts

TOKENS, EXPERTS, WIDTH, INNER = 48, 4, 64, 128


def experts_on(device: str) -> Any:
    config = MixtralConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS)
    config._experts_implementation = "grouped_mm"
    with torch.device(device):
        return MixtralExperts(config).requires_grad_(False)


@pytest.mark.parametrize("format", ["none", *FORMATS])
def test_each_token_is_multiplied_with_the_weights_of_its_experts_alone(format: str) -> None:
    device = torch.device("cpu")
    tracker = MemoryTracker(device.type)
    with fake_tensors(device, tracker.observe):
        experts = experts_on("meta")
        if format != "none":
            quantize_experts(experts, FORMATS[format])
        for name, weight in list(experts.named_parameters()):
            held = weight if weight.dtype == torch.uint8 else weight.bfloat16()
            setattr(experts, name, torch.nn.Parameter(torch.empty_like(held, device=device), requires_grad=False))
        x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        index, weights = torch.empty(TOKENS, 2, dtype=torch.int64), torch.empty(TOKENS, 2)
        tracker.reset()
        y = experts(x, index, weights)
        assert tracker.flops == 2 * 2 * TOKENS * 3 * WIDTH * INNER
        y.sum().backward()
        assert tracker.flops == 2 * 2 * 2 * TOKENS * 3 * WIDTH * INNER
