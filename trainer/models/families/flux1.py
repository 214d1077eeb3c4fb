"""FLUX.1: dev (guidance embedding) and schnell (distilled to a few steps), trained by flow matching.

Example and Batch keys: "latents" (16, H/8, W/8) fp32, normalised; "prompt_embeds" (L, D) of T5 with padding, which the
model attends to, L = 512 for dev and 256 for schnell; "pooled_embeds" (P,) of CLIP. A Batch adds a batch dim in front.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from PIL import Image
from torch import Tensor, nn

from trainer.config.families import Distilled
from trainer.config.sections import CompleteSample, ModelConfig, ObjectiveConfig
from trainer.config.size import Size
from trainer.models.base import FLOW_FIELDS, ImageFamily, LoadModule, TextLength
from trainer.models.objectives.base import Batch, Example, Loss
from trainer.models.objectives.flow_matching import flow_loss
from trainer.models.parts.folder import check_architecture, open_folder, write_model_index, write_random, write_tiny
from trainer.models.parts.image.clip import (
    CLIP_L,
    CLIP_TOKENS,
    CLIP_TYPES,
    clip_pooled,
    load_clip,
    tiny_clip,
    write_tiny_clip,
    write_tiny_clip_tokenizer,
)
from trainer.models.parts.image.euler import (
    denoise,
    euler_scheduler,
    linear_mu_of,
    spaced_sigmas,
    write_euler_scheduler,
)
from trainer.models.parts.image.images import device_of, pack, patchify, unpack, unpatchify
from trainer.models.parts.image.t5 import (
    T5_TYPES,
    T5_XXL,
    load_t5,
    t5_states,
    tiny_t5,
    write_tiny_t5,
    write_tiny_t5_tokenizer,
)
from trainer.models.parts.image.text_encoder import TextEncoder, load_tokenizer, max_tokens, text_lengths
from trainer.models.parts.image.vae import build_vae, decode_latents, encode_latents, published_vae, tiny_vae
from trainer.models.parts.layout import numbered, tensors_of
from trainer.parallel.parallelize import ShardSpec
from trainer.rng import SampleRng
from trainer.system.errors import InputError
from trainer.system.pinned import send
from trainer.weights.files import Fused


@dataclass(frozen=True)
class Architecture:
    """The sizes in which the published transformers differ."""

    num_layers: int
    num_single_layers: int
    guidance_embeds: bool

    def __str__(self) -> str:
        guidance = "with" if self.guidance_embeds else "without"
        return f"{self.num_layers} + {self.num_single_layers} blocks {guidance} guidance embedding"


ARCHITECTURES = {
    "dev": Architecture(19, 38, guidance_embeds=True),
    "schnell": Architecture(19, 38, guidance_embeds=False),
}
DEFAULT_ARCHITECTURE = "dev"
MAX_TOKENS = {"dev": 512, "schnell": 256}


@dataclass(frozen=True)
class TextEncoders:
    """The encoders of a caption: CLIP gives one vector of it, T5 a state per token."""

    clip: TextEncoder
    t5: TextEncoder


class Flux1(ImageFamily):
    components = ("transformer",)
    shard = ShardSpec(
        blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        returns_views=("FluxSingleTransformerBlock", "FluxTransformer2DModel"),
    )
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
            r"transformer_blocks\.\d+\.(ff|ff_context)\.net\.(0\.proj|2)",
            r"single_transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v)|proj_mlp|proj_out)",
        )
    }
    halves_swapped = (r"norm_out\.linear",)
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", FluxTransformer2DModel.__name__)}
    distilled = (
        Distilled(
            ("FLUX.1-schnell", "flux1-schnell"),
            base="black-forest-labs/FLUX.1-dev",
            steps=4,
            marks={"transformer/config.json": {"guidance_embeds": False}},
            architecture="schnell",
        ),
    )
    size_multiple = 16
    objective_fields = FLOW_FIELDS | {"guidance"}
    conditional_fields: ClassVar = {"objective.guidance": ("transformer/config.json", "guidance_embeds", False)}
    options_read = frozenset({"architecture", "distilled", "max_tokens"})
    longest_text = 512

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._folder = open_folder(model, ARCHITECTURES, self._write_tiny)
        self._transformer = self._folder.config("transformer", FluxTransformer2DModel.__name__)
        self._vae = self._folder.read("vae/config.json")
        self._scheduler = self._folder.read("scheduler/scheduler_config.json")
        self._check_encoders()
        # The config as the model reads it: fields that the file leaves out have their defaults.
        self._architecture: Any = self.build("transformer").config
        check_architecture(model, self._folder, ARCHITECTURES, self._own_architecture())
        self._check_inputs()
        self._max_tokens = max_tokens(model, self._folder, "tokenizer_2", MAX_TOKENS[self._kind])

    @property
    def model_spec(self) -> str:
        return f"flux-1-{self._kind}"

    def build(self, component: str) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = FluxTransformer2DModel.from_config(self._transformer)
        return model

    def layout(self, component: str) -> tuple[Fused, ...]:
        model = self.build(component)
        double = numbered("double_blocks", "transformer_blocks", model, DOUBLE_BLOCK)
        single = numbered("single_blocks", "single_transformer_blocks", model, SINGLE_BLOCK)
        return tensors_of(model, (*MODULES, *double, *single))

    def fingerprint(self) -> str:
        names = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")
        return hashlib.sha256(f"{self._max_tokens} {self._folder.digest(*names)}".encode()).hexdigest()

    def text_encoder(self, load: LoadModule) -> TextEncoders:
        from transformers import CLIPTextModel

        return TextEncoders(
            load_clip(load, self._folder, "text_encoder", "tokenizer", CLIPTextModel),
            load_t5(load, self._folder, "text_encoder_2", "tokenizer_2"),
        )

    def image_encoder(self, load: LoadModule) -> nn.Module:
        return load(build_vae(self._vae), self._folder.weights("vae"), ())

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoders, caption: str) -> Example:
        return {
            "prompt_embeds": t5_states(encoder.t5, caption, self._max_tokens)[0].cpu(),
            "pooled_embeds": clip_pooled(encoder.clip, caption)[0].cpu(),
        }

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        """Measure for T5 only. CLIP gives one vector of the first 77 tokens, in training as in every pipeline."""
        tokenizer = load_tokenizer(self._folder, "tokenizer_2")
        return [(length,) for length in text_lengths("text_encoder_2", tokenizer, captions, self._max_tokens)]

    @torch.no_grad()
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        return {"latents": encode_latents(encoder, image)[0].cpu()}

    def batch_key(self, example: Example) -> Hashable:
        return (*example["latents"].shape[-2:], example["prompt_embeds"].shape[0])

    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        def predict(noisy: Tensor, sigma: Tensor) -> Tensor:
            return self._predict(model, noisy, sigma, batch, self.objective.guidance)

        height, width = batch["latents"].shape[-2:]
        return flow_loss(self.objective, self.shift, batch, height * width // 4, rng, predict)

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
        """Generate an image. Only dev reads `cfg.guidance`; no model reads the negative prompt."""
        device = device_of(encoder)
        width, height = (2 * (side // self.size_multiple) for side in cfg.size)
        prompt = {key: tensor.to(device).unsqueeze(0) for key, tensor in text.items()}

        def predict(latents: Tensor, sigma: Tensor) -> Tensor:
            return self._predict(model, latents, sigma, prompt, cfg.guidance)

        noise = rng.normal("sample", (self._vae["latent_channels"], height, width)).to(device)
        mu = linear_mu_of(self._scheduler, height * width // 4)
        scheduler = euler_scheduler(self._scheduler, cfg.steps, device, mu, sigmas=spaced_sigmas(cfg.steps))
        return decode_latents(encoder, denoise(scheduler, noise, predict))

    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin

        state, alphas = FluxLoraLoaderMixin.lora_state_dict(
            str(file.parent), weight_name=file.name, local_files_only=True, return_alphas=True
        )
        FluxLoraLoaderMixin.load_lora_into_transformer(
            state, network_alphas=alphas, transformer=model["transformer"], low_cpu_mem_usage=True
        )

    def blank_example(self, size: Size, text_tokens: int, dtype: torch.dtype) -> Example:
        return {
            "latents": torch.zeros(self._vae["latent_channels"], size.height // 8, size.width // 8),
            "prompt_embeds": torch.zeros(self._max_tokens, self._architecture.joint_attention_dim, dtype=dtype),
            "pooled_embeds": torch.zeros(self._architecture.pooled_projection_dim, dtype=dtype),
        }

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        return {
            "transformer": {
                "in_channels": 64,
                "num_layers": sizes.num_layers,
                "num_single_layers": sizes.num_single_layers,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": T5_XXL["d_model"],
                "pooled_projection_dim": CLIP_L["hidden_size"],
                "axes_dims_rope": [16, 56, 56],
            },
            "vae": published_vae(latent_channels=16),
            "text_encoder": CLIP_L,
            "text_encoder_2": T5_XXL,
            "tokenizer": {"model_max_length": CLIP_TOKENS},
            "tokenizer_2": {"model_max_length": MAX_TOKENS[architecture]},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        published = ARCHITECTURES[architecture or DEFAULT_ARCHITECTURE]
        return {
            "transformer": _tiny_transformer(published.guidance_embeds),
            "vae": tiny_vae(latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159),
            "text_encoder": tiny_clip(TINY_WIDTH, TINY_TOKENS),
            "text_encoder_2": tiny_t5(TINY_WIDTH),
            "scheduler": {"shift": 3.0, "use_dynamic_shifting": True} if published.guidance_embeds else {"shift": 1.0},
        }

    @property
    def _kind(self) -> str:
        return "dev" if self._architecture.guidance_embeds else "schnell"

    def _own_architecture(self) -> Architecture:
        config = self._architecture
        return Architecture(config.num_layers, config.num_single_layers, config.guidance_embeds)

    def _check_encoders(self) -> None:
        self._folder.encoder_config("text_encoder", *CLIP_TYPES)
        self._folder.encoder_config("text_encoder_2", *T5_TYPES)
        self._folder.read("tokenizer/tokenizer_config.json")

    def _check_inputs(self) -> None:
        """Refuse Fill, Depth and Canny, which read other images in addition to the latents."""
        needed = 4 * self._vae["latent_channels"]
        if self._architecture.in_channels != needed:
            raise InputError(
                f"{self._folder.field} {self.folder}: the transformer reads {self._architecture.in_channels} channels, "
                f"the autoencoder gives {needed}; only text-to-image models are trained, use dev or schnell"
            )

    def _write_tiny(self) -> Path:
        name = self.config.options.architecture or DEFAULT_ARCHITECTURE
        configs = self.tiny(name)
        return write_tiny(self.cache, f"flux1-{name}", TINY_VERSION, configs, lambda to: _write_tiny(to, configs))

    def _predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, prompt: Batch, guidance: float) -> Tensor:
        """Predict the velocity, fp32. latents: (B, C, h, w).  sigma: (B,).  prompt: (B, ...) of `encode_text`."""
        patches = patchify(latents)
        height, width = patches.shape[-2:]
        ids = send(image_ids(height, width), latents.device)
        packed = model["transformer"](
            hidden_states=pack(patches),
            encoder_hidden_states=prompt["prompt_embeds"].to(latents.dtype),
            pooled_projections=prompt["pooled_embeds"].to(latents.dtype),
            timestep=sigma,
            guidance=torch.full_like(sigma, guidance) if self._architecture.guidance_embeds else None,
            img_ids=ids,
            # Integers, as for the image: bf16 is exact only up to 256.
            txt_ids=ids.new_zeros(prompt["prompt_embeds"].shape[1], 3),
            return_dict=False,
        )[0]
        return unpatchify(unpack(packed.float(), height, width))


FAMILY = Flux1


def image_ids(height: int, width: int) -> Tensor:
    """Positions (0, row, column) of the image tokens: (h * w, 3)."""
    return torch.cartesian_prod(torch.zeros(1, dtype=torch.int64), torch.arange(height), torch.arange(width))


MODULES = (
    Fused("img_in", ("x_embedder",)),
    Fused("txt_in", ("context_embedder",)),
    Fused("time_in.in_layer", ("time_text_embed.timestep_embedder.linear_1",)),
    Fused("time_in.out_layer", ("time_text_embed.timestep_embedder.linear_2",)),
    Fused("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
    Fused("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
    Fused("guidance_in.in_layer", ("time_text_embed.guidance_embedder.linear_1",)),
    Fused("guidance_in.out_layer", ("time_text_embed.guidance_embedder.linear_2",)),
    Fused("final_layer.linear", ("proj_out",)),
    Fused("final_layer.adaLN_modulation.1", ("norm_out.linear",), halves_swapped=True),
)
"""The modules under their names in BFL's file; the tables below hold the modules of the blocks."""
DOUBLE_BLOCK = {
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.norm.query_norm": ("attn.norm_q",),
    "img_attn.norm.key_norm": ("attn.norm_k",),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",),
    "txt_attn.norm.key_norm": ("attn.norm_added_k",),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
}
SINGLE_BLOCK = {
    "modulation.lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "norm.query_norm": ("attn.norm_q",),
    "norm.key_norm": ("attn.norm_k",),
}


# The model of `model.path: tiny`.

TINY_VERSION = 1
"""Part of the folder's name: raise it when equal configs give other files than before."""
TINY_WIDTH = 32
TINY_TOKENS = 32


def _write_tiny(folder: Path, configs: dict[str, Any]) -> None:
    from transformers import CLIPTextModel

    write_random(folder / "transformer", lambda: FluxTransformer2DModel(**configs["transformer"]))
    write_random(folder / "vae", lambda: AutoencoderKL(**configs["vae"]))
    write_tiny_clip(folder / "text_encoder", configs["text_encoder"], CLIPTextModel)
    write_tiny_t5(folder / "text_encoder_2", configs["text_encoder_2"])
    write_tiny_clip_tokenizer(folder / "tokenizer", TINY_TOKENS)
    write_tiny_t5_tokenizer(folder / "tokenizer_2", TINY_TOKENS)
    write_euler_scheduler(folder / "scheduler", configs["scheduler"])
    write_model_index(
        folder,
        "FluxPipeline",
        scheduler=("diffusers", "FlowMatchEulerDiscreteScheduler"),
        text_encoder=("transformers", "CLIPTextModel"),
        text_encoder_2=("transformers", "T5EncoderModel"),
        tokenizer=("transformers", "CLIPTokenizer"),
        tokenizer_2=("transformers", "T5TokenizerFast"),
        transformer=("diffusers", "FluxTransformer2DModel"),
        vae=("diffusers", "AutoencoderKL"),
    )


def _tiny_transformer(guidance_embeds: bool) -> dict[str, Any]:
    return {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TINY_WIDTH,
        "pooled_projection_dim": TINY_WIDTH,
        "guidance_embeds": guidance_embeds,
        "axes_dims_rope": [4, 6, 6],
    }
