"""Ideogram 4, trained by flow matching. A second transformer without captions guides its samples.

Example keys: "latents" (C, H/16, W/16) fp32, patchified and normalised, C = 128 for the published model;
"prompt_embeds" (L, N * D), N hidden states of each of the caption's own tokens in the text encoder's type, with
neighbouring numbers from all N. A Batch adds a batch dim in front and pads captions to the longest; if their lengths
differ, "prompt_mask" (B, L) is true for a caption's own tokens.

Unlike FLUX.2, whose autoencoder it has, the channels of a latent are ordered by pixel of the patch first. diffusers'
pipeline puts the padding before captions and masks it: behind them, the model gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_ideogram4 import (
    IMAGE_POSITION_OFFSET,
    LLM_TOKEN_INDICATOR,
    OUTPUT_IMAGE_INDICATOR,
    SEQUENCE_PADDING_INDICATOR,
    Ideogram4MRoPE,
    Ideogram4Transformer2DModel,
)
from PIL import Image
from torch import Tensor, nn

from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models.base import LoadModule, TextLength
from trainer.models.flow_transformer import FlowTransformer, Index, masked_captions
from trainer.models.objectives.base import Batch, Example
from trainer.models.objectives.flow_matching import Shift
from trainer.models.parts.chat.chat_template import rendered
from trainer.models.parts.folder import DIFFUSERS_STEM, check_architecture, check_inputs, write_random
from trainer.models.parts.image.euler import euler_scheduler, logit_normal_sigmas
from trainer.models.parts.image.images import device_of, image_of, pack, patchify, pixels_of, unpack, unpatchify
from trainer.models.parts.image.packed_vae import PACKED_AUTOENCODER, PACKED_VAE, latent_statistics, tiny_packed_vae
from trainer.models.parts.image.text_encoder import (
    QWEN3_VL_8B,
    TextEncoder,
    hidden_states,
    language_model_config,
    load_language_model,
    load_tokenizer,
    max_tokens,
    text_lengths,
    tiny_qwen3_vl,
    write_tiny_tokenizer,
)
from trainer.parallel.parallelize import ShardSpec
from trainer.system.pinned import send
from trainer.weights.files import Fused, WeightFiles, safetensors_in


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer."""

    num_layers: int
    num_heads: int

    def __str__(self) -> str:
        return f"{self.num_layers} blocks of {self.num_heads} heads"


ARCHITECTURES = {"ideogram-4": Architecture(34, 18)}
DEFAULT_ARCHITECTURE = "ideogram-4"
GUIDE = "unconditional_transformer"
"""The component that predicts without a caption."""
NUM_STATES = 13
"""Hidden states of the text encoder that the published model reads."""
MAX_TOKENS = 2048
UNSHIFTED = 1024
"""Tokens of an image of 512 x 512 pixels, at which the sampler's noise levels have a median of a half."""
SAMPLER_STD = 1.5
"""Standard deviation of the logits of the sampler's noise levels."""
PATCH = 4
"""Latent pixels of a token."""


def _encode(vae: Any, image: Image.Image) -> Tensor:
    """Encode an RGB image to normalised latents (1, 4C, H/16, W/16), the mean of the posterior, not a sample."""
    latents = patchify(vae.encode(pixels_of(image, device_of(vae))).latent_dist.mode())
    count, channels, height, width = latents.shape
    by_pixel = latents.view(count, -1, PATCH, height, width).transpose(1, 2).reshape(count, channels, height, width)
    mean, std = latent_statistics(vae)
    return (by_pixel - mean) / std


def _decode(vae: Any, latents: Tensor) -> Image.Image:
    """Decode normalised latents (1, 4C, h, w) to an image."""
    mean, std = latent_statistics(vae)
    by_pixel = (latents * std + mean).view(1, PATCH, -1, *latents.shape[-2:])
    return image_of(vae.decode(unpatchify(by_pixel.transpose(1, 2).flatten(1, 2)), return_dict=False)[0])


class Ideogram4(FlowTransformer):
    """Its sampler and its training draw noise levels whose logits are normal, around the logarithm of the image's side
    in units of 512 pixels: that is the density `logit_normal` with a shift of this side."""

    network = Ideogram4Transformer2DModel
    autoencoder = replace(PACKED_AUTOENCODER, encode=_encode, decode=_decode)
    lora_loader = "Ideogram4LoraLoaderMixin"
    shard = ShardSpec(
        blocks=("Ideogram4TransformerBlock",),
        fp32_inputs=frozenset({"timestep"}),
        returns_views=("Ideogram4Transformer2DModel",),
    )
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        "transformer": (
            r"layers\.\d+\.attention\.(to_q|to_k|to_v|to_out\.0)",
            r"layers\.\d+\.feed_forward\.(w1|w2|w3)",
        )
    }
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", Ideogram4Transformer2DModel.__name__)}
    options_read = frozenset({"architecture", "max_tokens"})
    longest_text = MAX_TOKENS
    shift = Shift(unshifted=UNSHIFTED)
    reads_negative = False

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        self._guide = self._folder.config(GUIDE, self.network.__name__)
        safetensors_in(self._folder.path / GUIDE, DIFFUSERS_STEM)  # else the first samples would miss them
        self._language_model = language_model_config(self._folder, "qwen3_vl")
        self._max_tokens = max_tokens(model, self._folder, "tokenizer", MAX_TOKENS)
        config = self._architecture
        own = Architecture(config.num_layers, config.num_attention_heads)
        check_architecture(model, self._folder, ARCHITECTURES, own)
        depth, width = (self._language_model[name] for name in ("num_hidden_layers", "hidden_size"))
        count = config.llm_features_dim // width
        given = (PATCH * self._vae["latent_channels"], count * width)
        check_inputs(self._folder, (config.in_channels, config.llm_features_dim), given)
        # The outputs of evenly spaced layers, as of 0, 3, ... 33 of 36, and of the last one.
        self._text_layers = (*(depth * k // (count - 1) + 1 for k in range(count - 1)), depth)

    @property
    def model_spec(self) -> str:
        return "ideogram-4"

    @property
    def text_recipe(self) -> str:
        return f"{self._text_layers} {self._max_tokens}"

    def build(self, component: str) -> nn.Module:
        config = self._guide if component == GUIDE else self._transformer
        with torch.device("meta"):
            network: Any = self.network.from_config(config)
            network.t_embedding = _TimeEmbedding(network.hidden_size)
        model: nn.Module = network
        return model

    def weights(self, component: str) -> WeightFiles:
        if component != GUIDE:
            return super().weights(component)
        folder = replace(self._folder, single=None)  # a single file holds the other transformer
        return folder.denoiser_weights(component, self.build(component), self.layout(component))

    def computed_buffers(self, component: str) -> Mapping[str, Tensor]:
        config = self._architecture
        embedding = Ideogram4MRoPE(config.attention_head_dim, config.rope_theta, config.mrope_section)
        return {"rotary_emb.inv_freq": embedding.inv_freq}

    def layout(self, component: str) -> tuple[Fused, ...]:
        names = self.build(component).state_dict()
        return tuple(_original(name) for name in names if not name.endswith((".to_k.weight", ".to_v.weight")))

    def guides(self, load: LoadModule) -> Mapping[str, nn.Module]:
        guide: Any = load(self.build(GUIDE), self.weights(GUIDE), self.shard.blocks)
        guide.rotary_emb.inv_freq = self.computed_buffers(GUIDE)["rotary_emb.inv_freq"].to(device_of(guide))
        return {GUIDE: guide}

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        from transformers import Qwen3VLTextConfig, Qwen3VLTextModel

        classes = (Qwen3VLTextConfig, Qwen3VLTextModel)
        return load_language_model(load, self._folder, classes, self._language_model, self._text_layers)

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        text = _templated(encoder.tokenizer, caption)
        tokens = encoder.tokenizer(text, return_tensors="pt", truncation=True, max_length=self._max_tokens)
        states = hidden_states(encoder.model, tokens, self._text_layers, norm_last=False)
        return {"prompt_embeds": torch.stack(states, dim=-1)[0].flatten(-2).cpu()}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer = load_tokenizer(self._folder, "tokenizer")
        template = partial(_templated, tokenizer)
        return [(length,) for length in text_lengths("text_encoder", tokenizer, captions, self._max_tokens, template)]

    def batch_key(self, example: Example) -> Hashable:
        # The model gets a mask of the padding: captions of any length share a batch.
        return tuple(example["latents"].shape[-2:])

    def collate(self, examples: Sequence[Example]) -> Batch:
        return masked_captions(examples)

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        tokens = min(num_tokens, self._max_tokens)
        return {"prompt_embeds": torch.zeros(tokens, self._architecture.llm_features_dim, dtype=dtype)}

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        sizes = ARCHITECTURES[architecture]
        transformer = {
            "in_channels": 128,
            "num_layers": sizes.num_layers,
            "attention_head_dim": 256,
            "num_attention_heads": sizes.num_heads,
            "intermediate_size": 12288,
            "adaln_dim": 512,
            "llm_features_dim": NUM_STATES * QWEN3_VL_8B["hidden_size"],
            "mrope_section": [24, 20, 20],
        }
        return {
            "transformer": transformer,
            GUIDE: transformer,
            "vae": PACKED_VAE,
            "text_encoder": QWEN3_VL_8B,
            "tokenizer": {"model_max_length": MAX_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        return {
            "transformer": TINY_TRANSFORMER,
            "vae": tiny_packed_vae(),
            "text_encoder": tiny_qwen3_vl(TINY_WIDTH, TINY_VOCABULARY, num_layers=4),
            "scheduler": {},
        }

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        """The model's time runs from noise to data, and its prediction has that direction too."""
        text = batch["prompt_embeds"]
        own = batch.get("prompt_mask")
        own = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if own is None else own
        return self._velocity(model["transformer"], latents, sigma, text.to(latents.dtype), own)

    def predict_away(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor) -> list[Tensor]:
        guide: Any = model[GUIDE]
        # It is loaded as encoders are, which get their inputs in their own type.
        inputs = latents.to(guide.input_proj.weight.dtype)
        text = inputs.new_zeros(len(latents), 0, self._architecture.llm_features_dim)
        return [self._velocity(guide, inputs, sigma, text, text.new_zeros(len(latents), 0, dtype=torch.bool))]

    def _velocity(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, text: Tensor, own: Tensor) -> Tensor:
        """The velocity from data to noise, fp32, of a sequence of text and image. own: (B, L), true where text is not
        padding."""
        height, width = latents.shape[-2:]
        (batch, length), num_pixels = own.shape, height * width
        image = own.new_ones(batch, num_pixels, dtype=torch.int64)
        words = torch.arange(length)[:, None].expand(-1, 3)
        zero = torch.zeros(1, dtype=torch.int64)
        pixels = torch.cartesian_prod(zero, torch.arange(height), torch.arange(width)) + IMAGE_POSITION_OFFSET
        packed = pack(latents)
        predicted = transformer(
            hidden_states=torch.cat([packed.new_zeros(batch, length, packed.shape[-1]), packed], dim=1),
            timestep=1 - sigma,
            # The image's rows are read, and masked.
            encoder_hidden_states=nn.functional.pad(text, (0, 0, 0, num_pixels)),
            position_ids=send(torch.cat([words, pixels]), latents.device).expand(batch, -1, -1),
            segment_ids=torch.cat([torch.where(own, 1, SEQUENCE_PADDING_INDICATOR), image], dim=1),
            indicator=torch.cat([own * LLM_TOKEN_INDICATOR, image * OUTPUT_IMAGE_INDICATOR], dim=1),
            return_dict=False,
        )[0]
        return -unpack(predicted[:, length:].float(), height, width)

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        from transformers import Qwen3VLConfig, Qwen3VLModel

        write_random(folder / GUIDE, lambda: self.network(**configs["transformer"]))
        write_random(folder / "text_encoder", lambda: Qwen3VLModel(Qwen3VLConfig(**configs["text_encoder"])))
        write_tiny_tokenizer(folder / "tokenizer", TINY_VOCABULARY, TINY_TOKENS)
        return "Ideogram4Pipeline", {
            GUIDE: ("diffusers", self.network.__name__),
            "text_encoder": ("transformers", "Qwen3VLModel"),
            "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        }

    def sampler(self, noise: Tensor, num_steps: int) -> Any:
        mean = 0.5 * math.log(self.num_tokens(noise) / UNSHIFTED)
        sigmas = logit_normal_sigmas(num_steps, mean, SAMPLER_STD)
        return euler_scheduler(self._scheduler, num_steps, noise.device, sigmas=sigmas)


FAMILY = Ideogram4


class _TimeEmbedding(nn.Module):
    """diffusers' embedding of the time, for times in fp32 with weights of any type, as in the model's own code.

    Its waves have 10^4 times the time, which in bf16 would be up to 20 off.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_waves = dim // 2
        self.mlp_in = nn.Linear(dim, dim)
        self.mlp_out = nn.Linear(dim, dim)

    def forward(self, time: Tensor) -> Tensor:
        """Embed times in [0, 1]: (B,) -> (B, D)."""
        powers = torch.arange(self.num_waves, dtype=torch.float32, device=time.device)
        frequencies = torch.exp(powers * (-math.log(1e4) / (self.num_waves - 1)))
        angles = (1e4 * time.float())[:, None] * frequencies
        waves = torch.cat([angles.sin(), angles.cos()], dim=-1)
        hidden = self.mlp_in(waves.to(next(self.mlp_in.parameters()).dtype))
        embedded: Tensor = self.mlp_out(nn.functional.silu(hidden))
        return embedded


def _templated(tokenizer: Any, caption: str) -> str:
    """Put the caption into the chat template."""
    messages = [{"role": "user", "content": [{"type": "text", "text": caption}]}]
    return rendered(tokenizer, messages, add_generation_prompt=True)


def _original(name: str) -> Fused:
    """The tensor of the original file whose first part is diffusers' `name`."""
    block, is_query, _ = name.rpartition(".attention.to_q.")
    if is_query:
        return Fused(f"{block}.attention.qkv.weight", tuple(f"{block}.attention.to_{part}.weight" for part in "qkv"))
    return Fused(name.replace(".attention.to_out.0.", ".attention.o."), (name,))


# The model of `model.path: tiny`.

TINY_TOKENS = 48
TINY_WIDTH = 32
TINY_VOCABULARY = 512
TINY_TRANSFORMER = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "adaln_dim": 32,
    "llm_features_dim": 3 * TINY_WIDTH,
    "mrope_section": [3, 2, 2],
}
