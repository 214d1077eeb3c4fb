"""Small models with an adapter on them, filled with numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer import adapters
from trainer.adapters import Injected, Targets
from trainer.adapters.state import TrainedAdapter
from trainer.config.sections import (
    AdapterSection,
    BoftAdapter,
    ConvAdapter,
    DiagOftAdapter,
    DoraAdapter,
    LoconAdapter,
    LohaAdapter,
    LokrAdapter,
    LoraAdapter,
)
from trainer.models.base import ModelFamily
from trainer.rng import generator

BOTH = ("linear", "conv")
CONFIGS: dict[str, AdapterSection] = {
    "lora": LoraAdapter(rank=4, alpha=2),
    "locon": LoconAdapter(rank=4, conv_rank=3),
    "dora": DoraAdapter(rank=4, alpha=2),
    "loha": LohaAdapter(rank=2, conv_rank=2, alpha=1),
    "loha, dense": LohaAdapter(rank=12, conv_rank=12),
    "lokr": LokrAdapter(rank=2, conv_rank=2, factor=4, alpha=1),
    "lokr, both decomposed": LokrAdapter(rank=1, conv_rank=1, decompose_both=True),
    "lokr, whole": LokrAdapter(full_matrix=True, conv_rank=1, alpha=3),
    "diag-oft": DiagOftAdapter(block_size=4),
    "boft": BoftAdapter(block_size=4),
    "boft, 2 stages": BoftAdapter(block_size=4, num_stages=2),
}
"""{case: adapter}"""
WITH_DROPOUT = ("lora", "locon", "dora", "loha", "loha, dense", "lokr", "lokr, both decomposed", "lokr, whole")

Value = Callable[[str, Sequence[int]], Tensor]
"""(parameter, its shape) -> what it is to be."""


class Net(nn.Module):
    """A linear layer 48 -> 96 and a strided 3 x 3 convolution 24 -> 32, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 96)
        self.conv = nn.Conv2d(24, 32, 3, stride=2, padding=1)

    def forward(self, tokens: Tensor, picture: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(tokens), self.conv(picture)


NET_TARGETS = Targets({"net": ("linear",)}, {"net": ("conv",)}, ())


def net_inputs() -> tuple[Tensor, Tensor]:
    numbers = generator("inputs")
    return torch.randn(2, 5, 48, generator=numbers), torch.randn(2, 24, 9, 8, generator=numbers)


@dataclass(frozen=True)
class Adapted:
    """A model with an adapter. base: its own weights, by their names without it."""

    model: nn.ModuleDict
    injected: Injected
    cfg: AdapterSection
    base: dict[str, Tensor]

    def trained(self) -> TrainedAdapter:
        parameters = dict(self.model.named_parameters())
        weights = {name: parameters[name].detach() for name in self.injected.parameters}
        return TrainedAdapter(weights, self.cfg, lambda layer: self.base[f"{layer}.weight"])


def started(name: str, shape: Sequence[int]) -> Tensor:
    """What training begins with."""
    return adapters.initial_value(name, shape, seed=0)


def moved(name: str, shape: Sequence[int]) -> Tensor:
    """Numbers that change a layer about as much as it does itself."""
    fan_in = torch.Size(shape[1:]).numel() if len(shape) > 1 else 4
    scale = 0.1 if "oft_blocks" in name else fan_in**-0.5
    return scale * torch.randn(*shape, generator=generator("moved", name))


def adapt(model: nn.ModuleDict, cfg: AdapterSection, targets: Targets, value: Value = moved) -> Adapted:
    """Put an adapter on a model on the CPU, whose weights stay."""
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    injected = adapters.inject(model, cfg, targets, "net")
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            inside = name.replace(".base_layer.", ".")
            tensor.copy_(base[inside] if inside in base else value(name, tensor.shape))
    return Adapted(model, injected, cfg, base)


def plain_net(dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    """`Net` with the same weights each time."""
    torch.manual_seed(0)
    return nn.ModuleDict({"net": Net().to(dtype)})


def net(cfg: AdapterSection, value: Value = moved, dtype: torch.dtype = torch.float32) -> Adapted:
    """`Net` with an adapter on both layers, or on the linear one where the adapter changes no other."""
    if not isinstance(cfg, ConvAdapter):
        cfg = cfg.model_copy(update={"targets": BOTH[:1] if isinstance(cfg, DoraAdapter) else BOTH})
    return adapt(plain_net(dtype), cfg, NET_TARGETS, value)


def family_targets(family: ModelFamily) -> Targets:
    return Targets(family.adapter_targets, family.conv_targets, family.halves_swapped)


def denoiser(family: ModelFamily) -> nn.ModuleDict:
    """The family's first component with random weights, each layer of about unit gain."""
    name = family.components[0]
    module = family.build(name).to_empty(device="cpu").requires_grad_(False)
    for key, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0 if key.endswith("weight") else 0.1)
        else:
            parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator(key))
    return nn.ModuleDict({name: module})
