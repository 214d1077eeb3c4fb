"""toy: two blocks that see each latent pixel with the mean of the caption, trained by flow matching.

Example and Batch keys: "latents" (4, H/8, W/8) fp32, normalised; "prompt_embeds" (8,), shares of letters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer.models.base import LoadModule, TextLength
from trainer.models.flow_transformer import FlowTransformer, Index
from trainer.models.objectives.base import Batch, Example
from trainer.models.parts.image.images import pack, unpack
from trainer.models.parts.image.vae import published_vae, tiny_vae
from trainer.parallel.parallelize import ShardSpec
from trainer.weights.files import Fused

LETTERS = 8


class ToyBlock(nn.Module):
    """A residual layer of each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class ToyTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Tokens are latent pixels, which do not see each other."""

    @register_to_config
    def __init__(self, channels: int = 4, width: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(channels + 1 + LETTERS, width), nn.Linear(width, channels)
        self.blocks = nn.ModuleList(ToyBlock(width) for _ in range(num_layers))

    def forward(self, latents: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        """Predict the velocity. latents: (B, C, h, w).  sigma: (B,).  text: (B, LETTERS)."""
        tokens = pack(latents)
        seen = torch.cat([sigma[:, None], text], dim=1).to(tokens.dtype)
        x = self.proj_in(torch.cat([tokens, seen[:, None].expand(-1, tokens.shape[1], -1)], dim=2))
        for block in self.blocks:
            x = block(x)
        return unpack(self.proj_out(x), *latents.shape[-2:])


class ToyFamily(FlowTransformer):
    network = ToyTransformer
    encoder_folders = ("vae",)
    shard = ShardSpec(blocks=("ToyBlock",))
    adapter_targets: Mapping[str, tuple[str, ...]] = {"transformer": (r"blocks\.\d+\.(up|down)",)}
    architectures = ("toy-2",)
    default_architecture = "toy-2"
    model_files: ClassVar = {"transformer/config.json": ("_class_name", ToyTransformer.__name__)}
    reads_negative = False
    text_recipe = "shares of letters"
    model_spec = "toy"

    @property
    def latent_channels(self) -> int:
        return int(self._architecture.channels)

    def layout(self, component: str) -> tuple[Fused, ...]:
        return tuple(Fused(name, (name,)) for name in self.build(component).state_dict())

    def text_encoder(self, load: LoadModule) -> nn.Module:
        return nn.Identity()

    def encode_text(self, encoder: Any, caption: str) -> Example:
        letters = torch.tensor([*caption.encode()], dtype=torch.int64) % LETTERS
        return {"prompt_embeds": torch.bincount(letters, minlength=LETTERS) / max(1, len(letters))}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        return [() for _ in captions]

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        predicted: Tensor = model["transformer"](latents, sigma, batch["prompt_embeds"]).float()
        return predicted

    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        state = {name.replace("diffusion_model.", "transformer.", 1): one for name, one in load_file(file).items()}
        model["transformer"].load_lora_adapter(state, prefix="transformer", low_cpu_mem_usage=True)

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        return {"prompt_embeds": torch.zeros(LETTERS)}

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        return {"transformer": {"channels": 16, "width": 64}, "vae": published_vae(latent_channels=16)}

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        vae = tiny_vae(latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159)
        return {"transformer": {"channels": 4, "width": 32, "num_layers": 2}, "vae": vae, "scheduler": {"shift": 1.0}}

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        return "ToyPipeline", {}


FAMILY = ToyFamily
