"""FLUX.1 with 1 + 1 blocks of the published width: diffusers' converters of its original names know no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file

from tests.adapters import consumers
from tests.adapters.examples import Example, cached_example, saved
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models import families

WIDTH = {
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "axes_dims_rope": [16, 56, 56],
    "num_layers": 1,
    "num_single_layers": 1,
}


def figures(folder: Path) -> Iterator[tuple[str, float]]:
    """(what diffusers read, its error) of the single file and of a lora under kohya's names."""
    model = _wide(folder)
    yield "original single file", _single_file(model, folder)
    layers = model.adapter("lora")
    (file,) = saved(model.files(layers, "kohya"), folder / "kohya")
    yield "lora under kohya's names", consumers.diffusers(model, file, layers)


def _wide(folder: Path) -> Example:
    """The tiny model's folder with a wider denoiser, without its weights."""
    path = folder / "wide"
    shutil.copytree(cached_example("flux1", folder / "models").family.folder, path)
    file = path / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | WIDTH))
    family = families.get("flux1")(ModelConfig(family="flux1", path=str(path)), ObjectiveConfig(), folder)
    return Example(family)


def _single_file(model: Example, folder: Path) -> float:
    """Share of the numbers that diffusers reads differently."""
    tensors = {name: tensor.bfloat16() for name, tensor in model.model()["transformer"].state_dict().items()}
    for number, (name, tensor) in enumerate(tensors.items()):
        if tensor.dim() == 1:
            tensors[name] = torch.full_like(tensor, number)
    joined = {
        fused.name: fused.join([tensors[part] for part in fused.parts]).contiguous()
        for fused in model.family.layout("transformer")
    }
    save_file(joined, folder / "single.safetensors")
    read = FluxTransformer2DModel.from_single_file(
        str(folder / "single.safetensors"), config=str(folder / "wide"), subfolder="transformer", dtype=torch.bfloat16
    ).state_dict()
    assert read.keys() == tensors.keys()
    wrong = sum(int((read[name] != tensor).sum()) for name, tensor in tensors.items())
    return wrong / sum(tensor.numel() for tensor in tensors.values())
