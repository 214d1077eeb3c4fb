"""Stable Diffusion 3 and 3.5, trained by flow matching.

Example and Batch keys: "latents" (16, H/8, W/8) fp32, normalised; "prompt_embeds" (L, D), the states of both CLIPs
side by side, then those of T5 with padding, which the model attends to, L = 77 + 256; "pooled_embeds" (P,) of both
CLIPs. A Batch adds a batch dim in front.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from PIL import Image
from torch import Tensor, nn

from trainer.config.families import Distilled
from trainer.config.sections import CompleteSample, ModelConfig, ObjectiveConfig
from trainer.config.size import Size
from trainer.models.base import ImageFamily, LoadModule, TextLength
from trainer.models.objectives.base import Batch, Example, Loss
from trainer.models.objectives.flow_matching import Shift, flow_loss
from trainer.models.parts.folder import check_architecture, open_folder, write_model_index, write_random, write_tiny
from trainer.models.parts.image.clip import (
    CLIP_G,
    CLIP_L,
    CLIP_TOKENS,
    CLIP_TYPES,
    clip_states,
    clip_tokens,
    load_clip,
    tiny_clip,
    write_tiny_clip,
    write_tiny_clip_tokenizer,
)
from trainer.models.parts.image.euler import (
    denoise,
    euler_scheduler,
    guidance_inputs,
    guided,
    linear_mu_of,
    write_euler_scheduler,
)
from trainer.models.parts.image.images import device_of
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
from trainer.weights.files import Fused


@dataclass(frozen=True)
class Architecture:
    """The sizes in which the published transformers differ."""

    num_layers: int
    num_dual_layers: int
    qk_norm: bool

    def __str__(self) -> str:
        norm = "with" if self.qk_norm else "without"
        return f"{self.num_layers} blocks, {self.num_dual_layers} of them with two attentions, {norm} query-key norm"


ARCHITECTURES = {
    "sd3-medium": Architecture(24, 0, qk_norm=False),
    "sd35-medium": Architecture(24, 13, qk_norm=True),
    "sd35-large": Architecture(38, 0, qk_norm=True),
}
DEFAULT_ARCHITECTURE = "sd35-medium"
HEADS = {"sd3-medium": 24, "sd35-medium": 24, "sd35-large": 38}
"""Attention heads, 64 wide each."""
MODEL_SPECS = {
    "sd3-medium": "stable-diffusion-3-m",
    "sd35-medium": "stable-diffusion-3-5-medium",
    "sd35-large": "stable-diffusion-3-5-large",
}
MAX_TOKENS = 256
T5 = "text_encoder_3"
CLIP_TOKENIZERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}


@dataclass(frozen=True)
class TextEncoders:
    """The encoders of a caption. t5: None where it is left out; the model then sees zeros instead."""

    clips: tuple[TextEncoder, TextEncoder]
    t5: TextEncoder | None


class Sd3(ImageFamily):
    components = ("transformer",)
    shard = ShardSpec(blocks=("JointTransformerBlock",), fp32_inputs=frozenset({"timestep"}))
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
            r"transformer_blocks\.\d+\.attn2\.(to_q|to_k|to_v|to_out\.0)",
            r"transformer_blocks\.\d+\.(ff|ff_context)\.net\.(0\.proj|2)",
        )
    }
    # Only the norm1_context of the last block has two halves; for the other blocks no adapter needs the order.
    halves_swapped = (r"norm_out\.linear", r"transformer_blocks\.\d+\.norm1_context\.linear")
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", SD3Transformer2DModel.__name__)}
    # Its configs equal those of the base model: only its name identifies it.
    distilled = (
        Distilled(
            ("stable-diffusion-3.5-large-turbo", "sd3.5_large_turbo"),
            base="stabilityai/stable-diffusion-3.5-large",
            steps=4,
            marks={},
        ),
    )
    size_multiple = 16
    # The positions of all published models but 3.5 medium, which has twice as many.
    longest_side: int = 192 * size_multiple
    options_read = frozenset({"architecture", "distilled", "max_tokens", "without"})
    shift = Shift(constant=3.0)
    optional_encoders = (T5,)
    longest_text = 512

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._folder = open_folder(model, ARCHITECTURES, self._write_tiny)
        self._transformer = self._folder.config("transformer", SD3Transformer2DModel.__name__)
        self._vae = self._folder.read("vae/config.json")
        self._scheduler = self._folder.read("scheduler/scheduler_config.json")
        self._has_t5 = T5 not in model.options.without and (self.folder / T5).is_dir()
        self._check_encoders()
        # The config as the model reads it: fields that the file leaves out have their defaults.
        self._architecture: Any = self.build("transformer").config
        check_architecture(model, self._folder, ARCHITECTURES, self._own_architecture())
        self.longest_side = min(self.longest_side, self._num_positions() * self.size_multiple)
        self._max_tokens = model.options.max_tokens or MAX_TOKENS
        if self._has_t5 or (self.folder / "tokenizer_3").is_dir():
            self._max_tokens = max_tokens(model, self._folder, "tokenizer_3", MAX_TOKENS)

    def _num_positions(self) -> int:
        """The positions of patches along a side."""
        return int(self._architecture.pos_embed_max_size)

    @property
    def never_trained(self) -> tuple[str, ...]:
        # Nothing reads the queries of the text in the last block.
        return (rf"transformer_blocks\.{self._architecture.num_layers - 1}\.attn\.(add_q_proj|norm_added_q)\..+",)

    @property
    def model_spec(self) -> str:
        found = self._own_architecture()
        names = (MODEL_SPECS[name] for name, architecture in ARCHITECTURES.items() if architecture == found)
        return next(names, "stable-diffusion-3-tiny")

    def build(self, component: str) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = SD3Transformer2DModel.from_config(self._transformer)
        return model

    def layout(self, component: str) -> tuple[Fused, ...]:
        model: Any = self.build(component)
        last = f"{BLOCKS}.{len(model.transformer_blocks) - 1}.context_block.adaLN_modulation.1"
        blocks = numbered(BLOCKS, "transformer_blocks", model, BLOCK)
        marked = (replace(module, halves_swapped=module.name == last) for module in blocks)
        return tensors_of(model, (*MODULES, *marked))

    def fingerprint(self) -> str:
        clips = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")
        files = self._folder.digest(*clips, *((T5, "tokenizer_3") if self._has_t5 else ()))
        # Without T5 only the transformer determines the width of the embeddings.
        used = f"{self._has_t5} {self._max_tokens} {self._architecture.joint_attention_dim}"
        return hashlib.sha256(f"{used} {files}".encode()).hexdigest()

    def text_encoder(self, load: LoadModule) -> TextEncoders:
        from transformers import CLIPTextModelWithProjection

        first = load_clip(load, self._folder, "text_encoder", "tokenizer", CLIPTextModelWithProjection)
        second = load_clip(load, self._folder, "text_encoder_2", "tokenizer_2", CLIPTextModelWithProjection)
        t5 = load_t5(load, self._folder, T5, "tokenizer_3") if self._has_t5 else None
        return TextEncoders((first, second), t5)

    def image_encoder(self, load: LoadModule) -> nn.Module:
        return load(build_vae(self._vae), self._folder.weights("vae"), ())

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoders, caption: str) -> Example:
        states, pooled = zip(*(_clip_embeds(clip, caption) for clip in encoder.clips), strict=True)
        width = self._architecture.joint_attention_dim
        clips = torch.cat(states, dim=-1)
        clips = nn.functional.pad(clips, (0, width - clips.shape[-1]))
        if encoder.t5 is None:
            words = clips.new_zeros(1, self._max_tokens, width)
        else:
            words = t5_states(encoder.t5, caption, self._max_tokens)
        return {
            "prompt_embeds": torch.cat([clips, words.to(clips.dtype)], dim=1)[0].cpu(),
            "pooled_embeds": torch.cat(pooled, dim=-1)[0].cpu(),
        }

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        """Measure for every encoder: the CLIPs cut text that T5 may still read."""
        tokenizers = {name: load_tokenizer(self._folder, folder) for name, folder in CLIP_TOKENIZERS.items()}
        lengths = [text_lengths(name, t, captions, t.model_max_length) for name, t in tokenizers.items()]
        if self._has_t5:
            lengths.append(text_lengths(T5, load_tokenizer(self._folder, "tokenizer_3"), captions, self._max_tokens))
        return list(zip(*lengths, strict=True))

    def longer_text(self, length: TextLength) -> str | None:
        return super().longer_text(length) if length.encoder == T5 else None

    @torch.no_grad()
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        return {"latents": encode_latents(encoder, image)[0].cpu()}

    def batch_key(self, example: Example) -> Hashable:
        return (*example["latents"].shape[-2:], example["prompt_embeds"].shape[0])

    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        def predict(noisy: Tensor, sigma: Tensor) -> Tensor:
            return _predict(model, noisy, sigma, batch)

        return flow_loss(self.objective, self.shift, batch, self._num_tokens(batch["latents"]), rng, predict)

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
        width, height = (2 * (side // self.size_multiple) for side in cfg.size)
        prompts = [
            {key: tensor.to(device).unsqueeze(0) for key, tensor in example.items()}
            for example in guidance_inputs(text, negative, cfg.guidance)
        ]

        def predict(latents: Tensor, sigma: Tensor) -> Tensor:
            return guided([_predict(model, latents, sigma, prompt) for prompt in prompts], cfg.guidance)

        noise = rng.normal("sample", (self._architecture.in_channels, height, width)).to(device)
        mu = linear_mu_of(self._scheduler, self._num_tokens(noise))
        scheduler = euler_scheduler(self._scheduler, cfg.steps, device, mu)
        return decode_latents(encoder, denoise(scheduler, noise, predict))

    def load_adapter_file(self, model: nn.ModuleDict, file: Path) -> None:
        from diffusers.loaders.lora_pipeline import SD3LoraLoaderMixin

        state = SD3LoraLoaderMixin.lora_state_dict(str(file.parent), weight_name=file.name, local_files_only=True)
        SD3LoraLoaderMixin.load_lora_into_transformer(state, transformer=model["transformer"], low_cpu_mem_usage=True)

    def blank_example(self, size: Size, text_tokens: int, dtype: torch.dtype) -> Example:
        config = self._architecture
        clips = self._folder.encoder_config("text_encoder", *CLIP_TYPES)["max_position_embeddings"]
        return {
            "latents": torch.zeros(config.in_channels, size.height // 8, size.width // 8),
            "prompt_embeds": torch.zeros(clips + self._max_tokens, config.joint_attention_dim, dtype=dtype),
            "pooled_embeds": torch.zeros(config.pooled_projection_dim, dtype=dtype),
        }

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes, heads = ARCHITECTURES[architecture], HEADS[architecture]
        return {
            "transformer": {
                "in_channels": 16,
                "out_channels": 16,
                "num_layers": sizes.num_layers,
                "attention_head_dim": 64,
                "num_attention_heads": heads,
                "caption_projection_dim": 64 * heads,
                "joint_attention_dim": T5_XXL["d_model"],
                "pooled_projection_dim": CLIP_L["projection_dim"] + CLIP_G["projection_dim"],
                "pos_embed_max_size": 384 if architecture == "sd35-medium" else 192,
                "sample_size": 128,
                "dual_attention_layers": list(range(sizes.num_dual_layers)),
                "qk_norm": "rms_norm" if sizes.qk_norm else None,
            },
            "vae": published_vae(latent_channels=16),
            "text_encoder": CLIP_L,
            "text_encoder_2": CLIP_G,
            "text_encoder_3": T5_XXL,
            "tokenizer": {"model_max_length": CLIP_TOKENS},
            "tokenizer_2": {"model_max_length": CLIP_TOKENS},
            "tokenizer_3": {"model_max_length": 512},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        published = ARCHITECTURES[architecture or DEFAULT_ARCHITECTURE]
        return {
            "transformer": _tiny_transformer(published),
            "vae": tiny_vae(latent_channels=4, scaling_factor=1.5305, shift_factor=0.0609),
            "text_encoder": tiny_clip(TINY_WIDTH, TINY_TOKENS),
            "text_encoder_2": tiny_clip(TINY_WIDTH, TINY_TOKENS, hidden_act="gelu"),
            "text_encoder_3": tiny_t5(2 * TINY_WIDTH + 16),
            "scheduler": {"shift": 3.0},
        }

    def _num_tokens(self, latents: Tensor) -> int:
        patch: int = self._architecture.patch_size
        return latents.shape[-2] * latents.shape[-1] // patch**2

    def _own_architecture(self) -> Architecture:
        config = self._architecture
        return Architecture(config.num_layers, len(config.dual_attention_layers), config.qk_norm is not None)

    def _check_encoders(self) -> None:
        self._folder.encoder_config("text_encoder", *CLIP_TYPES)
        self._folder.encoder_config("text_encoder_2", *CLIP_TYPES)
        if self._has_t5:
            self._folder.encoder_config(T5, *T5_TYPES)
        for name in ("tokenizer", "tokenizer_2"):
            self._folder.read(f"{name}/tokenizer_config.json")

    def _write_tiny(self) -> Path:
        name = self.config.options.architecture or DEFAULT_ARCHITECTURE
        configs = self.tiny(name)
        return write_tiny(self.cache, f"sd3-{name}", TINY_VERSION, configs, lambda to: _write_tiny(to, configs))


FAMILY = Sd3


def _clip_embeds(encoder: TextEncoder, caption: str) -> tuple[Tensor, Tensor]:
    """States before the last layer (1, L, D) and the projected end of the caption (1, P)."""
    ids = clip_tokens(encoder.tokenizer, caption).to(device_of(encoder.model))
    states, output = clip_states(encoder.model, ids)
    return states, output.text_embeds


def _predict(model: nn.ModuleDict, latents: Tensor, sigma: Tensor, prompt: Batch) -> Tensor:
    """Predict the velocity, fp32. latents: (B, C, h, w).  sigma: (B,).  prompt: (B, ...) of `encode_text`."""
    velocity: Tensor = model["transformer"](
        hidden_states=latents,
        encoder_hidden_states=prompt["prompt_embeds"].to(latents.dtype),
        pooled_projections=prompt["pooled_embeds"].to(latents.dtype),
        timestep=sigma * 1000,
        return_dict=False,
    )[0]
    return velocity.float()


PREFIX = "model.diffusion_model."
"""Prefix of the transformer's tensors: the published files also hold the autoencoder and the text encoders."""
MODULES = (
    Fused(f"{PREFIX}pos_embed", ("pos_embed.pos_embed",)),
    Fused(f"{PREFIX}x_embedder.proj", ("pos_embed.proj",)),
    Fused(f"{PREFIX}context_embedder", ("context_embedder",)),
    Fused(f"{PREFIX}t_embedder.mlp.0", ("time_text_embed.timestep_embedder.linear_1",)),
    Fused(f"{PREFIX}t_embedder.mlp.2", ("time_text_embed.timestep_embedder.linear_2",)),
    Fused(f"{PREFIX}y_embedder.mlp.0", ("time_text_embed.text_embedder.linear_1",)),
    Fused(f"{PREFIX}y_embedder.mlp.2", ("time_text_embed.text_embedder.linear_2",)),
    Fused(f"{PREFIX}final_layer.linear", ("proj_out",)),
    Fused(f"{PREFIX}final_layer.adaLN_modulation.1", ("norm_out.linear",), halves_swapped=True),
)
"""The modules under their names in the single file; the table below holds the modules of the blocks."""
BLOCKS = f"{PREFIX}joint_blocks"
BLOCK = {
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "x_block.attn.ln_q": ("attn.norm_q",),
    "x_block.attn.ln_k": ("attn.norm_k",),
    "context_block.attn.ln_q": ("attn.norm_added_q",),
    "context_block.attn.ln_k": ("attn.norm_added_k",),
    "x_block.attn.proj": ("attn.to_out.0",),
    "context_block.attn.proj": ("attn.to_add_out",),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block.attn2.ln_q": ("attn2.norm_q",),
    "x_block.attn2.ln_k": ("attn2.norm_k",),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
}


# The model of `model.path: tiny`.

TINY_VERSION = 1
"""Part of the folder's name: raise it when equal configs give other files than before."""
TINY_WIDTH = 32
TINY_TOKENS = 32


def _write_tiny(folder: Path, configs: dict[str, Any]) -> None:
    from transformers import CLIPTextModelWithProjection

    write_random(folder / "transformer", lambda: SD3Transformer2DModel(**configs["transformer"]))
    write_random(folder / "vae", lambda: AutoencoderKL(**configs["vae"]))
    write_tiny_clip(folder / "text_encoder", configs["text_encoder"], CLIPTextModelWithProjection)
    write_tiny_clip(folder / "text_encoder_2", configs["text_encoder_2"], CLIPTextModelWithProjection)
    write_tiny_t5(folder / T5, configs[T5])
    write_tiny_clip_tokenizer(folder / "tokenizer", TINY_TOKENS)
    write_tiny_clip_tokenizer(folder / "tokenizer_2", TINY_TOKENS, pad_token="!")
    write_tiny_t5_tokenizer(folder / "tokenizer_3", TINY_TOKENS)
    write_euler_scheduler(folder / "scheduler", configs["scheduler"])
    write_model_index(
        folder,
        "StableDiffusion3Pipeline",
        scheduler=("diffusers", "FlowMatchEulerDiscreteScheduler"),
        text_encoder=("transformers", "CLIPTextModelWithProjection"),
        text_encoder_2=("transformers", "CLIPTextModelWithProjection"),
        text_encoder_3=("transformers", "T5EncoderModel"),
        tokenizer=("transformers", "CLIPTokenizer"),
        tokenizer_2=("transformers", "CLIPTokenizer"),
        tokenizer_3=("transformers", "T5TokenizerFast"),
        transformer=("diffusers", "SD3Transformer2DModel"),
        vae=("diffusers", "AutoencoderKL"),
    )


def _tiny_transformer(published: Architecture) -> dict[str, Any]:
    return {
        "sample_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 2 * TINY_WIDTH + 16,
        "caption_projection_dim": TINY_WIDTH,
        "pooled_projection_dim": 2 * TINY_WIDTH,
        "pos_embed_max_size": 32,
        "dual_attention_layers": [0] if published.num_dual_layers else [],
        "qk_norm": "rms_norm" if published.qk_norm else None,
    }
