"""Experts of a mixture as bytes, against transformers' own class with the decoded weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts

from tests.benchmarks.architectures import config_of
from trainer.models.parts.language.next_token import build_language_model
from trainer.models.parts.language.tiny_configs import tiny_config
from trainer.weights.quantization import FORMATS
from trainer.weights.quantized_experts import is_quantizable, quantize_experts, quantized_experts

KINDS = {
    "mixtral": {},
    "gpt_oss": {"is_transposed": True, "has_bias": True},
    "nemotron_h": {"has_gate": False},
    "muse_spark": {"has_post_expert_norm": True},
}
"""Classes of transformers that differ in each of its flags."""


def experts_of(kind: str) -> Any:
    """The experts of a layer of a tiny model, with random weights, computed expert by expert."""
    torch.manual_seed(0)
    if kind == "muse_spark":  # no causal language model of its own
        model = MuseSparkExperts(tiny_config(MuseSparkTextConfig(), moe_hidden_size=64))
    else:
        model = build_language_model(config_of(kind))
    found = next(module for module in model.modules() if is_quantizable(module)).to_empty(device="cpu")
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.1)
    found.config._experts_implementation = "eager"
    return found.requires_grad_(False)


def sent(experts: Any, tokens: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, and the two experts of each; the last expert gets none."""
    width = experts.down_proj.shape[-1 if experts.is_transposed else 1]
    x = torch.randn(tokens, width, requires_grad=True)
    index = torch.stack([torch.randperm(experts.num_experts - 1)[:2] for _ in range(tokens)])
    return x, index, torch.rand(tokens, 2, requires_grad=True)


@pytest.mark.parametrize("tokens", [11, 1])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_they_answer_as_transformers_does_with_the_decoded_weights(kind: str, format: str, tokens: int) -> None:
    plain = experts_of(kind)
    assert all(getattr(plain, flag) == value for flag, value in KINDS[kind].items())
    x, index, weights = sent(plain, tokens)
    stored = copy.deepcopy(plain)
    quantize_experts(stored, FORMATS[format])
    for name, shape in stored.shapes.items():
        records, kind_of = getattr(stored, f"{name}_records"), FORMATS[format]
        decoded = kind_of.decode(records.flatten(0, 1), shape[-1], torch.float32, kind_of.table()).view(shape)
        assert not torch.equal(decoded, getattr(plain, name))
        getattr(plain, name).copy_(decoded)
    outputs = [experts(x, index, weights) for experts in (stored, plain)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    direction = torch.randn_like(x)
    found, expected = (torch.autograd.grad(y, (x, weights), direction) for y in outputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_only_bytes_are_kept_for_backward() -> None:
    experts = experts_of("mixtral")
    x, index, weights = sent(experts)
    sizes = {experts.gate_up_proj.shape, experts.down_proj.shape}
    quantize_experts(experts, FORMATS["nf4"])
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        experts(x, index, weights)
    assert {id(tensor) for tensor in kept} >= {id(experts.gate_up_proj_records), id(experts.down_proj_records)}
    assert not any(
        tensor.shape in sizes or tensor.transpose(-1, -2).shape in sizes for tensor in kept if tensor.dim() == 3
    )


def test_a_model_with_them_saves_no_weight_of_an_expert() -> None:
    experts = experts_of("gpt_oss")
    model = nn.ModuleDict({"mlp": experts})
    biases = {name for name in model.state_dict() if name.endswith("bias")}
    quantize_experts(experts, FORMATS["int8"])
    assert model.state_dict().keys() == biases | {"mlp.gate_up_proj_records", "mlp.down_proj_records"}
    assert list(quantized_experts(model)) == ["mlp"]
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_weight_that_is_not_finite_is_refused() -> None:
    experts = experts_of("mixtral")
    experts.down_proj[1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        quantize_experts(experts, FORMATS["nf4"])
