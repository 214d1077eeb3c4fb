"""The demo model of family flux2: its parts put together before the transformer's training, and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel

TRANSFORMER = {
    "in_channels": 128,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": 384,
    "timestep_guidance_channels": 128,
    "axes_dims_rope": [16, 16, 16, 16],
    "guidance_embeds": False,
}
SCHEDULER = {"shift": 4.0, "use_dynamic_shifting": False}


def write_base(folder: Path, vae: Path, tokenizer: Any, text_encoder: Any, seed: int) -> None:
    """The model with a transformer of random weights, in fp32. vae: folder of the autoencoder."""
    torch.manual_seed(seed)
    pipeline: Any = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=AutoencoderKLFlux2.from_pretrained(vae),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=Flux2Transformer2DModel(**TRANSFORMER),
    )
    pipeline.save_pretrained(folder)


def write_demo(folder: Path, base: Path, transformer: Path) -> None:
    """The model with a trained transformer, in fp16. base, transformer: their folders."""
    trained = Flux2Transformer2DModel.from_pretrained(transformer)
    pipeline: Any = Flux2KleinPipeline.from_pretrained(base, transformer=trained)
    pipeline.to(torch.float16).save_pretrained(folder)
    for config in folder.rglob("*.json"):
        _forget_where_it_was(config)


def _forget_where_it_was(config: Path) -> None:
    """Diffusers notes the folder a part was read from."""
    values = json.loads(config.read_text(encoding="utf-8"))
    if values.pop("_name_or_path", None):
        config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
