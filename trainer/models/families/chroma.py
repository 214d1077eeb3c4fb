"""Chroma, FLUX.1 without its modulation layers and CLIP, trained by flow matching and sampled with guidance.

Example keys: "latents" (16, H/8, W/8) fp32, normalised; "prompt_embeds" (L, D), T5's states of a caption's own tokens
and of one of padding, which the model was trained to read. A Batch adds a batch dim in front and pads captions to the
longest; if their lengths differ, "prompt_mask" (B, L) is OWN for a caption's own tokens and OTHER for the rest.

diffusers' pipeline (0.42) means to mask all but that one token of padding, but gives 0 and 1 where attention adds the
mask: its samples of short prompts differ from these (huggingface/diffusers issue 12116).
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_chroma import (
    ChromaCombinedTimestepTextProjEmbeddings,
    ChromaTransformer2DModel,
)
from torch import Tensor, nn

from trainer.config.families import Distilled
from trainer.config.sections import ModelConfig, ObjectiveConfig
from trainer.models.base import LoadModule, TextLength
from trainer.models.flow_transformer import FlowTransformer, Index, masked_captions
from trainer.models.objectives.base import Batch, Example
from trainer.models.parts.folder import check_architecture, check_inputs
from trainer.models.parts.image import flux_blocks
from trainer.models.parts.image.images import pack, patchify, unpack, unpatchify
from trainer.models.parts.image.t5 import (
    T5_TYPES,
    T5_XXL,
    load_t5,
    masked_t5_states,
    tiny_t5,
    write_tiny_t5,
    write_tiny_t5_tokenizer,
)
from trainer.models.parts.image.text_encoder import TextEncoder, load_tokenizer, max_tokens, text_lengths
from trainer.models.parts.image.vae import published_vae, tiny_vae
from trainer.models.parts.layout import numbered, tensors_of
from trainer.parallel.parallelize import ShardSpec
from trainer.system.pinned import send
from trainer.weights.files import Fused


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer."""

    num_layers: int
    num_single_layers: int

    def __str__(self) -> str:
        return f"{self.num_layers} + {self.num_single_layers} blocks"


OWN, OTHER = 2.0**-7, -(2.0**17)
"""The transformer adds to attention's scores the product of what the mask has for a token and for the one it reads.
Own tokens get 2^-14 for each other, which changes nothing, and -1024 for the rest. No token is left with nothing to
read, as it would be with truth values, whose result some kernels make NaN."""
ARCHITECTURES = {"chroma1": Architecture(19, 38)}
DEFAULT_ARCHITECTURE = "chroma1"
MAX_TOKENS = 512


class Chroma(FlowTransformer):
    network = ChromaTransformer2DModel
    lora_loader = "FluxLoraLoaderMixin"
    has_separate_alphas = True
    shard = ShardSpec(
        blocks=("ChromaTransformerBlock", "ChromaSingleTransformerBlock"), returns_views=("ChromaTransformer2DModel",)
    )
    adapter_targets: Mapping[str, tuple[str, ...]] = {"transformer": flux_blocks.TARGETS}
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"transformer/config.json": ("_class_name", ChromaTransformer2DModel.__name__)}
    distilled = (Distilled(("Chroma1-Flash", "chroma1-flash"), base="lodestones/Chroma1-HD", steps=8, marks={}),)
    options_read = frozenset({"architecture", "distilled", "max_tokens"})
    longest_text = MAX_TOKENS

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        t5 = self._folder.encoder_config("text_encoder", *T5_TYPES)
        config = self._architecture
        check_architecture(
            model, self._folder, ARCHITECTURES, Architecture(config.num_layers, config.num_single_layers)
        )
        given = (4 * self._vae["latent_channels"], t5["d_model"])
        check_inputs(self._folder, (config.in_channels, config.joint_attention_dim), given)
        self._max_tokens = max_tokens(model, self._folder, "tokenizer", MAX_TOKENS)

    @property
    def model_spec(self) -> str:
        return "chroma"

    @property
    def latent_channels(self) -> int:
        return int(self._architecture.in_channels) // 4

    def build(self, component: str) -> nn.Module:
        with warnings.catch_warnings():  # diffusers' class imports its positions from where diffusers deprecates them
            warnings.simplefilter("ignore", FutureWarning)
            return super().build(component)

    def computed_buffers(self, component: str) -> Mapping[str, Tensor]:
        config = self._architecture
        num_vectors = 3 * config.num_single_layers + 12 * config.num_layers + 2
        embedding: Any = ChromaCombinedTimestepTextProjEmbeddings(config.approximator_num_channels // 4, num_vectors)
        return {"time_text_embed.mod_proj": embedding.mod_proj}

    def layout(self, component: str) -> tuple[Fused, ...]:
        model = self.build(component)
        double = numbered("double_blocks", "transformer_blocks", model, flux_blocks.DOUBLE)
        single = numbered("single_blocks", "single_transformer_blocks", model, flux_blocks.SINGLE)
        guidance = numbered(
            "distilled_guidance_layer.layers", "distilled_guidance_layer.layers", model, APPROXIMATOR_LAYER
        )
        norm = "distilled_guidance_layer.norms.{}".format
        numbers = range(self._architecture.approximator_layers)
        norms = (Fused(f"{norm(number)}.scale", (f"{norm(number)}.weight",)) for number in numbers)
        return (*tensors_of(model, (*MODULES, *double, *single, *guidance)), *norms)

    def text_encoder(self, load: LoadModule) -> TextEncoder:
        return load_t5(load, self._folder, "text_encoder", "tokenizer")

    @torch.no_grad()
    def encode_text(self, encoder: TextEncoder, caption: str) -> Example:
        return {"prompt_embeds": masked_t5_states(encoder, caption, self._max_tokens)[0].cpu()}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        tokenizer = load_tokenizer(self._folder, "tokenizer")
        return [(length,) for length in text_lengths("text_encoder", tokenizer, captions, self._max_tokens)]

    def batch_key(self, example: Example) -> Hashable:
        # The model gets a mask of the padding: captions of any length share a batch.
        return tuple(example["latents"].shape[-2:])

    def collate(self, examples: Sequence[Example]) -> Batch:
        return masked_captions(examples, OWN, OTHER)

    def blank_text(self, num_tokens: int, dtype: torch.dtype) -> Example:
        tokens = min(num_tokens, self._max_tokens)
        return {"prompt_embeds": torch.zeros(tokens, self._architecture.joint_attention_dim, dtype=dtype)}

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
                "axes_dims_rope": [16, 56, 56],
                "approximator_num_channels": 64,
                "approximator_hidden_dim": 5120,
                "approximator_layers": 5,
            },
            "vae": published_vae(latent_channels=16),
            "text_encoder": T5_XXL,
            "tokenizer": {"model_max_length": MAX_TOKENS},
        }

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        return {
            "transformer": TINY_TRANSFORMER,
            "vae": tiny_vae(latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159),
            "text_encoder": tiny_t5(TINY_WIDTH),
            "scheduler": {"shift": 3.0, "use_dynamic_shifting": True},
        }

    def write_tiny_encoders(self, folder: Path, configs: Mapping[str, Any]) -> Index:
        write_tiny_t5(folder / "text_encoder", configs["text_encoder"])
        write_tiny_t5_tokenizer(folder / "tokenizer", TINY_TOKENS)
        return "ChromaPipeline", {
            "text_encoder": ("transformers", "T5EncoderModel"),
            "tokenizer": ("transformers", "T5TokenizerFast"),
        }

    def predict(self, model: nn.ModuleDict, latents: Tensor, sigma: Tensor, batch: Batch, guidance: float) -> Tensor:
        patches = patchify(latents)
        height, width = patches.shape[-2:]
        ids = send(flux_blocks.image_ids(height, width), latents.device)
        mask = batch.get("prompt_mask")
        if mask is not None:
            mask = torch.cat([mask, mask.new_full((len(latents), height * width), OWN)], dim=1)
        packed = model["transformer"](
            hidden_states=pack(patches),
            encoder_hidden_states=batch["prompt_embeds"].to(latents.dtype),
            timestep=sigma,
            img_ids=ids,
            # Integers, as for the image: bf16 is exact only up to 256.
            txt_ids=ids.new_zeros(batch["prompt_embeds"].shape[1], 3),
            attention_mask=mask,
            return_dict=False,
        )[0]
        return unpatchify(unpack(packed.float(), height, width))


FAMILY = Chroma


MODULES = (
    Fused("img_in", ("x_embedder",)),
    Fused("txt_in", ("context_embedder",)),
    Fused("distilled_guidance_layer.in_proj", ("distilled_guidance_layer.in_proj",)),
    Fused("distilled_guidance_layer.out_proj", ("distilled_guidance_layer.out_proj",)),
    Fused("final_layer.linear", ("proj_out",)),
)
"""The modules outside of blocks under their names in the original file."""
APPROXIMATOR_LAYER = {"in_layer": ("linear_1",), "out_layer": ("linear_2",)}
"""Those of a layer of the network that gives all blocks their modulation."""


# The model of `model.path: tiny`.

TINY_WIDTH = 32
TINY_TOKENS = 32
TINY_TRANSFORMER = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": TINY_WIDTH,
    "axes_dims_rope": [4, 6, 6],
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 32,
    "approximator_layers": 2,
}
