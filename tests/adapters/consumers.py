"""The programs that read adapter files, each asked what it makes of one.

A consumer takes (example, file, layers) and returns the worst ||found - merged|| / ||merged - base|| of the layers,
and fails when it finds other layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from lycoris import create_lycoris_from_weights
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.adapters.examples import Example, relative
from trainer.adapters.layer import LayerAdapter
from trainer.export.adapter import published_paths, under_paths

Layers = Mapping[str, LayerAdapter]


def ourselves(example: Example, file: Path, layers: Layers) -> float:
    """This program's reader."""
    found = {name: layer.merged(example.weight(name)) for name, layer in example.read(file).items()}
    return example.error(found, layers)


def diffusers(example: Example, file: Path, layers: Layers) -> float:
    """The loader of the family's pipeline."""
    model = example.model()
    example.family.load_adapter_file(model, file)
    return example.error(merged_by_peft(model), layers)


def peft(example: Example, file: Path, layers: Layers) -> float:
    """`PeftModel.from_pretrained` of a folder."""
    denoiser, *encoders = example.family.components
    component = next((name for name in encoders if file.name.endswith(f"-{name}")), denoiser)
    given, ours = example.model()[component], published_paths(example.family, component)
    model = PeftModel.from_pretrained(under_paths(given, ours) if ours else given, file)
    merged = merged_by_peft(model.get_base_model())
    found = {f"{component}.{ours.get(name, name)}": weight for name, weight in merged.items()}
    return example.error(found, {name: layer for name, layer in layers.items() if name.startswith(f"{component}.")})


def lycoris(example: Example, file: Path, layers: Layers) -> float:
    """lycoris-lora's live forward of random inputs: its own merge scales loha and lokr twice. The denoiser only."""
    component = example.family.components[0]
    layers = {name: layer for name, layer in layers.items() if name.startswith(f"{component}.")}
    model = example.model()
    network, _ = create_lycoris_from_weights(1.0, None, model[component], weights_sd=load_file(file))
    assert len(network.loras) == len(layers)
    network.apply_to()
    return max(_live_error(model.get_submodule(name), layer, example.weight(name)) for name, layer in layers.items())


@torch.no_grad()
def _live_error(module: nn.Module, layer: LayerAdapter, weight: Tensor) -> float:
    inputs = torch.randn(4, weight.shape[1], *(8,) * (weight.dim() - 2))

    def outputs(weight: Tensor) -> Tensor:
        if isinstance(module, nn.Linear):
            return nn.functional.linear(inputs, weight)
        return nn.functional.conv2d(inputs, weight, stride=module.stride, padding=module.padding)

    return relative(module(inputs), outputs(layer.merged(weight)), outputs(weight))


def merged_by_peft(model: nn.Module) -> dict[str, Tensor]:
    """{layer: its weight with the adapter} as peft merges it, of the layers that carry one."""
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
            weights[name] = module.get_base_layer().weight.detach()
    return weights


CONSUMERS = {"diffusers": diffusers, "peft": peft, "lycoris": lycoris}
