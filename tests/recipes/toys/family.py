"""toy: two blocks that see each latent pixel with the mean of the caption, trained by flow matching.

Example and Batch keys: "latents" (4, H/8, W/8) fp32, normalised; "prompt_embeds" (8,), shares of letters.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer.config.sections import CompleteSample, ModelConfig, ObjectiveConfig
from trainer.config.size import Size
from trainer.models.base import ImageFamily, LoadModule, TextLength
from trainer.models.objectives.base import Batch, Example, Loss
from trainer.models.objectives.flow_matching import flow_loss
from trainer.models.parts.folder import open_folder, write_model_index, write_random, write_tiny
from trainer.models.parts.image.euler import denoise, euler_scheduler, write_euler_scheduler
from trainer.models.parts.image.images import device_of, pack, unpack
from trainer.models.parts.image.vae import build_vae, decode_latents, encode_latents, published_vae, tiny_vae
from trainer.parallel.parallelize import ShardSpec
from trainer.rng import SampleRng
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


class ToyFamily(ImageFamily):
    components = ("transformer",)
    shard = ShardSpec(blocks=("ToyBlock",))
    adapter_targets: Mapping[str, tuple[str, ...]] = {"transformer": (r"blocks\.\d+\.(up|down)",)}
    architectures = ("toy-2",)
    default_architecture = "toy-2"
    model_files: ClassVar = {"transformer/config.json": ("_class_name", ToyTransformer.__name__)}
    size_multiple = 16

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._folder = open_folder(model, self.architectures, self._write_tiny)
        self._transformer = self._folder.config("transformer", ToyTransformer.__name__)
        self._vae = self._folder.read("vae/config.json")
        self._scheduler = self._folder.read("scheduler/scheduler_config.json")

    @property
    def model_spec(self) -> str:
        return "toy"

    def build(self, component: str) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = ToyTransformer.from_config(self._transformer)
        return model

    def layout(self, component: str) -> tuple[Fused, ...]:
        return tuple(Fused(name, (name,)) for name in self.build(component).state_dict())

    def fingerprint(self) -> str:
        return self._folder.digest("vae")

    def text_encoder(self, load: LoadModule) -> nn.Module:
        return nn.Identity()

    def image_encoder(self, load: LoadModule) -> nn.Module:
        return load(build_vae(self._vae), self._folder.weights("vae"), ())

    def encode_text(self, encoder: Any, caption: str) -> Example:
        letters = torch.tensor([*caption.encode()], dtype=torch.int64) % LETTERS
        return {"prompt_embeds": torch.bincount(letters, minlength=LETTERS) / max(1, len(letters))}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        return [() for _ in captions]

    @torch.no_grad()
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        return {"latents": encode_latents(encoder, image)[0].cpu()}

    def batch_key(self, example: Example) -> Hashable:
        return tuple(example["latents"].shape[-2:])

    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        def predict(noisy: Tensor, sigma: Tensor) -> Tensor:
            predicted: Tensor = model["transformer"](noisy, sigma, batch["prompt_embeds"]).float()
            return predicted

        height, width = batch["latents"].shape[-2:]
        return flow_loss(self.objective, self.shift, batch, height * width, rng, predict)

    @torch.no_grad()
    def draw(
        self,
        model: nn.ModuleDict,
        encoder: Any,
        text: Example,
        negative: Example | None,
        cfg: CompleteSample,
        rng: SampleRng,
    ) -> Image.Image:
        device = device_of(encoder)
        prompt = text["prompt_embeds"].to(device)[None]

        def predict(latents: Tensor, sigma: Tensor) -> Tensor:
            predicted: Tensor = model["transformer"](latents, sigma, prompt).float()
            return predicted

        noise = rng.normal("sample", (self._vae["latent_channels"], cfg.size[1] // 8, cfg.size[0] // 8)).to(device)
        return decode_latents(encoder, denoise(euler_scheduler(self._scheduler, cfg.steps, device), noise, predict))

    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        state = {name.replace("diffusion_model.", "transformer.", 1): one for name, one in load_file(file).items()}
        model["transformer"].load_lora_adapter(state, prefix="transformer", low_cpu_mem_usage=True)

    def blank_example(self, size: Size, text_tokens: int, dtype: torch.dtype) -> Example:
        latents = torch.zeros(self._vae["latent_channels"], size.height // 8, size.width // 8)
        return {"latents": latents, "prompt_embeds": torch.zeros(LETTERS)}

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        return {"transformer": {"channels": 16, "width": 64}, "vae": published_vae(latent_channels=16)}

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        vae = tiny_vae(latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159)
        return {"transformer": {"channels": 4, "width": 32, "num_layers": 2}, "vae": vae, "scheduler": {"shift": 1.0}}

    def _write_tiny(self) -> Path:
        configs = self.tiny()

        def write(folder: Path) -> None:
            write_random(folder / "transformer", lambda: ToyTransformer(**configs["transformer"]))
            write_random(folder / "vae", lambda: AutoencoderKL(**configs["vae"]))
            write_euler_scheduler(folder / "scheduler", configs["scheduler"])
            write_model_index(folder, "ToyPipeline", transformer=("diffusers", ToyTransformer.__name__))

        return write_tiny(self.cache, "toy", 1, configs, write)


FAMILY = ToyFamily
