"""Stable Diffusion 3 and 3.5, trained by flow matching.

Example and Batch keys: "latents" (16, H/8, W/8) fp32, normalised; "prompt_embeds" (L, D), the states of both CLIPs
side by side, then those of T5 with padding, which the model attends to, L = 77 + 256; "pooled_embeds" (P,) of both
CLIPs. A Batch adds a batch dim in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor, nn

from trainer.config.families import Distilled
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models.base import LoadModule, TextLength
from trainer.models.flow_transformer import FlowTransformer, Index
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import Shift
from trainer.models.parts.folder import check_architecture
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
from trainer.models.parts.image.euler import euler_scheduler, linear_mu_of
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
from trainer.models.parts.image.vae import published_vae, tiny_vae
from trainer.models.parts.layout import numbered, tensors_of
from trainer.parallel.parallelize import ShardSpec
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


class Sd3(FlowTransformer):
    network = SD3Transformer2DModel
    lora_loader = "SD3LoraLoaderMixin"
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
    # The positions of all published models but 3.5 medium, which has twice as many.
    longest_side: int = 192 * 16
    options_read = frozenset({"architecture", "distilled", "max_tokens", "without"})
    shift = Shift(constant=3.0)
    optional_encoders = (T5,)
    longest_text = 512

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._has_t5 = T5 not in model.options.without and (self.folder / T5).is_dir()
        clips = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")
        self.encoder_folders = (*clips, *((T5, "tokenizer_3") if self._has_t5 else ()))
        self._check_encoders()
        check_architecture(model, self._folder, ARCHITECTURES, self._own_architecture())
        self.longest_side = min(self.longest_side, self._architecture.pos_embed_max_size * self.size_multiple)
        self._max_tokens = model.options.max_tokens or MAX_TOKENS
        if self._has_t5 or (self.folder / "tokenizer_3").is_dir():
            self._max_tokens = max_tokens(model, self._folder, "tokenizer_3", MAX_TOKENS)

    @property
    def never_trained(self) -> tuple[str, ...]:
        # Nothing reads the queries of the text in the last block.
        return (rf"transformer_blocks\.{self._architecture.num_layers - 1}\.attn\.(add_q_proj|norm_added_q)\..+",)

    @property
    def model_spec(self) -> str:
        found = self._own_architecture()
        names = (MODEL_SPECS[name] for name, architecture in ARCHITECTURES.items() if architecture == found)
        return next(names, "stable-diffusion-3-tiny")

    def layout(self, component: str) -> tuple[Fused, ...]:
        model: Any = self.build(component)
        last = f"{BLOCKS}.{len(model.transformer_blocks) - 1}.context_block.adaLN_modulation.1"
        blocks = numbered(BLOCKS, "transformer_blocks", model, BLOCK)
        marked = (replace(module, halves_swapped=module.name == last) for module in blocks)
        return tensors_of(model, (*MODULES, *marked))

    @property
    def text_recipe(self) -> str:
        # Without T5 only the transformer determines the width of the embeddings.
        return f"{self._has_t5} {self._max_tokens} {self._architecture.joint_attention_dim}"

    def text_encoder(self, load: LoadModule) -> TextEncoders:
        from transformers import CLIPTextModelWithProjection

        first = load_clip(load, self._folder, "text_encoder", "tokenizer", CLIPTextModelWithProjection)
        second = load_clip(load, self._folder, "text_encoder_2", "tokenizer_2", CLIPTextModelWithProjection)
        t5 = load_t5(load, self._folder, T5, "tokenizer_3") if self._has_t5 else None
        return TextEncoders((first, second), t5)

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoders, caption: str) -> Example:
        states, pooled = [], []
        for clip in encoder.clips:
            before_last, output = clip_states(
                clip.model, clip_tokens(clip.tokenizer, caption).to(device_of(clip.model))
            )
            states.append(before_last)
            pooled.append(output.text_embeds)
        # The CLIPs' states are side by side, padded to the width of T5's, which follow them.
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

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        config = self._architecture
        clips = self._folder.encoder_config("text_encoder", *CLIP_TYPES)["max_position_embeddings"]
        return {
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

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        velocity: Tensor = model["transformer"](
            hidden_states=latents,
            encoder_hidden_states=batch["prompt_embeds"].to(latents.dtype),
            pooled_projections=batch["pooled_embeds"].to(latents.dtype),
            timestep=sigma * 1000,
            return_dict=False,
        )[0]
        return velocity.float()

    def sampler(self, noise: Tensor, num_steps: int) -> Any:
        """Here the scheduler spaces the noise levels."""
        mu = linear_mu_of(self._scheduler, self.num_tokens(noise))
        return euler_scheduler(self._scheduler, num_steps, noise.device, mu)

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import CLIPTextModelWithProjection

        write_tiny_clip(folder / "text_encoder", configs["text_encoder"], CLIPTextModelWithProjection)
        write_tiny_clip(folder / "text_encoder_2", configs["text_encoder_2"], CLIPTextModelWithProjection)
        write_tiny_t5(folder / T5, configs[T5])
        write_tiny_clip_tokenizer(folder / "tokenizer", TINY_TOKENS)
        write_tiny_clip_tokenizer(folder / "tokenizer_2", TINY_TOKENS, pad_token="!")
        write_tiny_t5_tokenizer(folder / "tokenizer_3", TINY_TOKENS)
        return "StableDiffusion3Pipeline", {
            "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
            "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
            "text_encoder_3": ("transformers", "T5EncoderModel"),
            "tokenizer": ("transformers", "CLIPTokenizer"),
            "tokenizer_2": ("transformers", "CLIPTokenizer"),
            "tokenizer_3": ("transformers", "T5TokenizerFast"),
        }

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


FAMILY = Sd3


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

TINY_WIDTH = 32
TINY_TOKENS = 32


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
