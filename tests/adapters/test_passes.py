"""How often an adapter passes over the output of its layer, which is what it costs where memory is slow."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.adapters import ADAPTER
from trainer.adapters.dora import dora_layer
from trainer.adapters.lora import LoraLinear, lora_layer

OUT, IN, RANK = 40, 24, 4
VIEWS = ("view", "t.default", "detach", "alias", "transpose", "expand", "unsqueeze", "lift_fresh")


class Wide(TorchDispatchMode):
    """Counts the tensors of OUT features that operations read and write, by operation; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(name in str(func) for name in VIEWS):
            tensors = [tensor for tensor in (*args, out) if isinstance(tensor, Tensor)]
            wide = sum(tensor.dim() > 1 and tensor.shape[-1] == OUT and tensor.shape[0] != RANK for tensor in tensors)
            if wide:
                self.passes[str(func)] += wide
        return out


def layer(kind: str, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    make = dora_layer if kind == "dora" else lora_layer
    made = make(nn.Linear(IN, OUT, bias=bias), RANK, 0.5, nn.Identity())
    nn.init.normal_(made.lora_B[ADAPTER].weight)
    if kind == "dora":
        nn.init.normal_(made.lora_magnitude_vector[ADAPTER].weight, std=0.1)
    return made


@pytest.mark.parametrize(("kind", "most"), [("lora", 2), ("dora", 9)])
def test_an_adapter_passes_over_the_wide_output_seldom(kind: str, most: int) -> None:
    """By peft's own layers: lora 6, dora 13. addmm_ is the one operation that writes to what it reads."""
    x = torch.randn(2, 3, IN)
    found = layer(kind)
    with Wide() as seen:
        found(x)
    passes = seen.passes - Counter({"aten.addmm.default": 2})  # the base's own
    assert sum(passes.values()) == most, passes
    if kind == "lora":
        assert set(passes) == {"aten.addmm_.default"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lora_computes_what_peft_s_own_layer_does(bias: bool, dtype: torch.dtype) -> None:
    ours = layer("lora", bias).to(dtype)
    theirs = peft.tuners.lora.Linear(nn.Linear(IN, OUT, bias=bias), ADAPTER, peft.LoraConfig(), r=RANK).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    theirs.scaling[ADAPTER] = 0.5
    assert isinstance(ours, LoraLinear)
    x = torch.randn(2, 3, IN, dtype=dtype)
    results = []
    for module in (ours, theirs, copy.deepcopy(theirs).double()):
        at = x.to(module.base_layer.weight.dtype, copy=True).requires_grad_()
        out = module(at)
        (out.double() ** 2).sum().backward()
        grads = [p.grad for name, p in module.named_parameters() if "lora" in name]
        results.append([t.double().clone() for t in (out, at.grad, *grads) if t is not None])
        module.zero_grad()
    assert len(results[0]) == 4
    for mine, other, exact in zip(*results, strict=True):
        error, allowed = (mine - exact).norm(), (other - exact).norm()
        assert error <= 1.2 * allowed + 1e-6 * exact.norm()


def test_what_the_base_returns_is_not_changed_under_dropout() -> None:
    """Recompute keeps it."""
    made = lora_layer(nn.Linear(IN, OUT), RANK, 1.0, nn.Dropout(0.5))
    nn.init.normal_(made.lora_B[ADAPTER].weight)
    kept: list[Tensor] = []
    made.base_layer.register_forward_hook(lambda module, inputs, output: kept.append(output))
    made(torch.randn(2, IN))
    assert kept[0]._version == 0
